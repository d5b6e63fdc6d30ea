"""Reads a search from its stored study: states, results, objectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from plait.core.errors import StorageError
from plait.core.lifecycle import JobState
from plait.core.objectives import Objective
from plait.core.rungs import Share, step_of
from plait.core.settings import TrackingSettings
from plait.core.space import Value
from plait.search.attributes import REASON, result_of, state_of
from plait.search.ownership import host_name, lives_here, this_host, trainer_of
from plait.search.points import outside_of, values_of
from plait.search.recorded import recorded_command
from plait.search.results import SearchEnd, describe_point, short
from plait.search.stopper import RUNG_METRIC, RUNGS, STEPS
from plait.search.storage import JOURNAL, missing_file, open_storage, quiet
from plait.search.trials import Trial
from plait.tracking.leaderboard import JobRecord, Leaderboard
from plait.tracking.location import locate, sqlite_in
from plait.utils.addresses import redact
from plait.utils.counts import counted

if TYPE_CHECKING:
    from plait.tracking.results import SearchResult

MOST_LINES = 40  # most live trials that are listed
ORDER = {state: place for place, state in enumerate(JobState)}  # in which states are counted


class NoStudyError(StorageError):
    """There is no study with this name, or its file is missing."""


def stored_study(storage: str | None, root: Path, name: str) -> optuna.Study:
    """Load a study for reading, without creating anything.

    Raises:
        NoStudyError: it does not exist.
        StorageError: its storage does not answer.
    """
    where = redact(storage or str(root / JOURNAL))
    if "***" in (storage or ""):
        raise StorageError(where, "The study's address contains a password, which Plait does not store.")
    if (missing := missing_file(storage, root)) is not None:
        raise NoStudyError(where, f"The study's file {missing} was not found.")
    opened = open_storage(storage, root)
    if name not in optuna.get_all_study_names(opened):
        raise NoStudyError(where, f"The study {name} is no longer in its storage.")
    return optuna.load_study(study_name=name, storage=opened)


@dataclass(frozen=True, slots=True)
class TrialStanding:
    """One trial.

    Attributes:
        state: its state; ORPHANED if its worker on this host is dead, which is not known for other hosts.
        host: the other host whose worker has it, training or paused; "" otherwise.
        step: step of its last report; 0 if there is none.
        reported: the value of ``metric`` that was reported then.
        values: values of the searched keys, as far as suggested, and of those outside the space.
        outside: its settings outside the search space, as overrides; "" if there are none.
        reason: why it ended as it did.
        metric: what was reported: the objective, or the metric of rungs.
    """

    number: int
    state: JobState
    host: str
    step: int
    reported: float | None
    values: Mapping[str, Value]
    reason: str
    outside: str
    metric: str

    def __str__(self) -> str:
        parts = [f"{Trial(self.number).name}  {self.state:<8}"]
        if self.reported is not None:
            label = self.metric.replace("/", " ").replace("_", " ")
            parts.append(f"{label} {self.reported:.6g} at step {self.step}".lstrip())
        parts += [f"{key}={short(value)}" for key, value in self.values.items()]
        return "  ".join([*parts, "(outside the search space)"] if self.outside else parts).rstrip()


@dataclass(frozen=True, slots=True)
class Standing:
    """The present state of a search: its trials by number, the results of those that have ended, and its
    objectives."""

    trials: tuple[TrialStanding, ...]
    result: SearchEnd
    objectives: tuple[Objective, ...]

    @property
    def elsewhere(self) -> dict[str, int]:
        """How many trials belong to workers on other hosts, by host."""
        return dict(Counter(trial.host for trial in self.trials if trial.host))

    def describe(self) -> list[str]:
        """Counts, the best trial, and a line for each trial that has begun and not ended."""
        if not self.trials:
            return ["It has no trials yet."]
        here = sorted((each for each in self.trials if not each.host), key=lambda each: ORDER[each.state])
        counts = Counter(trial.state for trial in here)
        parts = [f"{number} {state}" for state, number in counts.items()]
        away = Counter((trial.host, trial.state) for trial in self.trials if trial.host)
        parts += [f"{number} {state} on host {host}" for (host, state), number in away.items()]
        lines = [f"{counted(len(self.trials), 'trial')}: {', '.join(parts)}."]
        if front := self.result.front(self.objectives):
            which = "Best" if len(self.objectives) == 1 else f"First of {len(front)} on the Pareto front"
            lines.append(f"{which}: {describe_point(front[0], self.objectives)}")
        live = [trial for trial in self.trials if not trial.state.ended and trial.state != JobState.QUEUED]
        lines += [f"  {trial}" for trial in live[:MOST_LINES]]
        return [*lines, f"  and {len(live) - MOST_LINES} more"] if len(live) > MOST_LINES else lines

    def facts(self) -> dict[str, Any]:
        """The same as plain data for programs."""
        objectives = {result.trial: list(result.values) for result in self.result.finished}
        jobs = [
            {
                "trial": trial.number,
                "name": Trial(trial.number).name,
                "state": trial.state,
                "host": trial.host,
                "reported": trial.reported,
                "metric": trial.metric if trial.reported is not None else "",
                "reported_step": trial.step if trial.reported is not None else None,
                "parameters": dict(trial.values),
                "outside": trial.outside,
                "objectives": objectives.get(trial.number, []),
                "reason": trial.reason,
            }
            for trial in self.trials
        ]
        return {"trials": len(self.trials), "ended": len(self.result.finished), "jobs": jobs}


def read_standing(study: Study) -> Standing:
    """The present state of a study's search. Must not be called by a process that trains it."""
    trials = study.get_trials(deepcopy=False)
    hosts = hosts_of(trials)
    objectives = _objectives(study)
    at_rungs = str(study.user_attrs.get(RUNG_METRIC, ""))
    found = []
    for item, host in zip(trials, hosts, strict=True):
        found.append(_trial(item, host, objectives[0].metric if item.intermediate_values else at_rungs))
    result = SearchEnd(tuple(result_of(item) for item in trials if item.state.is_finished()))
    return Standing(tuple(found), result, objectives)


