"""When a stage of one of several replicas adds up gradients and steps: in words, without processes."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest

from plait.core.plans import Microbatch, Segment
from plait.distributed.replica_run import ReplicaRun
from plait.planner.instructions import Key
from plait.planner.verify import ScheduleError
from plait.simulate.lowering import lower
from plait.simulate.orders import rule


class Said:
    """A stage that notes what it is to do."""

    messages: Any = None

    def __init__(self) -> None:
        self.said: list[str] = []

    def received(self) -> None: ...

    def sent(self) -> None: ...

    def forward(self, number: int, *_: object) -> None:
        self.said.append(f"forward {number}")

    def backward(self, number: int, *_: object) -> None:
        self.said.append(f"backward {number}")

    def squares(self, _: Key) -> float:
        raise AssertionError("norms are not sent")

    def begin(self, key: Key) -> Future[float]:
        self.said.append(f"add up {key[0]}{key[1]}")
        done = Future[float]()
        done.set_result(float(key[1]))
        return done

    def finish(self, begun: list[Future[float]], _: object) -> list[float]:
        return [each.result() for each in begun]

    def step(self, keys: list[Key], norms: list[float]) -> None:
        assert norms == [float(step) for _, step in keys]
        self.said.append("step " + " ".join(f"{job}{step}" for job, step in keys))


def said(owners: list[str], keys: list[Key]) -> list[str]:
    """What is done for one microbatch after another, of jobs and steps such as ``a1``."""
    microbatches = [
        Microbatch(0, place, (Segment(own[0], int(own[1]), (0,), (0,), (4,), 1.0),))
        for place, own in enumerate(owners)
    ]
    stage = Said()
    run = ReplicaRun(cast(Any, stage), cast(Any, None), 0)
    run.keys = keys
    run.run(lower(microbatches, 1, rule("1f1b", [len(owners)])), dict(enumerate(microbatches)))
    return stage.said


def test_sums_begin_when_complete_and_jobs_step_before_their_next_microbatch() -> None:
    assert said(["a1", "a1", "b1", "a2"], [("a", 1), ("b", 1), ("a", 2), ("c", 1)]) == [
        *("forward 0", "backward 0", "forward 1", "backward 1", "add up a1"),
        *("forward 2", "backward 2", "add up b1", "step a1"),
        *("forward 3", "backward 3", "add up a2", "add up c1", "step b1 a2 c1"),
    ]


def test_a_replica_without_samples_takes_part_at_once() -> None:
    assert said([], [("a", 1)]) == ["add up a1", "step a1"]


def test_a_step_that_would_wait_for_ever_is_refused() -> None:
    with pytest.raises(ScheduleError, match="a: step 1 is due before"):
        said(["a1", "a2", "b1"], [("b", 1), ("a", 1), ("a", 2)])
