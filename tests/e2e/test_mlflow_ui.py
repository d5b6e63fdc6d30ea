"""MLflow's pages in a real browser, of a store with two searches: one of four jobs, and one of fifty with its
figures."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

import pytest
from made_up_search import FIGURES, make_up

from plait.core.jobs import AdapterSpec, JobSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import GroupStep, JobAdmitted, JobEvaluated, JobProgress
from plait.core.settings import RunSettings, SearchSettings, TrackingSettings
from plait.tracking.facts import DataFacts, SearchFacts
from plait.tracking.results import SearchResult, load_search, search_address
from plait.tracking.tracker import Tracker
from plait_dashboards.publish import publish

pytestmark = [pytest.mark.browser, pytest.mark.slow]
JOBS, STEPS = 4, 15


@pytest.fixture(scope="module")
def settings(new_store: Callable[[], Path]) -> TrackingSettings:
    """The store; the search of four is written by the tracker from made-up events."""
    settings = TrackingSettings(root=new_store())
    make_up(settings, "made-up-50", 50, 12)
    publish(settings, load_search(settings).run_id, None, final=True)
    jobs = [JobSpec(f"trial-{trial:04d}", AdapterSpec(rank=2**trial)) for trial in range(JOBS)]
    run = RunSettings(tracking=settings, search=SearchSettings(trials=JOBS))
    with Tracker(settings) as tracker:
        tracker.start_search(SearchFacts("ranks", run, searched=("adapter.rank",)))
        counts = {"num_rows": 64, "train_samples": 64, "validation_samples": 8}
        tracker.use_data({jobs[0].data: DataFacts("sums.jsonl", 32 * "d", {"source": "jsonl"}, counts)})
        for trial, job in enumerate(jobs):
            tracker.start_job(job, trial)
            tracker.handle(JobAdmitted(job, 0, STEPS, "g0"))
        for step in range(1, STEPS + 1):
            for trial, job in enumerate(jobs):
                loss = (2.0 + trial) / step
                tracker.handle(JobProgress(job.name, step, loss, 1.0, 1e-4, 64 * step, 0.5 * step, 128.0))
            tracker.handle(GroupStep("g0", step, tuple(job.name for job in jobs), 1, 256, 2.0, None, 256))
        for trial, job in enumerate(jobs):
            tracker.handle(JobEvaluated(job.name, STEPS, 1.0 + trial, 100))
            loss = 1.0 + trial
            measured = (STEPS, "", loss, 960, 7.5, 30.0)
            tracker.handle(JobResult(job.name, JobState.FINISHED, *measured, values=(loss,)))
    return settings


@pytest.fixture(scope="module")
def result(settings: TrackingSettings) -> SearchResult:
    return load_search(settings, "ranks")


@pytest.fixture(scope="module")
def fifty(settings: TrackingSettings) -> SearchResult:
    return load_search(settings, "made-up-50")


@pytest.fixture(scope="module")
def seen(pictures: ModuleType, settings: TrackingSettings) -> Iterator[Any]:
    """A browser on the pages that ``plait ui`` serves."""
    with pictures.pages(settings) as address, pictures.browser(address) as browser:
        yield browser


def test_the_search_opens_to_its_jobs(pictures: ModuleType, seen: Any, result: SearchResult) -> None:
    names = [f"ranks/{item.trial:04d}" for item in result.records]
    pictures.show_search(seen, result.experiment_id, "ranks", names)
    assert all(name in seen.text() for name in names)


def test_curves_of_all_jobs_are_drawn_together(pictures: ModuleType, seen: Any, result: SearchResult) -> None:
    wanted = {f"ranks/{item.trial:04d} r{2**item.trial}": STEPS for item in result.records}
    pictures.show_curves(seen, result.experiment_id, "ranks", list(wanted), "train/loss")
    seen.wait_for_curves(lambda curves: curves == wanted)
    assert seen.curves() == wanted


def test_a_jobs_own_page_shows_its_curves(pictures: ModuleType, seen: Any, result: SearchResult) -> None:
    assert result.best is not None
    pictures.show_job(seen, result.experiment_id, result.best.run_id, "train/loss")
    seen.wait_for_curves(lambda curves: curves == {"ranks/0000 r1": STEPS})
    assert seen.curves() == {"ranks/0000 r1": STEPS}


def test_the_leaderboard_is_a_table(pictures: ModuleType, seen: Any, result: SearchResult) -> None:
    pictures.show_leaderboard(seen, result.experiment_id, result.run_id)
    seen.wait_for("adapter_rank", "finished")
    assert seen.text().count("finished") >= JOBS


def test_a_search_of_fifty_opens(pictures: ModuleType, seen: Any, fifty: SearchResult) -> None:
    newest = [f"{fifty.name}/{trial:04d}" for trial in sorted(item.trial for item in fifty.records)[-10:]]
    pictures.show_search(seen, fifty.experiment_id, fifty.name, newest)
    seen.wait_for("51 matching runs")  # the search and its jobs
    assert all(name in seen.text() for name in newest)


def test_fifty_runs_are_compared(seen: Any, fifty: SearchResult) -> None:
    runs = json.dumps([item.run_id for item in fifty.records])
    experiments = json.dumps([fifty.experiment_id])
    seen.open(f"compare-runs?runs={quote(runs)}&experiments={quote(experiments)}", "Comparing 50 Runs")
    seen.wait_for("train/loss", "adapter.rank")
    assert f"{fifty.name}/{fifty.records[0].trial:04d}" in seen.text()


@pytest.mark.parametrize(
    ("page", "figures"),
    [("report.html", FIGURES), ("figures/parallel-coordinates.html", ["parallel-coordinates"])],
)
def test_the_report_and_each_figure_are_shown_among_the_artifacts(
    pictures: ModuleType, seen: Any, fifty: SearchResult, page: str, figures: list[str]
) -> None:
    assert pictures.show_figures(seen, fifty.experiment_id, fifty.run_id, page) == figures


def test_a_picture_can_be_taken(seen: Any, tmp_path: Path) -> None:
    seen.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_the_printed_address_shows_the_trials_with_their_settings_best_first(
    pictures: ModuleType, seen: Any, settings: TrackingSettings
) -> None:
    """In a browser that was never on a page of model training."""
    seen.driver.execute_script("localStorage.removeItem('mlflow.workflowType_v1')")
    seen.driver.get("about:blank")
    address = search_address(settings, "ranks", seen.address)
    words = ("ranks/0000 r1", "adapter.rank", "objective", "sums.jsonl", "finished")
    pictures.show_trials(seen, address, *words)
    text = seen.text()
    places = [text.index(f"ranks/{trial:04d} r{2**trial}") for trial in range(JOBS)]
    assert places == sorted(places)
    assert "plait.state" in text
