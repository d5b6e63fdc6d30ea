"""MLflow's pages in a real browser: a search with its jobs below it, and a job's curves."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from plait.core.jobs import AdapterSpec, JobSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import GroupStep, JobAdmitted, JobEvaluated, JobProgress
from plait.core.settings import RunSettings, SearchSettings, TrackingSettings
from plait.tracking import SearchFacts, SearchResult, Tracker, load_search

pytestmark = [pytest.mark.browser, pytest.mark.slow]
JOBS, STEPS = 4, 15


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> TrackingSettings:
    """A store with one search, written by the tracker from made-up events."""
    settings = TrackingSettings(root=tmp_path_factory.mktemp("store"))
    jobs = [JobSpec(f"trial-{trial:04d}", AdapterSpec(rank=2**trial)) for trial in range(JOBS)]
    run = RunSettings(tracking=settings, search=SearchSettings(trials=JOBS))
    with Tracker(settings) as tracker:
        tracker.start_search(SearchFacts("ranks", run))
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
    return load_search(settings)


@pytest.fixture(scope="module")
def seen(pictures: ModuleType, settings: TrackingSettings) -> Iterator[Any]:
    """A browser on the pages that ``plait ui`` serves."""
    with pictures.pages(settings) as address, pictures.browser(address) as browser:
        yield browser


def test_the_search_opens_to_its_jobs(pictures: ModuleType, seen: Any, result: SearchResult) -> None:
    names = [item.name for item in result.records]
    pictures.show_search(seen, result.experiment_id, "ranks", names)
    assert all(name in seen.text() for name in names)


def test_curves_of_all_jobs_are_drawn_together(pictures: ModuleType, seen: Any, result: SearchResult) -> None:
    wanted = {item.name: STEPS for item in result.records}
    pictures.show_curves(seen, result.experiment_id, "ranks", list(wanted), "train/loss")
    seen.wait_for_curves(lambda curves: curves == wanted)
    assert seen.curves() == wanted


def test_a_jobs_own_page_shows_its_curves(pictures: ModuleType, seen: Any, result: SearchResult) -> None:
    assert result.best is not None
    pictures.show_job(seen, result.experiment_id, result.best.run_id, "train/loss")
    seen.wait_for_curves(lambda curves: curves == {result.best.name: STEPS})
    assert seen.curves() == {result.best.name: STEPS}


def test_the_leaderboard_is_a_table(pictures: ModuleType, seen: Any, result: SearchResult) -> None:
    pictures.show_leaderboard(seen, result.experiment_id, result.run_id)
    seen.wait_for("adapter_rank", "finished")
    assert seen.text().count("finished") >= JOBS


def test_a_picture_can_be_taken(seen: Any, tmp_path: Path) -> None:
    seen.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
