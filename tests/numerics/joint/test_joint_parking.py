"""Jobs that are parked, displaced, or thrown back by lack of memory end where they would have ended alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.engine.coordinator import Coordinator
from plait.engine.messages import Command, GroupStep, JobParked, RunMicrobatches
from plait.engine.worker import LocalWorker

STEPS = 8


@pytest.fixture
def lab(laboratory: Any) -> Any:
    return laboratory("llama")


def with_priority(job: Any, priority: int) -> Any:
    return replace(job, train=replace(job.train, priority=priority))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_parked_jobs_end_where_they_would_have_ended_alone(lab: Any, dropout: float) -> None:
    jobs = lab.group(dropout=dropout, steps=STEPS)[:4]

    def between(turn: int, coordinator: Coordinator) -> None:
        if turn in (2, 5):
            coordinator.park(jobs[0].name)
            coordinator.park(jobs[2].name)
        if turn in (4, 7):
            coordinator.unpark(jobs[0].name)
        if turn in (5, 9):
            coordinator.unpark(jobs[2].name)

    together = lab.run(jobs, between=between)
    parked = [event.job for event in together.events if isinstance(event, JobParked)]
    assert set(parked) == {jobs[0].name, jobs[2].name}
    assert len(parked) >= 3
    _same_as_alone(lab, jobs, together)


def test_a_parked_job_alone_goes_on_bit_for_bit(lab: Any) -> None:
    job = lab.group(dropout=0.1, steps=STEPS)[2]

    def between(turn: int, coordinator: Coordinator) -> None:
        if turn in (1, 4):
            coordinator.park(job.name)
        if turn in (3, 6):
            coordinator.unpark(job.name)

    disturbed, undisturbed = lab.run([job], between=between), lab.run([job])
    assert disturbed.losses(job.name) == undisturbed.losses(job.name)
    for site, (a, b) in undisturbed.end[job.name].items():
        assert torch.equal(a, disturbed.end[job.name][site][0])
        assert torch.equal(b, disturbed.end[job.name][site][1])


def test_a_step_that_runs_out_of_memory_is_taken_again_without_the_last_job(lab: Any) -> None:
    jobs = [
        with_priority(job, priority)
        for job, priority in zip(lab.group(dropout=0.1, steps=STEPS)[:4], (0, 1, 0, 1), strict=True)
    ]
    shots = iter([3, 5])
    shot = next(shots)
    runs = 0

    def before(worker: LocalWorker, command: Command) -> None:
        """Lets a microbatch in the middle of a step fail as a device does that has no memory left."""
        nonlocal runs, shot
        if not isinstance(command, RunMicrobatches):
            return
        runs += 1
        if runs == shot:
            shot = next(shots, 0)
            _fail_once(worker, after=1)

    together = lab.run(jobs, capacity=120, before=before)
    parked = [event.job for event in together.events if isinstance(event, JobParked)]
    assert parked == [jobs[2].name, jobs[0].name]
    sizes = [len(event.jobs) for event in together.events if isinstance(event, GroupStep)]
    assert sizes[:2] == [4, 4]
    assert max(sizes[2:]) <= 3
    _same_as_alone(lab, jobs, together)


def _fail_once(worker: LocalWorker, *, after: int) -> None:
    """The next forward pass but ``after`` raises torch's own error."""
    forward: Callable[..., Any] = worker._forward
    calls = 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            del worker.__dict__["_forward"]
            raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
        return forward(*arguments)

    worker.__dict__["_forward"] = failing


def _same_as_alone(lab: Any, jobs: Any, together: Any) -> None:
    alone = lab.solo(jobs)
    for job in jobs:
        assert together.ended(job.name).state == "finished"
        assert together.losses(job.name) == pytest.approx(alone[job.name].losses(job.name), rel=1e-5)
        assert len(together.losses(job.name)) == STEPS
        assert together.difference(alone[job.name], job.name) <= 1e-4
