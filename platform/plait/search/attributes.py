"""What a study keeps with itself and each trial beside Optuna's own: attributes, and folders on disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from plait.core.lifecycle import JobResult, JobState, state_from_optuna
from plait.core.settings import SearchSettings
from plait.core.space import Space
from plait.engine.checkpoints import checkpoints, remove_checkpoints
from plait.search.control.weights import remove_copy
from plait.search.points import points_left
from plait.search.trials import Trial

STATE = "plait.state"  # trial: its state, of which Optuna has fewer
REASON = "plait.reason"  # trial: why it ended as it did
RUN_ID = "mlflow.run_id"  # study and trial: the MLflow run
TRACKED = "plait.tracked"  # study: that run, and the address of its store without a password
CHECKPOINT = "plait.checkpoint"  # trial: where its states are
OWNER = "plait.owner"  # trial: who trains it
BEYOND = "plait.beyond"  # trial: it comes on top of search.trials
REQUEST = "plait.request"  # trial: the request that it answers
WARM = "plait.warm_from"  # trial: folder of the weights that it begins with
RETRY_OF = "plait.retry_of"  # trial: the failed one whose values it tries again
PRIORITY = "plait.priority"  # trial: its own, where that is not searched
PRIORITY_KEY = "train.priority"
PROBLEM = "plait.problem"  # study: what is searched, as JSON
MATERIAL = "plait.material"  # study: digests of data and model, as JSON
TOKEN = "plait.study"  # study: tells it from an earlier one of its name


def priority_of(item: FrozenTrial, usual: int) -> int:
    """Of its job, as far as it is known: a sampler may draw another for a trial that waits.

    Args:
        item: the trial.
        usual: of the search's jobs.
    """
    if PRIORITY in item.user_attrs:
        return int(item.user_attrs[PRIORITY])
    enqueued = item.system_attrs.get("fixed_params", {})
    return int(item.params.get(PRIORITY_KEY, enqueued.get(PRIORITY_KEY, usual)))


def total_of(trials: Sequence[FrozenTrial], settings: SearchSettings, space: Space) -> int:
    """How many trials there are to be: as asked for and those beyond, as long as there are points that none
    of them has.

    Args:
        trials: of the study so far.
        settings: of the search.
        space: what is searched.
    """
    wanted = settings.trials + sum(bool(item.user_attrs.get(BEYOND)) for item in trials)
    if settings.failed == "drop":
        wanted += sum(item.state == TrialState.FAIL for item in trials)
    if space.size is None or space.size >= wanted:
        return wanted
    return min(wanted, len(trials) + (points_left(trials, space) or 0))


def state_of(item: FrozenTrial) -> JobState:
    """A trial's state as the study has it: of a running one whose worker died, RUNNING."""
    return state_from_optuna(item.state.name, item.user_attrs.get(STATE))


def result_of(item: FrozenTrial) -> JobResult:
    """How a trial that has ended did so, as far as the study knows."""
    complete = item.state == TrialState.COMPLETE
    return JobResult(
        Trial(item.number).name,
        state_of(item),
        reason=str(item.user_attrs.get(REASON, "")),
        values=tuple(item.values) if complete else (),
        violations=item.constraints if complete else {},
        trial=item.number,
        parameters=item.params,
        run_id=str(item.user_attrs.get(RUN_ID, "")),
    )


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
