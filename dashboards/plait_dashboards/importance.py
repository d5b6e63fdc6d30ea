"""The importance of each searched key, from the study of a search."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from plait.core.errors import StorageError
from plait.core.rungs import Share
from plait.search.points import outside_of
from plait.search.stopper import UNIT
from plait.search.storage import quiet
from plait.search.stored import stored_study

METHOD = "PED-ANOVA"  # Optuna's default: Watanabe, Bansal, Hutter (2023), "PED-ANOVA", IJCAI
LEAST_TRIALS = 5  # with fewer, the shares are random
ENOUGH_FOR_ONE_KEY = 10  # complete trials per key; with fewer, a share says little


@dataclass(frozen=True, slots=True)
class Importance:
    """Shares of the searched keys, adding up to 1, largest first.

    Attributes:
        trials: number of trials that the shares are computed from.
        trouble: why there are no shares; "" if there are.
        step: step, or ``Share`` of its steps, at which each of these was measured; 0 if they are finished
            trials, by their objective.
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    trials: int = 0
    trouble: str = "The study was not read."
    step: int = 0

    @property
    def few(self) -> bool:
        """Whether there are too few trials for the shares to be more than a hint."""
        return self.trials < ENOUGH_FOR_ONE_KEY * max(len(self.shares), 1)


def read_importance(storage: str | None, root: Path, name: str) -> Importance:
    """The importance of every key of a study's space; an error is its ``trouble``, and not raised."""
    try:
        return _importance(stored_study(storage, root, name))
    except StorageError as error:
        return Importance(trouble=error.rule)


def _importance(study: optuna.Study) -> Importance:
    inside = [item for item in study.get_trials(deepcopy=False) if not outside_of(item)]
    trials, step = [item for item in inside if _usable(item)], 0
    if len(trials) < LEAST_TRIALS:
        finished = len(trials)
        trials, step = _at_one_step(study, inside)
        if not trials:
            rule = f"Importance needs {LEAST_TRIALS} finished trials, or {LEAST_TRIALS} measured at one step."
            return Importance(trials=finished, trouble=f"{rule} {finished} have finished.")
    if len({tuple(item.values) for item in trials}) == 1:
        return Importance(trials=len(trials), trouble="The compared trials all have the same objective.")
    # It imports scikit-learn, half a second that a search with too few trials does not wait for.
    from optuna.importance import get_param_importances

    quiet()  # about the study that is made in memory
    separate = optuna.create_study(directions=study.directions)
    separate.add_trials(trials)
    try:
        shares = get_param_importances(separate)  # by the study's own directions
    except (ValueError, RuntimeError) as error:
        return Importance(trials=len(trials), trouble=str(error))
    if not shares or not all(math.isfinite(value) for value in shares.values()):
        return Importance(trials=len(trials), trouble="No key was varied in all of the compared trials.")
    return Importance(dict(sorted(shares.items(), key=lambda pair: -pair[1])), len(trials), "", step)


def _at_one_step(study: Study, trials: Sequence[FrozenTrial]) -> tuple[list[FrozenTrial], int]:
    """Trials with their objective at one step, including those stopped early: the last step with at least
    half of all measured trials and at least ``LEAST_TRIALS``. Empty if no step has that many, or if there are
    several objectives, for which no intermediate values are known."""
    measured = [item for item in trials if item.intermediate_values]
    counts = Counter(step for item in measured for step in item.intermediate_values)
    least = max(LEAST_TRIALS, len(measured) / 2)
    last = max((step for step, count in counts.items() if count >= least), default=None)
    if last is None or len(study.directions) > 1:
        return [], 0
    chosen = [
        create_trial(params=item.params, distributions=item.distributions, value=value)
        for item in measured
        if (value := item.intermediate_values.get(last)) is not None
    ]
    return chosen, Share(last) if study.user_attrs.get(UNIT) == "shares" else last


def _usable(item: FrozenTrial) -> bool:
    return (
        item.state == TrialState.COMPLETE and item.values is not None and all(map(math.isfinite, item.values))
    )
