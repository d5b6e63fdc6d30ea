"""A laboratory on each family of the tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from laboratory import Kept, Laboratory
from processes import ForkedProcess, wanted_once

from plait.core.settings import ModelSettings
from plait.engine.memory import PeakSampler
from plait.models.base import BaseModel
from plait.models.load import load_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], BaseModel]:
    made: dict[str, BaseModel] = {}

    def make(family: str) -> BaseModel:
        if family not in made:
            settings = ModelSettings(kind="tiny", family=family, dtype="float32", seed=3)
            made[family] = load_model(settings, cache=tmp_path_factory.mktemp("cache"))
        return made[family]

    return make


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Undisturbed runs, made once for all tests of this folder."""
    return Kept(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def peaks() -> None:
    """For tests of peaks: they are observed as often as in a real run."""


@pytest.fixture(autouse=True)
def _one_peak(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere each worker observes one iteration."""
    if "peaks" not in request.fixturenames:
        monkeypatch.setattr(PeakSampler, "wanted", wanted_once)
        monkeypatch.setattr(ForkedProcess, "observes_once", True)


@pytest.fixture
def laboratory(
    tiny_model: Callable[[str], BaseModel], tmp_path: Path, kept: Kept
) -> Callable[[str], Laboratory]:
    torch.set_num_threads(1)
    return lambda family: Laboratory(family, tiny_model(family), tmp_path, kept)
