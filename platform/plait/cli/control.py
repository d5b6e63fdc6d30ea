"""`plait control`: steer a search from another terminal while it runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import chdir, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli.parser import Parser, check_least
from plait.core.errors import EXIT_DONE, ConfigError, PlaitError, StorageError, choices
from plait.search.locks import trains_here
from plait.search.recorded import RecordedCommand, known_command, quoted, read_command
from plait.utils.paths import begun_name, command_on, no_such_search, search_folder, search_names
from plait.utils.progress import say
from plait.utils.spelling import did_you_mean

if TYPE_CHECKING:
    from plait.search.control import SearchControl

USAGE = """\
plait control [--json]                        the searches that run on this machine
       plait control NAME [status] [--json]          its trials, their states and the best so far
       plait control NAME pause | resume             pause all trials; resume them
       plait control NAME stop | cancel              start no further trials; end all trials
       plait control NAME stop TRIAL                 end one trial
       plait control NAME add KEY=VALUE ...          one more trial, with these values
       plait control NAME clone TRIAL KEY=VALUE ...  a copy of a trial; --warm from its weights"""
VERBS = ("status", "pause", "resume", "stop", "cancel", "add", "clone")
WAIT_SECONDS = 30.0


def main(arguments: Sequence[str]) -> int:
    """Inspect and control a running search."""
    given = _parser().parse_intermixed_args(arguments)
    check_least(given, wait=0)
    if given.name is None:
        print(json.dumps(_modes(given.root), indent=2) if given.json else listing(given.root))
        return EXIT_DONE
    if given.name not in VERBS:
        given.name = begun_name(given.name, search_names(given.root))
    if not search_folder(given.root, given.name).is_dir():
        words = [given.name, *([given.verb] if given.verb else []), *given.rest]
        raise _no_such_search(given.root, words)
    verb = given.verb or "status"
    trial, overrides = read_words(verb, given.rest, warm=given.warm, name=given.name)
    if not given.json:
        say("Reading the search's study ...")
    if given.json and verb != "status":
        raise ConfigError(f"--json with {verb}", "Only `status` can be printed as JSON.", "Leave out --json.")
    control = _open(given.root, given.name, verb, given.wait)
    if verb == "status":
        print(json.dumps(control.facts(), indent=2) if given.json else "\n".join(control.status()))
    elif verb == "add":
        print(control.add(overrides, partial(_check, given.root, given.name)))
    elif verb == "clone" and trial is not None:
        print(control.clone(trial, overrides, partial(_check, given.root, given.name), warm=given.warm))
    else:
        print(control.order(verb) if trial is None else control.stop_trial(trial))
    return EXIT_DONE


def _open(root: Path, name: str, verb: str, wait: float) -> SearchControl:
    """Raises:
    ConfigError: the search has never trained, or it is finished and is asked for something.
    StorageError: its study does not answer, or the file with its command cannot be read.
    """
    recorded, command = read_command(root, name), f"plait control {shlex.quote(name)} {verb}"
    if recorded is None:
        raise ConfigError(
            command,
            "This search ended before training started, so it has no study.",
            "Start the search again with its `plait sweep` command.",
        )
    if recorded.finished and verb != "status":
        raise ConfigError(
            f"{command}: {name} is finished",
            "A finished search has no trials left to control.",
            f"`{command_on(root, 'resume', name, 'search.trials=N')}` adds trials to it.",
        )
    return _control(recorded, root, wait)


def _control(recorded: RecordedCommand, root: Path, wait: float = 0.0) -> SearchControl:
    from plait.search.control import SearchControl  # Optuna is slow to import

    return SearchControl(recorded, root, wait)


def _check(root: Path, name: str, overrides: Sequence[str]) -> None:
    """Check a trial that is to be added: compose the search's command, and the trial's job with it.

    Raises:
        InputError: it cannot be trained, or the command cannot be composed here.
    """
    from plait.cli.app import compose
    from plait.cli.sweeping import search_command
    from plait.search.checks import check_added
    from plait.search.trials import Trial

    recorded = known_command(root, name)
    directory = Path(recorded.directory)
    more = [f"tracking.root={quoted(str(root.absolute()))}", "mode=plan"]  # a plan's jobs leave no folders
    with chdir(directory) if directory.is_dir() else nullcontext():
        search = compose(recorded.words(more)[1:])
        command, _ = search_command(search.config, search.loader, search.arguments, ())
        check_added(command, command.make_job(Trial(0, overrides=tuple(overrides))))


def running(root: Path) -> list[str]:
    """Names of the searches below ``tracking.root`` that a process of this host trains, sorted."""
    return [name for name in search_names(root) if trains_here(search_folder(root, name))]


def listing(root: Path) -> str:
    """The searches that run on this machine, each with its mode, or what to do if there is none."""
    modes = _modes(root)
    if not modes:
        lists = command_on(root, "resume")
        return f"No search in {root} is running; `{lists}` lists those that can be resumed."
    lines = [f"{name}\t{mode}" for name, mode in modes.items()]
    shows = command_on(root, "control", next(iter(modes)), "status")
    return "\n".join([*lines, f"`{shows}` shows its status."])


def _modes(root: Path) -> dict[str, str]:
    """The searches that run on this machine, each with its mode."""
    return {name: _mode(root, name) for name in running(root)}


def _mode(root: Path, name: str) -> str:
    try:
        recorded = read_command(root, name)
    except StorageError as error:
        return f"unknown: {error.value}"
    try:
        return "starting" if recorded is None else _control(recorded, root).mode
    except StorageError:
        return "unknown: its study does not answer"


def _no_such_search(root: Path, words: Sequence[str]) -> PlaitError:
    """The error for an unknown name of a search, or for a command without a name."""
    name, names = words[0], running(root)
    if name in VERBS:
        said = shlex.join(words)
        meant = [f"`{command_on(root, 'control', each, *words)}`" for each in names]
        return ConfigError(
            f"plait control {said}: no search is named",
            "The name of a search comes first.",
            f"Type {' or '.join(meant)}." if meant else f"No search in {root} is running.",
        )
    return no_such_search(name, root, search_names(root))


def read_words(
    verb: str, rest: Sequence[str], *, warm: bool = False, name: str = "NAME"
) -> tuple[int | None, tuple[str, ...]]:
    """The trial and the overrides that follow a verb.

    Raises:
        ConfigError: the verb is unknown, the trial is missing or not a number, or a value is not KEY=VALUE.
    """
    command = f"plait control {shlex.quote(name)} {verb}"
    if verb not in VERBS:
        meant = did_you_mean(verb, VERBS)
        raise ConfigError(command, "There is no such command.", f"{meant}Available: {choices(VERBS)}.")
    if warm and verb != "clone":
        raise ConfigError(
            f"--warm with {verb}",
            "Only a cloned trial can start from another trial's weights.",
            "Use --warm with clone.",
        )
    words = list(rest)
    trial = None
    if verb == "clone" or (verb == "stop" and words):
        trial = _number(command, words.pop(0) if words else "")
    if words and verb not in ("add", "clone"):
        raise ConfigError(
            f"{command}: {' '.join(words)}", "This command takes no further arguments.", "Leave them out."
        )
    if not words and verb == "add":
        raise ConfigError(
            command, "A new trial needs at least one value.", "Add KEY=VALUE for a searched key."
        )
    for word in words:
        if "=" not in word:
            raise ConfigError(f"{command}: {word!r}", "Values are written as KEY=VALUE.", "Write KEY=VALUE.")
    return trial, tuple(words)


def _number(command: str, text: str) -> int:
    digits = text.removeprefix("trial-")
    if not digits.isdecimal():
        raise ConfigError(
            f"{command} {text}".rstrip(),
            "A trial is identified by its number.",
            "`plait control NAME status` and `plait leaderboard NAME` show the numbers.",
        )
    return int(digits)


def _parser() -> Parser:
    parser = Parser(
        prog="plait control",
        description="Inspect and control a running search.",
        usage=USAGE,
    )
    parser.add_argument("name", nargs="?", help="name of the search, as `plait sweep` prints it")
    parser.add_argument("verb", nargs="?", help=f"{', '.join(VERBS)}; default: status")
    parser.add_argument("rest", nargs="*", metavar="TRIAL | KEY=VALUE")
    parser.add_argument("--json", action="store_true", help="with status, or without NAME: print JSON")
    parser.add_argument("--warm", action="store_true", help="with clone: start from the trial's weights")
    parser.add_argument(
        "--wait",
        type=float,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help=f"how long to wait for a storage that does not answer; default: {WAIT_SECONDS:g}",
    )
    parser.add_root()
    return parser
