"""Figures and reports in a real browser: in MLflow's pages with 50 jobs, and as a file without a network at
10 and at 500; and the study in optuna-dashboard."""

import json
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

import optuna
import pytest
from made_up_search import make_up

from plait.cli.main import main
from plait.core.settings import TrackingSettings
from plait.search.storage import JOURNAL, open_storage
from plait.tracking import SearchResult, load_search
from plait_dashboards.publish import publish

pytestmark = [pytest.mark.browser, pytest.mark.slow]
FIGURES = [
    "curves-train-loss",
    "curves-eval-loss",
    "leaderboard",
    "parallel-coordinates",
    "importance",
    "pareto",
    "device-seconds",
    "packing",
    "predictions",
]


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], TrackingSettings]:
    """Stores with one search of so many jobs and steps, each made once."""
    made: dict[int, TrackingSettings] = {}

    def of(jobs: int, steps: int) -> TrackingSettings:
        if jobs not in made:
            made[jobs] = TrackingSettings(root=tmp_path_factory.mktemp(f"store-{jobs}"))
            make_up(made[jobs], f"made-up-{jobs}", jobs, steps)
        return made[jobs]

    return of


# ---- the report as a file ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jobs", "steps", "scheme"), [(10, 20, "light"), (10, 20, "dark"), (500, 12, "light")]
)
def test_the_report_shows_every_figure_without_a_network(
    pictures: ModuleType,
    made_up: Callable[[int, int], TrackingSettings],
    tmp_path: Path,
    jobs: int,
    steps: int,
    scheme: str,
) -> None:
    page = tmp_path / "page.html"
    assert main(["report", "--root", str(made_up(jobs, steps).root), "--output", str(page)]) == 0
    assert page.stat().st_size < 8_000_000
    with pictures.chromium(1200, 900) as driver:
        assert pictures.open_report(driver, page, scheme) == FIGURES
        assert [line for line in driver.get_log("browser") if line["level"] in ("SEVERE", "WARNING")] == []
        assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
        buttons = driver.execute_script(
            "return [...document.querySelectorAll('.modebar-btn')].map((button) => button.dataset.title)"
        )
        assert buttons
        assert not any(
            "loud" in title for title in buttons
        )  # Plotly offers to send a figure to its own server
        ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        drawn = driver.execute_script("return document.querySelector('.main-svg').style.background")
        assert ground == drawn == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 22, 22)"}[scheme]
        wide = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
        assert not driver.execute_script(wide)


# ---- MLflow's pages ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fifty(made_up: Callable[[int, int], TrackingSettings]) -> TrackingSettings:
    """A search of 50 jobs with its figures."""
    settings = made_up(50, 12)
    publish(settings, load_search(settings).run_id, None, final=True)
    return settings


@pytest.fixture(scope="module")
def result(fifty: TrackingSettings) -> SearchResult:
    return load_search(fifty)


@pytest.fixture(scope="module")
def seen(pictures: ModuleType, fifty: TrackingSettings) -> Iterator[Any]:
    """A browser on the pages that ``plait ui`` serves."""
    with pictures.pages(fifty) as address, pictures.browser(address) as browser:
        yield browser


def test_a_search_of_fifty_opens(pictures: ModuleType, seen: Any, result: SearchResult) -> None:
    newest = [f"{result.name}/{trial:04d}" for trial in sorted(item.trial for item in result.records)[-10:]]
    pictures.show_search(seen, result.experiment_id, result.name, newest)
    seen.wait_for("51 matching runs")  # the search and its jobs
    assert all(name in seen.text() for name in newest)


def test_fifty_runs_are_compared(seen: Any, result: SearchResult) -> None:
    runs, experiments = (
        json.dumps([item.run_id for item in result.records]),
        json.dumps([result.experiment_id]),
    )
    seen.open(f"compare-runs?runs={quote(runs)}&experiments={quote(experiments)}", "Comparing 50 Runs")
    seen.wait_for("train/loss", "adapter.rank")
    assert f"{result.name}/{result.records[0].trial:04d}" in seen.text()


def test_the_report_is_shown_among_the_artifacts(
    pictures: ModuleType, seen: Any, result: SearchResult
) -> None:
    assert pictures.show_figures(seen, result.experiment_id, result.run_id) == FIGURES


