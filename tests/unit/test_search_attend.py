"""What the views learn before an iteration."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
from job_results import ended
from studies import space_of, study_of

from plait.core.lifecycle import JobState
from plait.core.settings import RunSettings, SearchSettings
from plait.search.launch import Attend, Launch
from plait.search.orders import Orders
from plait.search.ownership import DeadWorker, Owner
from plait.search.results import SearchEnd
from plait.terminal.text import status_line
from plait.tracking.leaderboard import JobRecord, Leaderboard

CLAIMS = SimpleNamespace(own=set(), dead_workers=list)


def test_trials_adopted_in_the_same_check_are_not_orphaned() -> None:
    """Its dead owner is told of after the trial went on here."""
    board = Leaderboard("minimize", 2)
    for number in (0, 1):
        board.add(JobRecord(f"trial-{number:04d}", number, {}, state=JobState.RUNNING))
    gone = DeadWorker(Owner("w", "vm", "7-w"), {0: 3, 1: 5})
    source = SimpleNamespace(
        revision=0, total=2, claims=SimpleNamespace(own={0}, dead_workers=lambda: [gone]), finished=list
    )
    said: list[str] = []
    Attend(source, board, said.append, Orders)()
    assert [record.state for record in board.jobs.values()] == [JobState.RUNNING, JobState.ORPHANED]
    assert len(said) == 1


def test_the_total_that_is_shown_is_the_studys() -> None:
    """What was added by hand counts before it begins; the study is asked when something happened, or a while
    later."""
    source = SimpleNamespace(revision=0, total=14, claims=CLAIMS, finished=list)
    board = Leaderboard("minimize", 12)
    times = iter((0.0, 1.0, 2.0, 10.0))
    attend = Attend(source, board, print, Orders, clock=lambda: next(times))
    shown = []
    for total, revision in ((14, 0), (16, 0), (16, 1), (17, 1)):  # the last one by another process
        source.total, source.revision = total, revision
        attend()
        shown.append(board.trials)
    assert shown == [14, 14, 16, 17]


def test_trials_that_other_workers_ended_are_shown_at_once() -> None:
    """The store tells of them a while later; what this worker trains it knows better than the study."""
    board = Leaderboard("minimize", 3)
    board.add(JobRecord("trial-0001", 1, {}, state=JobState.RUNNING, steps=10, step=5))
    results = [ended("finished", 1.5, job="trial-0000", trial=0), ended("stopped", job="trial-0001", trial=1)]
    claims = SimpleNamespace(own={1}, dead_workers=list)
    source = SimpleNamespace(revision=0, total=3, claims=claims, finished=lambda: results)
    Attend(source, board, print, Orders)()
    assert status_line(board, None).endswith("1 of 3 ended, 1 running")
    best = board.best()
    assert best is not None
    assert (best.name, best.objective) == ("trial-0000", 1.5)


def test_an_outage_of_the_store_is_reported_once() -> None:
    answers = iter(["no answer", "no answer", "", "", "refused", "refused", ""])
    source = SimpleNamespace(revision=0, total=2, claims=CLAIMS, finished=list)
    said: list[str] = []
    attend = Attend(
        source, Leaderboard("minimize", 2), said.append, Orders, lambda: next(answers), store="http://a"
    )
    told = []
    for _ in range(7):
        attend()
        told.append(said[-1] if said else "")
        said.clear()
    assert told == [
        "",  # it was said when the search began without it
        "",
        "http://a answers again; buffered records are being sent.",
        "",
        "http://a does not answer (refused). Records are buffered on disk; training continues.",
        "",
        "http://a answers again; buffered records are being sent.",
    ]


def test_a_launched_search_is_resumed_under_its_launcher() -> None:
    """Alone, it would have one process, and be refused where it needs several."""
    for place, more in ((None, ""), (Mock(), ", under the launcher")):
        launch = Mock(_command=Mock(place=place))
        launch._command_on = lambda verb, *_: f"plait {verb} mine"
        Launch._report(launch, SearchEnd((), interrupted=True), Mock(), "", "")
        ((_, facts), _) = launch._screen.summarise.call_args
        assert facts["resume with"] == f"plait resume mine{more}"


@pytest.mark.parametrize("added", [False, True])
def test_a_search_is_finished_unless_a_trial_came_while_its_results_were_written(
    added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plait control` had said that the trial is queued, and lists no trial of a finished search."""
    trials = study_of(space_of("adapter.rank=1,2"), SearchSettings(name="s", trials=1))
    trial = trials.ask()
    assert trial is not None
    trials.tell(trial, ended("finished", 1.0))
    if added:
        trials.enqueue({"adapter.rank": 2})
    remember = Mock()
    monkeypatch.setattr("plait.search.launch._remember", remember)
    monkeypatch.setattr("plait.search.launch.write_result", Mock())
    monkeypatch.setattr("plait.search.launch.catch_up", lambda *_: ([], True))
    launch = Mock(_source=trials, _settings=RunSettings())
    launch._command_on = lambda verb, *_: f"plait {verb} s"
    launch._finish = partial(Launch._finish, launch)
    Launch._nothing_to_train(launch, SearchEnd(tuple(trials.finished())))
    assert remember.called != added
    said = str(launch._say.call_args_list)
    assert ("`plait resume s` trains it" in said) == added
    assert ("s is finished" in said) != added


def test_a_search_that_is_interrupted_at_once_knows_what_had_ended() -> None:
    """Without its store, which it would ask, the leaderboard that it leaves would lack all of it."""
    trials = study_of(space_of("adapter.rank=1,2"), SearchSettings(name="s", trials=2))
    trial = trials.ask()
    assert trial is not None
    trials.tell(trial, ended("finished", 1.5))
    trials.claims.own.clear()  # an earlier process had trained it
    launch = MagicMock(_source=trials, _settings=RunSettings(search=SearchSettings(name="s", trials=2)))
    launch._interrupts.__enter__.return_value.requested = True
    tracker = MagicMock(board=Leaderboard("minimize", 2), unreachable="")
    assert Launch._train(launch, MagicMock(), tracker, None, MagicMock()).interrupted
    best = tracker.board.best()
    assert (best.name, best.objective) == ("trial-0000", 1.5)
