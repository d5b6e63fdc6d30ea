"""A stage steps on the backend of its model, and never a job whose loss or norm was not finite."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.core.messages import StepJob
from plait.core.plans import Microbatch, Segment
from plait.distributed import stage_worker
from plait.distributed.stage_worker import StageWorker, _Schedule
from plait.engine.memory import FlightPeaks
from plait_kernels.steps import StepResult


def test_a_stage_steps_with_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def noting(_bank: object, steps: list[StepJob], **options: Any) -> list[StepResult]:
        asked.update(options)
        return [StepResult(step.job, norm, False) for step, norm in zip(steps, options["norms"], strict=True)]

    monkeypatch.setattr(stage_worker, "adamw_step", noting)
    worker: Any = object.__new__(StageWorker)
    worker._clock, worker._recorder = iter([0.0, 8.0]).__next__, SimpleNamespace(lap=lambda *_: None)
    blocks = {job: SimpleNamespace(state=torch.zeros(4, size)) for job, size in (("a", 30), ("b", 10))}
    worker.bank = SimpleNamespace(block=blocks.__getitem__)
    worker._backend, worker._adapter_step = "triton", (lambda step: step)
    worker._failed = set()
    schedule = _Schedule(2, {("a", 3): StepJob("a", 3, 0.1), ("b", 1): StepJob("b", 1, 0.1)})
    worker._of_key = dict.fromkeys(schedule.steps, schedule)
    worker.step([("a", 3), ("b", 1)], [2.5, math.nan])
    assert asked == {"norms": [2.5, math.nan], "backend": "triton"}
    assert [(each.job, each.step) for each in schedule.stepped] == [("a", 3), ("b", 1)]
    assert [each.seconds for each in schedule.stepped] == [6.0, 2.0]  # by size, as in one process
    assert schedule.left == 0
    assert math.isnan(worker.squares(("b", 2)))  # so that no stage steps it any more


def test_the_time_of_a_step_without_any_part_here_is_shared_out_evenly() -> None:
    worker: Any = object.__new__(StageWorker)
    worker.bank = SimpleNamespace(block=lambda _: SimpleNamespace(state=torch.zeros(4, 0)))
    results = [StepResult(job, 1.0, False) for job in "ab"]
    stepped = worker._stepped([("a", 1), ("b", 1)], results, 3.0)
    assert [each.seconds for each in stepped] == [1.5, 1.5]


def test_a_loss_that_is_not_finite_stops_the_step_of_a_stage_without_the_job() -> None:
    block = SimpleNamespace(state=torch.zeros(4, 0))
    worker: Any = object.__new__(StageWorker)
    worker._clock, worker._recorder = (lambda: 0.0), SimpleNamespace(lap=lambda *_, **__: None)
    worker.bank, worker._failed = SimpleNamespace(block=lambda _: block), set()
    worker._shared = None
    parts = tuple(Segment(job, 1, (0,), (0,), (2,), 0.5) for job in "ab")
    sums = torch.tensor([math.inf, 1.0])
    worker._running = {
        0: SimpleNamespace(
            leaving=torch.zeros(()),
            entering=None,
            seconds=0.0,
            nll=torch.zeros(1),
            loaded=SimpleNamespace(counts=(2, 2), segments=parts, sums=lambda _: sums),
        )
    }
    worker._of_number = {0: _Schedule(1, {})}
    worker._observed, worker._peaks = set(), FlightPeaks(torch.device("cpu"), tuple)
    with worker._peaks.forward(0, False):
        pass
    worker.backward(0, Microbatch(0, 0, parts), None)
    assert math.isnan(worker.squares(("a", 1)))
    assert worker.squares(("b", 1)) == 0.0
