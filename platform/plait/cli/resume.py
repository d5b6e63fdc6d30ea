"""`plait resume NAME`: goes on with a search as it was started, from what its folder keeps."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import chdir, nullcontext
from pathlib import Path

from plait.cli.control import running
from plait.config.build import key_of
from plait.core.errors import EXIT_DONE, ConfigError
from plait.core.settings import TrackingSettings
from plait.search.recorded import URI, RecordedCommand, known_command, quoted, recorded_commands
from plait.utils.addresses import redact

USAGE = """plait resume NAME [KEY=VALUE ...]

Goes on with a search that was killed or interrupted, with the settings that it was
started with. Settings that do not change what is searched may be given anew, as in
engine.threads=4 or search.trials=64. Searches are looked for in tracking.root.

`plait resume` alone lists the searches that can go on."""
ROOT = "tracking.root"


def main(arguments: Sequence[str]) -> int:
    """Go on with a search as it was started."""
    if set(arguments) & {"-h", "--help"}:
        print(USAGE)
        return EXIT_DONE
    names = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    if len(names) > 1 or any(name.startswith("-") for name in names):
        value = f"plait resume {shlex.join(arguments)}"
        raise ConfigError(value, "It takes the name of one search.", USAGE.splitlines()[0])
    root = _root(overrides)
    if not names:
        _list(root)
        return EXIT_DONE
    return _go_on(known_command(root, names[0]), root, overrides)


def _root(overrides: Sequence[str]) -> Path:
    given = [each.partition("=")[2] for each in overrides if key_of(each) == ROOT]
    return Path(given[-1] if given else TrackingSettings().root).expanduser().absolute()


def _list(root: Path) -> None:
    """The searches that can go on, each with its command; then those that a process trains now."""
    unfinished = [command for command in recorded_commands(root) if not command.finished]
    now = running(root)
    waiting = [command for command in unfinished if command.name not in now]
    if not waiting:
        print(f"No{' other' if now else ''} search in {root} is unfinished.")
    for command in waiting:
        print(f"{command.name}\t{redact(shlex.join(('plait', command.verb, *command.arguments)))}")
    if now:
        print(f"Training now: {', '.join(now)} (`plait control` steers them).")


def _go_on(command: RecordedCommand, root: Path, overrides: Sequence[str]) -> int:
    """Run the recorded command in the folder that it was given in, if that is still there."""
    from plait.cli.main import main as plait
    from plait.tracking.location import VARIABLE, sqlite_in

    more = [f"{ROOT}={quoted(str(root))}", *(each for each in overrides if key_of(each) != ROOT)]
    given = {key_of(each) for each in (*command.arguments, *more)}
    if command.store is None and VARIABLE in os.environ and URI not in given:
        more.append(f"{URI}={quoted(sqlite_in(root))}")  # the search was begun without the variable
    directory = Path(command.directory)
    if not directory.is_dir():
        print(f"{directory} is gone: relative paths are taken from {Path.cwd()}")
    with chdir(directory) if directory.is_dir() else nullcontext():
        return plait(command.words(more))
