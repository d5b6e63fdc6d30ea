"""A whole search while the clocks jump: states by the minute, an unavailable storage, times of runs."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from optuna.trial import FrozenTrial, TrialState

import plait.engine.adapter_store
import plait.engine.build
import plait.search.study
from plait.cli.main import main
from plait.search.storage import Journal

HOUR = 3600.0
Trials = Callable[..., list[FrozenTrial]]


def test_a_search_is_the_same_while_the_clocks_jump(
    folder: Path,
    short: tuple[str, ...],
    trials: Trials,
    finished_search: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = time.time
    wall = itertools.cycle([0.0, 5 * HOUR, -7 * HOUR, 100 * HOUR])
    monkeypatch.setattr(time, "time", lambda: real() + next(wall))
    monkeypatch.setattr(time, "time_ns", lambda: int((real() + next(wall)) * 1e9))
    rising = itertools.count(0.0, HOUR)
    jumping: dict[str, Any] = {"clock": lambda: next(rising)}
    for place, name in ((plait.engine.build, "Coordinator"), (plait.search.study, "Workers")):
        monkeypatch.setattr(place, name, partial(getattr(place, name), **jumping))

    saved: list[tuple[str, int]] = []
    write = plait.engine.adapter_store.write_checkpoint

    def noted(directory: Path, *arguments: Any) -> None:
        saved.append((directory.parent.name, int(directory.name.removeprefix("step-"))))
        write(directory, *arguments)

    monkeypatch.setattr(plait.engine.adapter_store, "write_checkpoint", noted)
    away, append = iter(range(12)), Journal.append_logs

    def sometimes(journal: Journal, logs: Sequence[dict[str, Any]]) -> None:
        if next(away, 0) in (8, 9):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(journal, logs)

    monkeypatch.setattr(Journal, "append_logs", sometimes)

    by_the_clock = ["engine.checkpoint_minutes=30", "engine.checkpoint_steps=null"]
    assert main(["sweep", *short, "adapter.rank=1,2", "search.sampler=grid", *by_the_clock]) == 0
    out = capsys.readouterr().out
    assert "The study's storage is unavailable (No space left on device)" in out.replace("[Errno 28] ", "")
    assert "The study's storage is back." in out
    assert sorted(saved) == [(f"trial-{number:04d}", step) for number in (0, 1) for step in (1, 2)]

    monkeypatch.undo()
    calm = trials(finished_search[0])
    found = trials(folder)
    assert [trial.state for trial in found] == [TrialState.COMPLETE] * 2
    assert [(trial.params, trial.value) for trial in found] == [(trial.params, trial.value) for trial in calm]
    client = MlflowClient(f"sqlite:///{folder / 'plait-runs' / 'mlflow.db'}")
    experiments = [item.experiment_id for item in client.search_experiments()]
    runs = client.search_runs(experiments)
    assert [run.info.status for run in runs] == ["FINISHED"] * 3
    for run in (run for run in runs if "plait.trial" in run.data.tags):
        steps = sorted(point.step for point in client.get_metric_history(run.info.run_id, "train/loss"))
        assert steps == [1, 2, 3]
