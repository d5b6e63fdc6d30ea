"""Jobs join, leave and stop early while a pipeline runs: steps are planned ahead, and it is not drained."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from curve_worker import ADAPTER, CurveWorker, lengths_data, load_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.jobs import JobSpec, TrainSpec
from plait.core.lifecycle import JobResult, JobState, PauseReason
from plait.core.messages import (
    Attach,
    Command,
    Detach,
    Event,
    Export,
    JobEvaluated,
    JobProgress,
    RunSchedule,
    SaveCheckpoint,
    ScheduleDone,
    StepDone,
    StepJob,
    WorkerEvent,
)
from plait.core.plans import Microbatch
from plait.core.settings import EngineSettings, PlannerSettings, RunSettings
from plait.engine.catalogue import DataCatalogue
from plait.engine.coordinator import Coordinator
from plait.engine.predictions import Around, Expected
from plait.engine.worker import WorkerFacts
from plait.simulate.lowering import Lowering

STAGES = 3


@dataclass
class Late:
    """An answer, and what the stages still have to do before it comes."""

    events: list[WorkerEvent]
    jobs: set[str] = field(default_factory=set)
    left: set[tuple[int, object]] = field(default_factory=set)


@dataclass
class Pipeline(CurveWorker):
    """Answers late, as the stages of a pipeline do. Each window's lists are checked after those before it."""

    lowering: Lowering = field(default_factory=lambda: Lowering(STAGES))
    late: deque[Late] = field(default_factory=deque)
    failed: set[str] = field(default_factory=set)
    drains: int = 0

    @property
    def facts(self) -> WorkerFacts:
        facts = super().facts
        return replace(facts, held=(facts.whole(facts.memory_bytes) * STAGES,))

    def execute(self, command: Command) -> Sequence[WorkerEvent]:
        flying = {job for each in self.late for job in each.jobs}
        match command:
            case RunSchedule():
                return self._follow(command)
            case Attach() if self.late:
                self.late.append(Late(list(super().execute(command))))
                return ()
            case Detach(job) | SaveCheckpoint(job) | Export(job):
                assert job not in flying
                self.failed.discard(job)
                if isinstance(command, Detach):
                    self.lowering.forget(job)
        return super().execute(command)

    def _follow(self, command: RunSchedule) -> list[WorkerEvent]:
        begin = self.lowering.next
        lists = self.lowering.window(command.microbatches, drained=command.drained)
        self.drains += command.drained
        items = tuple(each for each in command.items if isinstance(each, StepJob) or each.segments)
        if items:
            done = ScheduleDone(tuple(super().execute(replace(command, items=items))))
            numbers = [n for n, each in enumerate(command.microbatches, begin) if each.segments]
            keys = [(each.job, each.step) for each in command.steps]
            left = {(stage, each) for stage in range(STAGES) for each in (*numbers, *keys)}
            self.late.append(Late([done], {each.job for each in command.steps}, left))
        for stage, own in enumerate(lists):
            for each in own:
                over = {"backward": [each.microbatch], "step": each.keys}.get(each.kind, ())
                for one in self.late:
                    one.left -= {(stage, what) for what in over}
        found: list[WorkerEvent] = []
        while self.late and not self.late[0].left and (command.drained or len(self.late) > 1):
            found += self.late.popleft().events
        return found

    def _step(self, asked: StepJob) -> WorkerEvent:
        if self.fault("step", asked.job, asked.step):
            self.failed.add(asked.job)
        if asked.job not in self.failed:
            return super()._step(asked)
        self.steps[asked.job] = asked.step
        return StepDone(asked.job, asked.step, math.nan, self._spend())


def job(name: str, steps: int, **train: Any) -> JobSpec:
    return JobSpec(name, ADAPTER, TrainSpec(steps=steps, batch_size=2, **train), lengths_data((3, 5, 8)))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Coordinator, Pipeline]]:
    def build(max_jobs: int | None = None, every: int | None = None, **worker: Any) -> Any:
        return made(tmp_path, max_jobs, every, **worker)

    return build


