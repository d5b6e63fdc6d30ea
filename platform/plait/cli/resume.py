"""`plait resume NAME`: resumes a search with the command stored in its folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import chdir, nullcontext
from pathlib import Path

from plait.cli.control import running
from plait.cli.parser import Parser
from plait.config.build import key_of
from plait.core.errors import EXIT_DONE, ConfigError
from plait.search.recorded import (
    FILE,
    ROOT,
    URI,
    RecordedCommand,
    known_command,
    quoted,
    recorded_commands,
    unreadable_commands,
)
from plait.utils.addresses import redact
from plait.utils.counts import counted
from plait.utils.paths import command_on, search_folder

DESCRIPTION = (
    "Resume a search that was killed or interrupted, with the settings it was started with. Settings that do "
    "not change what is searched can be changed, for example engine.threads=4 or search.trials=64. Without a "
    "name, it lists the searches that can be resumed."
)


def main(arguments: Sequence[str]) -> int:
    """Resume a search as it was started."""
    usage = "plait resume NAME [KEY=VALUE ...]"
    parser = Parser(prog="plait resume", usage=usage, description=DESCRIPTION)
    parser.add_argument("words", nargs="*", metavar="NAME | KEY=VALUE", help="the search; settings to change")
    parser.add_root()
    known = parser.parse_intermixed_args(arguments)
    names = [word for word in known.words if "=" not in word]
    if len(names) > 1:
        value = f"plait resume {shlex.join(arguments)}"
        raise ConfigError(value, "`plait resume` takes the name of one search.", usage)
    root = known.root.absolute()
    if not names:
        _list(known.root)
        return EXIT_DONE
    command = known_command(root, names[0])
    _check_owner(search_folder(root, command.name) / FILE, command)
    return _resume(command, known.root, [word for word in known.words if "=" in word])


def _check_owner(file: Path, command: RecordedCommand) -> None:
    """Refuse to run what another user recorded: it names files to read and folders to write.

    Raises:
        ConfigError: the file is another user's.
    """
    if file.stat().st_uid != os.geteuid():
        words = redact(shlex.join(("plait", command.verb, *command.arguments)))
        raise ConfigError(
            f"plait resume {shlex.quote(command.name)}: {file} belongs to another user",
            "Its command would run with your permissions.",
            f"If you trust it, run it yourself: {words}",
        )


def _list(typed: Path) -> None:
    """List the searches that can be resumed, each with its adapters so far and its command; then those that
    are running, and files that cannot be read."""
    root = typed.absolute()
    unfinished = [command for command in recorded_commands(root) if not command.finished]
    now = running(root)
    waiting = [command for command in unfinished if command.name not in now]
    if not waiting:
        print(f"There are no{' other' if now else ''} unfinished searches in {root}.")
    for command in waiting:
        trained = len(list(search_folder(root, command.name).glob("adapters/*")))  # without the slow study
        words = redact(shlex.join(("plait", command.verb, *command.arguments)))
        print(f"{command.name}\t{counted(trained, 'adapter')} trained\t{words}")
    if now:
        print(f"Running: {', '.join(now)} (`{command_on(typed, 'control')}` controls them).")
    for path in unreadable_commands(root):
        print(f"Cannot be read: {path}")


def _resume(command: RecordedCommand, typed: Path, overrides: Sequence[str]) -> int:
    """Run the recorded command in its original folder, if that still exists."""
    from plait.cli.main import main as plait
    from plait.tracking.location import VARIABLE, sqlite_in

    directory = Path(command.directory)
    here = not directory.is_dir() or directory.samefile(Path.cwd())
    where = typed if here else typed.absolute()  # from the folder in which it runs
    more = [f"{ROOT}={quoted(str(where))}", *overrides]
    keys = {key_of(each) for each in (*command.arguments, *more)}
    if command.store is None and VARIABLE in os.environ and URI not in keys:
        more.append(f"{URI}={quoted(sqlite_in(typed.absolute()))}")  # as without the variable
    if not directory.is_dir():
        print(f"{directory} no longer exists: relative paths start at {Path.cwd()}")
    with chdir(directory) if directory.is_dir() else nullcontext():
        return plait(command.words(more))
