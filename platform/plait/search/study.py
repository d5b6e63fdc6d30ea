"""An Optuna study as a source of trials: suggest, report, and resume after an interruption."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import optuna
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from optuna.trial import Trial as LiveTrial

from plait.core.errors import SearchError
from plait.core.jobs import JobSpec
from plait.core.lifecycle import STORED_AS, JobResult, JobState
from plait.core.settings import SearchSettings
from plait.core.space import Space, Value
from plait.engine.checkpoints import remove_checkpoints
from plait.search.attributes import (
    BEYOND,
    CHECKPOINT,
    MATERIAL,
    PRIORITY,
    PRIORITY_KEY,
    REASON,
    RETRY_OF,
    STATE,
    TOKEN,
    TRACKED,
    WARM_WEIGHTS,
    Kept,
    enqueue,
    priority_of,
    result_of,
    state_of,
    total_of,
)
from plait.search.identity import Identity, check_material, check_problem, create, identify, sign
from plait.search.locks import WORKERS
from plait.search.objective import rejection
from plait.search.orders import StudyOrders
from plait.search.ownership import Claims, Workers, lives_here, trainer_of
from plait.search.points import (
    outside_of,
    overrides_of,
    points_left,
    read_enqueued,
    values_of,
)
from plait.search.prior import check_prior, earlier_trials
from plait.search.samplers import check_sampler
from plait.search.stopper import StudyRungs
from plait.search.storage import (
    Patience,
    SharedStudy,
    existing_storage,
    in_memory,
    quiet,
    study_lock,
)
from plait.search.suggest import Suggester, keep_space
from plait.search.trials import SearchCommand, Trial
from plait.tracking.spans import SPAN_FILES
from plait.tracking.tables import TABLES
from plait.utils.counts import counted


class StudyTrials:
    """Trials suggested by Optuna and kept in its storage.

    Orphaned and interrupted trials are adopted first, under their own numbers and with their own values.
    Several processes may share one study: each trial names the worker that trains it, and is suggested,
    adopted and reported under a lock of the study.

    Args:
        folder: the search's folder on disk; without one, this process is assumed to be the only one.
        patience: repeats calls while the storage is unavailable.

    Attributes:
        shared: the study, for calls that concern it as a whole.
        claims: which worker trains which trial.
        revision: increases when a trial is suggested, enqueued or ended here.
        token: distinguishes this study from an earlier one of the same name.
        checkpoints_folder: folder of its trials' checkpoints; None without a folder.

    Raises:
        SearchError: the sampler does not support the space, the study has another space, a point of
            ``search.enqueue`` is outside it, or ``search.prior`` cannot be used.
    """

    def __init__(
        self,
        settings: SearchSettings,
        space: Space,
        identity: Identity,
        storage: BaseStorage,
        *,
        folder: Callable[[str], Path] | None = None,
        patience: Patience | None = None,
    ) -> None:
        check_sampler(settings, space)
        points = read_enqueued(settings, space)
        patience = patience or Patience()
        self.revision = 0
        self._settings = settings
        self._space = space
        self._storage = storage
        name = settings.name or identity.name
        self._folder = None if folder is None else folder(name)
        self._usual_priority = int(identity.problem.get(PRIORITY_KEY, 0))
        self._study = patience(lambda: open_study(name, settings, space, identity, storage, self._folder))
        self.shared = SharedStudy(self._study, patience)
        self.token = str(patience(lambda: self._study.user_attrs[TOKEN]))
        self._workers = None if self._folder is None else Workers(self._folder / WORKERS, self._beat)
        self._paused: set[int] = set()  # numbers of its trials that the study calls paused
        self._kept = Kept(self._folder, self.token)
        self.claims = Claims(self.shared, self._workers, self._kept.resume_from)
        self.checkpoints_folder = self._kept.states
        self.orders = StudyOrders(self.shared)
        self.rungs = StudyRungs(self.shared, settings, self.claims)
        try:
            self._begin(points)
        except BaseException:  # a notebook's process lives on, and would count as one that trains
            if self._workers is not None:
                self._workers.close()
            raise

    def _begin(self, points: Mapping[str, Mapping[str, Value]]) -> None:
        """Complete the study, and be one of its workers from now on."""
        self.shared.patience(lambda: keep_space(self._study, self._space))
        self.prior = self.shared.patience(self._earlier_trials)
        self._suggester = Suggester(self._study, self._settings, self._space, self.prior)
        self.shared.patience(self._tidy_up)
        if points:
            self.shared.locked(lambda: self._enqueue_all(points))
        if self._workers is not None:
            self._workers.start()

    def _beat(self, key: str, number: int) -> None:
        self._study.set_user_attr(key, number)

    # ---- properties of the study ---------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The study's name."""
        return self._study.study_name

    @property
    def total(self) -> int:
        """How many trials there will be: the requested ones, at most one for each point, and those beyond
        them."""
        return total_of(self._all(), self._settings, self._space)

    @property
    def over(self) -> int:
        """How many have ended, including those that were dropped and replaced by new ones."""
        return sum(item.state.is_finished() for item in self._all())

    @property
    def failed(self) -> int:
        """How many failed, including dropped ones."""
        return sum(state_of(item) == JobState.FAILED for item in self._all())

    @property
    def exhausted(self) -> bool:
        """Whether every point of the space has been tried."""
        return points_left(self._all(), self._space) == 0

    def link(self, run_id: str, store: str) -> None:
        """Store the search's MLflow run, the parent of each trial's run, and the store that it is in."""
        self.shared.patience(lambda: self._study.set_user_attr(TRACKED, (run_id, store)))

    @property
    def recorded_in(self) -> str:
        """The store in which the search has been recorded so far, without a password; "" if in none yet."""
        return str(self.shared.patience(lambda: self._study.user_attrs.get(TRACKED, ("", "")))[1])

    @property
    def material(self) -> dict[str, str]:
        """What the search began with: digests of data and model, and the model's dtype."""
        stored = self.shared.patience(lambda: self._study.user_attrs.get(MATERIAL, "{}"))
        return {str(key): str(value) for key, value in json.loads(stored).items()}

    def check_material(self, material: Mapping[str, str]) -> None:
        """Check that data and model are those that the search began with; errors as for
        ``identity.check_material``."""
        self.shared.locked(lambda: check_material(self._study, material))

    # ---- suggesting and adopting ---------------------------------------------------------------------------

    def ask(self, *, new: bool = True, above: int | None = None) -> Trial | None:
        """The next trial, or None if none is left: by priority, then orphaned ones, then those whose values
        are known, then new ones.

        Args:
            new: whether to include trials other than orphaned ones.
            above: only trials of a higher priority than this, as far as known beforehand.
        """
        trial = self.shared.locked(lambda: self._ask(new, above))
        if trial is not None:  # only now, so that a failed attempt leaves no owner
            self.claims.own.add(trial.number)
            self.revision += 1
        return trial

    def enqueue(self, values: Mapping[str, Value], *, request: str = "", **facts: Any) -> int:
        """Enqueue a trial with these values and return its number; arguments as for
        ``attributes.enqueue``."""
        request = request or uuid4().hex  # the same for all attempts
        self.revision += 1
        return self.shared.locked(lambda: enqueue(self._study, values, request=request, **facts))

    def _ask(self, new: bool, above: int | None = None) -> Trial | None:
        trials = self.shared.trials()
        if self._suggester.complete(trials):  # a process was killed while it suggested them
            trials = self.shared.trials()
        self.claims.notice(trials)
        waiting = [item for item in trials if new and item.state == TrialState.WAITING]
        known = [*self.claims.orphans(trials), *waiting]
        first = max(known, key=self._priority, default=None)  # among equal priorities, the first one
        if above is not None and (first is None or self._priority(first) <= above):
            return None
        by_number = first is not None and (first.state == TrialState.RUNNING or first is not waiting[0])
        if first is not None and (by_number or outside_of(first)):
            if first.state == TrialState.WAITING:  # else Optuna begins another, or suggests all values
                self._storage.set_trial_state_values(first._trial_id, TrialState.RUNNING)
            return self._take(self.shared.trials()[first.number])
        if not new or (not waiting and len(trials) >= total_of(trials, self._settings, self._space)):
            return None
        number = self._suggester.begin()
        return self._take(self.shared.trials()[number])

    def _priority(self, item: FrozenTrial) -> int:
        return priority_of(item, self._usual_priority)

    def _take(self, item: FrozenTrial) -> Trial:
        """Sign a trial, and suggest its missing values."""
        self.claims.sign(item)
        self._suggester.complete(self.shared.trials())
        return self._trial(self.shared.trials()[item.number])

    def _enqueue_all(self, points: Mapping[str, Mapping[str, Value]]) -> None:
        """Enqueue the points of the settings. Those added to a search that has suggested all its trials are
        in addition to them."""
        for request, values in points.items():
            trials = self.shared.trials()
            own = sum(not item.user_attrs.get(BEYOND) for item in trials)
            enqueue(self._study, values, beyond=own >= self._settings.trials, request=request)

    def _earlier_trials(self) -> list[FrozenTrial]:
        with self.shared.exclusive():
            return earlier_trials(self._study, self._settings, self._space, self._storage)

    # ---- reporting -----------------------------------------------------------------------------------------

    def report(self, trial: Trial, step: int, value: float) -> None:
        """Store an intermediate value; if the step was reported before, the first value is kept."""
        several = len(self._settings.objectives) > 1  # Optuna has intermediate values of one objective only
        if several or not math.isfinite(value):
            return

        def note(frozen: FrozenTrial, live: LiveTrial) -> None:
            if step not in frozen.intermediate_values:
                live.report(value, step)

        self.claims.change(trial.number, note)

    def tell(self, trial: Trial, result: JobResult) -> None:
        """Report state and value, once; a trial whose value is not finite is reported as failed in any case.

        If another process has adopted the trial because it considered this one dead, that process reports it.
        """
        self.claims.own.discard(trial.number)
        self.revision += 1
        if self.shared.locked(lambda: self._tell(trial, result)):
            self._kept.clear(trial, failed=result.state == JobState.FAILED)

    def _tell(self, trial: Trial, result: JobResult) -> bool:
        """Report the result, and return whether the trial was this process's own and has now ended."""
        frozen, live = self.shared.live(trial.number)
        if not self.claims.signed(frozen):
            return False
        if frozen.state.is_finished():  # reported by an attempt whose answer was lost
            return True
        state, values = result.state, result.values
        if state == JobState.FINISHED and not (values and all(map(math.isfinite, values))):
            state = JobState.FAILED
        for key, fact in ((STATE, state), (REASON, result.reason)):
            if fact:
                live.set_user_attr(key, fact)
        for text, amount in result.violations.items():
            if text not in frozen.constraints:
                live.set_constraint(text, amount)
        if state == JobState.FINISHED:
            self._study.tell(trial.number, values)
        else:  # the value of a pruned trial is the last one reported
            self._study.tell(trial.number, state=TrialState[STORED_AS[state].optuna])
        return True

    def pause(self, trial: Trial, checkpoint: Path | None = None) -> None:
        """Store that the trial is paused; the next process resumes it, from the checkpoint if there is
        one."""
        self._paused.add(trial.number)
        facts: dict[str, str] = {STATE: JobState.PAUSED}
        if checkpoint is not None:
            facts[CHECKPOINT] = str(checkpoint.absolute())
        self._note(trial, facts)

    def resume(self, trial: Trial) -> None:
        """Store that a paused trial runs again; does nothing if it was not paused."""
        if trial.number in self._paused:
            self._paused.discard(trial.number)
            self._note(trial, {STATE: JobState.RUNNING})

    def _note(self, trial: Trial, facts: Mapping[str, str]) -> None:
        def note(_: FrozenTrial, live: LiveTrial) -> None:
            for key, fact in facts.items():
                live.set_user_attr(key, fact)

        self.claims.change(trial.number, note)

    def withdraw_orders(self) -> None:
        """Withdraw the user's orders at the end of the search, unless other processes still train."""
        if not self.claims.others:
            self.orders.withdraw()

    def finished(self) -> list[JobResult]:
        """Results of all trials that have ended, in this run and earlier ones, except dropped trials."""
        over = [item for item in self._all() if item.state.is_finished()]
        if self._settings.failed == "drop":
            over = [item for item in over if item.state != TrialState.FAIL]
        return [result_of(item) for item in over]

    def close(self) -> None:
        """End this process's part: the trials that it has not ended can be adopted."""
        if self._workers is not None:
            self._workers.close()

    # ---- reading -------------------------------------------------------------------------------------------

    def _all(self) -> list[FrozenTrial]:
        return self.shared.patience(self.shared.trials)

    def _trial(self, frozen: FrozenTrial) -> Trial:
        outside = outside_of(frozen)
        overrides = overrides_of(self._space, frozen.params, outside)
        if PRIORITY in frozen.user_attrs:
            overrides = [*overrides, f"{PRIORITY_KEY}={frozen.user_attrs[PRIORITY]}"]
        resume_from, warm_from = self._kept.resume_from(frozen), self._kept.warm_from(frozen)
        beyond = " ".join(f"{key}={each.text}" for key, each in outside.items())
        return Trial(frozen.number, values_of(frozen), tuple(overrides), resume_from, warm_from, beyond)

    def _tidy_up(self) -> None:
        """Remove the files of ended trials; try failed ones again if the settings say so."""
        self._kept.tidy_up(self.shared.trials())
        if self._settings.failed == "retry":
            with self.shared.exclusive():
                self._retry(self.shared.trials())

    def _retry(self, trials: list[FrozenTrial]) -> None:
        tried = {item.user_attrs.get(RETRY_OF) for item in trials}
        for item in trials:
            if item.state == TrialState.FAIL and item.number not in tried and values_of(item):
                enqueue(
                    self._study,
                    item.params,
                    retry_of=item.number,
                    warm_from=self._kept.warm_from(item),
                    priority=item.user_attrs.get(PRIORITY),
                    outside=outside_of(item),
                )


