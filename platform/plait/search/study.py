"""An Optuna study as a source of trials: ask, tell, and going on after an interruption."""

from __future__ import annotations

import json
import math
from collections import deque
from pathlib import Path

import optuna
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from plait.errors import SearchError
from plait.search.feasibility import check_sampler, grid_size
from plait.search.identity import Identity, difference
from plait.search.samplers import distributions, make_sampler, one_torch_thread
from plait.search.space import Space
from plait.search.trials import Finished, Outcome, Trial
from plait.settings import SearchSettings

PROBLEM = "plait.problem"  # study: what is searched, as JSON
REASON = "plait.reason"  # trial: why it ended as it did
RUN_ID = "mlflow.run_id"  # study and trial: the MLflow run
CHECKPOINT = "plait.checkpoint"  # trial: where its state was saved when it was cut short


class StudyTrials:
    """Trials drawn by Optuna and kept in its storage.

    Trials that a run left behind as RUNNING, killed or interrupted, are taken up first, under their own
    numbers and with their own values: left alone they would neither end nor leave the sampler in peace.

    Raises:
        SearchError: the sampler cannot do the space, or the study has another one.
    """

    def __init__(
        self, settings: SearchSettings, space: Space, identity: Identity, storage: BaseStorage
    ) -> None:
        check_sampler(settings, space)
        self._settings = settings
        self._space = space
        self._distributions = distributions(space)
        self._study = _open_study(settings, identity, storage)
        left = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        self._left_over = deque(self._trial(item) for item in left)

    @property
    def name(self) -> str:
        """The study's name."""
        return self._study.study_name

    @property
    def total(self) -> int:
        """How many trials there are to be: as asked for, and at most the points of a grid."""
        wanted = self._settings.trials
        return min(wanted, grid_size(self._space)) if self._settings.sampler == "grid" else wanted

    @property
    def left_over(self) -> int:
        """How many trials an earlier run left behind."""
        return len(self._left_over)

    def link(self, run_id: str) -> None:
        """Keep the search's MLflow run, below which each trial's run bears the trial's number."""
        self._study.set_user_attr(RUN_ID, run_id)

    def ask(self) -> Trial | None:
        """The next trial, or None when all have been drawn; first those that were cut short."""
        if self._left_over:
            return self._left_over.popleft()
        drawn = len(self._study.get_trials(deepcopy=False))
        if drawn >= self.total:
            return None
        self._study.sampler = make_sampler(self._settings, self._space, drawn)
        with one_torch_thread(self._settings.sampler):
            asked = self._study.ask(self._distributions)
        return self._trial(self._study.get_trials(deepcopy=False)[asked.number])

    def report(self, trial: Trial, step: int, value: float) -> None:
        """Keep an intermediate value; of a step that was reported before, the first stands."""
        frozen, live = self._live(trial)
        if math.isfinite(value) and step not in frozen.intermediate_values:
            live.report(value, step)

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        """Tell the state and the value; a value that is not finite is a failure, whatever it was called."""
        _, live = self._live(trial)
        for key, fact in ((REASON, outcome.reason), (RUN_ID, outcome.run_id)):
            if fact:
                live.set_user_attr(key, fact)
        value = outcome.value if outcome.value is not None and math.isfinite(outcome.value) else None
        if outcome.state == "complete" and value is not None:
            self._study.tell(trial.number, value)
        elif outcome.state == "pruned":  # its value is the last one reported
            self._study.tell(trial.number, state=TrialState.PRUNED)
        else:
            self._study.tell(trial.number, state=TrialState.FAIL)

    def put_back(self, trial: Trial, checkpoint: Path | None) -> None:
        """Leave the trial RUNNING: the next run takes it up, from the checkpoint if there is one."""
        if checkpoint is not None:
            self._live(trial)[1].set_user_attr(CHECKPOINT, str(checkpoint.absolute()))

    def finished(self) -> list[Finished]:
        """All trials that are over, of this run and of earlier ones."""
        trials = self._study.get_trials(deepcopy=False)
        return [Finished(self._trial(item), _outcome(item)) for item in trials if item.state.is_finished()]

    def _trial(self, frozen: FrozenTrial) -> Trial:
        values = {key: frozen.params[key] for key in self._distributions}
        saved = frozen.user_attrs.get(CHECKPOINT)
        resume_from = Path(saved) if saved and Path(saved).exists() else None
        return Trial(frozen.number, values, tuple(self._space.overrides(values)), resume_from)

    def _live(self, trial: Trial) -> tuple[FrozenTrial, optuna.trial.Trial]:
        frozen = self._study.get_trials(deepcopy=False)[trial.number]
        return frozen, optuna.trial.Trial(self._study, frozen._trial_id)


def _open_study(settings: SearchSettings, identity: Identity, storage: BaseStorage) -> optuna.Study:
    name = settings.name or identity.name
    known = name in optuna.get_all_study_names(storage)
    if known and settings.fresh:
        optuna.delete_study(study_name=name, storage=storage)
        known = False
    if not known:
        direction = StudyDirection[settings.direction.upper()]
        study = optuna.create_study(study_name=name, storage=storage, direction=direction)
        study.set_user_attr(PROBLEM, identity.problem_json)
        return study
    study = optuna.load_study(study_name=name, storage=storage)
    _check_problem(study, identity)
    return study


def _check_problem(study: optuna.Study, identity: Identity) -> None:
    stored = study.user_attrs.get(PROBLEM)
    remedy = "Choose another search.name, or start it anew with search.fresh=true."
    if stored is None:
        raise SearchError(f"search.name={study.study_name}", "Plait did not make this study.", remedy)
    lines = difference(json.loads(stored), json.loads(identity.problem_json))
    if lines:
        raise SearchError(
            f"search.name={study.study_name}: the study belongs to another search", "\n".join(lines), remedy
        )


def _outcome(item: FrozenTrial) -> Outcome:
    reason, run_id = str(item.user_attrs.get(REASON, "")), str(item.user_attrs.get(RUN_ID, ""))
    if item.state == TrialState.COMPLETE:
        return Outcome("complete", item.value, reason, run_id)
    return Outcome("pruned" if item.state == TrialState.PRUNED else "failed", None, reason, run_id)
