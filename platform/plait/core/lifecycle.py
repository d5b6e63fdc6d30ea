"""The states of a job and how it ended: one enum and one result, from the worker to MLflow and the report.

In a search one trial is one job. Optuna and MLflow know fewer states; ``STORED_AS`` is the one mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any


class JobState(StrEnum):
    """The state of a job. Its value is the word that every view, tag and report shows.

    ``PAUSED``: it left its slot by the user's order, at a rung, for a job of higher priority or because its
    process was interrupted; its checkpoint is on disk. ``PRUNED``: ended by a stopping rule. ``STOPPED``:
    ended by the user. ``INFEASIBLE``: not trained, because its own settings break a constraint. ``ORPHANED``:
    its worker died while it ran; another worker adopts it.

    A search's run in MLflow has one of RUNNING, PAUSED, FINISHED and FAILED. A new state also goes into
    ``ENDED`` and ``STORED_AS``, the styles in ``plait.terminal`` and the outcomes in ``plait_dashboards``.
    """

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    ORPHANED = "orphaned"
    FINISHED = "finished"
    PRUNED = "pruned"
    STOPPED = "stopped"
    INFEASIBLE = "infeasible"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether the job will not train again."""
        return self in ENDED


ENDED = frozenset(
    {JobState.FINISHED, JobState.PRUNED, JobState.STOPPED, JobState.INFEASIBLE, JobState.FAILED}
)


def described_state(state: JobState, reason: str) -> str:
    """A state, and why a paused job is paused: ``paused (at a rung)``."""
    return f"{state} ({reason})" if reason and state == JobState.PAUSED else str(state)


class PauseReason(StrEnum):
    """Why a job has no slot. The value is shown after the word "paused".

    ``LOST``: it fell back to its last checkpoint. ``MOVED``: it moves to other replicas, as it is. Like a
    preempted one, such a job resumes by itself.
    """

    AT_RUNG = "at a rung"
    BY_USER = "by the user"
    PREEMPTED = "preempted"
    LOST = "a process was lost"
    MOVED = "the replicas changed"


@dataclass(frozen=True, slots=True)
class StoredAs:
    """What Optuna and MLflow call a state; the state itself is stored with it, as an attribute or tag."""

    optuna: str
    mlflow: str


STORED_AS: Mapping[JobState, StoredAs] = MappingProxyType(
    {
        JobState.QUEUED: StoredAs("WAITING", "SCHEDULED"),
        JobState.RUNNING: StoredAs("RUNNING", "RUNNING"),
        JobState.PAUSED: StoredAs("RUNNING", "SCHEDULED"),
        JobState.ORPHANED: StoredAs("RUNNING", "KILLED"),
        JobState.FINISHED: StoredAs("COMPLETE", "FINISHED"),
        JobState.PRUNED: StoredAs("PRUNED", "KILLED"),
        JobState.STOPPED: StoredAs("PRUNED", "KILLED"),
        JobState.INFEASIBLE: StoredAs("PRUNED", "KILLED"),
        JobState.FAILED: StoredAs("FAIL", "FAILED"),
    }
)


def state_from_optuna(stored: str, noted: object = None) -> JobState:
    """The state of a trial that Optuna calls ``stored``.

    Args:
        stored: Optuna's name, such as "PRUNED".
        noted: the state that is stored with it; used only if Optuna calls that state ``stored``.
    """
    candidates = [state for state, names in STORED_AS.items() if names.optuna == stored]
    return next((state for state in candidates if state == noted), candidates[0])


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended; also its last event. The engine fills in what it measured; the search adds the
    objectives and may change the state (a finished job without its objective has failed).

    Attributes:
        state: one that has ended, or PAUSED if the process was interrupted and the job can be resumed.
        reason: in words; "" if the state says everything.
        eval_loss: that of the last evaluation, or of the best one if its weights are kept.
        device_seconds: device time attributed to the job.
        completion_seconds: time since its submission, earlier processes included; None if no engine of this
            process had the job, so that steps, tokens and seconds are not known here.
        adapter: PEFT folder of a finished job.
        checkpoint: folder from which an interrupted job resumes.
        values: the objectives, in order; empty if they were not measured.
        violations: by how much each constraint is broken, by its text; 0 or less means satisfied.
        trial: its number in the study; -1 outside a search.
        parameters: values of the searched keys.
    """

    job: str
    state: JobState
    step: int = 0
    reason: str = ""
    eval_loss: float | None = None
    tokens: int = 0
    device_seconds: float = 0.0
    completion_seconds: float | None = None
    adapter: Path | None = None
    checkpoint: Path | None = None
    values: tuple[float, ...] = ()
    violations: Mapping[str, float] = field(default_factory=dict)
    trial: int = -1
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def objective(self) -> float | None:
        """The first objective; None if it was not measured."""
        return self.values[0] if self.values else None

    @property
    def feasible(self) -> bool:
        """Whether every constraint is satisfied."""
        return all(amount <= 0 for amount in self.violations.values())
