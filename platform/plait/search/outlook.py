"""What may still come of a search: whether there is a trial to draw, and whether too many have failed."""

from __future__ import annotations

from plait.core.settings import SearchSettings
from plait.search.results import gave_up
from plait.search.trials import Trial, TrialSource


class Outlook:
    """Answers of the trial source, kept as long as nothing changes: each reads all trials of the study, which
    takes milliseconds, over a network tens of them, in the thread that trains.

    What other processes did is seen after :meth:`forget` only.

    Args:
        source: draws the trials.
        settings: of the search.
    """

    def __init__(self, source: TrialSource, settings: SearchSettings) -> None:
        self._source = source
        self._settings = settings
        self._none_left: tuple[int, bool] | None = None  # what was asked for in vain: the revision, and new
        self._verdict: tuple[int, str] | None = None  # at which revision, and why no more are drawn

    def forget(self) -> None:
        """Ask the source again, even where nothing changed here."""
        self._none_left = self._verdict = None

    @property
    def hopeless(self) -> bool:
        """More trials failed than the settings put up with: those that were begun are ended, and no more."""
        return bool(self.gave_up)

    @property
    def gave_up(self) -> str:
        """That too many trials failed, in words; "" where not that many did."""
        if self._settings.max_failure_rate >= 1:
            return ""
        revision = self._source.revision
        if self._verdict is None or self._verdict[0] != revision:
            self._verdict = revision, gave_up(self._source.failed, self._source.total, self._settings)
        return self._verdict[1]

    def draw(self, *, new: bool) -> Trial | None:
        """The next trial, as ``TrialSource.ask``; None where there was none and nothing changed since."""
        question = self._source.revision, new
        if question == self._none_left:
            return None
        trial = self._source.ask(new=new)
        if trial is None:
            self._none_left = question
        return trial
