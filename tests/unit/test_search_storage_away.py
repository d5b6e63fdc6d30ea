"""A study's storage that goes away at any moment of a search, for a moment: the search waits, and goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage, InMemoryStorage
from rung_bench import Bench, halving, states
from sqlalchemy.exc import OperationalError


def path() -> tuple[tuple[str, int], ...]:
    """Which lines of Plait this comes from."""
    found, frame = [], sys._getframe()
    while (frame := frame.f_back) is not None:
        if frame.f_globals.get("__name__", "").startswith("plait."):
            found.append((frame.f_code.co_filename, frame.f_lineno))
    return tuple(found)


class Leaving(InMemoryStorage):
    """Is away at one call of this thread, counted from the first; answers the next.

    Attributes:
        first: number of the first call from each place in Plait.
    """

    def __init__(self, away_at: int | None = None) -> None:
        super().__init__()
        self.calls = 0
        self.first: dict[tuple[tuple[str, int], ...], int] = {}
        self._away_at = away_at
        self._thread = threading.get_ident()  # others beat, and give up at once

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self._met(found) if name in REQUESTS else found

    def _met(self, request: Callable[..., Any]) -> Callable[..., Any]:
        def meet(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() == self._thread:
                self.calls += 1
                self.first.setdefault(path(), self.calls)
                if self.calls == self._away_at:
                    raise OperationalError("SELECT", {}, Exception("server closed the connection"))
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
    monkeypatch.setattr("plait.search.patience.FIRST_DELAY", 0.0)


@pytest.mark.parametrize("kind", ["successive_halving", "asha"])
def test_a_search_outlives_an_outage_wherever_it_asks(tmp_path: Path, kind: str) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = halving(trials=4, parallel=2, kind=kind)
    undisturbed = Bench(tmp_path / "undisturbed", search, storage=(storage := Leaving()))
    undisturbed.run()
    requests = sorted(storage.first.values())
    assert len(requests) > 20
    for request in requests:
        bench = Bench(tmp_path / str(request), search, storage=Leaving(request))
        bench.run()
        assert states(bench) == states(undisturbed), request
