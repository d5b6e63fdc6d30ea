"""Whether a trial is one that a command can be about."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from plait.core.errors import SearchError
from plait.core.lifecycle import JobState

NEAREST = 5  # trials that are named in place of one that will not do


def check_target(verb: str, number: int, states: Sequence[JobState], name: str) -> None:
    """Only a trial that runs can be stopped, and only one that has begun has values that can be cloned.

    Args:
        verb: "stop" or "clone".
        number: of the trial.
        states: of all trials of the search, by number.
        name: of the search.

    Raises:
        SearchError: there is no such trial, or it is not of this kind.
    """
    good = [at for at, state in enumerate(states) if _will_do(verb, state)]
    if number in good:
        return
    if not 0 <= number < len(states):
        value, rule = f"trial {number}", "There is no such trial in this search."
    elif verb == "stop":
        value, rule = f"trial {number} is {states[number]}", "Only a trial that runs can be stopped."
    else:
        value, rule = f"trial {number} has not begun", "Only a trial with values can be cloned."
    kind = "that run" if verb == "stop" else "that have begun"
    if not good:
        raise SearchError(value, rule, f"There are none {kind}." if states else "It has no trials yet.")
    nearest = sorted(sorted(good, key=lambda at: abs(at - number))[:NEAREST])
    among = "The nearest of those" if len(good) > NEAREST else "Those"
    remedy = f"{among} {kind}: {', '.join(map(str, nearest))}."
    raise SearchError(value, rule, f"{remedy} `plait leaderboard {shlex.quote(name)}` shows all.")


def _will_do(verb: str, state: JobState) -> bool:
    return state != JobState.QUEUED and not (verb == "stop" and state.ended)
