"""A process killed after its last trial and before it ended the search's run: the same command ends it."""

from pathlib import Path

import pytest
from forked import EndlessSearch
from mlflow import MlflowClient

from plait.cli.main import main
from plait.core.settings import TrackingSettings
from plait.search.recorded import recorded_command
from plait.tracking.results import load_search


def test_the_same_command_completes_a_search_killed_at_its_end(
    folder: Path, short: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["sweep", *short, "adapter.rank=1,2", "search.sampler=grid", "search.name=mine"]
    assert EndlessSearch(arguments).end() == 9
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
