"""One contract for the worker of this process and for the one that stands for it in unit tests."""

from __future__ import annotations

import pytest
import torch
from curve_worker import CurveWorker
from laboratory import random_data
from worker_contract import CAPACITY, WorkerContract

from plait.core.settings import EngineSettings, ModelSettings
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
