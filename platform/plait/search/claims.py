"""Which of a study's trials this process trains, which others do, and which nobody does any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from plait.core.lifecycle import JobState
from plait.engine.checkpoints import newest_step
from plait.search.trial_records import OWNER, STATE, trainer_of
from plait.search.workers import Owner, Workers


@dataclass(frozen=True, slots=True)
class Departed:
    """A process that trains no more.

    Attributes:
        trials: numbers of those that it left behind, with the step of each one's newest state.
    """

    owner: Owner
    trials: Mapping[int, int]

    def describe(self) -> str:
        """In a line."""
        which = ", ".join(f"{number} (from step {step})" for number, step in self.trials.items())
        what = f"its trials {which} go" if len(self.trials) > 1 else f"its trial {which} goes"
        return f"{self.owner.process} is gone: {what} on where a place is free"


class Claims:
    """The trials of a study, by who trains them.

    Args:
        study: whose trials.
        storage: of the study.
        workers: this process among others; None: it is the only one.

    Attributes:
        own: numbers of the trials that this process trains.
    """

    def __init__(self, study: Study, storage: BaseStorage, workers: Workers | None) -> None:
        self._study = study
        self._storage = storage
        self._workers = workers
        self.own: set[int] = set()
        self._noticed: set[str] = set()  # names of processes that are known to be gone
        self._departed: list[Departed] = []

    def add(self, number: int) -> None:
        """This process trains a trial."""
        self.own.add(number)

    def discard(self, number: int) -> None:
        """It does not any more."""
        self.own.discard(number)

    def sign(self, item: FrozenTrial) -> None:
        """Write this process down as the one that trains a trial."""
        if self._workers is not None:
            self._storage.set_trial_user_attr(item._trial_id, OWNER, self._workers.own.to_json())
        if STATE in item.user_attrs:  # it was paused
            self._storage.set_trial_user_attr(item._trial_id, STATE, JobState.RUNNING)

    def signed(self, item: FrozenTrial) -> bool:
        """Whether a trial bears this process's signature, and not that of one that took it over."""
        return self._workers is None or trainer_of(item) == self._workers.own

    def lost(self, trials: Sequence[FrozenTrial]) -> set[int]:
        """Numbers of the trials that other processes have taken over from this one, told once."""
        lost = {number for number in self.own if not self.signed(trials[number])}
        self.own -= lost
        return lost

    def orphans(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """Trials that are running by name only."""
        running = self._not_own(trials)
        if self._workers is None or not running:
            return running
        attributes = self._study.user_attrs
        owners: dict[Owner | None, bool] = {}
        for item in running:
            owner = trainer_of(item)
            if owner not in owners:
                mine = owner == self._workers.own  # but not known to be: it was taken in vain
                owners[owner] = mine or self._workers.gone(owner, attributes)
        return [item for item in running if owners[trainer_of(item)]]

    def notice(self, trials: Sequence[FrozenTrial], saved: Callable[[FrozenTrial], Path | None]) -> None:
        """Look who is gone, and what of.

        Args:
            trials: of the study.
            saved: where states of a trial are.
        """
        found: dict[Owner, dict[int, int]] = {}
        for item in self.orphans(trials):
            owner = trainer_of(item)
            if owner is not None and not self.signed(item) and owner.name not in self._noticed:
                found.setdefault(owner, {})[item.number] = newest_step(saved(item))
        self._noticed |= {owner.name for owner in found}
        self._departed += [Departed(owner, steps) for owner, steps in found.items()]

    def departed(self) -> list[Departed]:
        """Who was noticed to be gone, told once."""
        found, self._departed = self._departed, []
        return found

    def others(self, trials: Sequence[FrozenTrial]) -> int:
        """How many trials other processes train."""
        return len(self._not_own(trials)) - len(self.orphans(trials))

    def _not_own(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        return [item for item in trials if item.state == TrialState.RUNNING and item.number not in self.own]
