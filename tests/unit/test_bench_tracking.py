"""The tracking benchmark, small: what it counts and checks is real, a store that lacks something is
reported."""

import sys
from pathlib import Path

import pytest

from plait.core.errors import ConfigError, StorageError
from plait.core.jobs import AdapterSpec, JobSpec, TrainSpec
from plait.core.settings import RunSettings, TrackingSettings
from plait.tracking.ui import UiCommand
from plait_bench.tracking_scale import Script, tracking_scale

pytestmark = pytest.mark.usefixtures("temporary")

JOBS = [JobSpec("a", AdapterSpec(rank=4), TrainSpec()), JobSpec("b", AdapterSpec(rank=8), TrainSpec())]
SMALL = {"adapters": 4, "steps": 30, "together": 2, "edge": 1, "stores": ["sqlite"], "step_seconds": 0.5}


def test_every_point_that_is_due_arrives_and_is_counted() -> None:
    settings = RunSettings(tracking=TrackingSettings(points=10))
    report = tracking_scale(settings, JOBS, SMALL)
    figures = {figure.name: figure.ours for figure in report.figures}
    script = Script(4, 30, 2, Path())
    due = sum(len(script.kept(10)) for _ in range(4))
    assert figures["sqlite: losses in the store"] == due
    total = figures["sqlite: the thread that trains"] + figures["sqlite: the writer's CPU"]
    assert figures["sqlite: tracking in total"] == pytest.approx(total)
    assert figures["sqlite: shortest step of which it takes 2 %"] == pytest.approx(total / 120 / 0.02 * 1000)


def test_a_store_that_lacks_a_point_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Script.kept
    monkeypatch.setattr(Script, "kept", lambda script, points: whole(script, points) | {2})
    with pytest.raises(StorageError, match="points of"):
        tracking_scale(RunSettings(tracking=TrackingSettings(points=10)), JOBS, SMALL)


def test_a_server_that_never_answers_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object) -> UiCommand:
        return UiCommand("http://127.0.0.1:9", (sys.executable, "-c", "import time; time.sleep(60)"))

    monkeypatch.setattr("plait_bench.tracking_scale.ui_command", silent)
    monkeypatch.setattr("plait.tracking.ui.START_SECONDS", 0)
    with pytest.raises(StorageError, match=r"MLflow's server must start"):
        tracking_scale(RunSettings(), JOBS, SMALL | {"stores": ["server"]})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"edge": 3}, "edge=3"),
        ({"stores": ["file"]}, "server, sqlite"),
        ({"adapters": 0}, "adapters must be at least 1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        tracking_scale(RunSettings(), JOBS, SMALL | options)
