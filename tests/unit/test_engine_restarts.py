"""Processes that are lost while jobs train: all falls back to the last checkpoints, and nothing is missing or
double in the end."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from curve_worker import ADAPTER, CurveWorker, lengths_data, load_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.errors import GatheringInterruptedError, LostProcessError, ProcessError, ShortStageError
from plait.core.jobs import JobSpec, TrainSpec
from plait.core.lifecycle import JobResult, JobState, PauseReason
from plait.core.messages import (
    Command,
    Event,
    GroupStep,
    JobAdmitted,
    JobEvaluated,
    JobPaused,
    JobProgress,
    Notice,
    WorkerEvent,
)
from plait.core.settings import ClusterSettings, EngineSettings, PlannerSettings, RunSettings
from plait.engine.catalogue import DataCatalogue
from plait.engine.coordinator import Coordinator
from plait.engine.restarts import Restarts
from plait.engine.worker import WorkerFacts

pytestmark = pytest.mark.usefixtures("temporary")

STEPS = 7
RUNG = 4
LOST_SECONDS = 0.25  # of a command that comes to nothing


def falling(job: JobSpec, step: int) -> float:
    return 10.0 / (step + 1) + job.train.lr


def job(number: int) -> JobSpec:
    spec = TrainSpec(steps=STEPS, batch_size=2, lr=1e-3 * number, eval_every=2, priority=number % 2)
    return JobSpec(f"job-{number}", ADAPTER, spec, lengths_data((3, 5, 8)))


class Mortal(CurveWorker):
    """Is lost at one of its commands: before it is carried out, or after, when no one hears of it."""

    last: int | None = None
    late: bool = False
    capacities: tuple[int, ...] = (16,)

    @property
    def facts(self) -> WorkerFacts:
        devices = tuple(f"cpu:{number}" for number in range(len(self.capacities)))
        return replace(super().facts, devices=devices, capacities=self.capacities)

    def execute(self, command: Command) -> Sequence[WorkerEvent]:
        dies = self.last is not None and len(self.commands) >= self.last
        lost = LostProcessError("process 1 died")
        lost.seconds = LOST_SECONDS
        if dies and not self.late:
            raise lost
        events = super().execute(command)
        if dies:
            raise lost
        return events


def made(
    folder: Path, lives: Sequence[tuple[int, bool]], restarts: int = 1000, **engine: int | None
) -> Coordinator:
    """A coordinator whose workers live for so many commands, the last one forever."""
    left = iter(lives)

    def worker() -> Mortal:
        new = Mortal(falling)
        new.last, new.late = next(left, (None, False))
        return new

    run = RunSettings(
        engine=EngineSettings(capacity=16, **engine),  # type: ignore[arg-type]
        planner=PlannerSettings(max_jobs=2),
        cluster=ClusterSettings(restarts=restarts),
    )
    return Coordinator(worker(), DataCatalogue(load_lengths), run, folder=folder, renew=worker)


def trained(coordinator: Coordinator, rungs: bool) -> list[Event]:
    """All events until all jobs have ended; those that reach their rung are let past two turns later, from
    whatever step they then have."""
    for number in range(1, 4):
        coordinator.submit(job(number), rungs=(RUNG,) if rungs else ())
    events: list[Event] = []
    waiting: dict[str, int] = {}
    past: set[str] = set()
    for turn in range(400):
        if coordinator.idle:
            return events
        events += coordinator.settle()
        new = coordinator.advance()
        events += new
        for event in new:
            if rungs and isinstance(event, JobProgress) and event.step == RUNG and event.job not in past:
                past.add(event.job)
                waiting[event.job] = turn + 2
        for name in [name for name, due in waiting.items() if due <= turn]:
            del waiting[name]
            coordinator.resume(name, PauseReason.AT_RUNG)
    raise AssertionError("the jobs never came to an end")


def check(events: Sequence[Event]) -> None:
    """Every step's loss and every evaluation is that of its step, and none is missing."""
    for number in range(1, 4):
        name = f"job-{number}"
        steps = {each.step: each for each in events if isinstance(each, JobProgress) and each.job == name}
        assert sorted(steps) == list(range(1, STEPS + 1))
        found = [each for each in events if isinstance(each, JobProgress) and each.job == name]
        assert all(each.loss == pytest.approx(falling(job(number), each.step - 1)) for each in found)
        assert all(each.tokens == steps[each.step].tokens for each in found)
        evaluated = [each for each in events if isinstance(each, JobEvaluated) and each.job == name]
        assert {2, 4, 6, 7} <= {each.step for each in evaluated}
        assert all(each.loss == pytest.approx(falling(job(number), each.step)) for each in evaluated)
        (result,) = (each for each in events if isinstance(each, JobResult) and each.job == name)
        assert (result.state, result.step) == (JobState.FINISHED, STEPS)
        assert result.tokens == steps[STEPS].tokens


