"""The coordinator's decisions, with a worker that only follows a script: no torch, no model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from curve_worker import ADAPTER, LINEARS, SHAPE, CurveWorker, lengths_data, load_lengths, save
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.adapters.variants import adapter_bytes
from plait.core.errors import CapacityError, ConfigError, ModelError
from plait.core.jobs import DataSpec, JobSpec, TrainSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import (
    Command,
    Cursor,
    Evaluate,
    Event,
    Export,
    Generate,
    GroupStep,
    JobAdmitted,
    JobEvaluated,
    JobGenerated,
    JobPaused,
    JobProgress,
    Notice,
    PauseReason,
    RunSchedule,
    SaveCheckpoint,
    WorkerEvent,
)
from plait.core.settings import EngineSettings, PlannerSettings, RunSettings
from plait.engine.admission import Admission
from plait.engine.catalogue import DataCatalogue
from plait.engine.coordinator import Coordinator
from plait.engine.ledger import nanoseconds


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def job(
    name: str, *, lengths: Sequence[int] = (3, 5, 8), validation: Sequence[int] = (), **train: object
) -> JobSpec:
    spec = TrainSpec(**{"steps": 3, "batch_size": 2} | train)  # type: ignore[arg-type]
    return JobSpec(name, ADAPTER, spec, lengths_data(lengths, validation))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def coordinator(
    worker: CurveWorker,
    *,
    max_jobs: int | None = None,
    catalogue: DataCatalogue | None = None,
) -> Coordinator:
    planner = PlannerSettings(max_jobs=max_jobs)
    run = RunSettings(engine=EngineSettings(capacity=16), planner=planner)
    return Coordinator(
        worker, catalogue or DataCatalogue(load_lengths), run, folder=Path("run"), clock=Clock()
    )


def drain(made: Coordinator, between: Callable[[int], None] = lambda _: None) -> list[Event]:
    events: list[Event] = []
    for turn in range(1000):
        if made.idle:
            return events
        between(turn)
        events += made.advance()
    raise AssertionError("the coordinator never came to an end")


def of(kind: type, events: Sequence[Event], name: str | None = None) -> list:  # type: ignore[type-arg]
    return [e for e in events if isinstance(e, kind) and (name is None or getattr(e, "job", None) == name)]


def test_every_job_takes_all_its_steps_and_ends_finished() -> None:
    made = coordinator(worker := CurveWorker())
    made.submit(job("a", steps=2))
    made.submit(job("b", steps=5, batch_size=3))
    events = drain(made)
    assert [e.step for e in of(JobProgress, events, "a")] == [1, 2]
    assert [e.step for e in of(JobProgress, events, "b")] == [1, 2, 3, 4, 5]
    assert all(e.loss == 2.0 for e in of(JobProgress, events))
    ends = {e.job: e for e in of(JobResult, events)}
    assert {name: (e.state, e.step) for name, e in ends.items()} == {
        "a": ("finished", 2),
        "b": ("finished", 5),
    }
    assert ends["b"].adapter == Path("run/adapters/b")
    assert worker.jobs == {}
    assert [e.jobs for e in of(GroupStep, events)] == [("a", "b")] * 2 + [("b",)] * 3


@settings(max_examples=60)
@given(
    jobs=st.lists(
        st.tuples(st.lists(st.integers(1, 16), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 5)),
        min_size=1,
        max_size=5,
    ),
    max_jobs=st.integers(1, 4),
)
def test_device_time_is_attributed_to_the_last_nanosecond(
    jobs: list[tuple[list[int], int, int]], max_jobs: int
) -> None:
    made = coordinator(worker := CurveWorker(), max_jobs=max_jobs)
    for place, (lengths, batch_size, steps) in enumerate(jobs):
        made.submit(job(f"j{place}", lengths=lengths, validation=lengths, batch_size=batch_size, steps=steps))
    ends = of(JobResult, drain(made))
    total = sum(nanoseconds(seconds) for seconds in worker.spent)
    assert made.device_ns == total
    for command in worker.commands:
        if isinstance(command, RunSchedule | Evaluate):
            assert max(each.tokens for each in command.microbatches) <= 16
    assert sum(round(end.device_seconds * 1e9) for end in ends) == total
    assert len(ends) == len(jobs)


@dataclass
class TimedWorker(CurveWorker):
    """A worker that moves the clock on by what its commands take; ``iterations`` are those of training."""

    now: float = 0.0
    iterations: list[float] = field(default_factory=list)

    def execute(self, command: Command) -> Sequence[WorkerEvent]:
        spent = len(self.spent)
        events = super().execute(command)
        seconds = sum(self.spent[spent:])
        self.now += seconds
        if isinstance(command, RunSchedule):
            self.iterations.append(seconds)
        return events


def test_an_iteration_takes_from_the_first_microbatch_to_the_last_step_whoever_joins_or_ends() -> None:
    """Attaching, evaluating, saving and exporting are not in it: also if the first job ends in it."""
    worker = TimedWorker()
    run = RunSettings(engine=EngineSettings(capacity=16, checkpoint_steps=1))
    made = Coordinator(worker, DataCatalogue(load_lengths), run, folder=Path("run"), clock=lambda: worker.now)
    made.submit(job("first", steps=2, validation=(4,)))
    made.submit(job("second", steps=4, validation=(4,), eval_every=1))
    events = drain(made)
    iterations = of(GroupStep, events)
    assert [event.jobs for event in iterations] == [("first", "second")] * 2 + [("second",)] * 2
    assert [event.seconds for event in iterations] == pytest.approx(worker.iterations)
    for event in iterations:
        tokens = dict(zip(event.jobs, event.job_tokens, strict=True))
        for name in event.jobs:
            (step,) = [each for each in of(JobProgress, events, name) if each.step == event.iteration]
            assert step.tokens_per_s == pytest.approx(tokens[name] / event.seconds)


def test_a_failure_ends_its_own_job_only() -> None:
    faults = {("run", "bad", 2): "its loss is nan", ("step", "worse", 3): "its gradient is inf"}
    made = coordinator(worker := CurveWorker(fault=lambda *at: faults.get(at)))
    for name in ("good", "bad", "worse"):
        made.submit(job(name, steps=4))
    events = drain(made)
    ends = {e.job: (e.state, e.step, e.reason) for e in of(JobResult, events)}
    assert ends["bad"] == ("failed", 1, "its loss is nan")
    assert ends["worse"] == ("failed", 2, "its gradient is inf")
    assert ends["good"][:2] == ("finished", 4)
    assert worker.taken == {"good": 4, "bad": 1, "worse": 2}


def test_a_failed_evaluation_ends_the_job() -> None:
    made = coordinator(
        CurveWorker(fault=lambda *at: "its loss is nan" if at == ("evaluate", "a", 2) else None)
    )
    made.submit(job("a", validation=(4,), eval_every=2))
    made.submit(job("b", validation=(4,), eval_every=2))
    events = drain(made)
    assert {e.job: e.state for e in of(JobResult, events)} == {"a": "failed", "b": "finished"}


def test_evaluation_is_joint_at_its_interval_and_at_the_end() -> None:
    made = coordinator(worker := CurveWorker())
    made.submit(job("a", steps=5, eval_every=2, validation=(4, 4)))
    made.submit(job("b", steps=4, eval_every=0, validation=(6,)))
    events = drain(made)
    assert [(e.step, e.tokens, e.loss) for e in of(JobEvaluated, events, "a")] == [
        (2, 8, 2.0),
        (4, 8, 2.0),
        (5, 8, 2.0),
    ]
    assert [e.step for e in of(JobEvaluated, events, "b")] == [4]
    trained = {e.step: e.device_seconds for e in of(JobProgress, events, "a")}
    assert all(e.device_seconds > trained[e.step] for e in of(JobEvaluated, events, "a"))
    assert of(JobResult, events, "b")[0].eval_loss == 2.0
    joint = [c for c in worker.commands if isinstance(c, Evaluate)][1]
    assert [s.job for s in joint.microbatches[0].segments] == ["a", "b"]


def test_slots_are_filled_by_priority_then_arrival_as_they_come_free() -> None:
    made = coordinator(CurveWorker(), max_jobs=2)
    assert made.free_slots() == 2
    for name, priority, steps in (("a", 0, 1), ("b", 0, 3), ("c", 1, 2), ("d", 0, 1)):
        made.submit(job(name, priority=priority, steps=steps))
    assert made.free_slots() == 0
    events = drain(made)
    assert [e.job.name for e in of(JobAdmitted, events)] == ["c", "a", "b", "d"]
    assert [e.jobs for e in of(GroupStep, events)] == [("c", "a"), ("c", "b"), ("b", "d"), ("b",)]


def test_memory_limits_the_group_and_refuses_a_job_that_never_fits() -> None:
    one = adapter_bytes(ADAPTER, LINEARS, 4)
    assert one == 4 * 2 * (64 + 64) * 16
    admission = Admission(CurveWorker().facts, RunSettings(engine=EngineSettings(capacity=16)))
    activations = admission.predicted([admission.demand(ADAPTER, 8)]) - one
    assert activations > SHAPE.weight_bytes
    made = coordinator(CurveWorker(memory_bytes=int((activations + 2.5 * one) / 0.8)))
    for name in "abc":
        made.submit(job(name, steps=1))
    assert [e.jobs for e in of(GroupStep, drain(made))] == [("a", "b"), ("c",)]
    small = coordinator(CurveWorker(memory_bytes=int((activations + 0.5 * one) / 0.8)))
    with pytest.raises(CapacityError, match=r"engine\.capacity"):
        small.submit(job("a"))


def test_a_job_that_cannot_run_is_refused_at_submission() -> None:
    made = coordinator(CurveWorker())
    with pytest.raises(CapacityError, match="a sample of 17 tokens"):
        made.submit(job("long", lengths=(17,)))
    with pytest.raises(ModelError, match="q_proj, v_proj"):
        made.submit(replace(job("off"), adapter=replace(ADAPTER, target_modules=("k_proj",))))
    made.submit(job("twin"))
    with pytest.raises(ConfigError, match="Another job of this name"):
        made.submit(job("twin"))
    assert [e.job for e in of(JobResult, drain(made))] == ["twin"]


def test_a_validation_row_that_is_longer_than_a_microbatch_is_refused_too() -> None:
    made = coordinator(CurveWorker())
    made.submit(job("short", validation=(16,)))
    with pytest.raises(CapacityError):
        made.submit(job("long", validation=(17,)))


def test_a_checkpoint_contains_reported_steps_only(tmp_path: Path) -> None:
    """Whoever follows the run keeps what it was handed before the state is published."""
    run = RunSettings(engine=EngineSettings(capacity=16, checkpoint_steps=1))
    worker = CurveWorker()
    made = Coordinator(worker, DataCatalogue(load_lengths), run, folder=tmp_path)
    made.submit(job("a"))
    handed, saved = set[int](), set[int]()
    while not made.idle:
        events = made.advance()
        saved = {each.cursor.step for each in worker.commands if isinstance(each, SaveCheckpoint)}
        assert handed >= saved
        handed |= {event.step for event in of(JobProgress, events)}
    assert saved


def test_a_job_joins_and_another_is_cancelled_at_an_iteration_boundary() -> None:
    made = coordinator(worker := CurveWorker())
    made.submit(job("a", steps=6))
    made.submit(job("b", steps=6))

    def between(turn: int) -> None:
        if turn == 2:
            made.submit(job("late", steps=2))
        if turn == 3:
            made.cancel("b", "rung 1", state=JobState.PRUNED)

    events = drain(made, between)
    assert [e.jobs for e in of(GroupStep, events)][2:4] == [("a", "b", "late"), ("a", "late")]
    end = of(JobResult, events, "b")[0]
    assert (end.state, end.reason, end.step, end.adapter) == ("pruned", "rung 1", 3, None)
    assert not any(isinstance(c, Export) and c.job == "b" for c in worker.commands)
    with pytest.raises(ConfigError, match="waiting or training"):
        made.cancel("b", "rung 1")


def test_stop_saves_live_jobs_and_ends_all() -> None:
    made = coordinator(worker := CurveWorker(), max_jobs=1)
    made.submit(job("a", steps=9))
    made.submit(job("b", steps=9))
    made.advance()
    made.stop()
    ends = {e.job: e for e in of(JobResult, made.advance())}
    assert made.idle
    assert made.free_slots() == 0
    assert (ends["a"].state, ends["a"].reason, ends["a"].step) == ("paused", "interrupted", 1)
    assert ends["a"].checkpoint == Path("run/checkpoints/a/step-00000001")
    assert ends["b"].checkpoint is None
    saved = next(c for c in worker.commands if isinstance(c, SaveCheckpoint))
    assert saved.cursor.step == 1
    assert saved.cursor.device_ns == made.device_ns - nanoseconds(worker.spent[-1])  # all but the saving
    assert nanoseconds(ends["a"].device_seconds) == made.device_ns


def test_a_job_resumes_from_its_cursor() -> None:
    save(Path("saved", "step-00000002"), Cursor(2, 100, 5_000_000_000))
    made = coordinator(CurveWorker())
    made.submit(job("a", steps=4), resume_from=Path("saved"))
    made.submit(job("over", steps=2, validation=(4,)), resume_from=Path("saved"), recorded=7.5)
    events = drain(made)
    assert [(e.job.name, e.step) for e in of(JobAdmitted, events)] == [("a", 2), ("over", 2)]
    assert [e.step for e in of(JobProgress, events, "a")] == [3, 4]
    assert of(JobProgress, events, "a")[0].tokens > 100
    assert 7.0 > of(JobResult, events, "a")[0].device_seconds > 5.0
    assert of(JobResult, events, "over")[0].device_seconds > 7.5, "what a killed process spent is spent"
    assert [e.state for e in of(JobResult, events, "over")] == ["finished"]


def test_answers_are_generated_and_scored_at_the_end() -> None:
    asked: dict[str, list[object]] = defaultdict(list)

    def score(spec: DataSpec, rows: Sequence[int], texts: Sequence[str]) -> Sequence[float]:
        assert spec.source == "lengths"
        asked["rows"] += rows
        return [1.0 if text == "a" else 0.0 for text in texts]

    catalogue = DataCatalogue(load_lengths, generation_limit=lambda _: 8, score=score)
    made = coordinator(worker := CurveWorker(), catalogue=catalogue)
    made.submit(job("a", steps=1, validation=(4, 4, 4, 4)))
    made.submit(job("b", steps=1, validation=(4, 4)))
    events = drain(made)
    assert [(e.job, e.step, e.accuracy) for e in of(JobGenerated, events)] == [("a", 1, 0.5), ("b", 1, 0.5)]
    assert asked["rows"] == [0, 1, 2, 3, 0, 1]
    (command,) = [c for c in worker.commands if isinstance(c, Generate)]
    assert (command.max_new_tokens, [each.job for each in command.jobs]) == (8, ["a", "b"])
    assert sum(round(e.device_seconds * 1e9) for e in of(JobResult, events)) == made.device_ns


def test_answers_at_evaluations_are_scored_at_rungs_and_a_job_without_them_fails() -> None:
    """Those at a rung are of the weights there, those at the end of the best ones; each comes once."""
    asked: list[tuple[bool, list[str]]] = []
    catalogue = DataCatalogue(
        load_lengths,
        generation_limit=lambda _: 8,
        each_evaluation=lambda _: True,
        score=lambda _spec, rows, _texts: [0.5] * len(rows),
    )
    worker = CurveWorker(
        fault=lambda kind, name, step: "no room" if (kind, name, step) == ("generate", "c", 2) else None
    )
    execute = worker.execute

    def noting(command: Command) -> Sequence[WorkerEvent]:
        if isinstance(command, Generate):
            asked.append((command.best, sorted(each.job for each in command.jobs)))
        return execute(command)

    worker.execute = noting  # type: ignore[method-assign]
    made = coordinator(worker, catalogue=catalogue)
    for name in "abc":
        made.submit(job(name, steps=3, validation=(4, 4)), rungs=(2,) if name != "b" else (), measured=True)
    waiting: list[str] = []
    events: list[Event] = []
    for _ in range(100):
        if made.idle:
            break
        for name in waiting:
            made.resume(name, PauseReason.AT_RUNG)
        now = made.advance()
        events += now
        waiting = [event.job for event in of(JobPaused, now)]
    accuracies = [(e.job, e.step, e.accuracy) for e in of(JobGenerated, events)]
    assert sorted(accuracies) == [("a", 2, 0.5), ("a", 3, 0.5), ("b", 3, 0.5)]
    assert asked[0] == (False, ["a", "c"])
    assert all(best for best, _ in asked[1:])
    failed = [e for e in of(JobResult, events) if e.job == "c"]
    assert [(e.state, e.reason) for e in failed] == [("failed", "no room")]


@pytest.mark.parametrize("each_evaluation", [True, False])
def test_a_scorer_that_fails_costs_its_own_job_alone(each_evaluation: bool) -> None:
    """At an evaluation the job fails, at its end it has no accuracy, as where answers are not generated."""

    def score(_spec: DataSpec, rows: Sequence[int], _texts: Sequence[str]) -> list[float]:
        if len(rows) == 3:
            value = "data.scorer=own:score: ZeroDivisionError"
            raise ConfigError(value, "It must return numbers.", "Mend it.")
        return [1.0] * len(rows)

    catalogue = DataCatalogue(
        load_lengths, generation_limit=lambda _: 8, each_evaluation=lambda _: each_evaluation, score=score
    )
    made = coordinator(CurveWorker(), catalogue=catalogue)
    made.submit(job("a", steps=2, validation=(4, 4, 4), eval_every=1))
    made.submit(job("b", steps=2, validation=(4, 4), eval_every=1))
    events = drain(made)
    said = "data.scorer=own:score: ZeroDivisionError; It must return numbers. Mend it."
    ends = {e.job: (e.state, e.reason) for e in of(JobResult, events)}
    unscored = ("finished", f"budget spent; its answers were not scored: {said}")
    assert ends == {"a": ("failed", said) if each_evaluation else unscored, "b": ("finished", "budget spent")}
    assert {e.job for e in of(JobGenerated, events)} == {"b"}


def test_a_job_whose_answers_do_not_fit_into_memory_is_finished_without_them() -> None:
    """What it learned is kept; that its accuracy is missing is said with the reason."""
    catalogue = DataCatalogue(
        load_lengths, generation_limit=lambda _: 8, score=lambda _spec, rows, _texts: [1.0] * len(rows)
    )
    worker = CurveWorker(fault=lambda kind, name, _: "no room" if (kind, name) == ("generate", "a") else None)
    made = coordinator(worker, catalogue=catalogue)
    for name in "ab":
        made.submit(job(name, steps=1, validation=(4, 4)))
    events = drain(made)
    assert [(e.job, e.accuracy) for e in of(JobGenerated, events)] == [("b", 1.0)]
    ends = {e.job: (e.state, e.reason, e.adapter) for e in of(JobResult, events)}
    unscored = "budget spent; its answers were not scored: no room"
    assert ends == {
        "a": ("finished", unscored, Path("run/adapters/a")),
        "b": ("finished", "budget spent", Path("run/adapters/b")),
    }
    assert [e.text for e in of(Notice, events)] == ["a: its answers were not scored: no room"]
    assert sum(round(e.device_seconds * 1e9) for e in of(JobResult, events)) == made.device_ns
