"""One contract for the worker of this process and for the one that stands for it in unit tests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from curve_worker import CurveWorker
from laboratory import random_data
from processes import fleet
from transformers import LlamaConfig
from worker_contract import CAPACITY, JOBS, WorkerContract, run, schedule

from plait.core.messages import (
    Attach,
    Command,
    Detach,
    JobFailed,
    MicrobatchDone,
    OutOfMemory,
    RunSchedule,
    StepDone,
    WorkerEvent,
)
from plait.core.plans import Segment
from plait.core.settings import EngineSettings, ModelSettings
from plait.cost.fake_memory import fake_model
from plait.distributed.fleet import Fleet
from plait.engine import local_worker
from plait.engine.asked import CudaMark
from plait.engine.catalogue import DataCatalogue
from plait.engine.local_worker import LocalWorker
from plait.engine.microbatches import LoadedMicrobatch
from plait.engine.worker import Worker
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext, Rotation
from plait.models.load import load_model
from plait_kernels.counting import counted


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return load_model(
        ModelSettings(kind="tiny", dtype="float32", seed=3), cache=tmp_path_factory.mktemp("cache")
    )


class TestLocalWorker(WorkerContract):
    @pytest.fixture(params=["reference", "grouped"])
    def worker(self, model: BaseModel, request: pytest.FixtureRequest) -> LocalWorker:
        torch.set_num_threads(1)
        settings = EngineSettings(kernels=request.param, capacity=CAPACITY)
        return LocalWorker(model, DataCatalogue(random_data), settings)


class TestCurveWorker(WorkerContract):
    @pytest.fixture
    def worker(self) -> CurveWorker:
        return CurveWorker(curve=lambda job, step: 3.0 / (step + len(job.name)))


class Slow:
    """Peers that take three seconds to agree, on a clock that stands still otherwise."""

    def __init__(self, short: bool) -> None:
        self.now, self.short = 0.0, short

    def add_up(self, gradients: torch.Tensor, job: str, step: int) -> None:
        pass

    def fill(self, vectors: object) -> None:
        pass

    def finish(self, *, short: bool) -> bool:
        self.now += 3.0
        return short or self.short


@pytest.mark.parametrize("short", [False, True])
def test_seconds_of_waiting_for_peers_are_in_one_event(model: BaseModel, short: bool) -> None:
    peers = Slow(short)
    settings = EngineSettings(kernels="grouped", capacity=CAPACITY)
    worker = LocalWorker(model, DataCatalogue(random_data), settings, clock=lambda: peers.now, peers=peers)
    for each in JOBS:
        worker.execute(Attach(each))
    events = run(worker, JOBS, 1)
    spent = [event.seconds for event in events if isinstance(event, StepDone | OutOfMemory)]
    assert sum(spent) == pytest.approx(3.0)
    assert min(spent) > 0
    assert any(isinstance(event, OutOfMemory) for event in events) == short


class Behind:
    """A device's work, of which the host has seen nothing before it waits."""

    def __init__(self) -> None:
        self.asked = self.seen = self.waits = 0

    def mark(self, *_given: object) -> CudaMark:
        return CudaMark(Event(self))


class Event:
    def __init__(self, device: Behind) -> None:
        self.device = device

    def record(self) -> None:
        self.device.asked += 1
        self.at = self.device.asked

    def query(self) -> bool:
        return self.at <= self.device.seen

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.seen = self.device.asked

    def elapsed_time(self, end: Event) -> float:
        assert end.query()
        return 1e3 * (end.at - self.at)


def attached(model: BaseModel, peers: Slow | None) -> LocalWorker:
    """A worker with both jobs."""
    settings = EngineSettings(kernels="grouped", capacity=CAPACITY)
    worker = LocalWorker(model, DataCatalogue(random_data), settings, peers=peers)
    for each in JOBS:
        worker.execute(Attach(each))
    return worker


@pytest.mark.parametrize("peers", [None, Slow(short=False)], ids=["alone", "with peers"])
def test_losses_and_norms_of_a_batch_are_waited_for_once(
    model: BaseModel, monkeypatch: pytest.MonkeyPatch, peers: Slow | None
) -> None:
    workers = [attached(model, peers) for _ in range(2)]
    expected, device = run(workers[0], JOBS, 1), Behind()
    monkeypatch.setattr(local_worker, "mark", device.mark)
    found = run(workers[1], JOBS, 1)
    microbatches = [event for event in found if isinstance(event, MicrobatchDone)]
    assert len(microbatches) > 1
    assert (device.waits, device.asked) == (1, 2 * len(microbatches) + 2)
    assert [event.seconds for event in microbatches] == [1.0] * len(microbatches)
    assert sum(event.seconds for event in found if isinstance(event, StepDone)) == pytest.approx(1.0)
    before = [event.losses for event in expected if isinstance(event, MicrobatchDone)]
    assert [event.losses for event in microbatches] == before


