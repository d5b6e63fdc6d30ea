"""`plait control`: steer a search from another terminal while it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from plait.errors import EXIT_BAD_INPUT, EXIT_DONE, ConfigError, choices
from plait.paths import search_folder, search_names
from plait.search.control import Answer, Mailbox, Request
from plait.settings import TrackingSettings

USAGE = """
plait control NAME status                          what runs, what is over, the best so far
plait control NAME pause | resume                  park all jobs; go on
plait control NAME stop | cancel                   start no further trial; end at once
plait control NAME stop TRIAL                      end one trial
plait control NAME add KEY=VALUE ...               one more trial, with these values
plait control NAME clone TRIAL KEY=VALUE ...       its copy; with --warm from its weights
"""
VERBS = ("status", "pause", "resume", "stop", "cancel", "add", "clone")
PATIENCE_SECONDS = 30.0


def main(arguments: Sequence[str]) -> int:
    """Steer a search while it runs."""
    known = _parser().parse_intermixed_args(arguments)
    folder = search_folder(known.root, known.name)
    if not folder.is_dir():
        raise ConfigError(
            f"plait control {known.name}: no search of this name below {known.root}",
            f"There are: {choices(search_names(known.root)) or 'none'}.",
            "Give the folder of its runs with --root FOLDER.",
        )
    mailbox = Mailbox(folder / "control")
    request = read_request(known.verb, known.rest, warm=known.warm)
    if request.verb == "status" and not mailbox.attended:
        print(f"{known.name} does not run now (orders: {mailbox.orders.mode}).")
        print(f"`plait leaderboard {known.name}` shows its trials, `plait resume {known.name}` goes on.")
        return EXIT_DONE
    return _ask(mailbox, request, known.wait)


def read_request(verb: str, rest: Sequence[str], *, warm: bool = False) -> Request:
    """The request that the words of a command line stand for.

    Raises:
        ConfigError: an unknown verb, a trial that is missing or no number, a value that is not KEY=VALUE.
    """
    if verb not in VERBS:
        raise ConfigError(
            f"plait control NAME {verb}", "There is no such command.", f"There are: {choices(VERBS)}."
        )
    if warm and verb != "clone":
        raise ConfigError("--warm", "A warm start begins with the weights of the trial that is cloned.")
    words = list(rest)
    trial = None
    if verb == "clone" or (verb == "stop" and words):
        trial = _number(verb, words.pop(0) if words else "")
    wanted = verb in ("add", "clone")
    if words and not wanted:
        raise ConfigError(f"plait control NAME {verb}: {' '.join(words)}", "It takes no further words.")
    if not words and verb == "add":
        raise ConfigError(f"plait control NAME {verb}", "Give at least one KEY=VALUE of the searched keys.")
    for word in words:
        if "=" not in word:
            raise ConfigError(f"plait control NAME {verb}: {word!r}", "A value is given as KEY=VALUE.")
    return Request(verb, trial, tuple(words), warm)


def _number(verb: str, text: str) -> int:
    digits = text.removeprefix("trial-")
    if not digits.isdecimal():
        raise ConfigError(
            f"plait control NAME {verb} {text}".rstrip(),
            "A trial is given by its number, as in `plait leaderboard`.",
        )
    return int(digits)


def _ask(mailbox: Mailbox, request: Request, seconds: float) -> int:
    mailbox.post(request)
    if not mailbox.attended:
        print("The search does not run now; it will do this when it goes on.")
        return EXIT_DONE
    answer = mailbox.take_answer(request, seconds)
    if answer is None:
        print(f"No answer after {seconds:g} s: the search is in the middle of a step and reads this then.")
        if request.verb != "status":
            print("`plait control NAME status` shows afterwards whether it was done.")
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
    parser.add_argument("name", help="of the search, as `plait sweep` prints it")
    parser.add_argument("verb", help=", ".join(VERBS))
    parser.add_argument("rest", nargs="*", metavar="TRIAL | KEY=VALUE")
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
