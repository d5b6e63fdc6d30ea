"""A stage's optimiser step runs on the backend of its model, as one process's does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from plait.distributed import stage_worker
from plait.distributed.stage_worker import StageWorker
from plait_kernels.steps import StepResult


def test_a_stage_steps_with_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def noting(_bank: object, steps: list[str], **options: Any) -> list[StepResult]:
        asked.update(options)
        return [StepResult(step, norm, False) for step, norm in zip(steps, options["norms"], strict=True)]

    monkeypatch.setattr(stage_worker, "adamw_step", noting)
    worker: Any = object.__new__(StageWorker)
    worker._clock, worker._recorder = (lambda: 0.0), SimpleNamespace(lap=lambda *_: None)
    worker._backend, worker._adapter_step, worker.bank = "triton", (lambda step: step.job), None
    (done,) = worker.step([SimpleNamespace(job="a", step=3)], [2.5])
    assert asked == {"norms": [2.5], "backend": "triton"}
    assert (done.job, done.step) == ("a", 3)
