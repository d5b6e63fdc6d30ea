"""Losses of a small joint run, kept: data order, initial weights, dropout and optimiser must not drift.

A difference here means that jobs saved by an earlier release would go on otherwise, or that searches no
longer repeat. ``joint_tiny_run.json`` holds what :func:`losses` returned when it was last meant to change.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.messages import Event, JobEvaluated, JobProgress
from plait.core.samples import Sample, Split, TokenisedData
from plait.core.settings import EngineSettings, ModelSettings, RunSettings
from plait.engine.catalogue import DataCatalogue
from plait.engine.coordinator import Coordinator
from plait.engine.local_worker import LocalWorker
from plait.models.load import load_model

KEPT = Path(__file__).with_name("joint_tiny_run.json")
# Rounding differs between processors and releases of torch, and training amplifies it.
TOLERANCE = 1e-4


def sample(number: int) -> Sample:
    length = 6 + 5 * (number % 7)
    tokens = (7 * np.arange(length) * (number + 1) + 13 * number) % 240 + 5
    return Sample(tokens.astype(np.int32), np.arange(length) % 3 == number % 3)


def data(spec: DataSpec) -> TokenisedData:
    first = int(spec.mapping()["first"])
    train = Split.of([sample(first + number) for number in range(9)])
    return TokenisedData(spec.options, train, Split.of([sample(first + number) for number in (20, 21)]))


def jobs() -> list[JobSpec]:
    return [
        JobSpec(
            f"rank-{rank}",
            AdapterSpec(rank, dropout=dropout, target_modules=targets),
            TrainSpec(lr=lr, steps=6, batch_size=batch, eval_every=3, seed=rank, schedule="cosine"),
            DataSpec.of("fixed", first=rank),
        )
        for rank, dropout, targets, lr, batch in (
            (2, 0.0, "all-linear", 1e-3, 1),
            (5, 0.1, ("q_proj", "v_proj"), 3e-3, 4),
            (16, 0.3, ("o_proj", "down_proj"), 1e-3, 2),
        )
    ]


def losses(folder: Path) -> dict[str, dict[str, list[float]]]:
    settings = RunSettings(
        model=ModelSettings(kind="tiny", dtype="float32", seed=1), engine=EngineSettings(capacity=100)
    )
    catalogue = DataCatalogue(data)
    worker = LocalWorker(load_model(settings.model, cache=folder), catalogue, settings.engine)
    coordinator = Coordinator(worker, catalogue, settings, folder=folder)
    for job in jobs():
        coordinator.submit(job)
    events: list[Event] = []
    while not coordinator.idle:
        events += coordinator.advance()
    found: dict[str, dict[str, list[float]]] = {}
    for event in events:
        if isinstance(event, JobProgress | JobEvaluated):
            kind = "train" if isinstance(event, JobProgress) else "validation"
            found.setdefault(event.job, {}).setdefault(kind, []).append(event.loss)
    return found


def test_losses_are_those_kept(tmp_path: Path) -> None:
    found, kept = losses(tmp_path), json.loads(KEPT.read_text())
    assert found.keys() == kept.keys()
    for job, kinds in kept.items():
        for kind, values in kinds.items():
            assert found[job][kind] == pytest.approx(values, rel=TOLERANCE), f"{job}, {kind}"
