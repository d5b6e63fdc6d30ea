"""Two objectives and a constraint, points that come first, and knowledge of an earlier search, to the end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from mlflow import MlflowClient
from optuna.trial import FrozenTrial, TrialState

from plait.cli.main import main
from plait.core.settings import TrackingSettings
from plait.search.storage import open_storage
from plait.tracking.results import load_search
from plait_dashboards.costs import pareto, pareto_axes
from plait_dashboards.importance import read_importance
from plait_dashboards.reading import read_sweep

Trials = Callable[..., list[FrozenTrial]]
Leaderboard = Callable[..., list[dict[str, Any]]]
Short = tuple[str, ...]
SEARCH = (
    "adapter.rank=choice(1,2,4,8)",
    "train.lr=tag(log,interval(1e-3,3e-1))",
    "search.metric=[eval/loss,adapter.rank]",
    "search.direction=[minimize,minimize]",
    "search.constraints={adapter.rank: '<= 4', cost/device_seconds: '<= 600'}",
    "search.stopping.rungs=[1,2]",
    "search/stopping=patience",
    "search.seed=3",
)
POINTS = "{adapter.rank: 8, train.lr: 0.05}, {adapter.rank: 1}"


def dominated(item: FrozenTrial, others: list[FrozenTrial]) -> bool:
    return any(
        all(a <= b for a, b in zip(other.values, item.values, strict=True)) and other.values != item.values
        for other in others
    )


@pytest.mark.slow
def test_a_search_with_two_objectives_a_constraint_and_enqueued_points_resumes(
    folder: Path, short: Short, trials: Trials, leaderboard: Leaderboard, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", *short, *SEARCH, "search.name=two"]
    assert main([*command, f"search.enqueue=[{POINTS}]", "search.trials=3"]) == 0
    assert "search/stopping=patience goes by eval/loss alone, the first objective" in capsys.readouterr().out
    begun = trials(folder)
    assert (begun[0].params, begun[1].params["adapter.rank"]) == ({"adapter.rank": 8, "train.lr": 0.05}, 1)
    more = [*command, f"search.enqueue=[{POINTS}, {{adapter.rank: 4, train.lr: 0.1}}]", "search.trials=6"]
    assert main(more) == 0  # goes on: one more point comes first, and the others are not tried again
    held = trials(folder)
    assert [item.params for item in held[: len(begun)]] == [item.params for item in begun]
    assert held[len(begun)].params == {"adapter.rank": 4, "train.lr": 0.1}
    feasible = [item for item in held if item.params["adapter.rank"] <= 4]
    assert [item for item in held if item.state == TrialState.COMPLETE] == feasible
    assert len(feasible) == 6  # the first point is not trained, and another one is in its place
    for item in held:
        assert item.constraints["adapter.rank <= 4"] == item.params["adapter.rank"] - 4
    for item in feasible:
        assert item.values[1] == item.params["adapter.rank"]
        assert set(item.user_attrs["plait.rungs"]) == {"1", "2"}  # judged by the first objective
    front = {item.number for item in feasible if not dominated(item, feasible)}
    results = sorted(folder.glob("plait-runs/multirun/*/*/optimization_results.yaml"))[-1]
    assert [each["params"] for each in yaml.safe_load(results.read_text())["solutions"]] == [
        held[number].params for number in sorted(front, key=lambda number: held[number].values[0])
    ]
    rows = leaderboard()
    assert {row["trial"] for row in rows if row["pareto"] == "yes"} == front
    assert {row["trial"] for row in rows[: len(front)]} == front
    assert {row["trial"]: row["feasible"] for row in rows}[0] == "no"
    assert rows[-1]["reason"] == "violates adapter.rank <= 4"
    check_parent(folder, front, {item.number for item in feasible})
    assert main(["export", "two", "--to", str(folder / "taken")]) == 2
    assert "Choose one from its front" in capsys.readouterr().err
    check_prior(folder, short, feasible, capsys)


def check_parent(folder: Path, front: set[int], feasible: set[int]) -> None:
    """The search's run has the front as a table, each of its jobs' runs a tag; the figure shows the same."""
    settings = TrackingSettings(root=folder / "plait-runs")
    found = load_search(settings, "two")
    client = MlflowClient(found.location.uri)
    table = json.loads(Path(client.download_artifacts(found.run_id, "pareto.json", str(folder))).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert {row["trial"] for row in rows} == front
    assert all(row["objective_2"] == row["adapter_rank"] for row in rows)
    for record in found.records:
        tags = client.get_run(record.run_id).data.tags
        assert (tags.get("plait.pareto") == "true") == (record.trial in front)
        assert (tags.get("plait.feasible") == "false") == (record.trial not in feasible)
    sweep = read_sweep(settings, "two")
    assert [axis.name for axis in pareto_axes(sweep)] == ["adapter.rank", "eval/loss"]
    assert set(pareto(sweep).data[-1].customdata) == front
    assert read_importance(None, settings.root, "two").trials == 6


def check_prior(
    folder: Path, short: Short, known: list[FrozenTrial], capsys: pytest.CaptureFixture[str]
) -> None:
    """A second search that knows of the first has numbers of its own."""
    others = ["search.trials=2", "search.name=new", "search.prior=two"]
    assert main(["sweep", *short, *SEARCH[:2], *others]) == 2  # one objective
    assert "search.metric: was" in capsys.readouterr().err
    assert main(["plan", *short, *SEARCH, *others]) == 0  # it learns from the same trials
    assert main(["plan", *short, *SEARCH[:2], "search.name=two"]) == 2
    assert "the study belongs to another search" in capsys.readouterr().err
    assert main(["sweep", *short, *SEARCH, *others]) == 0
    said = f"search.prior=two: the sampler learns from its {len(known)} finished trials; tpe"
    assert said in capsys.readouterr().out
    storage = open_storage(None, folder / "plait-runs")
    new = optuna.load_study(study_name="new", storage=storage)
    assert sum(item.state == TrialState.COMPLETE for item in new.trials) == 2
    kept = json.loads(new.user_attrs["plait.prior"])["trials"]
    assert [each["values"] for each in kept] == [item.values for item in known]
    records = load_search(TrackingSettings(root=folder / "plait-runs"), "new").records
    assert len(records) == len(new.trials)
