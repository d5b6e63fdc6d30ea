"""Two real processes on one study, with cohorts that neither can fill alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import curve_process
import optuna
import pytest
from curve_worker import CurveWorker
from forked import Talking
from rung_bench import Bench, states

from plait.search.control import SearchControl
from plait.search.recorded import RecordedCommand
from plait.search.storage import open_storage


class Process:
    """One worker process, ready to search."""

    def __init__(self, folder: Path, *more: str) -> None:
        self._process = Talking(curve_process.main, str(folder), *more)
        self.steps: list[tuple[str, int]] = []
        self.last = ""

    def wait_until_ready(self) -> None:
        assert self._next() == "ready"

    def go(self) -> None:
        self._process.stdin.write("go\n")

    def next_job(self) -> str:
        """The job of the next step that it trains."""
        return self._next().partition(" ")[0]

    def read(self) -> None:
        """Take in the steps that it trains, up to its end."""
        while (line := self._next()) not in ("done", "interrupted"):
            job, step = line.split()
            self.steps.append((job, int(step)))
        self.last = line
        assert self._process.wait() == 0

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _next(self) -> str:
        return self._process.stdout.readline().strip()


@pytest.fixture(params=[[]])
def processes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Process, Process]]:
    both = Process(tmp_path, *request.param), Process(tmp_path)
    for each in both:
        each.wait_until_ready()
    for each in both:
        each.go()
    for each in both:
        each.read()
    yield both
    for each in both:
        each.kill()


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The same search in one process."""
    bench = Bench(tmp_path_factory.mktemp("alone"), curve_process.search(), make_worker=CurveWorker)
    bench.run()
    return bench


def shared(tmp_path: Path) -> Bench:
    return curve_process.bench(tmp_path)


def check(bench: Bench, undisturbed: Bench, processes: tuple[Process, Process]) -> None:
    """All is decided as in one process, and each step of each trial was trained once, by one of the two."""
    assert states(bench) == states(undisturbed)
    assert {state.name for state, _ in states(bench)} == {"COMPLETE", "PRUNED"}
    trained = Counter(processes[0].steps + processes[1].steps)
    assert set(trained.values()) == {1}
    for trial in bench.trials:
        done = 8 if trial.state == optuna.trial.TrialState.COMPLETE else max(trial.intermediate_values)
        name = f"trial-{trial.number:04d}"
        assert sorted(step for job, step in trained if job == name) == list(range(1, done + 1))


def test_cohorts_over_two_processes_decide_as_in_one(
    processes: tuple[Process, Process], undisturbed: Bench, tmp_path: Path
) -> None:
    assert [each.last for each in processes] == ["done", "done"]
    check(shared(tmp_path), undisturbed, processes)
    one, other = ({job for job, _ in each.steps} for each in processes)
    assert one
    assert other
    assert not one & other


@pytest.mark.parametrize("processes", [["leaves"]], indirect=True)
def test_an_interrupted_worker_releases_its_trials(
    processes: tuple[Process, Process], undisturbed: Bench, tmp_path: Path
) -> None:
    """At the first Ctrl-C: saved, told to nobody, and resumed by the other, to the same end."""
    leaving, staying = processes
    assert [each.last for each in processes] == ["interrupted", "done"]
    check(shared(tmp_path), undisturbed, processes)
    left = {job for job, _ in leaving.steps}
    assert {(job, 1) for job in left} == set(leaving.steps)
    assert {(job, 2) for job in left} <= set(staying.steps)


def test_orders_reach_workers_that_share_the_study_but_no_folder(tmp_path: Path) -> None:
    """As on several hosts: who orders has neither worker's folder."""
    with Process(tmp_path, "steered=one") as one, Process(tmp_path, "steered=other") as other:
        for each in (one, other):
            each.wait_until_ready()
            each.go()
        first, _ = other.next_job(), one.next_job()
        (name,) = optuna.get_all_study_names(open_storage(None, tmp_path))
        control = SearchControl(RecordedCommand(name, "sweep", (), str(tmp_path)), tmp_path)
        control.stop_trial(int(first.removeprefix("trial-")))
        while other.next_job() == first:
            pass
        control.order("cancel")
        for each in (one, other):
            each.read()
            assert each.last == "done"
    trials = optuna.load_study(study_name=None, storage=open_storage(None, tmp_path)).get_trials()
    assert [trial.state.name for trial in trials] == ["PRUNED"] * 3
    assert {trial.user_attrs["plait.reason"] for trial in trials} == {"by the user"}
