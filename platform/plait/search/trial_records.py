"""What a study keeps with each trial beside its values, and how that is read."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.trial import FrozenTrial, TrialState

from plait.core.lifecycle import JobResult, JobState, state_from_optuna
from plait.core.settings import SearchSettings
from plait.core.space import Space
from plait.search.points import points_left
from plait.search.trials import Trial
from plait.search.workers import Owner, owner_of

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


def trainer_of(item: FrozenTrial) -> Owner | None:
    """Who trains it; None where nobody signed it."""
    return owner_of(item.user_attrs.get(OWNER))


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
