"""Figures made while a search runs: now and then, once more at its end, and never in its way."""

import threading
from collections.abc import Callable

import pytest

from plait.core.errors import StorageError
from plait.core.settings import TrackingSettings
from plait.tracking import figures as made_now_and_then
from plait.tracking.figures import Figures, Publish, publishers

SETTINGS = TrackingSettings()


class Recorded:
    """A publisher that remembers what it was asked for, and may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[TrackingSettings, str, str | None, bool]] = []
        self.called = threading.Event()
        self.error = error

    def __call__(self, settings: TrackingSettings, run_id: str, storage: str | None, final: bool) -> None:
        self.calls.append((settings, run_id, storage, final))
        self.called.set()
        if self.error is not None:
            raise self.error


Make = Callable[..., Figures]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(*made: Publish, first_seconds: float = 0.01) -> Figures:
        monkeypatch.setattr(made_now_and_then, "publishers", lambda: list(made))
        monkeypatch.setattr(made_now_and_then, "FIRST_SECONDS", first_seconds)
        return Figures(SETTINGS, "run", "study.db")

    return make


def test_figures_are_made_while_the_search_runs(figures: Make) -> None:
    publisher = Recorded()
    with figures(publisher):
        assert publisher.called.wait(30)
    assert publisher.calls[0] == (SETTINGS, "run", "study.db", False)


def test_a_short_search_has_them_at_its_end_only(figures: Make) -> None:
    publisher = Recorded()
    with figures(publisher, first_seconds=3600) as made:
        pass
    made.publish(final=True)
    assert publisher.calls == [(SETTINGS, "run", "study.db", True)]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StorageError("tracking.uri=x: gone", "rule", "remedy"), "tracking.uri=x: gone"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    ],
)
def test_errors_are_reported_and_stop_nothing(figures: Make, error: Exception, said: str) -> None:
    publisher = Recorded(error)
    with figures(publisher) as made:
        assert publisher.called.wait(30)
    made.publish(final=True)
    assert made.trouble == said
    publisher.error = None
    made.publish(final=True)
    assert made.trouble == ""


def test_a_search_that_fails_is_not_held_up(figures: Make) -> None:
    release = threading.Event()

    class Slow(Recorded):
        def __call__(self, settings: TrackingSettings, run_id: str, storage: str | None, final: bool) -> None:
            super().__call__(settings, run_id, storage, final)
            release.wait(30)

    slow = Slow()

    def fail() -> None:
        with figures(slow):
            assert slow.called.wait(30)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    release.set()


def test_the_dashboards_offer_figures() -> None:
    assert [made.__module__ for made in publishers()] == ["plait_dashboards.publish"]  # type: ignore[attr-defined]
