"""Stores that several files of contract tests use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plait.core.settings import TrackingSettings


@pytest.fixture(scope="module")
def database(new_store: Callable[[], Path]) -> str:
    """The address of a SQLite store for one file of tests."""
    return f"sqlite:///{new_store() / 'mlflow.db'}"


@pytest.fixture
def settings(database: str, tmp_path: Path) -> TrackingSettings:
    """An experiment of its own for each test in that store."""
    return TrackingSettings(uri=database, root=tmp_path, experiment=f"tests {tmp_path}")
