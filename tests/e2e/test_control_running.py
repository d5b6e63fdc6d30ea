"""`plait control` and a real sweep that runs at the same time, in a separate process."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from forked import HANGS, HELD_AT, EagerSearch, Forked, HeldSearch
from optuna.trial import FrozenTrial, TrialState

from plait.cli.main import main

SPACE = (
    "adapter.rank=1,2,4",
    "train.lr=tag(log,interval(1e-4,1e-2))",
    "search.sampler=random",
    "search.name=mine",
)
Trials = Callable[..., list[FrozenTrial]]
Study = Callable[[], list[FrozenTrial]]  # the trials as they are now
Said = Callable[..., str]


@contextmanager
def running(arguments: Sequence[str], process: type[Forked] = EagerSearch) -> Iterator[Forked]:
    """A sweep as a separate process, killed at the end if it still runs."""
    sweep = process(["sweep", *arguments])
    try:
        yield sweep
    finally:
        sweep.kill()


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """What `plait control mine ...` prints; its exit status is checked."""

    def say(*words: str, status: int = 0) -> str:
        capsys.readouterr()
        assert main(["control", "mine", *words, "--wait", str(HANGS)]) == status
        shown = capsys.readouterr()
        return shown.out if status == 0 else shown.err

    return say


def steps(status: str) -> dict[str, int]:
    """The step of the last report of every live trial that `status` shows."""
    return {name: int(step) for name, step in re.findall(r"(trial-\d+).*? at step (\d+)", status)}


@pytest.mark.slow
def test_every_command_against_a_running_sweep(
    folder: Path,
    short: tuple[str, ...],
    trials: Trials,
    said: Said,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        *short, *SPACE, "search.trials=3", "search.parallel=3", "train.steps=100000",
        "engine.checkpoint_steps=20", "train.eval_every=20",
    ]  # fmt: skip
    study = partial(trials, folder)
    with running(arguments) as sweep:
        sweep.until(lambda: (folder / "plait-runs" / "searches" / "mine" / "command.json").exists())
        sweep.until(lambda: len(steps(said("status"))) == 3)
        pause_and_resume(sweep, said)
        stop_a_trial(sweep, said, study)
        add_a_trial(sweep, said, study)
        clone_a_trial(sweep, said, study)
    # killed: what is asked for now is done when it resumes
    assert "is not running" in said("status")
    assert "no such trial" in said("stop", "9", status=2)
    assert "is not running" in said("stop", "1")
    with running(arguments) as sweep:
        sweep.until(lambda: study()[1].state == TrialState.PRUNED)
        sweep.until(lambda: "3 running" in said("status"))
        assert "end after the current step" in said("cancel")
        assert sweep.end() == 0, sweep.output
    assert [item.state for item in study()] == [TrialState.PRUNED] * 5
    log = Path("sweep.log").read_text()
    assert "ended early" in log
    assert "resume with" not in log  # nothing is left
    capsys.readouterr()
    assert main(["resume"]) == 0
    assert "no unfinished searches" in capsys.readouterr().out
    assert "Pending" not in said("status")


def pause_and_resume(sweep: Forked, said: Said) -> None:
    """No trial takes a step in between."""
    assert "paused after the current step" in said("pause")
    sweep.until(lambda: "3 paused" in said("status"))
    held = steps(said("status"))
    time.sleep(0.5)
    assert steps(said("status")) == held
    assert said("status").startswith("mine is paused")
    said("resume")
    sweep.until(lambda: all(step > held[name] for name, step in steps(said("status")).items()))


def stop_a_trial(sweep: Forked, said: Said, study: Study) -> None:
    """The first, once."""
    assert "Trial 0 ends" in said("stop", "0")
    sweep.until(lambda: study()[0].state == TrialState.PRUNED)
    assert study()[0].user_attrs["plait.reason"] == "by the user"
    assert "is stopped" in said("stop", "0", status=2)


def add_a_trial(sweep: Forked, said: Said, study: Study) -> None:
    """In the place of the one that was stopped."""
    assert "Trial 3" in said("add", "adapter.rank=4", "train.lr=2e-3")
    point = {"adapter.rank": 4, "train.lr": 2e-3}  # written value by value, once it runs
    sweep.until(lambda: study()[3].params == point)
    sweep.until(lambda: "trial-0003" in steps(said("status")))
    assert "at least 1" in said("add", "adapter.rank=0", status=2)


def clone_a_trial(sweep: Forked, said: Said, study: Study) -> None:
    """With a higher priority, so that the one that was added leaves."""
    text = said("clone", "1", "train.lr=2e-2", "train.priority=5", "--warm")
    assert "Trial 4" in text
    assert "train.lr=2e-2 lies outside the search space" in text
    cloned = {"adapter.rank": study()[1].params["adapter.rank"]}
    sweep.until(lambda: study()[4].params == cloned)
    assert (Path(study()[4].user_attrs["plait.warm_from"]) / "checkpoint.json").exists()
    sweep.until(lambda: "trial-0004" in steps(said("status")))
    sweep.until(lambda: "1 paused" in said("status"))  # trial 3 was preempted
    assert "train.lr=0.02  (outside the search space)" in said("status")


@pytest.mark.slow
def test_stop_lets_running_trials_end_and_the_same_command_suggests_the_rest(
    folder: Path, short: tuple[str, ...], trials: Trials, said: Said
) -> None:
    arguments = [*short, *SPACE, "search.trials=4", "search.parallel=2", f"train.steps={HELD_AT + 2}"]
    search = folder / "plait-runs" / "searches" / "mine"
    with running(arguments, HeldSearch) as sweep:
        sweep.until(lambda: (search / "command.json").exists())
        sweep.until(lambda: "2 running" in said("status"))
        assert "No further trials start" in said("stop")
        assert sweep.end() == 0, sweep.output
    assert [item.state for item in trials(folder)] == [TrialState.COMPLETE] * 2
    assert main(["sweep", *arguments]) == 0
    assert [item.state for item in trials(folder)] == [TrialState.COMPLETE] * 4


@pytest.mark.slow
def test_cancelling_a_killed_search_ends_its_trials_when_it_resumes(
    folder: Path, short: tuple[str, ...], trials: Trials, said: Said
) -> None:
    arguments = [*short, *SPACE, "search.trials=4", "search.parallel=2", "train.steps=100000"]
    search = folder / "plait-runs" / "searches" / "mine"
    with running(arguments) as sweep:
        sweep.until(lambda: (search / "command.json").exists())
        sweep.until(lambda: [item.state for item in trials(folder)] == [TrialState.RUNNING] * 2)
    assert "is not running" in said("cancel")
    assert main(["sweep", *arguments]) == 0
    assert [item.state for item in trials(folder)] == [TrialState.PRUNED] * 2
    assert {item.user_attrs["plait.reason"] for item in trials(folder)} == {"by the user"}


def test_a_search_that_is_not_there(folder: Path, said: Said) -> None:
    (folder / "plait-runs" / "searches" / "other").mkdir(parents=True)
    text = said("pause", status=2)
    assert "Available: other." in text
