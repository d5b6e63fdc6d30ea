"""One contract for the worker of this process and for the one that stands for it in unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from curve_worker import CurveWorker
from laboratory import random_data
from processes import fleet
from worker_contract import CAPACITY, JOBS, WorkerContract, run

from plait.core.messages import Attach, Detach, MicrobatchDone, OutOfMemory, StepDone
from plait.core.settings import EngineSettings, ModelSettings
from plait.distributed.fleet import Fleet
from plait.engine import local_worker
from plait.engine.asked import CudaMark
from plait.engine.catalogue import DataCatalogue
from plait.engine.local_worker import LocalWorker
from plait.models.base import BaseModel
from plait.models.load import load_model


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


def test_the_losses_of_all_microbatches_of_a_batch_are_waited_for_once(
    model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EngineSettings(kernels="grouped", capacity=CAPACITY)
    workers = [LocalWorker(model, DataCatalogue(random_data), settings) for _ in range(2)]
    for worker in workers:
        for each in JOBS:
            worker.execute(Attach(each))
    expected, device = run(workers[0], JOBS, 1), Behind()
    monkeypatch.setattr(local_worker, "mark", device.mark)
    found = run(workers[1], JOBS, 1)
    microbatches = [event for event in found if isinstance(event, MicrobatchDone)]
    assert len(microbatches) > 1
    assert (device.waits, device.asked) == (1, 2 * len(microbatches))
    assert [event.seconds for event in microbatches] == [1.0] * len(microbatches)
    before = [event.losses for event in expected if isinstance(event, MicrobatchDone)]
    assert [event.losses for event in microbatches] == before


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    settings = EngineSettings(kernels="grouped", capacity=CAPACITY, threads=1)
    model = ModelSettings(kind="tiny", dtype="float32", seed=3)
    with fleet(2, model, settings, tmp_path_factory.mktemp("processes")) as made:
        yield made


class TestFleet(WorkerContract):
    @pytest.fixture
    def worker(self, processes: Fleet) -> Iterator[Fleet]:
        """As after a start: no job is in."""
        yield processes
        for job in processes.jobs:
            processes.execute(Detach(job))
