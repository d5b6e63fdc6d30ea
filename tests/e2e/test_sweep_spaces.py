"""Spaces, objectives and limits through the command, to the end: what is drawn, told and trained at once."""

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState

from plait.cli.main import main
from plait.core.messages import Command, RunSchedule, WorkerEvent
from plait.engine.local_worker import LocalWorker

Trials = Callable[..., list[FrozenTrial]]
Leaderboard = Callable[..., list[dict[str, Any]]]
Short = tuple[str, ...]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many jobs each training command to the worker had."""
    sizes: list[int] = []
    real = LocalWorker.execute

    def execute(self: LocalWorker, command: Command) -> Sequence[WorkerEvent]:
        if isinstance(command, RunSchedule):
            parts = (segment.job for each in command.microbatches for segment in each.segments)
            sizes.append(len(set(parts)))
        return real(self, command)

    monkeypatch.setattr(LocalWorker, "execute", execute)
    return sizes


def test_ranges_and_intervals_maximised_two_jobs_at_a_time(
    folder: Path,
    short: Short,
    together: list[int],
    trials: Trials,
    leaderboard: Leaderboard,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "adapter.rank=range(1,7,2)",
        "train.batch_size=range(1,4)",
        "train.lr=tag(log,interval(1e-4,1e-2))",
        "search.metric=train/tokens",
        "search.direction=maximize",
        "search.sampler=random",
        "search.trials=5",
        "planner.max_jobs=2",
    ]
    short = tuple(word for word in short if not word.startswith("train.batch_size"))
    assert main(["sweep", *short, *arguments]) == 0
    assert "The highest train/tokens counts as the best" in capsys.readouterr().out
    held = trials(folder)
    assert [item.state for item in held] == [TrialState.COMPLETE] * 5
    for item in held:
        assert item.params["adapter.rank"] in (1, 3, 5)
        assert item.params["train.batch_size"] in (1, 2, 3)
        assert 1e-4 <= item.params["train.lr"] <= 1e-2
    assert len({item.params["train.batch_size"] for item in held}) > 1
    rows = leaderboard()
    assert rows[0]["objective"] == max(item.value for item in held if item.value is not None)
    assert [row["objective"] for row in rows] == [row["tokens"] for row in rows]
    assert rows == sorted(rows, key=lambda row: -row["objective"])
    assert max(together) == 2


class Staying:
    """In place of what ends the whole program with its status, which here are the tests."""

    def leave(self, status: int) -> None:
        assert status == 0


def test_python_m_plait_m_is_the_same_search(
    folder: Path,
    short: Short,
    trials: Trials,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*short, "adapter.rank=1,2", "search.sampler=grid"]
    monkeypatch.setattr(sys, "argv", ["plait", "-m", *words])
    monkeypatch.setattr("plait.cli.main.Ending", Staying)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("plait", run_name="__main__")
    assert ended.value.code == 0
    before = [item.value for item in trials(folder)]
    assert len(before) == 2
    capsys.readouterr()
    assert main(["sweep", *words]) == 0  # by its default name it is known, and finished
    assert "search.fresh=true" in capsys.readouterr().out
    assert [item.value for item in trials(folder)] == before


def test_a_single_job_that_diverges_ends_with_status_3_and_says_why(
    folder: Path, short: Short, trials: Trials, leaderboard: Leaderboard
) -> None:
    assert main(["train", *short, "train.steps=6", "train.lr=1e30", "train.clip_norm=null"]) == 3
    (item,) = trials(folder)
    assert item.state == TrialState.FAIL
    (row,) = leaderboard()
    assert row["state"] == "failed"
    assert row["reason"] == item.user_attrs["plait.reason"] != ""
    assert row["objective"] is None
    assert list((folder / "plait-runs" / "outputs").glob("*/*/.hydra")), "what began to train stays on disk"
