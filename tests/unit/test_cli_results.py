"""Sorting the leaderboard."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from plait.cli.leaderboard import print_leaderboard, show
from plait.cli.main import main
from plait.cli.results import store_parser, store_settings
from plait.core.errors import StorageError
from plait.core.lifecycle import JobState, PauseReason
from plait.core.objectives import Objective
from plait.core.settings import TrackingSettings
from plait.tracking.leaderboard import JobRecord
from plait.tracking.location import Location
from plait.tracking.results import SearchResult

RECORDS = [
    JobRecord("a", 0, {"train.lr": 1e-3}, JobState.FINISHED, objective=2.0),
    JobRecord("b", 1, {"train.lr": 1e-4}, JobState.FAILED),
    JobRecord("c", 2, {"train.lr": 1e-2}, JobState.FINISHED, objective=1.0),
]


def test_the_store_may_be_given_as_for_a_sweep() -> None:
    known = store_parser("leaderboard", "").parse_args(["tracking.root=my runs", "tracking.experiment=e"])
    assert store_settings(known) == TrackingSettings(root=Path("my runs"), experiment="e")


def test_a_format_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["leaderboard", "--format", "xml"]) == 2
    assert re.search("xml.*table.*csv.*json", capsys.readouterr().err)


def test_a_mistyped_option_is_answered_with_the_likely_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["leaderboard", "mine", "--fromat", "csv: text"]) == 2
    assert "Did you mean --format? " in capsys.readouterr().err


def test_the_title_says_what_comes_first() -> None:
    place = Location("sqlite:///x.db", Path("x"), None)
    result = SearchResult(
        "mine", "finished", (Objective("eval/loss", "maximize"),), "r", "0", place, tuple(RECORDS)
    )
    text = io.StringIO()
    print_leaderboard(result, "table", Console(file=text, width=100))
    assert text.getvalue().splitlines()[0].strip() == "mine (finished), highest eval/loss first"


def test_the_table_shows_values_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An expression such as [qv]_proj is no markup, and a reason with :boom: has no emoji."""
    place = Location("sqlite:///x.db", Path("x"), None)
    odd = JobRecord("a", 0, {"adapter.target_modules": ".*[qv]_proj"}, JobState.FAILED, reason="m:boom: x")
    other = JobRecord("b", 1, {"adapter.target_modules": "all-linear"}, JobState.FINISHED, objective=1.0)
    found = SearchResult("mine", JobState.FINISHED, (Objective("eval/loss"),), "r", "0", place, (other, odd))
    monkeypatch.setattr("plait.cli.leaderboard.read_search", lambda *_: found)
    show(TrackingSettings(), "mine", "table")
    printed = capsys.readouterr().out
    assert ".*[qv]_proj" in printed
    assert "m:boom: x" in printed


def test_a_trial_whose_process_was_killed_before_its_run_was_made_is_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Location("sqlite:///x.db", Path("x"), None)

    def result(*records: JobRecord) -> SearchResult:
        return SearchResult("mine", JobState.RUNNING, (Objective("eval/loss"),), "r", "0", place, records)

    left = JobRecord("trial-0007", 7, {"train.lr": 3e-4}, state=JobState.ORPHANED)
    monkeypatch.setattr("plait.cli.leaderboard.read_search", lambda *_: result())
    monkeypatch.setattr("plait.search.stored.board_of_study", lambda *_: result(left))
    show(TrackingSettings(), "mine", "table")
    shown = capsys.readouterr()
    assert re.search(r"7 +orphaned", shown.out)
    assert "plait resume mine" in shown.err


def test_a_trial_whose_process_was_killed_is_orphaned_or_paused_whatever_the_store_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Location("sqlite:///x.db", Path("x"), None)

    def result(state: JobState) -> SearchResult:
        records = (JobRecord("a", 0, state=JobState.FINISHED, objective=1.0), JobRecord("b", 1, state=state))
        return SearchResult("mine", JobState.RUNNING, (Objective("eval/loss"),), "r", "0", place, records)

    monkeypatch.setattr("plait.cli.leaderboard.read_search", lambda *_: result(JobState.RUNNING))
    titles = {
        JobState.ORPHANED: "mine (orphaned)",
        JobState.RUNNING: "mine (running)",
        JobState.PAUSED: "mine (paused)",
    }
    for known, title in titles.items():
        monkeypatch.setattr("plait.search.stored.board_of_study", lambda *_, known=known: result(known))
        show(TrackingSettings(), "mine", "table")
        out, err = capsys.readouterr()
        assert out.startswith(title)
        assert re.search(rf"1 +{known}", out)
        assert ("`plait resume mine` resumes the search" in err) == (known == JobState.ORPHANED)
    monkeypatch.setattr("plait.cli.leaderboard.trains_here", lambda _: True)
    show(TrackingSettings(), "mine", "table")
    assert capsys.readouterr().out.startswith("mine (running)"), "its process has just begun or ended a trial"


@pytest.mark.parametrize("known", [True, False])
def test_a_search_that_lives_is_paused_if_the_user_paused_it(
    known: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, reason = Location("sqlite:///x.db", Path("x"), None), PauseReason.AT_RUNG

    def result(*_: object) -> SearchResult:
        records = (JobRecord("a", 0, state=JobState.PAUSED, reason=reason),)
        return SearchResult("mine", JobState.RUNNING, (Objective("eval/loss"),), "r", "0", place, records)

    def asked(_: Path) -> bool:
        if known:
            return True
        raise StorageError("the lock", "It is another user's.")

    monkeypatch.setattr("plait.cli.leaderboard.read_search", result)
    monkeypatch.setattr("plait.search.stored.board_of_study", lambda *_: None)
    monkeypatch.setattr("plait.cli.leaderboard.trains_here", asked)
    show(TrackingSettings(), "mine", "table")
    assert capsys.readouterr().out.startswith("mine (running)")
    reason = PauseReason.BY_USER
    show(TrackingSettings(), "mine", "table")
    assert capsys.readouterr().out.startswith("mine (paused)")


def test_a_trial_that_has_no_run_yet_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Location("sqlite:///x.db", Path("x"), None)
    stored = (JobRecord("a", 0, state=JobState.FINISHED, objective=1.0),)
    running = JobRecord("c", 2, state=JobState.RUNNING)  # its first record is still on its way to the store
    known = (*stored, JobRecord("b", 1, {"adapter.rank": 8}), running)

    def result(state: JobState, records: tuple[JobRecord, ...]) -> SearchResult:
        return SearchResult("mine", state, (Objective("eval/loss"),), "r", "0", place, records)

    monkeypatch.setattr("plait.search.stored.board_of_study", lambda *_: result(JobState.PAUSED, known))
    for state, shown in ((JobState.RUNNING, True), (JobState.FINISHED, False)):
        monkeypatch.setattr(
            "plait.cli.leaderboard.read_search", lambda *_, state=state: result(state, stored)
        )
        show(TrackingSettings(), "mine", "table")
        out = capsys.readouterr().out
        assert ("queued" in out, "2 running" in out) == (shown, shown)
