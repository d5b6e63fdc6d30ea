"""`plait control`: steer a search from another terminal while it runs."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli.results import no_such_search
from plait.core.errors import EXIT_BAD_INPUT, EXIT_DONE, ConfigError, StorageError, choices
from plait.core.settings import TrackingSettings
from plait.search.control import Answer, Mailbox, Request
from plait.search.control.targets import check_target
from plait.search.recorded import RecordedCommand, recorded_command
from plait.utils.paths import search_folder, search_names
from plait.utils.spelling import did_you_mean

if TYPE_CHECKING:
    from plait.search.stored import Standing

USAGE = """
plait control                                      which searches train now
plait control NAME [status] [--json]               what runs, what is over, the best so far
plait control NAME pause | resume                  park all jobs; go on
plait control NAME stop | cancel                   start no further trial; end at once
plait control NAME stop TRIAL                      end one trial
plait control NAME add KEY=VALUE ...               one more trial, with these values
plait control NAME clone TRIAL KEY=VALUE ...       its copy; with --warm from its weights
"""
VERBS = ("status", "pause", "resume", "stop", "cancel", "add", "clone")
FACTS = "facts"  # how a status is asked for as JSON
PATIENCE_SECONDS = 30.0


def main(arguments: Sequence[str]) -> int:
    """Steer a search while it runs."""
    known = _parser().parse_intermixed_args(arguments)
    if known.name is None:
        print(listing(known.root))
        return EXIT_DONE
    folder = search_folder(known.root, known.name)
    if not folder.is_dir():
        raise _no_such_search(known.root, [known.name, *([known.verb] if known.verb else []), *known.rest])
    mailbox = Mailbox(folder / "control")
    request = read_request(known.verb or "status", known.rest, warm=known.warm, name=known.name)
    if known.json:
        request = _as_facts(request)
    if mailbox.attended:
        return _ask(mailbox, request, known.wait, known.name)
    said = _unattended(mailbox, request, known.root, known.name)
    print(*said, sep="\n")
    return EXIT_DONE


def _as_facts(request: Request) -> Request:
    if request.verb != "status":
        raise ConfigError(f"--json with {request.verb}", "Only a status is given as JSON.")
    return replace(request, verb=FACTS)


def _unattended(mailbox: Mailbox, request: Request, root: Path, name: str) -> list[str]:
    """What to say of a search that no process trains from this folder; a request is left for later.

    Raises:
        ConfigError: it is finished, and is asked for something.
        SearchError: it is asked for something that its trial cannot do.
    """
    recorded, quoted = recorded_command(root, name), shlex.quote(name)
    finished = recorded is not None and recorded.finished
    if finished and request.verb not in ("status", FACTS):
        raise ConfigError(
            f"plait control {quoted} {request.verb}: {name} is finished",
            "Only a search that has trials to train can be steered.",
            f"`plait resume {quoted} search.trials=N` adds trials to it.",
        )
    standing, trouble = _standing(recorded, root)
    if request.verb == FACTS:
        state = {"search": name, "mode": "finished" if finished else "not running"}
        return [
            json.dumps(state | ({"trouble": trouble} if standing is None else standing.facts()), indent=2)
        ]
    if request.verb == "status":
        mode = mailbox.orders.mode
        ordered = "" if mode == "running" else f" Ordered: {mode}."
        first = f"{name} is finished." if finished else f"{name} does not run now.{ordered}"
        known = [trouble] if standing is None else standing.describe()
        last = f"`plait leaderboard {quoted}` shows its trials"
        return [first, *known, f"{last}." if finished else f"{last}, `plait resume {quoted}` goes on."]
    if standing is not None and request.trial is not None:
        check_target(request.verb, request.trial, standing.states, name)
    mailbox.post(request)
    said = "The search does not run now; it will do this, or refuse it, when it goes on."
    if standing is not None and standing.elsewhere:
        hosts = " or ".join(standing.elsewhere)
        said = (
            f"Nobody trains it from here: ask on {hosts}. Here it is done, or refused, when it goes on here."
        )
    return [said, trouble] if standing is None and request.trial is not None else [said]


def _standing(recorded: RecordedCommand | None, root: Path) -> tuple[Standing | None, str]:
    """What the study of a search says; what is in the way, where it says nothing."""
    from plait.search.storage import quiet
    from plait.search.stored import read_standing  # Optuna takes its time

    if recorded is None:
        return None, "Its study is not known here: the search never got so far as to train."
    quiet()
    try:
        return read_standing(recorded, root), ""
    except StorageError as error:
        return None, f"Its study cannot be read now: {error.rule}"


def running(root: Path) -> list[str]:
    """Names of the searches below ``tracking.root`` that train now, in order."""
    return [name for name in search_names(root) if Mailbox(search_folder(root, name) / "control").attended]


def listing(root: Path) -> str:
    """The searches that train now, with their orders where there are any; what else there is."""
    names = running(root)
    if not names:
        return f"No search below {root} trains now; `plait resume` lists those that can go on."
    modes = {name: Mailbox(search_folder(root, name) / "control").orders.mode for name in names}
    lines = [f"{name}\t{mode}" for name, mode in modes.items()]
    return "\n".join([*lines, f"`plait control {shlex.quote(names[0])} status` says how it stands."])


def _no_such_search(root: Path, words: Sequence[str]) -> ConfigError:
    """The error for a name that no search has; or for a command without a name."""
    name, names = words[0], running(root)
    if name in VERBS:
        said = shlex.join(words)
        meant = [f"`plait control {shlex.quote(each)} {said}`" for each in names]
        return ConfigError(
            f"plait control {said}: no search is named",
            "The name of a search comes first.",
            f"Type {' or '.join(meant)}." if meant else f"No search below {root} trains now.",
        )
    return no_such_search("plait control", root, name)


def read_request(verb: str, rest: Sequence[str], *, warm: bool = False, name: str = "NAME") -> Request:
    """The request that the words of a command line stand for, to the search called ``name``.

    Raises:
        ConfigError: an unknown verb, a trial that is missing or no number, a value that is not KEY=VALUE.
    """
    command = f"plait control {shlex.quote(name)} {verb}"
    if verb not in VERBS:
        meant = did_you_mean(verb, VERBS)
        raise ConfigError(command, "There is no such command.", f"{meant}There are: {choices(VERBS)}.")
    if warm and verb != "clone":
        raise ConfigError("--warm", "A warm start begins with the weights of the trial that is cloned.")
    words = list(rest)
    trial = None
    if verb == "clone" or (verb == "stop" and words):
        trial = _number(command, words.pop(0) if words else "")
    wanted = verb in ("add", "clone")
    if words and not wanted:
        raise ConfigError(f"{command}: {' '.join(words)}", "It takes no further words.")
    if not words and verb == "add":
        raise ConfigError(command, "Give at least one KEY=VALUE of the searched keys.")
    for word in words:
        if "=" not in word:
            raise ConfigError(f"{command}: {word!r}", "A value is given as KEY=VALUE.")
    return Request(verb, trial, tuple(words), warm)


def _number(command: str, text: str) -> int:
    digits = text.removeprefix("trial-")
    if not digits.isdecimal():
        raise ConfigError(
            f"{command} {text}".rstrip(),
            "A trial is given by its number, as in `plait leaderboard`.",
        )
    return int(digits)


def _ask(mailbox: Mailbox, request: Request, seconds: float, name: str) -> int:
    mailbox.post(request)
    answer = mailbox.take_answer(request, seconds)
    if answer is None:
        print(f"No answer after {seconds:g} s: the search is in the middle of a step and reads this then.")
        if request.verb != "status":
            print(f"`plait control {shlex.quote(name)} status` shows afterwards whether it was done.")
        return EXIT_DONE
    return _say(answer)


def _say(answer: Answer) -> int:
    if answer.done:
        print(answer.text)
        return EXIT_DONE
    first, *rest = answer.text.splitlines()
    print(f"plait: {first}", *(f"  {line}" for line in rest), sep="\n", file=sys.stderr)
    return EXIT_BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plait control",
        description="Steer a search while it runs.",
        usage=USAGE,
    )
    parser.add_argument("name", nargs="?", help="of the search, as `plait sweep` prints it")
    parser.add_argument("verb", nargs="?", help=f"{', '.join(VERBS)}; status where it is left out")
    parser.add_argument("rest", nargs="*", metavar="TRIAL | KEY=VALUE")
    parser.add_argument("--json", action="store_true", help="status: as JSON")
    parser.add_argument("--warm", action="store_true", help="clone: start from the trial's weights")
    parser.add_argument(
        "--wait",
        type=float,
        default=PATIENCE_SECONDS,
        metavar="SECONDS",
        help=f"for the answer ({PATIENCE_SECONDS:g})",
    )
    root = TrackingSettings().root
    parser.add_argument("--root", type=Path, default=root, help=f"folder of the runs ({root})")
    return parser
