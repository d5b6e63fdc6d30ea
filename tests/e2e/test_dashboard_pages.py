"""Reports of 10 and of 500 jobs in a real browser, without a network; and studies in optuna-dashboard."""

import dataclasses
import json
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import ThreadingMixIn
from threading import Thread
from types import ModuleType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import optuna
import pytest
from made_up_search import FIGURES, make_up

from plait.cli.main import main
from plait.core.settings import TrackingSettings
from plait.search.storage import JOURNAL, open_storage
from plait.tracking.results import load_search
from plait_dashboards.figures import all_figures
from plait_dashboards.page import report
from plait_dashboards.reading import read_sweep
from plait_dashboards.sweep import Sweep

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def ten(new_store: Callable[[], Path]) -> TrackingSettings:
    """A store with a search of ten jobs."""
    settings = TrackingSettings(root=new_store())
    make_up(settings, "made-up-10", 10, 20)
    return settings


def repeated(sweep: Sweep, times: int) -> Sweep:
    """As if its jobs had come so many times, all with trials of their own: writing 500 jobs takes long."""
    jobs = len(sweep.records)
    turns = [jobs * turn for turn in range(times)]

    def later(trials: Any) -> dict[int, Any]:
        return {trial + turn: value for turn in turns for trial, value in trials.items()}

    def named(trial: int) -> str:
        return f"trial-{trial:04d}"

    def job(record: Any, turn: int) -> Any:
        return dataclasses.replace(record, trial=record.trial + turn, name=named(record.trial + turn))

    def step(row: Any, turn: int) -> Any:
        names = tuple(named(int(name.rpartition("-")[2]) + turn) for name in row.jobs)
        return dataclasses.replace(row, iteration=row.iteration + turn // jobs * len(sweep.steps), jobs=names)

    return dataclasses.replace(
        sweep,
        records=tuple(job(record, turn) for record in sweep.records for turn in turns),
        curves={metric: later(found) for metric, found in sweep.curves.items()},
        steps=tuple(step(row, turn) for turn in turns for row in sweep.steps),
        objectives=tuple(dataclasses.replace(e, values=later(e.values)) for e in sweep.objectives),
    )


# ---- the report as a file ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium(pictures: ModuleType) -> Iterator[Any]:
    """A browser for files."""
    with pictures.chromium(1200, 900) as driver:
        yield driver


@pytest.mark.parametrize(("times", "schemes"), [(1, ("light", "dark")), (50, ("light",))])
def test_the_report_shows_every_figure_without_a_network(
    pictures: ModuleType,
    chromium: Any,
    ten: TrackingSettings,
    tmp_path: Path,
    times: int,
    schemes: tuple[str, ...],
) -> None:
    page = tmp_path / "page.html"
    if times == 1:
        assert main(["report", "--root", str(ten.root), "--output", str(page)]) == 0
    else:
        sweep = repeated(read_sweep(ten), times)
        page.write_text(report(sweep, all_figures(sweep)))
    assert page.stat().st_size < 8_000_000
    for scheme in schemes:
        assert pictures.open_report(chromium, page, scheme) == FIGURES
        _check_page(chromium, {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 22, 22)"}[scheme])


def _check_page(chromium: Any, colour: str) -> None:
    """Nothing in the console, nothing loaded, no button to a server, one ground, no wider than the window."""
    run = chromium.execute_script
    said = [line for line in chromium.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
    # WebGL's pictures are read back where the rest of a page is drawn without it, as in these tests' browser.
    assert [line for line in said if "GPU stall due to ReadPixels" not in line["message"]] == []
    assert run("return performance.getEntriesByType('resource').length") == 0
    buttons = run("return [...document.querySelectorAll('.modebar-btn')].map((each) => each.dataset.title)")
    assert buttons
    assert not any("loud" in title for title in buttons)  # Plotly offers to send a figure to its own server
    ground = run("return getComputedStyle(document.body).backgroundColor")
    assert ground == run("return document.querySelector('.main-svg').style.background") == colour
    assert not run("return document.documentElement.scrollWidth > document.documentElement.clientWidth")


# ---- optuna-dashboard --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(pictures: ModuleType) -> Iterator[Any]:
    """A browser for pages of a server."""
    with pictures.chromium(1500, 950) as driver:
        yield driver


@pytest.fixture
def study_pages(ten: TrackingSettings, tmp_path: Path) -> Iterator[str]:
    """The address of optuna-dashboard's pages on the study of the search of 10, in SQLite."""
    storage = f"sqlite:///{tmp_path}/study.db"
    optuna.copy_study(
        from_study_name="made-up-10",
        from_storage=open_storage(str(ten.root / JOURNAL), ten.root),
        to_storage=open_storage(storage, tmp_path),
    )
    with _served(storage) as address:
        yield address


class _Server(ThreadingMixIn, WSGIServer):
    """As optuna-dashboard's own program has it."""

    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _served(storage: str) -> Iterator[str]:
    """The address of optuna-dashboard's pages on a storage, served by a thread of this process."""
    dashboard = pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed")
    pages = dashboard.wsgi(storage)
    with make_server("127.0.0.1", 0, pages, server_class=_Server, handler_class=_Quiet) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _asked(address: str, path: str) -> Any:
    with urllib.request.urlopen(f"{address}/api/{path}", timeout=30) as answer:
        return json.load(answer)


def test_optuna_dashboard_reads_the_study(study_pages: str, ten: TrackingSettings) -> None:
    result = load_search(ten)
    (study,) = _asked(study_pages, "studies")["study_summaries"]
    assert study["study_name"] == "made-up-10"
    trials = _asked(study_pages, f"studies/{study['study_id']}")["trials"]
    words = {"finished": "Complete", "pruned": "Pruned", "failed": "Fail"}
    assert Counter(item["state"] for item in trials) == Counter(words[item.state] for item in result.records)
    assert all(item["intermediate_values"] for item in trials if item["state"] == "Pruned")


def test_optuna_dashboard_shows_what_a_search_with_rungs_pruned(
    pictures: ModuleType, served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real search in a journal: what the pages are told of its pruned trials, and what they show."""
    monkeypatch.chdir(tmp_path)
    rungs = ["search/stopping=successive_halving", "search.stopping.rungs=[1,2]", "search.stopping.cohort=4"]
    short = ["model=tiny", "engine.threads=1", "data.size=16", "data.validation=4", "train.steps=4"]
    space = ["train.lr=tag(log,interval(1e-4,1e-1))", "search.sampler=random", "search.trials=4"]
    assert main(["sweep", *short, *rungs, *space, "train.batch_size=2", "search.name=pruned"]) == 0
    storage = tmp_path / "plait-runs" / JOURNAL
    with _served(str(storage)) as address:
        (study,) = _asked(address, "studies")["study_summaries"]
        trials = _asked(address, f"studies/{study['study_id']}")["trials"]
        assert Counter(trial["state"] for trial in trials) == {"Pruned": 3, "Complete": 1}
        for trial in trials:
            values = {each["step"]: each["value"] for each in trial["intermediate_values"]}
            assert tuple(values) in ((1,), (1, 2), (1, 2, 4))
            assert trial["values"] == [values[max(values)]]
            reason = next(each for each in trial["user_attrs"] if each["key"] == "plait.reason")
            assert trial["state"] == "Complete" or "at rung" in reason["value"]
        browser = pictures.Browser(served, address)
        browser.driver.get(f"{address}/dashboard/studies/{study['study_id']}/trials")
        browser.wait_for("4 Trials", "Complete", "Pruned")
