"""Two searches that must be the same, trial by trial: their studies, runs and curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from mlflow import MlflowClient
from optuna.trial import FrozenTrial

from plait.search.storage import open_storage


def study_of(folder: Path, address: str | None = None) -> list[FrozenTrial]:
    storage = open_storage(address, folder / "plait-runs")
    return optuna.load_study(study_name="mine", storage=storage).get_trials()


def runs_of(folder: Path, address: str | None = None) -> tuple[list[Any], dict[int, Any], MlflowClient]:
    """The search's runs, the jobs' runs by trial, and who reads their curves."""
    client = MlflowClient(address or f"sqlite:///{folder / 'plait-runs' / 'mlflow.db'}")
    experiments = [item.experiment_id for item in client.search_experiments()]
    runs = client.search_runs(experiments, max_results=1000)
    children = [run for run in runs if "plait.trial" in run.data.tags]
    parents = [run for run in runs if "plait.trial" not in run.data.tags]
    by_trial = {int(run.data.tags["plait.trial"]): run for run in children}
    assert len(by_trial) == len(children), "a trial has several runs"
    return parents, by_trial, client


def settings_of(trial: FrozenTrial) -> tuple[Any, ...]:
    return tuple(sorted(trial.params.items()))


def curve(client: MlflowClient, run: Any, metric: str) -> list[tuple[int, float]]:
    points = client.get_metric_history(run.info.run_id, metric)
    return sorted((point.step, point.value) for point in points)


def close(left: float | None, right: float | None) -> bool:
    if left is None or right is None:
        return left is right
    return math.isclose(left, right, rel_tol=1e-5)


def compare(
    found: Path, expected: Path, *, adds_up: bool = True, elsewhere: tuple[str, str] | None = None
) -> int:
    """Study, runs and curves of two searches are the same, trial by trial as matched by their values; the
    number of points compared.

    Args:
        adds_up: also the device time: the jobs' last points make up the search's.
        elsewhere: addresses of the study and the runs, if hosts without a common folder made the first one.
            Then none knows what another spent, and numbers of points are left out for what one may send late.
    """
    study, store = elsewhere or (None, None)
    ours, theirs = study_of(found, study), {settings_of(trial): trial for trial in study_of(expected)}
    assert sorted(settings_of(trial) for trial in ours) == sorted(theirs)
    parents, runs, client = runs_of(found, store)
    _, other_runs, other_client = runs_of(expected)
    assert [run.info.status for run in parents] == ["FINISHED"]
    assert runs.keys() == {trial.number for trial in ours}
    count = 0
    for trial in ours:
        twin = theirs[settings_of(trial)]
        assert trial.state == twin.state
        assert close(trial.value, twin.value)
        assert trial.intermediate_values.keys() == twin.intermediate_values.keys()
        for step, value in trial.intermediate_values.items():
            assert close(value, twin.intermediate_values[step])
        run, other = runs[trial.number], other_runs[twin.number]
        assert run.info.status == other.info.status
        assert run.data.params == other.data.params
        for metric in ("train/loss", "eval/loss", "train/tokens", "train/grad_norm", "objective"):
            left, right = curve(client, run, metric), curve(other_client, other, metric)
            assert [step for step, _ in left] == [step for step, _ in right], (trial.number, metric)
            assert all(close(a, b) for (_, a), (_, b) in zip(left, right, strict=True)), (
                trial.number,
                metric,
            )
            count += len(left)
        steps = [step for step, _ in curve(client, run, "train/loss")]
        assert steps == list(range(1, len(steps) + 1)), "a step is missing or double"
        costs = curve(client, run, "cost/device_seconds")
        assert {step for step, _ in costs} == set(steps), "the cost of a step is missing"
        values = [value for _, value in costs]
        assert elsewhere or values == sorted(values), "its cost falls"
        assert elsewhere or run.data.metrics["cost/device_seconds"] == costs[-1][1], (
            "its last cost is not its highest"
        )
        assert len(set(costs)) == len(costs), "a cost is double"
    count += check_own_curves(
        client, parents[0], list(runs.values()), adds_up=adds_up and not elsewhere, gaps=bool(elsewhere)
    )
    assert not list((found / "plait-runs" / "searches" / "mine" / "checkpoints").glob("*/*"))
    return count


def check_own_curves(
    client: MlflowClient, search: Any, jobs: Sequence[Any], *, adds_up: bool, gaps: bool
) -> int:
    """The search's own curves have every step once, and end with what its jobs add up to; their points."""
    curves = {metric: curve(client, search, metric) for metric in search.data.metrics}
    for metric, points in curves.items():
        steps = [step for step, _ in points]
        assert len(set(steps)) == len(steps), f"{metric}: a step is double"
    steps = [step for step, _ in curves["search/seconds"]]
    assert gaps or steps == list(range(1, len(steps) + 1)), "a step is missing"
    for metric in ("search/seconds", "search/ended", "train/tokens", "cost/device_seconds"):
        values = [value for _, value in curves[metric]]
        if metric.startswith("cost/"):  # what a kill took back after this point is in no job's account
            values = values[:-1]
        assert values == sorted(values), f"{metric} falls"
    for metric in ("train/tokens", *(("cost/device_seconds",) if adds_up else ())):
        assert math.isclose(curves[metric][-1][1], sum(job.data.metrics[metric] for job in jobs)), metric
    assert curves["search/ended"][-1][1] == len(jobs)
    return sum(map(len, curves.values()))