def _trial(item: FrozenTrial, host: str, metric: str) -> TrialStanding:
    state = state_of(item)
    if state == JobState.RUNNING and not host and not lives_here(trainer_of(item)):
        state = JobState.ORPHANED
    reported = item.intermediate_values or {
        int(step): value for step, value in item.user_attrs.get(RUNGS, {}).items()
    }
    last = max(reported, default=0)
    step = step_of(Share(last), item.user_attrs[STEPS]) if STEPS in item.user_attrs else last
    reason = str(item.user_attrs.get(REASON, ""))
    outside = " ".join(f"{key}={each.text}" for key, each in outside_of(item).items())
    values = item.system_attrs.get("fixed_params", {}) | values_of(item)  # also of one that is queued
    return TrialStanding(item.number, state, host, step, reported.get(last), values, reason, outside, metric)


def _objectives(study: Study) -> tuple[Objective, ...]:
    names = study.metric_names or [f"objective {at}" for at, _ in enumerate(study.directions, 1)]
    pairs = zip(names, study.directions, strict=True)
    return tuple(Objective(name, direction.name.lower()) for name, direction in pairs)


def hosts_of(trials: Sequence[FrozenTrial]) -> tuple[str, ...]:
    """By number, the other host whose worker has a trial, running or paused; "" for all others. This host
    before a reboot does not count as another one."""
    here = host_name(this_host())
    owners = [trainer_of(item) if item.state == TrialState.RUNNING else None for item in trials]
    names = ["" if owner is None else host_name(owner.host) for owner in owners]
    return tuple("" if name == here else name for name in names)


def board_of_study(settings: TrackingSettings, name: str) -> SearchResult | None:
    """What the study knows about a search that is recorded in this store: states, values and objectives, but
    no losses, tokens or seconds. None if this search was not begun in the folder of the runs.

    Raises:
        StorageError: the study does not answer.
    """
    from plait.tracking.results import SearchResult  # MLflow is slow to import

    location = locate(settings)
    recorded = recorded_command(location.root, name)
    if recorded is None or (recorded.store or sqlite_in(location.root)) != location.uri:
        return None
    quiet()
    standing = read_standing(stored_study(recorded.storage, location.root, name))
    first, *others = standing.objectives
    board = Leaderboard(first.direction, len(standing.trials), others=tuple(others))
    for trial in standing.trials:
        job = Trial(trial.number).name
        known = JobRecord(job, trial.number, trial.values, trial.state, outside=trial.outside)
        board.add(replace(known, searched_only=True))
    for result in standing.result.finished:
        board.jobs[result.job].parameters = result.parameters
        board.take_result(result)
    return SearchResult(
        name=name,
        state=JobState.FINISHED if recorded.finished else JobState.PAUSED,
        objectives=standing.objectives,
        run_id="",
        experiment_id="",
        location=location,
        records=tuple(board.ordered()),
    )
