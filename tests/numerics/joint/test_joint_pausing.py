"""Jobs that are paused, preempted, or thrown back by lack of memory end where they would have ended alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from laboratory import History, Kept, Laboratory, assert_same, assert_same_bits, with_train

from plait.core.jobs import JobSpec
from plait.core.lifecycle import PauseReason
from plait.core.messages import Command, Evaluate, GroupStep, JobPaused, Notice, RunSchedule
from plait.engine.coordinator import Coordinator
from plait.engine.local_worker import LocalWorker
from plait_kernels import Bank

STEPS = 6


@pytest.fixture(scope="module")
def lab(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory, kept: Kept) -> Laboratory:
    torch.set_num_threads(1)
    return Laboratory("llama", tiny_model("llama"), tmp_path_factory.mktemp("pausing"), kept)


@pytest.fixture(scope="module")
def jobs(lab: Laboratory) -> list[JobSpec]:
    """Four, each unlike the others, with dropout."""
    return lab.group(dropout=0.1, steps=STEPS)[:4]


@pytest.fixture(scope="module")
def alone(lab: Laboratory, jobs: list[JobSpec]) -> dict[str, History]:
    """Each trained by itself, whatever its priority: that is no part of the mathematics."""
    return lab.solo(jobs)


def test_paused_jobs_end_where_they_would_have_ended_alone(
    lab: Laboratory, jobs: list[JobSpec], alone: dict[str, History]
) -> None:
    def between(turn: int, coordinator: Coordinator) -> None:
        if turn in (2, 5):
            coordinator.pause(jobs[0].name)
            coordinator.pause(jobs[2].name)
        if turn in (4, 7):
            coordinator.resume(jobs[0].name)
        if turn in (5, 8):
            coordinator.resume(jobs[2].name)

    together = lab.run(jobs, between=between)
    paused = [event.job for event in together.events if isinstance(event, JobPaused)]
    assert set(paused) == {jobs[0].name, jobs[2].name}
    assert len(paused) >= 3
    _same_as_alone(alone, jobs, together)


def test_a_preempted_job_resumes_where_it_would_have_been_alone(
    lab: Laboratory, jobs: list[JobSpec], alone: dict[str, History]
) -> None:
    """Two places, of which one of higher priority takes one in the middle."""
    urgent = with_train(jobs[3], priority=1)

    def between(turn: int, coordinator: Coordinator) -> None:
        if turn == 2:
            coordinator.submit(urgent)

    together = lab.run(jobs[1:3], between=between, max_jobs=2)
    (paused,) = [event for event in together.events if isinstance(event, JobPaused)]
    assert (paused.job, paused.step, paused.reason) == (jobs[2].name, 2, PauseReason.PREEMPTED)
    _same_as_alone(alone, [jobs[1], jobs[2], urgent], together)


def test_a_preempted_job_that_trained_alone_resumes_bit_for_bit(
    lab: Laboratory, jobs: list[JobSpec], alone: dict[str, History]
) -> None:
    """With one place, each is packed as if it were alone."""

    def between(turn: int, coordinator: Coordinator) -> None:
        if turn == 2:
            coordinator.submit(with_train(jobs[0], priority=1))

    together = lab.run([jobs[2]], between=between, max_jobs=1)
    assert any(isinstance(event, JobPaused) for event in together.events)
    for job in (jobs[2], jobs[0]):
        assert_same_bits(together, alone[job.name], [job])


def test_a_paused_job_alone_resumes_bit_for_bit(
    lab: Laboratory, jobs: list[JobSpec], alone: dict[str, History]
) -> None:
    job = jobs[2]

    def between(turn: int, coordinator: Coordinator) -> None:
        if turn in (1, 4):
            coordinator.pause(job.name)
        if turn in (3, 6):
            coordinator.resume(job.name)

    paused = lab.run([job], between=between)
    assert sum(isinstance(event, JobPaused) for event in paused.events) == 2
    assert_same_bits(paused, alone[job.name], [job])


def test_a_step_that_runs_out_of_memory_is_taken_again_without_the_last_job(
    lab: Laboratory, jobs: list[JobSpec], alone: dict[str, History]
) -> None:
    jobs = [with_train(job, priority=priority) for job, priority in zip(jobs, (0, 1, 0, 1), strict=True)]
    shots = iter([3, 5])
    shot = next(shots)
    runs = 0

    def before(worker: LocalWorker, command: Command) -> None:
        """Lets a microbatch in the middle of a step fail as a device does that has no memory left."""
        nonlocal runs, shot
        if not isinstance(command, RunSchedule):
            return
        runs += 1
        if runs == shot:
            shot = next(shots, 0)
            _fail_once(worker, after=1)

    together = lab.run(jobs, capacity=120, before=before)
    paused = [event.job for event in together.events if isinstance(event, JobPaused)]
    assert paused == [jobs[2].name, jobs[0].name]
    sizes = [len(event.jobs) for event in together.events if isinstance(event, GroupStep)]
    assert sizes[:2] == [4, 4]
    assert max(sizes[2:]) <= 3
    _same_as_alone(alone, jobs, together)


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


@pytest.mark.parametrize("planted", ["attach", "block"])
def test_a_job_that_runs_out_of_memory_as_it_is_attached_comes_later(
    lab: Laboratory,
    jobs: list[JobSpec],
    alone: dict[str, History],
    planted: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before its block is there, or when it is: nothing of it stays, and the others continue."""
    whole, planted_for = getattr(Bank, planted), {jobs[2].name}

    def failing(*arguments: Any, **more: Any) -> Any:
        if named := planted_for.intersection(argument for argument in arguments if isinstance(argument, str)):
            planted_for.difference_update(named)
            raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
        return whole(*arguments, **more)

    monkeypatch.setattr(Bank, planted, failing)
    together = lab.run(jobs)
    notices = [event.text for event in together.events if isinstance(event, Notice)]
    said = (
        f"{jobs[2].name} waits for memory: out of memory while it was attached (tried to allocate 20.00 GiB)"
    )
    assert notices == [said]
    _same_as_alone(alone, jobs, together)


def test_an_evaluation_that_runs_out_of_memory_is_done_in_parts(
    lab: Laboratory, jobs: list[JobSpec], alone: dict[str, History]
) -> None:
    """Validation losses and everything else stay as they are; no group is made smaller for it."""
    evaluations = 0

    def before(worker: LocalWorker, command: Command) -> None:
        nonlocal evaluations
        if isinstance(command, Evaluate):
            evaluations += 1
            if evaluations in (1, 2):
                _fail_once(worker, after=0)

    together = lab.run(jobs, before=before)
    assert evaluations == 5  # of all four, of the first two, of each of those, of the others
    assert not [event for event in together.events if isinstance(event, JobPaused)]
    _same_as_alone(alone, jobs, together)


def _same_as_alone(alone: dict[str, History], jobs: Sequence[JobSpec], together: History) -> None:
    for job in jobs:
        assert_same(together, alone[job.name], [job])
