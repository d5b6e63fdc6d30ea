"""What a study holds of rungs: the values measured at them, and what was decided in the order of arrival.

Values of the objective are the trial's intermediate values, as Optuna's pruners, its samplers and
optuna-dashboard read them; those of another metric are a user attribute, so that the two are never mixed, and
so is whatever is judged where there are several objectives: of those Optuna takes no intermediate values.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import optuna
from optuna.pruners import BasePruner
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from plait.core.errors import SearchError, choices
from plait.core.settings import SearchSettings, StoppingSettings
from plait.search.patience import Patience
from plait.search.rungs import judged
from plait.search.stopping import Record

RUNGS = "plait.rungs"  # trial: value by step, where it is not the objective that is judged
PASSED = "plait.passed"  # trial: the last rung past which an asynchronous rule let it
COHORTS = "plait.cohorts"  # study: how many trials a rule compares with each other, by rule
PRUNERS = (
    "HyperbandPruner",
    "MedianPruner",
    "NopPruner",
    "PatientPruner",
    "PercentilePruner",
    "SuccessiveHalvingPruner",
    "ThresholdPruner",
)


class StudyRungs:
    """A study's rungs.

    Args:
        study: where they are kept.
        settings: of the search.
        patience: for a storage that is away.
        locked: does something that one process at a time does, with patience.
        own: whether a trial is this process's own still: what another took over is not written here.

    Raises:
        SearchError: Optuna has no such pruner, it does not take the options, or it cannot see the metric.
    """

    def __init__(
        self,
        study: Study,
        settings: SearchSettings,
        patience: Patience,
        locked: Callable[[Callable[[], int]], int],
        own: Callable[[FrozenTrial], bool] = lambda _: True,
    ) -> None:
        self._study = study
        self._own = own
        self._patience = patience
        self._locked = locked
        kind = settings.stopping.kind
        first, *further = (each.metric for each in settings.objectives)
        # Optuna takes intermediate values of a single objective only.
        self._objective = not further and (kind == "none" or judged(settings).metric == first)
        self._pruner = make_pruner(settings.stopping) if kind == "optuna" else None
        if self._pruner is not None and not self._objective:
            raise SearchError(
                f"search.stopping.metric={settings.stopping.metric} with search.stopping.kind=optuna",
                f"Optuna's pruners read the intermediate values of a single objective: {first}.",
                "Leave search.stopping.metric out, or take another kind.",
            )

    def records(self) -> dict[int, Record]:
        """All trials that were drawn, by number: of those that wait for their turn, none may ever come."""
        trials = self._patience(lambda: self._study.get_trials(deepcopy=False))
        return {
            trial.number: Record(
                self._values(trial), trial.state.is_finished(), int(trial.user_attrs.get(PASSED, 0))
            )
            for trial in trials
            if trial.state != TrialState.WAITING
        }

    def _values(self, trial: FrozenTrial) -> dict[int, float]:
        if self._objective:
            return trial.intermediate_values
        return {int(step): value for step, value in trial.user_attrs.get(RUNGS, {}).items()}

    def keep_cohort(self, rule: str, size: int) -> int:
        """How many trials a rule compares with each other: what was kept first, else ``size`` from now on."""
        return self._locked(lambda: self._keep_cohort(rule, size))

    def _keep_cohort(self, rule: str, size: int) -> int:
        kept: dict[str, int] = self._study.user_attrs.get(COHORTS, {})
        if rule not in kept:
            self._study.set_user_attr(COHORTS, kept | {rule: size})
        return kept.get(rule, size)

    def measure(self, number: int, step: int, value: float) -> None:
        """Keep what was measured at a rung; of a step that was measured before, the first stands."""
        self._patience(lambda: self._measure(number, step, value))

    def _measure(self, number: int, step: int, value: float) -> None:
        frozen, live = self._live(number)
        if step in self._values(frozen) or not math.isfinite(value) or not self._own(frozen):
            return
        if self._objective:
            live.report(value, step)
        else:
            live.set_user_attr(RUNGS, frozen.user_attrs.get(RUNGS, {}) | {str(step): value})

    def let_past(self, number: int, step: int) -> None:
        """Keep that an asynchronous rule let a trial past a rung."""
        self._patience(lambda: self._let_past(number, step))

    def _let_past(self, number: int, step: int) -> None:
        frozen, live = self._live(number)
        if self._own(frozen):
            live.set_user_attr(PASSED, step)

    def prunes(self, number: int) -> bool:
        """Whether Optuna's pruner would end the trial now, from what is recorded at this moment."""
        pruner = self._pruner
        assert pruner is not None  # asked for the kind "optuna" alone
        return self._patience(lambda: pruner.prune(self._study, self._live(number)[0]))

    def _live(self, number: int) -> tuple[FrozenTrial, optuna.trial.Trial]:
        frozen = self._study.get_trials(deepcopy=False)[number]
        return frozen, optuna.trial.Trial(self._study, frozen._trial_id)


def make_pruner(stopping: StoppingSettings) -> BasePruner:
    """Optuna's pruner of the settings.

    Raises:
        SearchError: there is none of this name, or it does not take the options.
    """
    if stopping.pruner not in PRUNERS:
        raise SearchError(
            f"search.stopping.pruner={stopping.pruner!r}", f"It must be one of {choices(PRUNERS)}."
        )
    factory = getattr(optuna.pruners, stopping.pruner)
    options: dict[str, Any] = dict(stopping.options)
    if stopping.pruner == "PatientPruner":  # wraps another; alone it looks at the trial's own values
        options = {"wrapped_pruner": None} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
        try:
            pruner: BasePruner = factory(**options)
        except (TypeError, ValueError) as error:
            known = [name for name in inspect.signature(factory).parameters if name != "wrapped_pruner"]
            raise SearchError(
                f"search.stopping.options={dict(stopping.options)!r}",
                f"{stopping.pruner} does not take them: {error}",
                f"It takes {choices(known)}." if known else "It takes none.",
            ) from error
    return pruner
