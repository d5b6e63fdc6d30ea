"""Reads a search from MLflow and its study."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from mlflow import MlflowClient
from mlflow.entities import Metric, Run

from plait.core.lifecycle import JobState
from plait.core.messages import GroupStep
from plait.core.settings import TrackingSettings
from plait.tracking import names
from plait.tracking.connection import storage_errors
from plait.tracking.leaderboard import JobRecord, varying
from plait.tracking.results import SearchResult, load_search
from plait.tracking.tables import GROUP_STEPS_ARTIFACT, group_step
from plait_dashboards.importance import read_importance
from plait_dashboards.sweep import Curve, Sweep, SweepObjective

CURVES = (names.TRAIN_LOSS, names.EVAL_LOSS)
SERVER_CALLS = 8  # at once: a server answers several, a database file one


def read_sweep(settings: TrackingSettings, name: str | None = None, storage: str | None = None) -> Sweep:
    """A search with its jobs, curves, steps and importance.

    Args:
        settings: where to look.
        name: name of the search, or its MLflow run id; None means the newest.
        storage: storage of the study (``search.storage``); None means that given in the search's run.

    Raises:
        SearchError: there is no such search, or none at all.
        StorageError: the store cannot be used.
    """
    result = load_search(settings, name)
    with storage_errors(result.location):
        return sweep_of(result, MlflowClient(result.location.uri), storage)


def sweep_of(result: SearchResult, client: MlflowClient, storage: str | None) -> Sweep:
    """The same for a search that has been found."""
    run = client.get_run(result.run_id)
    storage = storage or run.data.params.get("search.storage")
    first = result.objectives[0]
    curves = {
        metric: read_curves(client, result, metric) for metric in dict.fromkeys((*CURVES, first.metric))
    }
    return Sweep(
        name=result.name,
        state=result.state,
        direction=first.direction,
        metric=first.metric,
        records=result.records,
        curves={metric: found for metric, found in curves.items() if found},
        steps=read_steps(client, result),
        importance=read_importance(storage, result.location.root, result.name),
        objectives=objectives_of(result),
        about=about(run, result.records),
    )


def about(run: Run, records: Sequence[JobRecord]) -> dict[str, str]:
    """What was searched, by whom and when, to distinguish pages after a month."""
    settings, tags = run.data.params, run.data.tags
    data = {_words(item.parameters, ("data.source", "data.task", "data.path", "data.id")) for item in records}
    found = {
        "started": _time(run.info.start_time),
        "ended": _time(run.info.end_time),
        "model": _words(settings, ("model.kind", "model.id", "model.path")),
        "data": ", ".join(sorted(data - {""})),
        "sampler": settings.get("search.sampler", ""),
        "searched": ", ".join(varying(records)),
        "stopping": _kind(settings.get("search.stopping", "")),
        "user": tags.get("mlflow.user", ""),
        "Plait": tags.get("plait.version", ""),
        "command": tags.get("plait.command", ""),
    }
    return {name: value for name, value in found.items() if value}


def _words(settings: Mapping[str, Any], keys: Sequence[str]) -> str:
    return " ".join(str(settings[key]) for key in keys if settings.get(key) is not None)


def _time(milliseconds: int | None) -> str:
    if milliseconds is None:
        return ""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _kind(stopping: str) -> str:
    try:
        return str(json.loads(stopping)["kind"])
    except (ValueError, KeyError, TypeError):
        return ""


def objectives_of(result: SearchResult) -> tuple[SweepObjective, ...]:
    """The objectives of a search, from its jobs' runs."""
    finished = [item for item in result.records if item.state == JobState.FINISHED]
    whole = [item for item in finished if len(item.values) == len(result.objectives)]
    return tuple(
        SweepObjective(each.metric, each.direction, {item.trial: item.values[at] for item in whole})
        for at, each in enumerate(result.objectives)
    )


def read_curves(client: MlflowClient, result: SearchResult, metric: str) -> dict[int, Curve]:
    """One metric of all jobs, by trial."""

    def read(record: JobRecord) -> Sequence[Metric]:
        return client.get_metric_history(record.run_id, metric)

    if result.location.is_server:
        with ThreadPoolExecutor(SERVER_CALLS) as pool:
            histories = list(pool.map(read, result.records))
    else:
        histories = [read(record) for record in result.records]
    found = {record.trial: curve_of(points) for record, points in zip(result.records, histories, strict=True)}
    return {trial: curve for trial, curve in found.items() if len(curve.steps)}


def curve_of(points: Sequence[Metric]) -> Curve:
    """Points in the order of steps; if a step has several, the one written last."""
    latest = {point.step: point.value for point in sorted(points, key=lambda point: point.timestamp)}
    steps = sorted(latest)
    return Curve(
        np.array(steps, dtype=np.int64), np.array([latest[step] for step in steps], dtype=np.float64)
    )


def read_steps(client: MlflowClient, result: SearchResult) -> tuple[GroupStep, ...]:
    """The search's group steps, from the table of its run."""
    if not any(item.path == GROUP_STEPS_ARTIFACT for item in client.list_artifacts(result.run_id)):
        return ()
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(client.download_artifacts(result.run_id, GROUP_STEPS_ARTIFACT, folder))
        table = json.loads(copied.read_text(encoding="utf-8"))
    return tuple(group_step(dict(zip(table["columns"], row, strict=True))) for row in table["data"])
