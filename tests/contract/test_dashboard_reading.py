"""Figures from a real store: what is read is what the tracker wrote, and where the pages go."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
from made_up_search import make_up
from mlflow import MlflowClient

from plait.cli.main import main
from plait.core.settings import TrackingSettings
from plait.tracking.leaderboard import JobRecord
from plait.tracking.results import load_search
from plait.tracking.tables import GROUP_STEPS_FILE, group_step
from plait.utils.paths import search_folder
from plait_dashboards.publish import publish
from plait_dashboards.reading import about, curve_of, read_sweep
from plait_dashboards.sweep import FAILED, PRUNED, USEFUL, Sweep, outcome

JOBS, STEPS = 10, 20
FIGURES = {
    "curves-train-loss": "Learning curves: train/loss",
    "curves-eval-loss": "Learning curves: eval/loss",
    "leaderboard": "Leaderboard",
    "parallel-coordinates": "Parallel coordinates",
    "importance": "Importance of each hyperparameter",
    "pareto": "Pareto front",
    "device-seconds": "Device-seconds by outcome and by adapter",
    "packing": "Timeline of the packing",
    "predictions": "Predicted against measured time and memory",
}


@pytest.fixture(scope="module", autouse=True)
def _no_commentary() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(before)


@pytest.fixture(scope="module")
def settings(new_store: Callable[[], Path]) -> TrackingSettings:
    settings = TrackingSettings(root=new_store())
    make_up(settings, "ten", JOBS, STEPS)
    return settings


@pytest.fixture(scope="module")
def sweep(settings: TrackingSettings) -> Sweep:
    return read_sweep(settings)


def options(settings: TrackingSettings) -> list[str]:
    return ["--root", str(settings.root)]


def test_jobs_and_their_curves_are_those_of_the_tracker(sweep: Sweep) -> None:
    assert (sweep.name, sweep.state, sweep.direction, sweep.metric) == (
        "ten",
        "finished",
        "minimize",
        "eval/loss",
    )
    assert sorted(item.trial for item in sweep.records) == list(range(JOBS))
    assert {outcome(item) for item in sweep.records} == {USEFUL, PRUNED, FAILED}
    for item in sweep.records:
        losses = sweep.curves["train/loss"][item.trial]
        assert list(losses.steps) == list(range(1, item.step + 1))
        assert losses.values[-1] == pytest.approx(item.loss)
    evaluated = {trial: list(curve.steps) for trial, curve in sweep.curves["eval/loss"].items()}
    assert evaluated[sweep.records[0].trial] == [5, 10, 15, 20]


def test_the_page_says_what_was_searched(sweep: Sweep) -> None:
    assert list(sweep.about) == [
        "started", "ended", "model", "data", "sampler", "searched", "stopping", "user", "Plait",
    ]  # fmt: skip
    assert (sweep.about["model"], sweep.about["data"]) == ("smollm2", "reasoning_gym")
    assert sweep.about["searched"] == "adapter.rank, adapter.dropout, train.lr"
    assert (sweep.about["sampler"], sweep.about["stopping"]) == ("tpe", "none")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", sweep.about["started"])
    info, data = SimpleNamespace(start_time=0, end_time=0), SimpleNamespace(params={}, tags={})
    run = SimpleNamespace(info=info, data=data)
    record = JobRecord("trial-0000", 0, {"data.source": "hub", "data.id": "openai/gsm8k"})
    assert about(run, [record])["data"] == "hub openai/gsm8k"  # type: ignore[arg-type]


def test_importance_is_of_the_study(sweep: Sweep) -> None:
    assert set(sweep.importance.shares) == {"adapter.rank", "adapter.dropout", "train.lr"}
    assert sweep.importance.trials == sum(item.state == "finished" for item in sweep.records)


def test_steps_are_those_of_the_table(settings: TrackingSettings, sweep: Sweep) -> None:
    lines = (search_folder(settings.root, "ten") / GROUP_STEPS_FILE).read_text().splitlines()
    rows = [group_step({**json.loads(line), "iteration": at}) for at, line in enumerate(lines, 1)]
    assert list(sweep.steps) == rows


def test_the_later_of_two_values_of_a_step_counts() -> None:
    points = [
        SimpleNamespace(step=step, value=value, timestamp=at)
        for step, value, at in ((2, 1.0, 9), (1, 3.0, 1), (2, 5.0, 4))
    ]
    found = curve_of(points)  # type: ignore[arg-type]
    assert list(found.steps) == [1, 2]
    assert list(found.values) == [3.0, 1.0]


def test_the_report_has_every_figure_and_fetches_nothing(
    settings: TrackingSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    assert main(["report", "ten", "--output", str(path), *options(settings)]) == 0
    assert capsys.readouterr().out == f"ten: {path}\n"
    page = path.read_text(encoding="utf-8")
    found = re.findall(
        r'<section id="([^"]+)">\n<h2>([^<]+)</h2>\n<p><span class="origin">([^<]+)</span>', page
    )
    assert {key: title for key, title, _ in found} == FIGURES
    assert {origin for _, _, origin in found} == {"Measured.", "Estimated.", "Predicted and measured."}
    assert page.count('id="plotly"') == 1
    assert not re.search(r'(src|href)="(?!data:|#)', page)


def test_without_a_name_the_newest_search_is_used(
    settings: TrackingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "te", *options(settings)]) == 0  # by the beginning of its name
    assert (tmp_path / "ten.html").exists()


def test_an_unknown_name_lists_the_known_ones(
    settings: TrackingSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "tne", *options(settings)]) == 2
    said = capsys.readouterr().err
    assert "search 'tne' is not in" in said
    assert "Available: ten." in said


def test_nothing_is_made_if_nothing_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--root", str(tmp_path / "none")]) == 2
    assert "no search in" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_folder_that_is_not_there_is_named(
    settings: TrackingSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--output", str(tmp_path / "gone" / "page.html"), *options(settings)]) == 2
    assert f"--output {tmp_path / 'gone' / 'page.html'}: No such file or directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_page_goes_to_the_searchs_run_and_at_the_end_every_figure(settings: TrackingSettings) -> None:
    result = load_search(settings)
    client = MlflowClient(result.location.uri)

    def there(path: str | None = None) -> set[str]:
        return {item.path for item in client.list_artifacts(result.run_id, path)}

    publish(settings, result.run_id, None, final=False)
    assert "report.html" in there()
    assert "figures" not in there()
    publish(settings, result.run_id, None, final=True)
    assert there("figures") == {f"figures/{key}.html" for key in FIGURES}