@settings(max_examples=150, deadline=None)
@given(
    lives=st.lists(st.tuples(st.integers(0, 25), st.booleans()), max_size=6),
    checkpoint_steps=st.sampled_from([1, 2, 3, None]),
    rungs=st.booleans(),
)
def test_whenever_processes_are_lost_no_step_is_missing_or_wrong(
    lives: list[tuple[int, bool]], checkpoint_steps: int | None, rungs: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        coordinator = made(Path(folder), lives, checkpoint_steps=checkpoint_steps)
        events = trained(coordinator, rungs)
        check(events)
        said = [each.text for each in events if isinstance(each, Notice)]
        count = coordinator.restarts.count
        assert sum("Restarting with the processes" in each for each in said) == count <= len(lives)
        assert sum(" again after " in each for each in said) <= count
        results = [each for each in events if isinstance(each, JobResult)]
        assert sum(each.device_seconds for each in results) == pytest.approx(coordinator.device_ns / 1e9)
        assert coordinator.device_ns / 1e9 >= count * LOST_SECONDS


def test_jobs_that_fall_back_are_said_to_wait_until_they_are_admitted_again(tmp_path: Path) -> None:
    count = 0
    for commands in range(4, 20):
        coordinator = made(tmp_path / str(commands), [(commands, False)], checkpoint_steps=3)
        events = trained(coordinator, rungs=False)
        (fell,) = (i for i, each in enumerate(events) if isinstance(each, Notice) and "Restart" in each.text)
        running: set[str] = set()
        for event in events[: fell + 1]:
            if isinstance(event, JobAdmitted):
                running.add(event.job.name)
            elif isinstance(event, JobPaused | JobResult):
                running.discard(event.job)
        assert not running
        fallen = [each for each in events if isinstance(each, JobPaused) and each.reason == PauseReason.LOST]
        for each in fallen:
            back = next(e for e in events[fell:] if isinstance(e, JobAdmitted) and e.job.name == each.job)
            assert back.step == each.step
        count += len(fallen)
    assert count > 16


def test_a_restart_repeats_only_steps_since_the_last_checkpoints(tmp_path: Path) -> None:
    most = 0
    for commands in range(8, 20):
        coordinator = made(tmp_path / str(commands), [(commands, False)], checkpoint_steps=2)
        events = trained(coordinator, rungs=False)
        steps = [each for each in events if isinstance(each, JobProgress)]
        assert coordinator.restarts.count == 1
        assert coordinator.restarts.steps <= 2 * 2
        assert len(steps) == 3 * STEPS + coordinator.restarts.steps
        most = max(most, coordinator.restarts.steps)
    assert most > 0


def test_an_interrupted_run_waits_for_no_process_that_is_lost(tmp_path: Path) -> None:
    coordinator = made(tmp_path, [(9, False), (0, False)], checkpoint_steps=1)
    coordinator.submit(job(1))
    while coordinator.restarts.count == 0:
        coordinator.advance()
    coordinator.stop()
    (result,) = (each for each in coordinator.advance() if isinstance(each, JobResult))
    assert result.state == JobState.PAUSED
    assert result.checkpoint is not None
    assert result.checkpoint.name == f"step-{result.step:08d}"


def test_a_run_that_is_interrupted_while_processes_gather_saves_and_counts_nothing(tmp_path: Path) -> None:
    coordinator = made(tmp_path, [(9, False)], checkpoint_steps=1)
    coordinator.submit(job(1))
    while coordinator.restarts.count == 0:
        coordinator.advance()

    def interrupted() -> Mortal:
        raise GatheringInterruptedError("interrupted")

    coordinator._renew = interrupted
    assert coordinator.advance() == []
    coordinator.stop()
    (result,) = (each for each in coordinator.advance() if isinstance(each, JobResult))
    assert (result.state, coordinator.restarts.count) == (JobState.PAUSED, 1)
    assert result.checkpoint is not None


def test_with_processes_that_join_jobs_train_on_from_where_they_are(tmp_path: Path) -> None:
    joining = [False, False, False, True, False, False, True]
    coordinator = made(tmp_path, [], checkpoint_steps=None)
    coordinator._grown = lambda: bool(joining) and joining.pop(0)
    events = trained(coordinator, rungs=True)
    check(events)
    assert not joining
    moved = [each for each in events if isinstance(each, JobPaused) and each.reason == PauseReason.MOVED]
    assert len(moved) == 3
    assert all(each.step > 0 for each in moved)
    assert len([each for each in events if isinstance(each, JobProgress)]) == 3 * STEPS
    assert coordinator.restarts.count == 0


def shrinking(
    folder: Path, before: tuple[int, ...], after: tuple[int, ...], **cluster: object
) -> Coordinator:
    """A coordinator with replicas of these capacities, of which some are lost for good."""
    workers = iter([(before, 12), (after, None)])

    def worker() -> Mortal:
        new = Mortal(falling)
        new.capacities, new.last = next(workers)
        return new

    made = ClusterSettings(processes=2, **cluster)  # type: ignore[arg-type]
    run = RunSettings(engine=EngineSettings(capacity=16), cluster=made)
    return Coordinator(worker(), DataCatalogue(load_lengths), run, folder=folder, renew=worker)


def test_without_the_replica_that_takes_its_samples_a_job_waits_for_another_run(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="8 tokens, but the processes here take at most 4"):
        trained(shrinking(tmp_path, (4, 16), (4,), capacities=(4, 16)), rungs=False)


def test_jobs_need_more_where_fewer_replicas_keep_the_moments(tmp_path: Path) -> None:
    coordinator = shrinking(tmp_path, (16, 16), (16,), optimiser="sharded")
    coordinator.submit(job(1))
    needed: dict[int, int] = {}
    while not coordinator.idle:
        if any(isinstance(event, GroupStep) for event in coordinator.advance()):
            expected = coordinator.plan().groups[0].predicted
            assert expected is not None
            assert expected.bytes is not None
            count = coordinator.restarts.count
            needed[count] = max(needed.get(count, 0), expected.bytes)
    assert needed[0] < needed[1]


def test_too_many_lost_processes_within_an_hour_end_the_run(tmp_path: Path) -> None:
    coordinator = made(tmp_path, [(3, False)] * 5, restarts=2, checkpoint_steps=1)
    with pytest.raises(ProcessError, match="process 1 died"):
        trained(coordinator, rungs=False)
    assert coordinator.restarts.count == 3


def test_memory_that_is_short_where_no_job_trains_is_a_loss_like_others(tmp_path: Path) -> None:
    """No smaller group follows, so it would be short for ever."""
    coordinator = made(tmp_path, [(9, False)], restarts=2, checkpoint_steps=1)
    coordinator.submit(job(1))
    while coordinator.restarts.count == 0:
        coordinator.advance()

    def short() -> Mortal:
        raise ShortStageError("no memory for what the other processes send")

    coordinator._renew = short
    coordinator.advance()
    assert coordinator.restarts.count == 2
    with pytest.raises(ShortStageError):
        coordinator.advance()


def test_restarts_are_counted_by_the_hour() -> None:
    now = 0.0
    restarts = Restarts(2, lambda: now)
    assert [restarts.another(), restarts.another(), restarts.another()] == [True, True, False]
    now = 3600.0
    assert restarts.another(), "an hour later"
    assert restarts.count == 4


def test_the_account_names_what_checkpoints_and_restarts_have_cost() -> None:
    restarts = Restarts(9)
    assert restarts.account(0, 0.0) == ""
    assert restarts.account(2, 1.25) == "2 took 1.2 s"
    restarts.another()
    restarts.seconds, restarts.steps = 3.0, 1
    assert restarts.account(0, 0.0) == (
        "0 took 0.0 s; 1 restart after lost processes took 3.0 s and repeated 1 step"
    )
    restarts.another()
    assert "; 2 restarts after lost processes took" in restarts.account(0, 0.0)


def test_a_plan_names_the_processes_that_the_search_began_with(tmp_path: Path) -> None:
    """It resumes with all of them."""
    workers = [Mortal(falling), Mortal(falling)]
    workers[0].last, workers[0].capacities = 6, (16, 16)
    run = RunSettings(engine=EngineSettings(capacity=16))
    left = iter(workers)
    coordinator = Coordinator(
        next(left), DataCatalogue(load_lengths), run, folder=tmp_path, renew=lambda: next(left)
    )
    coordinator.submit(job(1))
    begun = coordinator.plan()
    while not coordinator.idle:
        coordinator.advance()
    assert len(coordinator.plan().replicas) == 1
    assert coordinator.plan().choices == begun.choices
    assert begun.choices["processes"] == 2
