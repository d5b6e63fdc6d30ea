"""How a search stands that nobody trains from here at the moment: what its study says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.study import Study
from optuna.trial import FrozenTrial

from plait.core.lifecycle import JobState
from plait.core.objectives import Objective
from plait.search.recorded import RecordedCommand
from plait.search.results import SearchResult, describe_point
from plait.search.stored import stored_study
from plait.search.trial_records import result_of, state_of, trainer_of
from plait.search.trials import Trial
from plait.search.workers import host_name, this_host

RUNNING = JobState.RUNNING


@dataclass(frozen=True, slots=True)
class Standing:
    """What a study says of its search.

    Attributes:
        states: of all trials, by number; those that run on another host are RUNNING.
        result: the trials that are over.
        objectives: of the search.
        hosts: by number: the other host whose worker signed a running trial; "" otherwise.
    """

    states: tuple[JobState, ...]
    result: SearchResult
    objectives: tuple[Objective, ...]
    hosts: tuple[str, ...]

    @property
    def elsewhere(self) -> dict[str, int]:
        """How many running trials workers on other hosts signed, by host."""
        return dict(Counter(filter(None, self.hosts)))

    def describe(self) -> list[str]:
        """In a few lines."""
        if not self.states:
            return ["It has no trials yet."]
        counts = Counter(self.states)
        parts = [f"{counts[state]} {state}" for state in JobState if counts[state] and state != RUNNING]
        parts += [f"{number} {RUNNING} on host {host}" for host, number in self.elsewhere.items()]
        lines = [f"{len(self.states)} trial{'s' if len(self.states) > 1 else ''}: {', '.join(parts)}."]
        if front := self.result.front(self.objectives):
            lines.append(f"Best: {describe_point(front[0], self.objectives)}")
        if self.elsewhere:
            lines.append(f"Ask on {' or '.join(self.elsewhere)} where that still trains.")
        return lines

    def facts(self) -> dict[str, Any]:
        """The same for programs."""
        jobs = [
            {
                "trial": number,
                "name": Trial(number).name,
                "state": state,
                "host": host,
            }
            for number, (state, host) in enumerate(zip(self.states, self.hosts, strict=True))
        ]
        ended = len(self.result.finished)
        return {"trials": len(self.states), "ended": ended, "jobs": jobs}


def read_standing(recorded: RecordedCommand, root: Path) -> Standing:
    """How a search stands, by its study.

    Args:
        recorded: its last command.
        root: folder of the runs.

    Raises:
        StorageError: the study is not there, or its storage does not answer.
    """
    study = stored_study(recorded.storage, root, recorded.name)
    trials = study.get_trials(deepcopy=False)
    hosts = hosts_of(trials)
    states = [state_of(item) for item in trials]
    orphaned = [state == RUNNING and not host for state, host in zip(states, hosts, strict=True)]
    return Standing(
        tuple(JobState.ORPHANED if alone else state for state, alone in zip(states, orphaned, strict=True)),
        SearchResult(tuple(result_of(item) for item in trials if item.state.is_finished())),
        _objectives(study),
        hosts,
    )


def _objectives(study: Study) -> tuple[Objective, ...]:
    names = study.metric_names or [f"objective {at}" for at, _ in enumerate(study.directions, 1)]
    pairs = zip(names, study.directions, strict=True)
    return tuple(Objective(name, direction.name.lower()) for name, direction in pairs)


def hosts_of(trials: Sequence[FrozenTrial]) -> tuple[str, ...]:
    """As in :class:`Standing`. What this host began before it was rebooted is not elsewhere."""
    here = host_name(this_host())
    owners = [trainer_of(item) if state_of(item) == RUNNING else None for item in trials]
    names = ["" if owner is None else host_name(owner.host) for owner in owners]
    return tuple("" if name == here else name for name in names)
