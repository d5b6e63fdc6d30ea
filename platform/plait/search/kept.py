"""What lies on disk for a trial until it is over: its states, and what a warm clone begins with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from plait.engine.checkpoints import checkpoints, remove_checkpoints
from plait.search.control.weights import remove_copy
from plait.search.trial_records import CHECKPOINT, WARM
from plait.search.trials import Trial


class Kept:
    """Of one study.

    Args:
        folder: of the search on disk; None where nothing is kept.
        token: of the study.

    Attributes:
        states: where the states lie; None without a folder.
    """

    def __init__(self, folder: Path | None, token: str) -> None:
        self.states = None if folder is None else folder / "checkpoints" / token
        self._control = None if folder is None else folder / "control"

    def resume_from(self, item: FrozenTrial) -> Path | None:
        """Where a state of the trial is, here or where an earlier run left it."""
        places = [] if self.states is None else [self.states / Trial(item.number).name]
        if saved := item.user_attrs.get(CHECKPOINT):
            places.append(Path(saved))
        return next((place for place in places if checkpoints(place)), None)

    def warm_from(self, item: FrozenTrial) -> Path | None:
        """The weights that it begins with; None for fresh ones."""
        warm = item.user_attrs.get(WARM)
        return None if warm is None else Path(warm)

    def clear(self, trial: Trial, *, failed: bool) -> None:
        """The trial is over: what was kept for it goes. The weights that a failed one began with stay, since
        it may be tried again. Nothing is raised."""
        if self.states is not None and self._control is not None:
            remove_checkpoints(self.states / trial.name)
            if not failed:
                remove_copy(self._control, trial.warm_from)

    def tidy_up(self, trials: Iterable[FrozenTrial]) -> None:
        """As :meth:`clear`, for all that are over: a process may have been killed before it did."""
        for item in trials:
            if item.state.is_finished():
                trial = Trial(item.number, warm_from=self.warm_from(item))
                self.clear(trial, failed=item.state == TrialState.FAIL)
