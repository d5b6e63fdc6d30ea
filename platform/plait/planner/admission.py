"""Which jobs train now (mLoRA §3.4): priority, then arrival, as far as predicted memory goes.

Pure functions over plain data. They are asked at the end of an iteration; a job that has to make room is
preempted: saved, and resumed later from where it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from plait.core.errors import CapacityError, ConfigError
from plait.cost.memory import MemoryModel, MemoryShape


class Needs(Protocol):
    """What the memory of a group depends on, of each of its jobs."""

    @property
    def adapter_bytes(self) -> int:
        """Exact bytes of its adapter: masters, gradients, moments, copies."""

    @property
    def rank(self) -> int:
        """The rank of its adapter."""


@dataclass(frozen=True, slots=True)
class Applicant:
    """One job that wants to train.

    Attributes:
        arrival: order of submission; a paused job keeps its own.
        running: it trains at present.
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
        started: of those, the ones that did not run before.
        preempted: ran before and must make room.
        waiting: did not run and still do not.
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
        model: fitted; its margin is included.
        keep_up_to: longest sample that keeps its attention probabilities for backward.
    """

    model: MemoryModel
    base_bytes: int
    capacity: int
    longest: int
    keep_up_to: float = math.inf

    def __call__(self, jobs: Sequence[Needs]) -> float:
        """Base and adapters, and the heaviest microbatch that may come: full, labelled, largest rank, of
        samples as long as they can be and still keep their attention probabilities."""
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

    Jobs are taken by priority, then arrival; one that does not fit beside those before it is passed over,
    and later ones may use the room. A job passed over comes first again next time, so what took its room
    is preempted as soon as it fits: no job waits for ever behind later ones.

    Args:
        predict: peak bytes of a group; must not fall when a job joins.
        max_jobs: most jobs at once; None leaves it to memory.

    Raises:
        ConfigError: two jobs of one name.
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
    """A job that would never be admitted is refused at once.

    Raises:
        CapacityError: naming the job, what it needs and what there is.
    """
    needed = predict([job])
    if needed > available:
        raise CapacityError(
            f"job {job.name} needs {needed / 2**30:.2f} GiB",
            f"{available / 2**30:.2f} GiB may be used.",
            "Lower engine.capacity, adapter.rank or model.max_length, raise planner.memory_share, or "
            "turn on engine.checkpointing.",
        )