def made(
    folder: Path, max_jobs: int | None = None, every: int | None = None, **worker: Any
) -> tuple[Coordinator, Pipeline]:
    """``every``: steps between checkpoints."""
    pipeline = Pipeline(**worker)
    engine = EngineSettings(capacity=16, checkpoint_minutes=None, checkpoint_steps=every)
    run = RunSettings(engine=engine, planner=PlannerSettings(max_jobs=max_jobs))
    return Coordinator(pipeline, DataCatalogue(load_lengths), run, folder=folder), pipeline


def drain(coordinator: Coordinator, between: Callable[[int], None] = lambda _: None) -> list[Event]:
    events: list[Event] = []
    for turn in range(300):
        between(turn)
        events += coordinator.advance()
        if coordinator.idle:
            return events
    raise AssertionError("the coordinator never came to an end")


def steps(events: Sequence[Event], name: str) -> list[int]:
    return [event.step for event in events if isinstance(event, JobProgress) and event.job == name]


def ends(events: Sequence[Event]) -> dict[str, JobResult]:
    return {event.job: event for event in events if isinstance(event, JobResult)}


def test_jobs_join_and_end_and_the_pipeline_is_drained_once(make: Any) -> None:
    coordinator, pipeline = make()
    for number in range(3):
        coordinator.submit(job(f"job{number}", 4 + 6 * number))

    def between(turn: int) -> None:
        if turn in (3, 5):
            coordinator.submit(job(f"late{turn}", 8))

    events = drain(coordinator, between)
    for name, count in {"job0": 4, "job1": 10, "job2": 16, "late3": 8, "late5": 8}.items():
        assert steps(events, name) == list(range(1, count + 1))
        assert ends(events)[name].state is JobState.FINISHED
    assert pipeline.drains == 1
    assert (
        len({name for each in pipeline.commands if isinstance(each, RunSchedule) for name in [each.drained]})
        == 1
    )


def test_a_job_whose_step_fails_ends_when_it_has_landed_and_the_others_go_on(make: Any) -> None:
    coordinator, pipeline = make(
        fault=lambda kind, name, step: "nan" if (kind, name, step) == ("step", "b", 3) else None
    )
    for name in "abc":
        coordinator.submit(job(name, 8))
    events = drain(coordinator)
    assert steps(events, "b") == [1, 2]
    assert ends(events)["b"].state is JobState.FAILED
    assert "gradient norm is nan" in ends(events)["b"].reason
    assert steps(events, "a") == steps(events, "c") == list(range(1, 9))
    assert pipeline.drains == 1


@pytest.mark.parametrize("every", [None, 1, 2], ids="checkpoints every {} steps".format)
def test_no_step_is_planned_beyond_a_rung_or_an_evaluation(make: Any, every: int | None) -> None:
    coordinator, pipeline = make(every=every)
    coordinator.submit(job("a", 9), rungs=[3], measured=True)
    coordinator.submit(job("b", 9, eval_every=4))
    waiting: list[tuple[int, int]] = []

    def between(turn: int) -> None:
        waiting.append((turn, pipeline.steps.get("a", 0)))
        if turn == 12:
            coordinator.resume("a", PauseReason.AT_RUNG)

    events = drain(coordinator, between)
    assert max(step for turn, step in waiting if turn <= 12) == 3
    evaluated = [(e.job, e.step) for e in events if isinstance(e, JobEvaluated)]
    assert sorted(evaluated) == [("a", 3), ("a", 9), ("b", 4), ("b", 8), ("b", 9)]
    assert steps(events, "a") == steps(events, "b") == list(range(1, 10))


def test_what_is_due_when_all_jobs_are_saved_is_evaluated_before(make: Any) -> None:
    coordinator, pipeline = make()
    coordinator.submit(job("a", 9, eval_every=2))
    events = coordinator.advance() + coordinator.advance()
    assert (steps(events, "a"), pipeline.steps["a"]) == ([1], 2)
    coordinator.stop()
    events = coordinator.advance()
    assert [event.step for event in events if isinstance(event, JobEvaluated)] == [2]
    assert ends(events)["a"].state is JobState.PAUSED


