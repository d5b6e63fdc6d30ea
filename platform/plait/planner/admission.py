"""Decides which jobs train now (mLoRA §3.4): by priority, then arrival, as far as predicted memory allows.

Pure functions over plain data, called at the end of an iteration. A job that must make room is preempted: it
is saved, and resumes later from the same point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from plait.core.errors import CapacityError, ConfigError
from plait.cost.memory import MemoryModel, MemoryShape


class Needs(Protocol):
    """What the memory of a group needs to know about each of its jobs."""

    @property
    def adapter_bytes(self) -> int:
        """Exact bytes of its adapter: master weights, gradients, moments, copies."""

    @property
    def rank(self) -> int:
        """The rank of its adapter."""


@dataclass(frozen=True, slots=True)
class Applicant:
    """One job that is ready to train.

    Attributes:
        arrival: order of submission; a paused job keeps its number.
        running: whether it is training now.
    """

    name: str
    priority: int
    arrival: int
    adapter_bytes: int
    rank: int
    running: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """The jobs that train in the next iteration.

    Attributes:
        started: those of them that did not run before.
        preempted: jobs that ran before and must make room.
        waiting: jobs that did not run and still do not.
        bytes: predicted peak of the group.
    """

    training: tuple[str, ...]
    started: tuple[str, ...]
    preempted: tuple[str, ...]
    waiting: tuple[str, ...]
    bytes: float


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Predicted peak of a group of jobs on one device.

    Attributes:
        model: the fitted model; its margin is included.
        keep_up_to: longest sample that keeps its attention probabilities for backward.
    """

    model: MemoryModel
    base_bytes: int
    capacity: int
    longest: int
    keep_up_to: float = math.inf

    def __call__(self, jobs: Sequence[Needs]) -> float:
        """Bytes of base model and adapters, and of the heaviest possible microbatch: full, all labelled, of
        the largest rank, with the longest samples that still keep their attention probabilities."""
        static = self.base_bytes + sum(job.adapter_bytes for job in jobs)
        if not jobs:
            return float(static)
        length = int(min(self.longest, self.keep_up_to))
        full, rest = divmod(self.capacity, length)
        lengths = [length] * full + ([rest] if rest else [])
        rank = max(job.rank for job in jobs)
        shape = MemoryShape.of(lengths, ranks=rank, keep_up_to=self.keep_up_to)
        return self.model.safe_peak(shape, static=static)


def admit(
    applicants: Iterable[Applicant],
    *,
    available: float,
    predict: Callable[[Sequence[Applicant]], float],
    max_jobs: int | None = None,
) -> Admitted:
    """Choose the jobs of the next iteration.

    Jobs are admitted by priority, then arrival. One that does not fit in addition to those before it is
    passed over, and later ones may use the room. It is considered first again next time, and those that took
    its room are preempted as soon as it fits, so no job waits forever behind later ones.

    Args:
        predict: returns the peak bytes of a group; must not decrease when a job joins.
        max_jobs: most jobs at once; None leaves it to memory.

    Raises:
        ConfigError: two jobs have the same name.
        CapacityError: a job does not fit even alone.
    """
    ordered = sorted(applicants, key=lambda job: (-job.priority, job.arrival, job.name))
    if len({job.name for job in ordered}) < len(ordered):
        raise ConfigError("two jobs of one name", "Names of jobs must be unique.")
    chosen: list[Applicant] = []
    for job in ordered:
        check_fits_alone(job, available=available, predict=predict)
        if (max_jobs is None or len(chosen) < max_jobs) and predict([*chosen, job]) <= available:
            chosen.append(job)
    names = {job.name for job in chosen}
    return Admitted(
        training=tuple(job.name for job in chosen),
        started=tuple(job.name for job in chosen if not job.running),
        preempted=tuple(job.name for job in ordered if job.running and job.name not in names),
        waiting=tuple(job.name for job in ordered if not job.running and job.name not in names),
        bytes=predict(chosen),
    )


def check_fits_alone(
    job: Applicant, *, available: float, predict: Callable[[Sequence[Applicant]], float]
) -> None:
    """Check that a job can ever be admitted.

    Raises:
        CapacityError: it cannot; the message gives the bytes needed and available.
    """
    needed = predict([job])
    if needed > available:
        raise CapacityError(
            f"job {job.name} needs {needed / 2**30:.2f} GiB",
            f"{available / 2**30:.2f} GiB may be used.",
            "Lower engine.capacity, adapter.rank or model.max_length, raise planner.memory_share, or "
            "turn on engine.checkpointing.",
        )