@pytest.mark.parametrize("peers", [None, Slow(short=False)], ids=["alone", "with peers"])
def test_a_job_whose_loss_is_not_finite_is_not_stepped_though_its_gradient_is(
    model: BaseModel, monkeypatch: pytest.MonkeyPatch, peers: Slow | None
) -> None:
    workers = [attached(model, peers) for _ in range(2)]
    sums = LoadedMicrobatch.sums

    def infinite(self: LoadedMicrobatch, nll: torch.Tensor) -> torch.Tensor:
        bad = torch.tensor([segment.job == "a" for segment in self.segments])
        return torch.where(bad, torch.inf, sums(self, nll))

    before = workers[0].bank.block("a").state[0].clone()
    monkeypatch.setattr(LoadedMicrobatch, "sums", infinite)
    found = run(workers[0], JOBS, 1)
    monkeypatch.setattr(LoadedMicrobatch, "sums", sums)
    run(workers[1], JOBS, 1)
    assert {event.job for event in found if isinstance(event, JobFailed)} == {"a"}
    norms = {event.job: event.grad_norm for event in found if isinstance(event, StepDone)}
    assert math.isnan(norms["a"])
    assert math.isfinite(norms["b"])
    first, second = (worker.bank for worker in workers)
    assert torch.equal(first.block("a").state[0], before)
    assert torch.equal(first.block("b").state, second.block("b").state)


def assert_a_failed_job_stays_as_it_is(worker: Worker) -> None:
    """Two steps in one schedule; the first one's gradient of job "a" is not finite."""
    for each in JOBS:
        worker.execute(Attach(each))
    first, second = (schedule(worker, JOBS, step) for step in (1, 2))
    spoilt = [
        replace(each, segments=tuple(replace(own, loss_weight=weight(own)) for own in each.segments))
        for each in first.microbatches
    ]
    later = [replace(each, index=len(spoilt) + each.index) for each in second.microbatches]
    found = worker.execute(RunSchedule((*spoilt, *first.steps, *later, *second.steps)))
    norms = {(each.job, each.step): each.grad_norm for each in found if isinstance(each, StepDone)}
    assert {key for key, norm in norms.items() if not math.isfinite(norm)} == {("a", 1), ("a", 2)}
    assert norms.keys() == {("a", 1), ("b", 1), ("a", 2), ("b", 2)}
    for each in JOBS:
        worker.execute(Detach(each.name))
    worker.execute(Attach(JOBS[0]))
    run(worker, JOBS[:1], 1)
    (again,) = [each for each in run(worker, JOBS[:1], 2) if isinstance(each, StepDone)]
    assert math.isfinite(again.grad_norm)  # another of the same name, attached later
    worker.execute(Detach(JOBS[0].name))


def weight(segment: Segment) -> float:
    return math.nan if segment.job == "a" else segment.loss_weight


def test_a_failed_job_does_not_step_later_in_the_same_schedule(model: BaseModel, processes: Fleet) -> None:
    settings = EngineSettings(kernels="grouped", capacity=CAPACITY)
    alone = LocalWorker(model, DataCatalogue(random_data), settings)
    assert_a_failed_job_stays_as_it_is(alone)
    assert_a_failed_job_stays_as_it_is(processes)


@pytest.mark.parametrize("peers", [None, Slow(short=False)], ids=["alone", "with peers"])
def test_a_batch_on_a_device_has_one_wait(monkeypatch: pytest.MonkeyPatch, peers: Slow | None) -> None:
    """With Triton's kernels, over meta tensors, which stand for a device's."""
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2
    )
    meta = fake_model(config, layers=2, dtype=torch.bfloat16)

    def rotation(_layer: int, context: MicrobatchContext) -> Rotation:
        both = (torch.empty(1, len(context.token_ids), 16, dtype=torch.bfloat16, device="meta"),) * 2
        return Rotation(both, both)

    monkeypatch.setattr(meta, "_rotation", rotation)  # which a fake model cannot compute
    monkeypatch.setattr(local_worker, "device_kind", str)
    settings = EngineSettings(kernels="triton", capacity=CAPACITY)
    worker, device = LocalWorker(meta, DataCatalogue(random_data), settings, peers=peers), Behind()
    for each in JOBS:
        worker.execute(Attach(each))
    with counted():
        run(worker, JOBS, 1)  # what a bank makes once
    monkeypatch.setattr(local_worker, "mark", device.mark)
    with counted() as counts:
        found = run(worker, JOBS, 2)
    assert sum(isinstance(event, MicrobatchDone) for event in found) > 1
    assert sum(isinstance(event, StepDone) for event in found) == len(JOBS)
    assert (counts.waits, device.waits) == (0, 1)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    settings = EngineSettings(kernels="grouped", capacity=CAPACITY, threads=1)
    model = ModelSettings(kind="tiny", dtype="float32", seed=3)
    with fleet(2, model, settings, tmp_path_factory.mktemp("processes")) as made:
        yield made


class TestFleet(WorkerContract):
    @pytest.fixture
    def worker(self, processes: Fleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
        """As after a start: no job is in."""
        attached, execute = set[str](), processes.execute

        def noting(command: Command) -> Sequence[WorkerEvent]:
            attached.update([command.job.name] if isinstance(command, Attach) else ())
            attached.difference_update([command.job] if isinstance(command, Detach) else ())
            return execute(command)

        monkeypatch.setattr(processes, "execute", noting)
        yield processes
        for job in attached:
            execute(Detach(job))
