"""What a command's events add up to, and whom its time is charged to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.core.errors import LostProcessError
from plait.core.jobs import JobSpec
from plait.core.messages import (
    Attach,
    Attached,
    Command,
    Cursor,
    Detach,
    Evaluate,
    Export,
    Generate,
    Generated,
    GenerateJob,
    JobFailed,
    JobLoss,
    KeepWeights,
    MicrobatchDone,
    ObservedPeak,
    OutOfMemory,
    RunSchedule,
    SaveCheckpoint,
    Saved,
    ScheduleDone,
    StepDone,
    WorkerEvent,
)
from plait.core.plans import Microbatch, Segment
from plait.engine.ledger import Ledger, Outcome

TURN = (
    Microbatch(0, 0, (Segment("a", 1, (0,), (0,), (4,), 1.0), Segment("b", 1, (0,), (0,), (2,), 1.0))),
    Microbatch(0, 1, (Segment("b", 1, (1,), (0,), (6,), 1.0),)),
)


def accounts() -> tuple[Counter[str], Any]:
    """Nanoseconds of each job, and what the ledger takes for the live jobs that it charges."""
    charged = Counter[str]()

    def charge(name: str, nanoseconds: int) -> None:
        charged[name] += nanoseconds

    return charged, {name: SimpleNamespace(charge=partial(charge, name)) for name in "ab"}


class Answering:
    """A worker that gives these events, or is lost after so many seconds."""

    def __init__(self, events: Sequence[WorkerEvent] | float) -> None:
        self._events = events

    def execute(self, _: Command) -> Sequence[WorkerEvent]:
        if isinstance(self._events, float):
            error = LostProcessError("process 1", "It died.")
            error.seconds = self._events
            raise error
        return self._events


def ledger(events: Sequence[WorkerEvent] | float) -> Ledger:
    worker: Any = Answering(events)
    return Ledger(worker)


def peak(size: int | None) -> ObservedPeak:
    """Of a process at which so many bytes were observed; None: what lay beside is unknown."""
    return ObservedPeak(0, (("forward", 1), ("backward", size or 2)), 0 if size else None)


def test_peaks_are_known_if_every_microbatch_of_every_process_was_observed() -> None:
    seen = {0: (peak(5), peak(9)), 1: (peak(7), peak(3))}
    whole = Outcome(microbatches=2, peaks=seen)
    assert whole.peak_bytes == 9
    assert whole.process_peaks({0: 2}, {0: 0, 1: 0}) == {0: 7, 1: 9}
    assert whole.process_peaks({0: 2, 1: 2}, {0: 0, 1: 1}) == {0: 5, 1: 9, 2: 7, 3: 3}
    one_missing = Outcome(microbatches=3, peaks=seen)
    assert (one_missing.peak_bytes, one_missing.process_peaks({0: 2}, {0: 0, 1: 0})) == (None, {})
    unknown = Outcome(microbatches=2, peaks={0: (peak(5), peak(None)), 1: (peak(7), peak(3))})
    assert (unknown.peak_bytes, unknown.process_peaks({0: 2}, {0: 0, 1: 0})) == (None, {0: 7})
    assert Outcome().peak_bytes is None


def test_events_are_added_up_and_their_time_is_charged() -> None:
    losses = (JobLoss("a", 1, 8.0, 4, 4), JobLoss("b", 1, 3.0, 2, 2)), (JobLoss("b", 1, 5.0, 2, 6),)
    events = (
        Attached("b", Cursor()),
        MicrobatchDone(0, losses[0], 6e-9, (peak(5),)),
        MicrobatchDone(1, losses[1], 4e-9),
        StepDone("a", 1, 0.5, 1e-9),
        StepDone("b", 1, float("inf"), 1e-9),
        JobFailed("b", 1, "later", 2e-9),
        Generated("a", (0,), ("1",), 3e-9),
        Saved("a", 5e-9),
        ScheduleDone((MicrobatchDone(0, losses[1], 1e-9),)),
    )
    (charged, jobs), made = accounts(), ledger(events)
    outcome = made.send(RunSchedule(TURN), jobs)
    assert {name: (each.mean, each.tokens) for name, each in outcome.tallies.items()} == {
        "a": (2.0, 4),
        "b": (2.0, 8),
    }
    assert (outcome.tokens, outcome.microbatches, outcome.peak_bytes) == (12, 2, None)
    assert list(outcome.steps) == ["a"]
    assert outcome.failures == {"b": "gradient norm is inf"}, "the first reason"
    assert (list(outcome.attached), list(outcome.generated)) == (["b"], ["a"])
    assert [each.tokens for each in outcome.schedules] == [6]
    assert charged == {"a": 4 + 1 + 3 + 5, "b": 2 + 4 + 1 + 2 + 1}
    assert made.device_ns == 23


WASTED = [
    (RunSchedule(TURN), {"a": 4, "b": 8}),  # by tokens
    (Evaluate(TURN), {"a": 4, "b": 8}),
    (RunSchedule(()), {}),
    (Attach(JobSpec("a")), {"a": 12}),
    (Generate((GenerateJob("a", (0,)), GenerateJob("b", (0,))), 4), {"a": 6, "b": 6}),
    (KeepWeights(("a", "b")), {"a": 6, "b": 6}),
    (Detach("a"), {"a": 12}),
    (SaveCheckpoint("a", Path(), Cursor()), {"a": 12}),
    (Export("a", Path()), {"a": 12}),
]


@pytest.mark.parametrize(("command", "shares"), WASTED)
def test_the_time_of_what_came_to_nothing_is_charged_to_its_jobs(
    command: Command, shares: dict[str, int]
) -> None:
    (charged, jobs), lost = accounts(), ledger(12e-9)
    with pytest.raises(LostProcessError, match="process 1"):
        lost.send(command, jobs)
    assert charged == shares
    assert lost.device_ns == sum(shares.values())
    (charged, jobs), full = accounts(), ledger([OutOfMemory("full", 12e-9)])
    assert full.send(command, jobs).out_of_memory == "full"
    assert charged == shares
