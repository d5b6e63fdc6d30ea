"""Trials, and the protocols that the search loop depends on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobResult, JobState, PauseReason
from plait.core.messages import Event
from plait.core.space import Value


@dataclass(frozen=True, slots=True)
class Trial:
    """One point to try.

    Attributes:
        number: in its study.
        values: of the searched keys.
        overrides: that set these keys, in Hydra's syntax.
        resume_from: state that an interrupted run saved of it.
        warm_from: folder with the weights that it begins with; None for fresh ones.
    """

    number: int
    values: Mapping[str, Value] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    resume_from: Path | None = None
    warm_from: Path | None = None

    @property
    def name(self) -> str:
        """The job's name."""
        return f"trial-{self.number:04d}"


class TrialSource(Protocol):
    """Suggests the trials and records how they ended."""

    @property
    def revision(self) -> int:
        """Rises when this process draws, enqueues or ends a trial."""

    @property
    def total(self) -> int:
        """How many trials there are to be."""

    @property
    def over(self) -> int:
        """How many of them are over."""

    @property
    def failed(self) -> int:
        """How many failed, those that are dropped among them."""

    def ask(self, *, new: bool = True, above: int | None = None) -> Trial | None:
        """The next trial, or None when none is left: by priority, then orphaned ones.

        Args:
            new: whether any but orphaned ones are asked for.
            above: only trials of a higher priority than this, as far as it is known beforehand.
        """

    def report(self, trial: Trial, step: int, value: float) -> None:
        """Keep the objective as it stands after ``step`` optimiser steps."""

    def tell(self, trial: Trial, result: JobResult) -> None:
        """The trial has ended."""

    def pause(self, trial: Trial, checkpoint: Path | None = None) -> None:
        """The trial left its slot; it resumes later, in another process from this checkpoint."""

    def resume(self, trial: Trial) -> None:
        """The trial has a slot, for the first time or again."""

    def adopted(self) -> set[int]:
        """Numbers of the trials that other workers have adopted from this one, each once."""

    def wait(self) -> bool:
        """Wait a moment for trials that other processes train, or leave; False where there are none."""

    def withdraw_orders(self) -> None:
        """The search has ended here: withdraw its user's orders, unless other processes train on."""

    def finished(self) -> list[JobResult]:
        """Results of all trials that have ended, in this run and in earlier ones."""


class Coordinator(Protocol):
    """What the loop needs of the engine."""

    def submit(
        self,
        job: JobSpec,
        *,
        resume_from: Path | None = None,
        warm_from: Path | None = None,
        rungs: Collection[int] = (),
        measured: bool = False,
    ) -> None:
        """Queue a job, fresh, with given weights or from a saved state, that waits at each of its rungs."""

    def cancel(self, job: str, reason: str, *, state: JobState = JobState.STOPPED) -> None:
        """End a job in this state at the next boundary."""

    def pause(self, job: str) -> None:
        """Save a job at the next boundary and give its slot away."""

    def resume(self, job: str, reason: PauseReason = PauseReason.BY_ORDER) -> None:
        """Resume a job that is paused for this reason."""

    def settle(self) -> Iterable[Event]:
        """The boundary between two iterations: end what was cancelled, pause what waits."""

    def stop(self) -> None:
        """At the next ``advance``, save every job and end it as paused."""

    def free_slots(self) -> int:
        """How many more jobs could be admitted now."""

    def advance(self) -> Iterable[Event]:
        """One iteration of the group."""


class Recorder(Protocol):
    """Who is shown and keeps what happens: tracking and terminal."""

    def start_job(self, job: JobSpec, trial: int) -> None:
        """A job is about to be submitted."""

    def handle(self, event: Event) -> None:
        """Something happened in the engine; of the end of a job, what the search decided."""

    def lose(self, job: str) -> None:
        """Another process trains the job from here on: nothing more is written of it."""

    def commit(self) -> None:
        """Return when all that was handed over survives a crash."""

    def run_id(self, job: str) -> str:
        """MLflow's id of the job's run; "" while it is not known."""
