"""Promise 1 over processes: an adapter trained on several replicas ends where one process leaves it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from laboratory import History, distance
from peft_folders import stored_pairs
from processes import fleet

from plait.core.messages import JobProgress, RunSchedule
from plait.core.settings import EngineSettings, ModelSettings

TINY = ModelSettings(kind="tiny", dtype="float32", seed=3)
STEPS = 6
LOSS_TOLERANCE = 1e-5  # relative, every step
WEIGHT_TOLERANCE = 1e-4  # of the norm of the adapter's update


@pytest.mark.parametrize("count", [2, 3])
def test_replicas_train_as_one_process_does(
    laboratory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1, steps=STEPS)
    alone = lab.run(jobs, kernels="grouped")
    engine = EngineSettings(kernels="grouped", capacity=160, threads=1)
    with fleet(count, TINY, engine, tmp_path / "processes") as worker:
        ran: list[int] = []
        monkeypatch.setattr(worker, "execute", partial(noting, worker.execute, ran))
        first = lab.run(jobs, worker=worker)
        assert set(ran) == set(range(count))
        weights = {job.name: stored_pairs(first.ended(job.name).adapter) for job in jobs}
        second = lab.run(jobs, worker=worker)
    assert losses(first) == losses(second)
    for job in jobs:
        assert len(first.losses(job.name)) == STEPS
        assert first.losses(job.name) == pytest.approx(alone.losses(job.name), rel=LOSS_TOLERANCE)
        assert first.norms(job.name) == pytest.approx(alone.norms(job.name), rel=1e-4)
        assert first.evaluations(job.name) == pytest.approx(alone.evaluations(job.name), rel=LOSS_TOLERANCE)
        assert alone.difference_from(weights[job.name], job.name) <= WEIGHT_TOLERANCE
        again = stored_pairs(second.ended(job.name).adapter)
        assert distance(weights[job.name], again) == 0.0


def noting(execute: Any, ran: list[int], command: Any) -> Any:
    """Carry out a command, and note which replicas have microbatches."""
    if isinstance(command, RunSchedule):
        ran += [each.replica for each in command.microbatches]
    return execute(command)


def losses(history: History) -> list[float]:
    """Of all jobs, in the order in which they came."""
    return [each.loss for each in history.events if isinstance(each, JobProgress)]
