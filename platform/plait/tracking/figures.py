"""Figures of a search, made by the packages that provide them, while the search runs and when it has ended.

A package provides them through an entry point of the group ``plait.figures`` that names a :class:`Publish`.
Plait itself contains none: without such a package a search has no figures, and everything else works. A seam
to these packages.
"""

from __future__ import annotations

import threading
import time
from importlib.metadata import entry_points
from typing import Protocol, Self

from plait.core.errors import PlaitError
from plait.core.settings import TrackingSettings

GROUP = "plait.figures"
FIRST_SECONDS = 60.0  # until the first figures of a running search, and the shortest time between two
SHARE = 0.01  # share of the time that may be spent on making them
PATIENCE = 30.0  # seconds that the end of a search waits for figures that are being made


class Publish(Protocol):
    """Reads a search from the tracking store and writes its figures to the search's run."""

    def __call__(self, settings: TrackingSettings, run_id: str, storage: str | None, final: bool) -> None:
        """Publish the figures. ``storage`` is the study's; ``final``: the search has ended."""


def publishers() -> list[Publish]:
    """The publishers of the installed packages, sorted by name."""
    return [point.load() for point in sorted(entry_points(group=GROUP), key=lambda item: item.name)]


class Figures:
    """A context manager that makes a search's figures now and then in the background.

    Errors in making them are kept in ``trouble`` and stop nothing."""

    def __init__(self, settings: TrackingSettings, run_id: str, storage: str | None) -> None:
        self._settings = settings
        self._run_id = run_id
        self._storage = storage
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._now_and_then, name="plait-figures", daemon=True)
        self.trouble = ""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._over.set()
        if error is None:
            self._thread.join(PATIENCE)

    def publish(self, *, final: bool) -> None:
        """Make the figures now; ``final`` once the store has the whole search."""
        self.trouble = ""
        try:
            for made in publishers():
                made(self._settings, self._run_id, self._storage, final)
        except PlaitError as error:
            self.trouble = error.value
        except Exception as error:
            self.trouble = f"{type(error).__name__}: {error}"

    def _now_and_then(self) -> None:
        pause = FIRST_SECONDS
        while not self._over.wait(pause):
            begun = time.monotonic()
            self.publish(final=False)
            pause = max(FIRST_SECONDS, (time.monotonic() - begun) / SHARE)
