"""What Plait stores with a study and its trials: attributes, and folders on disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from uuid import uuid4

from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from plait.core.errors import SearchError
from plait.core.lifecycle import JobResult, JobState, state_from_optuna
from plait.core.settings import SearchSettings
from plait.core.space import Space, Value
from plait.engine.checkpoints import checkpoints, remove_checkpoints
from plait.search.points import OUTSIDE, OutsideValue, points_left, values_of
from plait.search.results import MOST_REJECTED
from plait.search.trials import Trial
from plait.utils.files import disk_errors, new_folder

STATE = "plait.state"  # trial: its state; Optuna has fewer states
REASON = "plait.reason"  # trial: why it ended as it did
TRACKED = "plait.tracked"  # study: its MLflow run, and the address of that store without a password
CHECKPOINT = "plait.checkpoint"  # trial: where its checkpoints are
OWNER = "plait.owner"  # trial: who trains it
BEYOND = "plait.beyond"  # trial: it is in addition to search.trials
REQUEST = "plait.request"  # trial: the request that it answers
WARM = "plait.warm_from"  # trial: folder of the weights that it starts with
RETRY_OF = "plait.retry_of"  # trial: the failed one whose values it tries again
PRIORITY = "plait.priority"  # trial: its priority, if that is not searched
PRIORITY_KEY = "train.priority"
ADAPTER = "adapter_model.safetensors"
WARM_WEIGHTS = "warm"  # folder of a search with the weights that its warm clones start with
PROBLEM = "plait.problem"  # study: what is searched, as JSON
MATERIAL = "plait.material"  # study: digests of data and model, as JSON
CURVES = "plait.curves"  # study: the worker that writes the search's own curves
TOKEN = "plait.study"  # study: distinguishes it from an earlier one of the same name


def priority_of(item: FrozenTrial, usual: int) -> int:
    """The priority of its job, as far as known: a sampler may suggest another one for a queued trial."""
    if PRIORITY in item.user_attrs:
        return int(item.user_attrs[PRIORITY])
    enqueued = item.system_attrs.get("fixed_params", {})
    return int(values_of(item).get(PRIORITY_KEY, enqueued.get(PRIORITY_KEY, usual)) or 0)


def total_of(trials: Sequence[FrozenTrial], settings: SearchSettings, space: Space) -> int:
    """How many trials there will be: the requested ones, those beyond them, and one more for each that was
    rejected, as long as untried points remain and not all suggestions are rejected.
    """
    own = [item for item in trials if not item.user_attrs.get(BEYOND)]
    rejected: list[bool] = [item.user_attrs.get(STATE) == JobState.INFEASIBLE for item in own]
    wanted = settings.trials + len(trials) - len(own) + sum(rejected)
    if settings.failed == "drop":
        wanted += sum(item.state == TrialState.FAIL for item in trials)
    if len(own) >= MOST_REJECTED and all(rejected[-MOST_REJECTED:]):
        return len(trials)
    if space.size is None or space.size >= wanted:
        return wanted
    return min(wanted, len(trials) + (points_left(trials, space) or 0))


def state_of(item: FrozenTrial) -> JobState:
    """A trial's state in the study; RUNNING also if its worker has died."""
    return state_from_optuna(item.state.name, item.user_attrs.get(STATE))


def result_of(item: FrozenTrial) -> JobResult:
    """The result of a trial that has ended, as far as the study knows."""
    complete = item.state == TrialState.COMPLETE
    return JobResult(
        Trial(item.number).name,
        state_of(item),
        reason=str(item.user_attrs.get(REASON, "")),
        values=tuple(item.values) if complete else (),
        violations=item.constraints,
        trial=item.number,
        parameters=values_of(item),
    )


