"""Whom the search loop speaks to: who trains the jobs, and who keeps and shows what happens."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Protocol

from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobState, PauseReason
from plait.core.messages import Event


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
