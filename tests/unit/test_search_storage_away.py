"""A study's storage that goes away at any moment of a search, for a moment: the search waits, and goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import optuna
import pytest
from optuna.storages import BaseStorage, InMemoryStorage
from rung_bench import Bench, halving, states
from sqlalchemy.exc import OperationalError
from studies import space_of, study_of

from plait.core.errors import SearchError, StorageError
from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.settings import RunSettings, SearchSettings, TrackingSettings
from plait.search.checks import find_study
from plait.search.identity import identify
from plait.search.launch import Launch
from plait.search.trials import SearchCommand
from plait.tracking.tracker import Peers


def path() -> tuple[tuple[str, int], ...]:
    """Which lines of Plait this comes from."""
    found, frame = [], sys._getframe().f_back
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("plait."):
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


AWAY = OperationalError("SELECT", {}, Exception("server closed the connection"))


class Leaving(InMemoryStorage):
    """Is away at one call of this thread, counted from the first; answers the next.

    Args:
        away_at: number of that call.
        done: whether what it asks for is done all the same, and only the answer is lost.

    Attributes:
        first: number of the first call from each place in Plait.
    """

    def __init__(self, away_at: int | None = None, *, done: bool = False) -> None:
        super().__init__()
        self.calls = 0
        self.first: dict[tuple[tuple[str, int], ...], int] = {}
        self.away_at = away_at
        self._done = done
        self._thread = threading.get_ident()  # others beat, and give up at once

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self._met(found) if name in REQUESTS else found

    def _met(self, request: Callable[..., Any]) -> Callable[..., Any]:
        def meet(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() == self._thread:
                self.calls += 1
                self.first.setdefault(path(), self.calls)
                if self.calls == self.away_at:
                    if self._done:
                        request(*arguments, **named)
                    raise AWAY
            return request(*arguments, **named)

        return meet


REQUESTS = {
    name
    for name in dir(BaseStorage)
    if not name.startswith("_") and name not in ("remove_session", "check_trial_is_updatable")
}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.search.run.WAIT_SECONDS", 0.0)
    monkeypatch.setattr("plait.search.run.LOOK_SECONDS", 0.0)
    monkeypatch.setattr("plait.search.storage.FIRST_DELAY", 0.0)
    monkeypatch.setattr("plait.search.ownership.POLL_SECONDS", 0.0)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("kind", ["successive_halving", "asha"])
def test_a_search_outlives_an_outage_wherever_it_asks(tmp_path: Path, kind: str, done: bool) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = halving(trials=4, parallel=2, kind=kind)
    undisturbed = Bench(tmp_path / "undisturbed", search, storage=(storage := Leaving()))
    undisturbed.run()
    requests = sorted(storage.first.values())
    assert len(requests) > 20
    for request in requests:
        bench = Bench(tmp_path / str(request), search, storage=Leaving(request, done=done), alive=200)
        bench.run()
        assert states(bench) == states(undisturbed), request


def test_a_search_outlives_an_outage_at_the_end_of_any_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was done under it is done; a lock that lives in a database is given up by a request to it."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    away_at, locks = 0, 0

    @contextmanager
    def lock(*_: object) -> Iterator[None]:
        nonlocal locks
        locks += 1
        yield
        if locks == away_at:
            raise AWAY

    monkeypatch.setattr("plait.search.study.study_lock", lock)
    monkeypatch.setattr("plait.search.storage.study_lock", lock)
    search = halving(trials=4, parallel=2)
    undisturbed = Bench(tmp_path / "undisturbed", search)
    undisturbed.run()
    taken = locks
    assert taken > 8
    for away_at in range(1, taken + 1):
        locks = 0
        bench = Bench(tmp_path / str(away_at), search, alive=200)
        bench.run()
        assert states(bench) == states(undisturbed), away_at


SPACE = space_of("adapter.rank=1,2")
IDENTITY = identify(SPACE, JobSpec("base"), RunSettings())


def command(root: Path, search: SearchSettings) -> SearchCommand:
    made = cast(Any, None)  # no job is made
    return SearchCommand(RunSettings(search=search), SPACE, JobSpec("base"), made, (), "", (), (), root)


def test_data_and_model_are_checked_again_after_an_outage() -> None:
    storage = Leaving()
    trials = study_of(SPACE, SearchSettings(name="s"), storage)
    storage.away_at = storage.calls + 1
    trials.check_material({"model": "a"})
    with pytest.raises(SearchError, match="was a, now b"):
        trials.check_material({"model": "b"})


def test_a_search_is_found_after_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Leaving()
    monkeypatch.setattr("plait.search.checks.existing_storage", lambda *_: storage)
    earlier = study_of(SPACE, SearchSettings(name="earlier"), storage)
    trial = earlier.ask()
    assert trial is not None
    earlier.tell(trial, JobResult(trial.name, JobState.FINISHED, values=(1.0,)))
    study_of(SPACE, SearchSettings(name="s"), storage)
    search = SearchSettings(name="s", fresh=True, prior="earlier")
    before = storage.calls
    assert find_study(command(tmp_path, search), "s", IDENTITY)[1]
    requests = storage.calls - before
    assert requests > 3
    for request in range(1, requests + 1):
        storage.away_at = storage.calls + request
        assert find_study(command(tmp_path, search), "s", IDENTITY)[1], request


def test_a_search_that_is_being_trained_is_not_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known before its data is loaded."""
    search = SearchSettings(name="s", fresh=True)
    trials = study_of(SPACE, search, folder=lambda name: tmp_path / name)
    trials.ask()
    monkeypatch.setattr("plait.search.checks.existing_storage", lambda *_: trials.shared.study._storage)
    with pytest.raises(SearchError, match="is being trained by another process"):
        find_study(command(tmp_path, search), "s", IDENTITY)
    trials.close()
    assert find_study(command(tmp_path, search), "s", IDENTITY)[1]


@pytest.mark.parametrize(
    ("answers", "known"),
    [
        (0, Peers(training=True)),
        (1, Peers(training=False)),
        (2, Peers(training=False, ended={"a"})),
        (3, Peers(training=False, ended={"a"}, orphaned={"b"})),
    ],
)
def test_others_train_until_the_study_says_that_none_does(answers: int, known: Peers) -> None:
    left = iter(range(answers))

    def answer(found: object) -> Any:
        if next(left, None) is None:
            raise StorageError("away")
        return found

    class Claims:
        others = property(lambda _: answer(0))
        orphaned = property(lambda _: answer({"b"}))

    source = SimpleNamespace(claims=Claims(), finished=lambda: answer([JobResult("a", JobState.FINISHED)]))
    blank = cast(Any, SimpleNamespace(settings=None))
    found = Launch(blank, cast(Any, source), blank, blank, None)._peers()
    assert (found.training, set(found.ended), set(found.orphaned)) == (
        known.training,
        set(known.ended),
        set(known.orphaned),
    )


def test_the_address_of_a_search_shows_no_password(tmp_path: Path) -> None:
    """A password may stand in any key."""
    settings = RunSettings(tracking=TrackingSettings(root=tmp_path, experiment="mssql://u:secret@h/x"))
    blank = cast(Any, SimpleNamespace(settings=settings))
    launch = Launch(blank, cast(Any, SimpleNamespace(name="s")), blank, blank, None)
    assert "experiment=mssql://u:***@h/x" in launch._view(cast(Any, SimpleNamespace(page="")))
