"""How often a search reads its study, which takes milliseconds of the thread that trains."""

from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from curve_worker import step_fault
from rung_bench import Bench, halving

from plait.core.messages import GroupStep
from plait.search.attributes import state_of
from plait.search.orders import Orders
from plait.search.study import StudyTrials


def reads(monkeypatch: pytest.MonkeyPatch, bench: Bench, steps: int) -> tuple[int, int]:
    """How often it reads all trials in a search of so many steps, and in how many iterations."""
    count = 0
    get_trials = optuna.Study.get_trials

    def counting(study: optuna.Study, *args: object, **more: object) -> object:
        nonlocal count
        count += 1
        return get_trials(study, *args, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Study, "get_trials", counting)
        replace(bench, steps=lambda _: steps).run()
    return count, len(bench.of(GroupStep))


@pytest.mark.parametrize("kind", ["none", "successive_halving", "asha"])
def test_iterations_in_which_nothing_happens_read_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """A place is free all the time, one trial failed, and one is at its last rung for long."""
    monkeypatch.setattr("plait.search.run.LOOK_SECONDS", 1e9)
    search = replace(halving(trials=3, parallel=4, kind=kind), max_failure_rate=0.5)
    fails = {"fault": step_fault(lambda job, _: job == "trial-0001")}
    found = [
        reads(monkeypatch, Bench(tmp_path / str(steps), search, worker=fails), steps) for steps in (100, 200)
    ]
    assert found[1][1] >= found[0][1] + 100
    assert found[1][0] == found[0][0]


def test_a_point_enqueued_here_is_suggested_at_the_next_iteration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("plait.search.run.LOOK_SECONDS", 1e9)
    seen: list[list[str]] = []

    def owner(study: StudyTrials, poll: int) -> Orders:
        if poll == 3:
            study.enqueue({"train.lr": 1e-4}, request="add")
        seen.append([state_of(item) for item in study.shared.trials()])
        return Orders()

    bench = Bench(tmp_path, halving(trials=1, kind="none"), owner=owner)
    bench.run()
    assert seen[3] == ["running", "queued"]
    assert seen[4] == ["running", "running"]
