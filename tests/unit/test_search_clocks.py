"""Clocks that jump by hours: nobody is given up for it, and nothing is saved too rarely."""

from __future__ import annotations

import itertools
import time
from functools import partial
from pathlib import Path

import optuna
import pytest
from job_results import ended
from rung_bench import SPACE, Bench, halving, states
from studies import study_of

from plait.core.messages import JobAdmitted
from plait.search.orders import Orders
from plait.search.ownership import BEATS, MISSED_BEATS, Workers

HOUR = 3600.0


@pytest.fixture(autouse=True)
def _jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock jumps forward and backward by hours at every look, the rising clock forward only."""
    now = time.time()
    wall = itertools.cycle([0.0, 5 * HOUR, -7 * HOUR, 100 * HOUR, -0.5 * HOUR])
    monkeypatch.setattr(time, "time", lambda: now + next(wall))
    monkeypatch.setattr(time, "time_ns", lambda: int((now + next(wall)) * 1e9))
    rising = itertools.count(0.0, HOUR)
    monkeypatch.setattr("plait.search.study.Workers", partial(Workers, clock=lambda: next(rising)))
    monkeypatch.setattr("plait.search.ownership.POLL_SECONDS", 0.005)


@pytest.mark.parametrize("polls", [60, None])
def test_a_worker_elsewhere_keeps_its_trial_as_long_as_it_beats(
    tmp_path: Path, polls: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends it after so many looks; or it dies at once, and its trial is taken over."""
    search = halving(trials=4, parallel=2, kind="none")
    storage = optuna.storages.InMemoryStorage()
    with monkeypatch.context() as patch:
        patch.setattr("plait.search.ownership.this_host", lambda: "elsewhere")
        far = study_of(SPACE, search, storage, folder=lambda _: tmp_path / "far")
    trial = far.ask()
    assert trial is not None
    assert far._workers is not None
    name = far._workers.own.name
    far._workers._ended.set()  # from here on the test beats for it
    looks = 0

    def beat(*_: object) -> Orders:
        nonlocal looks
        looks += 1
        if polls is not None and looks < polls:
            far._beat(BEATS + name, looks)
        if looks == polls:
            far.tell(trial, ended("finished", 1.5, "budget spent"))
        return Orders()

    bench = Bench(tmp_path / "near", search, storage=storage, owner=beat)
    bench.run()
    assert [state.name for state, _ in states(bench)] == ["COMPLETE"] * 4
    admitted = {event.job.name for event in bench.of(JobAdmitted)}
    assert (trial.name in admitted) == (polls is None)
    assert (bench.trials[0].value == 1.5) == (polls is not None)
    assert looks > MISSED_BEATS
    far.close()


def test_a_jumping_wall_clock_does_not_change_decisions(tmp_path: Path) -> None:
    rising = itertools.count(0.0, HOUR)
    bench = Bench(tmp_path / "jumping", halving(cohort=4), clock=lambda: next(rising))
    bench.run()
    calm = Bench(tmp_path / "calm", halving(cohort=4))
    calm.run()
    assert states(bench) == states(calm)