@pytest.mark.parametrize("figure", ["parallel-coordinates", "packing"])
def test_each_figure_is_shown_by_itself(
    pictures: ModuleType, seen: Any, result: SearchResult, figure: str
) -> None:
    page = f"figures/{figure}.html"
    assert pictures.show_figures(seen, result.experiment_id, result.run_id, page) == [figure]


# ---- optuna-dashboard --------------------------------------------------------------------------------


@pytest.fixture(params=["journal", "sqlite"])
def study_pages(
    request: pytest.FixtureRequest, pictures: ModuleType, fifty: TrackingSettings, tmp_path: Path
) -> Iterator[str]:
    """The address of optuna-dashboard's pages on the study of the search of 50."""
    journal = fifty.root / JOURNAL
    storage = str(journal)
    if request.param == "sqlite":
        storage = f"sqlite:///{tmp_path}/study.db"
        optuna.copy_study(
            from_study_name="made-up-50",
            from_storage=open_storage(str(journal), fifty.root),
            to_storage=open_storage(storage, tmp_path),
        )
    with _served(storage, pictures.free_port()) as address:
        yield address


@contextmanager
def _served(storage: str, port: int) -> Iterator[str]:
    """The address of optuna-dashboard's pages on a storage."""
    pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed")
    program = Path(sys.executable).with_name("optuna-dashboard")
    command = [str(program), storage, "--port", str(port), "--server", "wsgiref", "--quiet"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        _until_it_answers(f"{address}/api/studies", server)
        yield address
    finally:
        server.terminate()
        server.wait(30)


def _asked(address: str, path: str) -> Any:
    with urllib.request.urlopen(f"{address}/api/{path}", timeout=30) as answer:
        return json.load(answer)


def _until_it_answers(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"no answer from {url}; the server's exit status: {server.poll()}")


def test_optuna_dashboard_reads_the_study(
    pictures: ModuleType, study_pages: str, result: SearchResult
) -> None:
    (study,) = _asked(study_pages, "studies")["study_summaries"]
    assert study["study_name"] == "made-up-50"
    trials = _asked(study_pages, f"studies/{study['study_id']}")["trials"]
    words = {"finished": "Complete", "pruned": "Pruned", "failed": "Fail"}
    assert Counter(item["state"] for item in trials) == Counter(words[item.state] for item in result.records)
    assert all(item["intermediate_values"] for item in trials if item["state"] == "Pruned")
    with pictures.browser(study_pages) as browser:
        browser.driver.get(f"{study_pages}/dashboard/studies/{study['study_id']}/trials")
        browser.wait_for("50 Trials", "Complete", "Pruned", "Fail")


def test_optuna_dashboard_shows_what_a_search_with_rungs_pruned(
    pictures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real search: what the pages are told of its pruned trials, and what they show."""
    monkeypatch.chdir(tmp_path)
    rungs = ["search/stopping=successive_halving", "search.stopping.rungs=[1,2]", "search.stopping.cohort=4"]
    short = ["model=tiny", "data=reasoning_gym", "data.size=16", "data.validation=4", "train.steps=4"]
    space = ["train.lr=tag(log,interval(1e-4,1e-1))", "search.sampler=random", "search.trials=4"]
    assert main(["sweep", *short, *rungs, *space, "train.batch_size=2", "search.name=pruned"]) == 0
    storage = tmp_path / "plait-runs" / JOURNAL
    with _served(str(storage), pictures.free_port()) as address:
        (study,) = _asked(address, "studies")["study_summaries"]
        trials = _asked(address, f"studies/{study['study_id']}")["trials"]
        assert Counter(trial["state"] for trial in trials) == {"Pruned": 3, "Complete": 1}
        for trial in trials:
            values = {each["step"]: each["value"] for each in trial["intermediate_values"]}
            assert tuple(values) in ((1,), (1, 2), (1, 2, 4))
            assert trial["values"] == [values[max(values)]]
            reason = next(each for each in trial["user_attrs"] if each["key"] == "plait.reason")
            assert trial["state"] == "Complete" or "at rung" in reason["value"]
        with pictures.browser(address) as browser:
            browser.driver.get(f"{address}/dashboard/studies/{study['study_id']}/trials")
            browser.wait_for("4 Trials", "Complete", "Pruned")
