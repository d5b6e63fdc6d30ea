"""What the coordinator may expect of every worker: :class:`plait.engine.worker.Worker`, as tests."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
from laboratory import random_data, random_texts

from plait.core.errors import StorageError
from plait.core.jobs import AdapterSpec, JobSpec, TrainSpec
from plait.core.messages import (
    Attach,
    Attached,
    Cursor,
    Detach,
    Evaluate,
    Export,
    Generate,
    Generated,
    GenerateJob,
    MicrobatchDone,
    RunSchedule,
    SaveCheckpoint,
    Saved,
    StepDone,
    StepJob,
    WorkerEvent,
)
from plait.core.plans import Replica
from plait.engine.packer import Packer
from plait.engine.steps import DataOrder, training_batch, validation_batch
from plait.engine.worker import Worker

CAPACITY = 64


def job(name: str, rank: int, seed: int) -> JobSpec:
    adapter = AdapterSpec(rank, dropout=0.1, target_modules=("q_proj", "v_proj"))
    train = TrainSpec(steps=4, batch_size=3, lr=1e-2, seed=seed)
    return JobSpec(name, adapter, train, random_texts(seed, 5, 25))


JOBS = (job("a", 2, 1), job("b", 5, 2))


def run(worker: Worker, jobs: Sequence[JobSpec], step: int) -> list[WorkerEvent]:
    """One step of these jobs: their microbatches, and the optimiser."""
    return list(worker.execute(schedule(worker, jobs, step)))


def schedule(worker: Worker, jobs: Sequence[JobSpec], step: int) -> RunSchedule:
    """The schedule of one step of these jobs."""
    batches = []
    for each in jobs:
        split = random_data(each.data).train
        batches.append(training_batch(each, DataOrder.of(each.train, len(split)), split, step))
    packer = Packer([Replica(number, capacity=CAPACITY) for number in range(len(worker.facts.devices))])
    steps = (StepJob(each.name, step, each.train.lr) for each in jobs)
    return RunSchedule((*packer.pack(batches), *steps))


def losses(events: Sequence[WorkerEvent], name: str) -> float:
    """A job's loss, summed over the microbatches."""
    done = [event for event in events if isinstance(event, MicrobatchDone)]
    return sum(loss.loss_sum for event in done for loss in event.losses if loss.job == name)


def evaluation(jobs: Sequence[JobSpec], step: int) -> Evaluate:
    batches = [validation_batch(each, random_data(each.data).validation, step) for each in jobs]
    return Evaluate(Packer([Replica(capacity=CAPACITY)]).pack(batches))


class WorkerContract:
    """Every worker keeps these; a subclass has the fixture ``worker``, a fresh one that finds random data."""

    def test_what_is_said_can_be_sent_to_another_process(self, worker: Worker, tmp_path: Path) -> None:
        said: list[object] = [worker.facts]
        for command in (Attach(JOBS[0]), evaluation(JOBS[:1], 0), Export("a", tmp_path / "a"), Detach("a")):
            said += [command, *worker.execute(command)]
        assert pickle.loads(pickle.dumps(said)) == said

    def test_a_fresh_job_starts_at_the_beginning(self, worker: Worker) -> None:
        (event,) = worker.execute(Attach(JOBS[0]))
        assert isinstance(event, Attached)
        assert (event.job, event.cursor, event.checkpoint, event.notices) == ("a", Cursor(), None, ())

    def test_each_microbatch_and_each_step_is_answered_once_and_takes_time(self, worker: Worker) -> None:
        for each in JOBS:
            worker.execute(Attach(each))
        events = run(worker, JOBS, 1)
        done = [event for event in events if isinstance(event, MicrobatchDone)]
        assert len(done) > 1
        assert [event.index for event in done] == list(range(len(done)))
        assert {loss.step for event in done for loss in event.losses} == {1}
        steps = [event for event in events if isinstance(event, StepDone)]
        assert [(event.job, event.step) for event in steps] == [("a", 1), ("b", 1)]
        assert events == [*done, *steps]
        assert all(event.seconds > 0 for event in (*done, *steps))

    def test_losses_are_those_of_each_job_alone(self, worker: Worker) -> None:
        for each in JOBS:
            worker.execute(Attach(each))
        together = [run(worker, JOBS, step) for step in (1, 2, 3)]
        for each in JOBS:
            worker.execute(Detach(each.name))
        for each in JOBS:
            worker.execute(Attach(each))
            alone = [losses(run(worker, [each], step), each.name) for step in (1, 2, 3)]
            assert [losses(events, each.name) for events in together] == pytest.approx(alone, rel=1e-5)
            worker.execute(Detach(each.name))

    def test_an_evaluation_changes_nothing(self, worker: Worker) -> None:
        for each in JOBS:
            worker.execute(Attach(each))
        run(worker, JOBS, 1)
        first, second = (worker.execute(evaluation(JOBS, 1)) for _ in range(2))
        assert all(isinstance(event, MicrobatchDone) and event.evaluation for event in first)
        assert [losses(first, name) for name in "ab"] == [losses(second, name) for name in "ab"]

    def test_a_job_resumes_from_its_checkpoint_as_if_it_had_stayed(
        self, worker: Worker, tmp_path: Path
    ) -> None:
        worker.execute(Attach(JOBS[0]))
        for step in (1, 2):
            run(worker, JOBS[:1], step)
        folder, cursor = tmp_path / "a" / "step-00000002", Cursor(2, tokens=90, device_ns=7)
        (saved,) = worker.execute(SaveCheckpoint("a", folder, cursor))
        assert isinstance(saved, Saved)
        assert saved.job == "a"
        stayed = losses(run(worker, JOBS[:1], 3), "a")
        worker.execute(Detach("a"))
        (attached,) = worker.execute(Attach(JOBS[0], tmp_path / "a"))
        assert isinstance(attached, Attached)
        assert (attached.cursor, attached.checkpoint) == (cursor, folder)
        assert losses(run(worker, JOBS[:1], 3), "a") == stayed

    def test_a_checkpoint_that_cannot_be_written_leaves_the_job_as_it_was(
        self, worker: Worker, tmp_path: Path
    ) -> None:
        worker.execute(Attach(JOBS[0]))
        run(worker, JOBS[:1], 1)
        (tmp_path / "file").write_text("where a folder must be")
        with pytest.raises(StorageError):
            worker.execute(SaveCheckpoint("a", tmp_path / "file" / "step-00000001", Cursor(1)))
        first = losses(run(worker, JOBS[:1], 2), "a")
        worker.execute(Detach("a"))
        worker.execute(Attach(JOBS[0]))
        run(worker, JOBS[:1], 1)
        assert losses(run(worker, JOBS[:1], 2), "a") == first

    def test_an_answer_comes_for_each_sample_in_the_order_asked_for(self, worker: Worker) -> None:
        for each in JOBS:
            worker.execute(Attach(each))
        asked = (GenerateJob("b", (2, 0)), GenerateJob("a", (1,)))
        answered = worker.execute(Generate(asked, 3))
        assert [(event.job, event.samples) for event in answered if isinstance(event, Generated)] == [
            ("b", (2, 0)),
            ("a", (1,)),
        ]
        assert [len(event.texts) for event in answered if isinstance(event, Generated)] == [2, 1]