def test_a_job_of_higher_priority_takes_the_slot_of_one_in_flight_at_once(make: Any) -> None:
    coordinator, _ = make(max_jobs=2)
    for name in "ab":
        coordinator.submit(job(name, 20))

    def between(turn: int) -> None:
        if turn == 4:
            coordinator.submit(job("urgent", 2, priority=1))

    events = drain(coordinator, between)
    at = {
        name: next(n for n, e in enumerate(events) if isinstance(e, JobResult) and e.job == name)
        for name in ("a", "urgent")
    }
    assert at["urgent"] < at["a"]
    assert len([e for e in events[: at["urgent"]] if isinstance(e, JobProgress) and e.job == "a"]) < 12
    assert steps(events, "b") == list(range(1, 21))


def jobs_of(microbatches: Sequence[Microbatch]) -> list[list[str]]:
    return [[each.job for each in own.segments] for own in microbatches]


@pytest.mark.parametrize("batch", [1, 4])
def test_what_is_in_flight_beside_a_window_is_foreseen(make: Any, batch: int) -> None:
    """Jobs whose batches fill one microbatch, or several: what was sent before, and what will follow."""
    coordinator, _ = make()
    sent: list[tuple[Sequence[Microbatch], Around]] = []
    expect = coordinator._flights._expect

    def noting(window: Sequence[Microbatch], jobs: Any, around: Around) -> Expected:
        assert list(jobs) == ["a", "b"]  # all that are attached take memory
        sent.append((window, around))
        return expect(window, jobs, around)

    coordinator._flights._expect = noting
    data = lengths_data((8, 8, 8, 8))
    for name in "ab":
        coordinator.submit(replace(job(name, 6), data=data, train=TrainSpec(steps=6, batch_size=batch)))
    drain(coordinator)
    assert len(sent) == 6
    every = [own for window, _ in sent for own in jobs_of(window)]
    begin = 0
    for window, around in sent:
        end, beside = begin + len(window), STAGES - 1
        assert jobs_of(around.before) == every[max(0, begin - beside) : begin]
        follow = every[end : end + beside]
        assert jobs_of(around.after) == follow + [[]] * (beside - len(follow))
        begin = end


LIVES = st.tuples(st.integers(1, 9), st.integers(0, 12), st.integers(0, 2))  # steps, turn, priority
ORDERS = st.tuples(st.integers(0, 14), st.sampled_from("pc"), st.integers(0, 5))  # turn, pause or cancel, job


@settings(max_examples=40, deadline=None)
@given(data=st.data(), lives=st.lists(LIVES, min_size=1, max_size=6))
def test_whatever_joins_pauses_and_is_cancelled_each_step_is_taken_once(
    tmp_path_factory: Any, data: st.DataObject, lives: list[tuple[int, int, int]]
) -> None:
    coordinator, pipeline = made(tmp_path_factory.mktemp("run"), data.draw(st.sampled_from([None, 2])))
    orders = data.draw(st.lists(ORDERS, max_size=4))
    gone: set[str] = set()

    def between(turn: int) -> None:
        for number, (count, joins, priority) in enumerate(lives):
            if joins == turn:
                coordinator.submit(job(f"job{number}", count, priority=priority))
        for at, what, number in orders:
            name = f"job{number}"
            known = {each.name: each for each in coordinator._roster.all()}
            if name in known and what == "p" and turn == at:
                coordinator.pause(name)
            if name in known and what == "p" and turn == at + 5:
                coordinator.resume(name)
            if name in known and what == "c" and turn == at:
                coordinator.cancel(name, "asked")
                gone.add(name)

    events: list[Event] = []
    for turn in range(200):
        between(turn)
        events += coordinator.advance()
    assert coordinator.idle
    assert not pipeline.late
    for number, (count, *_) in enumerate(lives):
        taken = steps(events, f"job{number}")
        assert taken == list(range(1, len(taken) + 1))
        state = ends(events)[f"job{number}"].state
        assert (state, len(taken)) == (JobState.FINISHED, count) or f"job{number}" in gone