def open_study(
    name: str,
    settings: SearchSettings,
    space: Space,
    identity: Identity,
    storage: BaseStorage,
    folder: Path | None,
) -> Study:
    """Open the study of a search, or create it.

    Raises:
        SearchError: the study has another space, it should be restarted while others train it, or
            ``search.prior`` cannot be used.
    """
    with study_lock(storage, name):
        known = name in optuna.get_all_study_names(storage)
        if not known or settings.fresh:  # before anything is made or deleted
            check_prior(name, settings, space, storage)
        if known:
            study = optuna.load_study(study_name=name, storage=storage)
            if not settings.fresh:
                check_problem(study, identity)
                sign(study, identity)
                return study
            _delete(study, storage, folder)
        return create(name, settings.objectives, identity, storage)


def check_restart(study: Study) -> None:
    """Check that no process of this host trains a study that will be restarted. Must not be called by one
    that does.

    Raises:
        SearchError: one trains it.
    """
    for item in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if lives_here(trainer_of(item)):
            raise SearchError(
                f"search.fresh=true: search.name={study.study_name} is being trained by another process",
                f"It has {Trial(item.number).name}, whose training would be lost.",
                "End that process first, or choose another search.name.",
            )


def _delete(study: Study, storage: BaseStorage, folder: Path | None) -> None:
    """Delete a study that is restarted, with its checkpoints; errors as for :func:`check_restart`."""
    check_restart(study)
    if folder is not None and (token := study.user_attrs.get(TOKEN)):
        remove_checkpoints(folder / "checkpoints" / token)
        remove_checkpoints(folder / WARM_WEIGHTS)
        for file in (*TABLES, *SPAN_FILES):
            (folder / file).unlink(missing_ok=True)
    optuna.delete_study(study_name=study.study_name, storage=storage)


def suggest_jobs(command: SearchCommand) -> list[JobSpec]:
    """The jobs that a search would train if none of its results were known, for benchmarks and plans. Nothing
    is stored.

    Raises:
        InputError: the sampler does not support the space, a value is wrong, ``search.prior`` cannot be used,
            or the constraints leave no job.
    """
    quiet()
    search = replace(command.settings.search, fresh=False)
    identity = identify(command.space, command.base, command.settings)
    memory = in_memory()
    if search.prior is not None:
        there = existing_storage(search.storage, command.settings.tracking.root)
        study = create(search.name or identity.name, search.objectives, identity, memory)
        earlier_trials(study, command.settings.search, command.space, there)  # which it stores
    source = StudyTrials(search, command.space, identity, memory)
    jobs = []
    while (trial := source.ask()) is not None:
        job = command.make_job(trial)
        rejected = rejection(job, search)
        if rejected is None:
            jobs.append(job)
        else:
            source.tell(trial, rejected)
    if not jobs:
        raise SearchError(
            f"search.constraints: {' and '.join(map(str, search.limits))}",
            f"Of {counted(source.over, 'suggestion')}, none satisfies them.",
            "Change the constraints or the search space.",
        )
    return jobs
