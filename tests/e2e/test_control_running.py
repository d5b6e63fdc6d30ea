"""`plait control` and a real sweep that runs beside it, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from optuna.trial import FrozenTrial, TrialState

from plait.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 300.0  # seconds until something is taken to hang: no promise of how fast a loaded machine is
SPACE = (
    "adapter.rank=1,2,4",
    "train.lr=tag(log,interval(1e-4,1e-2))",
    "search.sampler=random",
    "search.name=mine",
)
Trials = Callable[..., list[FrozenTrial]]
Said = Callable[..., str]


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A sweep as a process of its own, killed at the end if it still runs."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("platform", "kernels")),
        "PYTHONUNBUFFERED": "1",
    }
    with Path("sweep.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "plait", "-m", *arguments],
            env=environment,
            stdout=log,
            stderr=log,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(process: subprocess.Popen[str], what: Callable[[], bool]) -> None:
    """Wait for something that must come while the sweep runs."""
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, Path("sweep.log").read_text()
        assert process.poll() is None, Path("sweep.log").read_text()
        time.sleep(0.1)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """What `plait control mine ...` prints; its exit status is checked."""

    def say(*words: str, status: int = 0) -> str:
        capsys.readouterr()
        assert main(["control", "mine", *words, "--wait", str(PATIENCE)]) == status
        shown = capsys.readouterr()
        return shown.out if status == 0 else shown.err

    return say


def steps(status: str) -> dict[str, int]:
    """The step of the last report of every live trial that `status` shows."""
    return {name: int(step) for name, step in re.findall(r"(trial-\d+).*? at step (\d+)", status)}


@pytest.mark.slow
def test_every_command_against_a_running_sweep(
    folder: Path, short: tuple[str, ...], trials: Trials, said: Said
) -> None:
    arguments = [
        *short, *SPACE, "search.trials=3", "search.parallel=3", "train.steps=100000",
        "engine.checkpoint_steps=20", "train.eval_every=20",
    ]  # fmt: skip
    search = folder / "plait-runs" / "searches" / "mine"

    def state(number: int) -> TrialState:
        return trials(folder)[number].state

    with running(arguments) as sweep:
        until(sweep, lambda: (search / "command.json").exists())
        until(sweep, lambda: len(steps(said("status"))) == 3)

        assert "paused after the current step" in said("pause")
        until(sweep, lambda: "3 paused" in said("status"))
        held = steps(said("status"))
        time.sleep(0.5)
        assert steps(said("status")) == held
        assert said("status").startswith("mine is paused")

        said("resume")
        until(sweep, lambda: all(step > held[name] for name, step in steps(said("status")).items()))

        assert "Trial 0 ends" in said("stop", "0")
        until(sweep, lambda: state(0) == TrialState.PRUNED)
        assert trials(folder)[0].user_attrs["plait.reason"] == "by the user"
        assert "is stopped" in said("stop", "0", status=2)

        assert "Trial 3" in said("add", "adapter.rank=4", "train.lr=2e-3")
        point = {"adapter.rank": 4, "train.lr": 2e-3}  # written value by value, once it runs
        until(sweep, lambda: trials(folder)[3].params == point)
        until(sweep, lambda: "trial-0003" in steps(said("status")))
        assert "choice(1,2,4)" in said("add", "adapter.rank=64", status=2)

        assert "Trial 4" in said("clone", "1", "train.lr=1e-3", "train.priority=5", "--warm")
        cloned = trials(folder)[1].params | {"train.lr": 1e-3}
        until(sweep, lambda: trials(folder)[4].params == cloned)
        assert (Path(trials(folder)[4].user_attrs["plait.warm_from"]) / "checkpoint.json").exists()
        until(sweep, lambda: "trial-0004" in steps(said("status")))
        until(sweep, lambda: "1 paused" in said("status"))  # trial 3 was preempted
    # killed: what is asked for now is done when it goes on
    assert "is not running" in said("status")
    assert "no such trial" in said("stop", "9", status=2)
    assert "is not running" in said("stop", "1")
    with running(arguments) as sweep:
        until(sweep, lambda: state(1) == TrialState.PRUNED)
        until(sweep, lambda: "3 running" in said("status"))
        assert "end after the current step" in said("cancel")
        assert sweep.wait(PATIENCE) == 0, Path("sweep.log").read_text()
    assert [item.state for item in trials(folder)] == [TrialState.PRUNED] * 5
    assert "plait sweep" in Path("sweep.log").read_text()  # the command that goes on
    assert "Ordered" not in said("status")


@pytest.mark.slow
def test_stop_lets_what_runs_end_and_the_same_command_draws_the_rest(
    folder: Path, short: tuple[str, ...], trials: Trials, said: Said
) -> None:
    arguments = [*short, *SPACE, "search.trials=4", "search.parallel=2", "train.steps=150"]
    search = folder / "plait-runs" / "searches" / "mine"
    with running(arguments) as sweep:
        until(sweep, lambda: (search / "command.json").exists())
        until(sweep, lambda: "2 running" in said("status"))
        assert "No further trials start" in said("stop")
        assert sweep.wait(PATIENCE) == 0, Path("sweep.log").read_text()
    assert [item.state for item in trials(folder)] == [TrialState.COMPLETE] * 2
    assert main(["sweep", *arguments]) == 0
    assert [item.state for item in trials(folder)] == [TrialState.COMPLETE] * 4


@pytest.mark.slow
def test_cancel_of_a_search_that_was_killed_ends_what_it_left_when_it_goes_on(
    folder: Path, short: tuple[str, ...], trials: Trials, said: Said
) -> None:
    arguments = [*short, *SPACE, "search.trials=4", "search.parallel=2", "train.steps=100000"]
    search = folder / "plait-runs" / "searches" / "mine"
    with running(arguments) as sweep:
        until(sweep, lambda: (search / "command.json").exists())
        until(sweep, lambda: [item.state for item in trials(folder)] == [TrialState.RUNNING] * 2)
    assert "is not running" in said("cancel")
    assert main(["sweep", *arguments]) == 0
    assert [item.state for item in trials(folder)] == [TrialState.PRUNED] * 2
    assert {item.user_attrs["plait.reason"] for item in trials(folder)} == {"by the user"}


def test_a_search_that_is_not_there(folder: Path, said: Said) -> None:
    (folder / "plait-runs" / "searches" / "other").mkdir(parents=True)
    text = said("pause", status=2)
    assert "Available: other." in text