def enqueue(
    study: Study,
    values: Mapping[str, Value],
    *,
    beyond: bool = True,
    request: str = "",
    retry_of: int | None = None,
    warm_from: Path | None = None,
    priority: int | None = None,
    outside: Mapping[str, OutsideValue] = MappingProxyType({}),
) -> int:
    """Enqueue a trial with these values and return its number. Call it under the study's lock.

    Args:
        values: values of some or all searched keys; the sampler suggests the others.
        beyond: whether it is in addition to ``search.trials``.
        request: the request that it answers; a second call for the same request enqueues nothing.
        retry_of: the failed trial that it tries again.
        warm_from: folder of the weights that it starts with.
        priority: its priority, if that is not searched.
        outside: settings outside the search space, by key; the sampler suggests none for these keys and
            does not learn from the trial.
    """
    known = (
        item.number for item in study.get_trials(deepcopy=False) if item.user_attrs.get(REQUEST) == request
    )
    if request and (number := next(known, None)) is not None:
        return number
    facts = {
        BEYOND: beyond,
        REQUEST: request or uuid4().hex,
        RETRY_OF: retry_of,
        WARM: None if warm_from is None else str(warm_from.absolute()),
        PRIORITY: priority,
        OUTSIDE: dict(outside) or None,
    }
    study.enqueue_trial(
        dict(values), user_attrs={key: fact for key, fact in facts.items() if fact is not None}
    )
    return study.get_trials(deepcopy=False)[-1].number


class Kept:
    """Files on disk of the trials of one study.

    Args:
        folder: the search's folder; None if nothing is kept.

    Attributes:
        states: folder of the checkpoints; None without a folder.
    """

    def __init__(self, folder: Path | None, token: str) -> None:
        self.states = None if folder is None else folder / "checkpoints" / token
        self._warm = None if folder is None else (folder / WARM_WEIGHTS).absolute()

    def resume_from(self, item: FrozenTrial) -> Path | None:
        """The path of the trial's checkpoint, here or where an earlier run left it."""
        places = [] if self.states is None else [self.states / Trial(item.number).name]
        if saved := item.user_attrs.get(CHECKPOINT):
            places.append(Path(saved))
        return next((place for place in places if checkpoints(place)), None)

    def warm_from(self, item: FrozenTrial) -> Path | None:
        """The weights that it starts with; None for fresh ones."""
        warm = item.user_attrs.get(WARM)
        return None if warm is None else Path(warm)

    def clear(self, trial: Trial, *, failed: bool) -> None:
        """Delete the files of an ended trial, except the weights that a failed one started with, because it
        may be tried again. Raises nothing."""
        if self.states is not None:
            remove_checkpoints(self.states / trial.name)
        if not failed and trial.warm_from is not None and trial.warm_from.parent == self._warm:
            shutil.rmtree(trial.warm_from, ignore_errors=True)

    def tidy_up(self, trials: Iterable[FrozenTrial]) -> None:
        """Clear all ended trials, in case a process was killed before it did."""
        for item in trials:
            if item.state.is_finished():
                trial = Trial(item.number, warm_from=self.warm_from(item))
                self.clear(trial, failed=item.state == TrialState.FAIL)


def keep_weights(folder: Path, token: str, state: JobState, number: int, request: str) -> Path:
    """Copy the newest saved weights of a trial for a warm clone, because its checkpoints are deleted when it
    ends.

    Args:
        state: the trial's state; an exported adapter of an unfinished trial belongs to an earlier search.
        request: name of the copy.

    Raises:
        SearchError: the trial has no saved weights.
        StorageError: they cannot be copied.
    """
    name = Trial(number).name
    exported = folder / "adapters" / name
    if state == JobState.FINISHED and (exported / ADAPTER).exists():
        found = [exported]
    else:
        found = checkpoints(folder / "checkpoints" / token / name)
    if not found:
        raise SearchError(
            f"trial {number} has no saved weights yet",
            "A warm start needs a saved checkpoint.",
            "`plait control NAME pause` saves all trials: then clone this one, and `resume`. Or wait for its "
            "next checkpoint (engine.checkpoint_minutes), or clone it without --warm.",
        )
    copy = (folder / WARM_WEIGHTS / request).absolute()
    rule = "The weights for a warm clone are copied first."
    remedy = "Free some space, or try again: the checkpoint may just have been replaced by a newer one."
    with disk_errors(copy, rule, remedy), new_folder(copy) as made:
        shutil.copytree(found[0], made, dirs_exist_ok=True)
    return copy
