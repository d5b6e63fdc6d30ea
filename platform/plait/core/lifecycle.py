"""The states of a job and how it ended: one enum and one result, from the worker to MLflow and the report.

In a search one trial is one job. Optuna and MLflow know fewer states; ``STORED_AS`` is the one mapping.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType


class JobState(StrEnum):
    """Where a job stands. The value is the word that every view, tag and report shows.

    ``PAUSED``: left its slot by order, at a rung or for a job of higher priority; its checkpoint is on disk.
    ``PRUNED``: ended by a stopping rule. ``STOPPED``: ended by the user. ``ORPHANED``: running by name, while
    its worker is dead.
    """

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    PRUNED = "pruned"
    STOPPED = "stopped"
    FAILED = "failed"
    ORPHANED = "orphaned"

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of the job."""
        return self in ENDED


ENDED = frozenset({JobState.FINISHED, JobState.PRUNED, JobState.STOPPED, JobState.FAILED})


@dataclass(frozen=True, slots=True)
class StoredAs:
    """What Optuna and MLflow call a state; the state itself stands beside it, as an attribute or tag."""

    optuna: str
    mlflow: str


STORED_AS = MappingProxyType(
    {
        JobState.QUEUED: StoredAs("WAITING", "SCHEDULED"),
        JobState.RUNNING: StoredAs("RUNNING", "RUNNING"),
        JobState.PAUSED: StoredAs("RUNNING", "RUNNING"),
        JobState.ORPHANED: StoredAs("RUNNING", "RUNNING"),
        JobState.FINISHED: StoredAs("COMPLETE", "FINISHED"),
        JobState.PRUNED: StoredAs("PRUNED", "KILLED"),
        JobState.STOPPED: StoredAs("PRUNED", "KILLED"),
        JobState.FAILED: StoredAs("FAIL", "FAILED"),
    }
)


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended. The engine fills in what it measured; the search adds ``values`` and may decide on
    another state (a finished job without its objective has failed).

    Attributes:
        job: its name.
        state: one that has ended, or PAUSED where the process was interrupted and the job can be resumed.
        reason: in words; "" where the state says all.
        step: optimiser steps done.
        eval_loss: of the last evaluation, or of the best one where its weights are kept.
        tokens: real tokens trained on.
        device_seconds: attributed to the job.
        completion_seconds: since its submission, earlier processes included.
        adapter: PEFT folder of a finished job.
        checkpoint: folder from which an interrupted job resumes.
        values: the objectives, in order; empty where they were not measured.
        violations: by how much each constraint is broken; 0 or less keeps it.
        run_id: MLflow's id of the job's run; "" while unknown.
    """

    job: str
    state: JobState
    reason: str = ""
    step: int = 0
    eval_loss: float | None = None
    tokens: int = 0
    device_seconds: float = 0.0
    completion_seconds: float = 0.0
    adapter: Path | None = None
    checkpoint: Path | None = None
    values: tuple[float, ...] = ()
    violations: tuple[float, ...] = ()
    run_id: str = ""

    @property
    def objective(self) -> float | None:
        """The first objective; None where it was not measured."""
        return self.values[0] if self.values else None

    @property
    def feasible(self) -> bool:
        """Whether every constraint is kept."""
        return all(amount <= 0 for amount in self.violations)
