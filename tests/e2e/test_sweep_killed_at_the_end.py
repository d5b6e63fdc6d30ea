"""A process killed after its last trial and before it ended the search's run: the same command ends it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from plait.cli.main import main
from plait.core.settings import TrackingSettings
from plait.search.recorded import recorded_command
from plait.tracking.results import load_search

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, sys
from plait.cli.main import main
from plait.tracking.tracker import Tracker
Tracker.end_search = lambda *_: os._exit(9)
main(sys.argv[1:])
"""


def test_the_same_command_completes_a_search_killed_at_its_end(
    folder: Path, short: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["sweep", *short, "adapter.rank=1,2", "search.sampler=grid", "search.name=mine"]
    paths = os.pathsep.join(str(ROOT / name) for name in ("platform", "kernels", "dashboards"))
    killed = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], env=os.environ | {"PYTHONPATH": paths}, check=False
    )
    assert killed.returncode == 9
    settings = TrackingSettings(root=folder / "plait-runs")
    assert load_search(settings, "mine").state == "running"
    assert main(arguments) == 0
    assert "mine is finished" in capsys.readouterr().out
    found = load_search(settings, "mine")
    client = MlflowClient(found.location.uri)
    run = client.get_run(found.run_id)
    assert (run.info.status, found.state) == ("FINISHED", "finished")
    assert [item.state for item in found.records] == ["finished", "finished"]
    assert run.data.metrics["search/best"] == found.records[0].objective
    held = {item.path for item in client.list_artifacts(found.run_id)}
    assert {"leaderboard.json", "report.html", "figures"} <= held
    recorded = recorded_command(settings.root, "mine")
    assert recorded is not None
    assert recorded.finished
