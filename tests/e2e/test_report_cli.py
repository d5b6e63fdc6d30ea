"""A finished search has its figures in MLflow, and `plait report` makes a page of it."""

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from plait.cli.main import main
from plait.core.settings import RunSettings, TrackingSettings
from plait.tracking.facts import SearchFacts
from plait.tracking.results import load_search
from plait.tracking.tracker import Tracker


def test_a_finished_search_has_its_figures(
    finished_search: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = finished_search
    monkeypatch.chdir(folder)
    result = load_search(TrackingSettings(), "mine")
    client = MlflowClient(result.location.uri)
    assert "report.html" in {item.path for item in client.list_artifacts(result.run_id)}
    figures = {Path(item.path).stem for item in client.list_artifacts(result.run_id, "figures")}
    assert {"curves-train-loss", "leaderboard", "importance", "device-seconds", "packing"} <= figures


def test_the_report_of_a_real_search(
    finished_search: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = finished_search
    monkeypatch.chdir(folder)
    page = tmp_path / "mine.html"
    assert main(["report", "mine", "--output", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "Importance needs 5 finished trials, or 5 measured at one step." in text
    assert "iterations of the group. Each column is one iteration." in text
    assert "No group steps were recorded" not in text


def test_the_page_of_a_search_stays_in_the_current_folder(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the search is called."""
    folder = tmp_path / "a" / "b"
    (folder / "plait-runs").mkdir(parents=True)
    shutil.copy(empty_store, folder / "plait-runs")
    monkeypatch.chdir(folder)
    settings = TrackingSettings()
    with Tracker(settings) as tracker:
        tracker.start_search(SearchFacts("../../x", RunSettings(tracking=settings)))
    assert main(["report", "../../x"]) == 0
    assert [path.name for path in folder.glob("*.html")] == ["..%2F..%2Fx.html"]
    assert not list(tmp_path.glob("*.html"))
