"""Jobs that leave their slots and come back: at rungs, paused, preempted, or when memory runs out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from curve_worker import ADAPTER, CurveWorker, lengths_data, load_lengths

from plait.core.errors import ConfigError, StorageError
from plait.core.jobs import JobSpec, TrainSpec
from plait.core.lifecycle import JobResult, JobState, PauseReason
from plait.core.messages import (
    Command,
    Evaluate,
    Event,
    Export,
    GroupStep,
    JobAdmitted,
    JobEvaluated,
    JobPaused,
    JobProgress,
    Notice,
    RunSchedule,
    SaveCheckpoint,
    WorkerEvent,
)
from plait.core.settings import EngineSettings, PlannerSettings, RunSettings, SearchSettings
from plait.engine.catalogue import DataCatalogue
from plait.engine.checkpoints import RETRY_SECONDS
from plait.engine.coordinator import Coordinator
from plait.engine.ledger import nanoseconds
from plait.search.objective import Observed


def falling(job: JobSpec, step: int) -> float:
    return 10.0 / (step + 1) + job.train.lr


def job(name: str, **train: Any) -> JobSpec:
    spec = TrainSpec(**{"steps": 6, "batch_size": 2, "lr": 1e-3} | train)
    return JobSpec(name, ADAPTER, spec, lengths_data((3, 5, 8)))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Coordinator, CurveWorker]]:
    def build(max_jobs: int | None = None, **worker: Any) -> tuple[Coordinator, CurveWorker]:
        made = CurveWorker(falling, **worker)
        planner = PlannerSettings(max_jobs=max_jobs)
        run = RunSettings(engine=EngineSettings(capacity=16), planner=planner)
        return Coordinator(made, DataCatalogue(load_lengths), run, folder=tmp_path), made

    return build


def drain(made: Coordinator, between: Callable[[int], None] = lambda _: None) -> list[Event]:
    events: list[Event] = []
    for turn in range(300):
        between(turn)
        if made.idle:
            return events
        events += made.advance()
    raise AssertionError("the coordinator never came to an end")


def groups(events: Sequence[Event]) -> list[tuple[str, ...]]:
    return [event.jobs for event in events if isinstance(event, GroupStep)]


class Full(CurveWorker):
    """Whose disk takes the first state and no other."""

    def execute(self, command: Command) -> Sequence[WorkerEvent]:
        if isinstance(command, SaveCheckpoint) and command.cursor.step > 1:
            raise StorageError("no space left")
        return super().execute(command)


def test_a_job_is_not_paused_with_an_older_checkpoint_than_its_step(tmp_path: Path) -> None:
    run = RunSettings(engine=EngineSettings(capacity=16, checkpoint_steps=1))
    made = Coordinator(Full(falling), DataCatalogue(load_lengths), run, folder=tmp_path)
    made.submit(job("a"))
    made.advance()
    made.advance()
    assert made.checkpointer.save([made._find("a")])[0]["a"].name.endswith("1")
    made.pause("a")
    assert paused(made.settle()) == []


def test_a_job_that_waits_is_paused_too(make: Callable[..., tuple[Coordinator, CurveWorker]]) -> None:
    made, _ = make(max_jobs=1)
    made.submit(job("a"))
    made.submit(job("b"))
    made.advance()
    made.pause("b")
    assert paused(made.settle()) == [("b", 0, PauseReason.BY_USER)]


def steps(events: Sequence[Event], name: str) -> list[int]:
    return [event.step for event in events if isinstance(event, JobProgress) and event.job == name]


def paused(events: Sequence[Event]) -> list[tuple[str, int, str]]:
    return [(e.job, e.step, e.reason) for e in events if isinstance(e, JobPaused)]


def test_a_job_at_a_rung_gives_its_slot_to_the_next_and_resumes(make: Any) -> None:
    made, worker = make(max_jobs=1)
    made.submit(job("a"), rungs=(2, 4), measured=True)
    made.submit(job("b", steps=3))
    events = drain(made, lambda turn: made.resume("a", PauseReason.AT_RUNG) if turn in (5, 9) else None)
    assert paused(events) == [("a", 2, PauseReason.AT_RUNG), ("a", 4, PauseReason.AT_RUNG)]
    assert groups(events) == [("a",)] * 2 + [("b",)] * 3 + [("a",)] * 4
    assert steps(events, "a") == [1, 2, 3, 4, 5, 6]
    assert [e.step for e in events if isinstance(e, JobAdmitted) and e.job.name == "a"] == [0, 2, 4]
    evaluated = {e.step: e.loss for e in events if isinstance(e, JobEvaluated) and e.job == "a"}
    assert evaluated == pytest.approx({step: falling(job("a"), step) for step in (2, 4, 6)})
    assert worker.jobs == {}


def test_a_job_released_before_the_boundary_keeps_its_slot(make: Any) -> None:
    made, _ = make()
    made.submit(job("a"), rungs=(2,))
    events = [*made.advance(), *made.advance()]
    assert made.free_slots() > 0
    made.resume("a", PauseReason.AT_RUNG)
    events += drain(made)
    assert paused(events) == []
    assert steps(events, "a") == [1, 2, 3, 4, 5, 6]


def test_a_rung_that_is_not_measured_costs_no_evaluation(make: Any) -> None:
    made, worker = make()
    made.submit(job("a"), rungs=(2,))
    drain(made, lambda turn: made.resume("a", PauseReason.AT_RUNG) if turn == 2 else None)
    assert sum(isinstance(command, Evaluate) for command in worker.commands) == 1


def test_all_jobs_at_a_rung_are_evaluated_together(make: Any) -> None:
    made, worker = make()
    for name in "abc":
        made.submit(job(name), rungs=(2,), measured=True)
    made.advance()
    made.advance()
    (command,) = [command for command in worker.commands if isinstance(command, Evaluate)]
    assert {s.job for each in command.microbatches for s in each.segments} == {"a", "b", "c"}
    assert made.free_slots() > 0


def test_pausing_and_resuming_by_hand_at_any_point(make: Any) -> None:
    made, _ = make(max_jobs=1)
    made.submit(job("a"))
    made.submit(job("b", steps=2))

    def between(turn: int) -> None:
        if turn == 1:
            made.pause("a")
        if turn == 2:
            made.pause("b")
        if turn == 4:
            made.resume("a")
            made.resume("b")

    events = drain(made, between)
    assert paused(events) == [("a", 1, PauseReason.BY_USER), ("b", 1, PauseReason.BY_USER)]
    assert groups(events) == [("a",), ("b",)] + [("a",)] * 5 + [("b",)]
    with pytest.raises(ConfigError, match="waiting or training"):
        made.pause("c")


def test_a_pause_at_a_rung_lasts_until_pause_and_rung_have_ended(make: Any) -> None:
    made, _ = make()
    made.submit(job("a", steps=3), rungs=(1,))
    made.advance()
    made.pause("a")
    assert paused(made.advance()) == [("a", 1, PauseReason.AT_RUNG)]
    made.resume("a", PauseReason.AT_RUNG)
    assert made.advance() == []
    made.resume("a")
    assert steps(drain(made), "a") == [2, 3]


def test_a_paused_job_can_be_cancelled(make: Any) -> None:
    made, _ = make()
    made.submit(job("a"), rungs=(2,))
    for _ in range(3):
        made.advance()
    made.cancel("a", "not among the best")
    (end,) = made.settle()
    assert isinstance(end, JobResult)
    assert (end.state, end.reason, end.step) == ("stopped", "not among the best", 2)
    assert made.idle


def test_a_job_that_ends_before_it_resumes_has_no_figures_of_this_process(make: Any, tmp_path: Path) -> None:
    """Its steps and seconds are those of the process that trained it: not none."""
    made, _ = make()
    made.submit(job("a"), resume_from=tmp_path)
    made.submit(job("b"))
    for name in ("a", "b"):
        made.cancel(name, "by order")
    ends = {end.job: end.completion_seconds for end in made.settle()}
    assert ends["a"] is None
    assert ends["b"] is not None


def test_stopping_saves_paused_jobs_too(make: Any) -> None:
    made, _ = make(max_jobs=1)
    made.submit(job("a"), rungs=(2,))
    made.submit(job("b"))
    for _ in range(3):
        made.advance()
    made.stop()
    ends = {e.job: e for e in made.advance() if isinstance(e, JobResult)}
    assert {name: end.step for name, end in ends.items()} == {"a": 2, "b": 1}
    for end in ends.values():
        assert end.checkpoint is not None
        assert end.checkpoint.is_dir()


def test_a_job_that_resumes_from_a_checkpoint_at_a_rung_waits_there(make: Any, tmp_path: Path) -> None:
    made, _ = make()
    made.submit(job("a"), rungs=(2, 4))
    for _ in range(3):
        made.advance()
    made.stop()
    made.advance()
    again, _ = make()
    again.submit(job("a"), resume_from=tmp_path / "checkpoints" / "a", rungs=(2, 4), measured=True)
    events = again.advance()
    assert [(type(e), e.step) for e in events if isinstance(e, JobAdmitted | JobProgress | JobEvaluated)] == [
        (JobAdmitted, 2),
        (JobEvaluated, 2),
    ]
    again.resume("a", PauseReason.AT_RUNG)
    assert steps([*again.advance(), *again.advance()], "a") == [3, 4]


def test_a_job_of_higher_priority_takes_the_slot_of_the_latest_of_the_lowest(make: Any) -> None:
    made, _ = make(max_jobs=3)
    made.submit(job("a", priority=1))
    made.submit(job("b"))
    made.submit(job("c"))

    def between(turn: int) -> None:
        if turn == 2:
            made.submit(job("urgent", priority=2, steps=2))
        if turn == 3:
            made.submit(job("later", steps=1))

    events = drain(made, between)
    assert paused(events) == [("c", 2, PauseReason.PREEMPTED)]
    assert groups(events)[2:5] == [("a", "b", "urgent")] * 2 + [("a", "b", "c")]
    for name in "abc":
        assert steps(events, name) == [1, 2, 3, 4, 5, 6]
    admitted = [e.job.name for e in events if isinstance(e, JobAdmitted)]
    assert admitted == ["a", "b", "c", "urgent", "c", "later"]


@dataclass
class Disk(CurveWorker):
    """A worker whose disk is full for checkpoints, or is not."""

    full: bool = False

    def execute(self, command: Command) -> Sequence[WorkerEvent]:
        if isinstance(command, SaveCheckpoint) and self.full:
            raise StorageError("no space left")
        return super().execute(command)


def test_a_preempted_job_that_cannot_be_saved_keeps_its_slot_until_it_can(tmp_path: Path) -> None:
    """The urgent one waits meanwhile, no step is lost, and afterwards it has the slot."""
    worker, now = Disk(falling), [0.0]
    run = RunSettings(engine=EngineSettings(capacity=16), planner=PlannerSettings(max_jobs=1))
    made = Coordinator(worker, DataCatalogue(load_lengths), run, folder=tmp_path, clock=lambda: now[0])
    made.submit(job("low"))
    begun = made.advance()
    made.submit(job("urgent", priority=1, steps=2))
    worker.full = True
    kept = [*made.advance(), *made.advance()]
    assert groups([*begun, *kept]) == [("low",)] * 3
    assert paused(kept) == []
    assert list(worker.jobs) == ["low"]
    worker.full, now[0] = False, RETRY_SECONDS
    later = made.advance()
    assert paused(later) == [("low", 3, PauseReason.PREEMPTED)]
    assert groups(later) == [("urgent",)]
    events = [*begun, *kept, *later, *drain(made)]
    assert steps(events, "low") == [1, 2, 3, 4, 5, 6]
    assert {event.job: event.state for event in events if isinstance(event, JobResult)} == {
        "low": JobState.FINISHED,
        "urgent": JobState.FINISHED,
    }


def test_out_of_memory_makes_the_group_smaller_and_no_step_is_lost(make: Any) -> None:
    made, worker = make(room=2)
    for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 0)):
        made.submit(job(name, priority=priority, steps=3))
    events = drain(made)
    assert paused(events) == [("d", 0, PauseReason.PREEMPTED), ("c", 0, PauseReason.PREEMPTED)]
    assert groups(events) == [("b", "a")] * 3 + [("c", "d")] * 3
    for name in "abcd":
        assert steps(events, name) == [1, 2, 3]
    assert {e.job: e.state for e in events if isinstance(e, JobResult)} == dict.fromkeys("abcd", "finished")
    runs = sum(isinstance(command, RunSchedule) for command in worker.commands)
    assert runs == 3 + 3 + 2  # the two that ran out of memory were taken again


def test_a_group_that_ran_out_of_memory_is_not_formed_again_while_its_jobs_train(make: Any) -> None:
    made, worker = make(room=2)
    for name in "abc":
        made.submit(job(name))
    made.advance()
    assert made.free_slots() == 0
    made.submit(job("d"))
    for _ in range(4):
        made.advance()
    assert sum(isinstance(command, RunSchedule) for command in worker.commands) == 5 + 1
    assert set(worker.jobs) == {"a", "b"}


def test_a_larger_group_is_tried_again_after_ends_ever_more_rarely(make: Any) -> None:
    """Memory is short for three, all the time: it runs out about log2 of the number of jobs."""
    made, worker = make(room=2)
    names = [f"job-{number}" for number in range(40)]
    for name in names:
        made.submit(job(name, steps=1))
    events = drain(made)
    assert {len(group) for group in groups(events)} <= {1, 2}
    assert [name for name in names if steps(events, name) != [1]] == []
    out = [each for each in paused(events) if each[2] == PauseReason.PREEMPTED]
    runs = sum(isinstance(command, RunSchedule) for command in worker.commands)
    assert runs - len(groups(events)) == len(out)
    assert 2 <= len(out) - 38 <= 1 + math.log2(40)  # the first step came down from 40 to 2, one by one


def test_memory_that_is_there_again_is_used_again(make: Any) -> None:
    made, worker = make(room=2)
    for name, length in (("a", 2), ("b", 6), ("c", 6), ("d", 6)):
        made.submit(job(name, steps=length))
    events = [*made.advance(), *made.advance()]
    assert set(worker.jobs) == {"b"}
    worker.room = 3
    events += drain(made)
    assert max(map(len, groups(events))) == 3
    for name, length in (("a", 2), ("b", 6), ("c", 6), ("d", 6)):
        assert steps(events, name) == list(range(1, length + 1))


def test_a_job_that_runs_out_of_memory_alone_fails(make: Any) -> None:
    made, _ = make(room=0)
    made.submit(job("a"))
    made.submit(job("b"))
    ends = {e.job: (e.state, e.reason) for e in drain(made) if isinstance(e, JobResult)}
    assert ends == dict.fromkeys("ab", ("failed", "out of memory, with no other job training: no room"))


# ---- memory that runs out while a job is taken in ----------------------------------------------------------


def test_a_job_for_which_there_is_no_room_waits_until_there_is(make: Any) -> None:
    made, worker = make(attach_room=2)
    for name in "abcd":
        made.submit(job(name, steps=3))
    events = drain(made)
    assert groups(events) == [("a", "b")] * 3 + [("c", "d")] * 3
    for name in "abcd":
        assert steps(events, name) == [1, 2, 3]
    assert {e.job: e.state for e in events if isinstance(e, JobResult)} == dict.fromkeys("abcd", "finished")
    turned_away = [e.text for e in events if isinstance(e, Notice)]
    assert turned_away[0] == "c waits for memory: out of memory while it was attached (no room)"
    assert len(turned_away) <= 3  # once at the start, then after ends, and not in every iteration
    spent = sum(nanoseconds(seconds) for seconds in worker.spent)
    assert made.device_ns == spent
    assert sum(round(e.device_seconds * 1e9) for e in events if isinstance(e, JobResult)) == spent


def test_a_job_that_does_not_fit_alone_fails_and_the_next_has_its_turn(make: Any) -> None:
    made, _ = make(attach_room=0)
    for name in "ab":
        made.submit(job(name))
    ends = {e.job: (e.state, e.reason) for e in drain(made) if isinstance(e, JobResult)}
    assert ends == dict.fromkeys(
        "ab", ("failed", "out of memory while it was attached, with no other job training: no room")
    )


def test_a_job_of_higher_priority_takes_a_slot_if_there_is_no_room(make: Any) -> None:
    """It comes in when one of the others has been paused for it, and that one continues exactly."""
    made, _ = make(attach_room=2)
    for name in "ab":
        made.submit(job(name))
    events = [*made.advance(), *made.advance()]
    made.submit(job("urgent", priority=1, steps=2))
    events += drain(made)
    assert paused(events) == [("b", 3, PauseReason.PREEMPTED)]
    assert groups(events)[2:6] == [("a", "b")] + [("a", "urgent")] * 2 + [("a", "b")]
    for name in "ab":
        assert steps(events, name) == [1, 2, 3, 4, 5, 6]


def test_a_paused_job_without_room_keeps_its_checkpoint_and_its_account(make: Any) -> None:
    made, worker = make(attach_room=2)
    made.submit(job("a"))
    made.submit(job("b"))
    events = [*made.advance(), *made.advance()]
    made.pause("a")
    made.submit(job("c", steps=2))
    events += made.advance()
    made.resume("a")
    events += drain(made)
    for name in "ab":
        assert steps(events, name) == [1, 2, 3, 4, 5, 6]
    assert any(isinstance(e, Notice) and e.text.startswith("a waits for memory") for e in events)
    spent = sum(nanoseconds(seconds) for seconds in worker.spent)
    assert sum(round(e.device_seconds * 1e9) for e in events if isinstance(e, JobResult)) == spent


def test_the_cost_of_an_evaluation_at_a_rung_is_reported_with_the_pause(make: Any) -> None:
    """The process may be killed before the job trains again or ends: no later event would say it."""
    made, worker = make()
    made.submit(job("a"), rungs=(2,), measured=True)
    events = [event for _ in range(3) for event in made.advance()]
    (paused,) = (event for event in events if isinstance(event, JobPaused))
    last = [event for event in events if isinstance(event, JobProgress)][-1]
    assert (paused.step, paused.tokens) == (last.step, last.tokens) == (2, last.tokens)
    assert paused.device_seconds > last.device_seconds
    assert paused.device_seconds == pytest.approx(sum(worker.spent))


def test_a_job_that_must_end_is_not_saved_again(tmp_path: Path) -> None:
    """Another process may train it by now, since this one was out of reach: then they are that one's."""
    worker = CurveWorker(falling)
    run = RunSettings(engine=EngineSettings(capacity=16, checkpoint_steps=2, checkpoint_keep=1))
    for interrupted in (False, True):
        made = Coordinator(worker, DataCatalogue(load_lengths), run, folder=tmp_path / str(interrupted))
        made.submit(job("a"))
        made.submit(job("b"))
        for _ in range(2):
            made.advance()
        theirs = tmp_path / str(interrupted) / "checkpoints" / "a" / "step-00000005"
        theirs.mkdir(parents=True)
        made.cancel("a", "adopted")
        if interrupted:
            made.stop()
        events = made.advance()
        assert {event.job: event.state for event in events if isinstance(event, JobResult)}["a"] == "stopped"
        assert [path.name for path in theirs.parent.iterdir()] == [theirs.name]
        assert list((tmp_path / str(interrupted) / "checkpoints" / "b").iterdir())
        if not interrupted:
            made.cancel("b", "")
            made.advance()


class Unwritable(CurveWorker):
    """Whose adapters cannot be written."""

    def execute(self, command: Command) -> Sequence[WorkerEvent]:
        if isinstance(command, Export):
            raise StorageError("no space left")
        return super().execute(command)


def test_a_job_that_resumes_after_its_last_step_has_that_step_s_values(make: Any, tmp_path: Path) -> None:
    run = RunSettings(engine=EngineSettings(capacity=16))
    made = Coordinator(Unwritable(falling), DataCatalogue(load_lengths), run, folder=tmp_path)
    made.submit(job("a", steps=2))
    events = [event for _ in range(3) for event in made.advance()]
    (last,) = (each for each in events if isinstance(each, JobProgress) and each.step == 2)
    made.stop()
    made.advance()
    again, _ = make()
    again.submit(job("a", steps=2), resume_from=tmp_path / "checkpoints" / "a")
    observed = Observed()
    for event in drain(again):
        assert not isinstance(event, JobProgress)
        observed.handle(event)
    metrics = ("train/loss", "train/grad_norm", "throughput/tokens_per_s")
    search = SearchSettings(metric=metrics)
    assert observed.score("a", search).values == (last.loss, last.grad_norm, last.tokens_per_s)
