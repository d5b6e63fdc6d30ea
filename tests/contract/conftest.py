"""Stores that several files of contract tests use."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.core.settings import TrackingSettings


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a SQLite store for one file of tests: making its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


@pytest.fixture
def settings(database: str, tmp_path: Path) -> TrackingSettings:
    """An experiment of its own for each test in that store."""
    return TrackingSettings(uri=database, root=tmp_path, experiment=f"tests {tmp_path}")
