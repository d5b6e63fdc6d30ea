"""One iteration of a group: who takes part, what goes through the model, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.messages import Event, GroupStep, JobProgress, Notice
from plait.core.plans import GlobalBatch, Microbatch
from plait.engine.accounting import NANOSECONDS
from plait.engine.ledger import Outcome, Tally
from plait.engine.live import LiveJob
from plait.engine.packer import pack_step
from plait.engine.predictions import Expected


@dataclass(frozen=True, slots=True)
class Iteration:
    """What is to be trained.

    Attributes:
        jobs: that take part, by name.
        microbatches: their next global batches.
    """

    jobs: dict[str, LiveJob]
    microbatches: tuple[Microbatch, ...]


class Packer:
    """Makes the microbatches of a group.

    Args:
        capacity: most tokens of one.

    Attributes:
        repeats: whether packing the same again gives the same; False once the clock stopped the solver.
    """

    def __init__(self, capacity: int) -> None:
        self.repeats = True
        self._capacity = capacity
        self._said = False

    def iteration(self, jobs: Sequence[LiveJob]) -> Iteration:
        """The next global batch of each of these jobs."""
        return Iteration({job.name: job for job in jobs}, self.pack([job.next_batch() for job in jobs]))

    def pack(self, batches: Sequence[GlobalBatch]) -> tuple[Microbatch, ...]:
        """All of these global batches."""
        packed = pack_step(batches, capacity=self._capacity)
        self.repeats = self.repeats and packed.repeats
        return packed.microbatches

    def notices(self) -> list[Event]:
        """What is to be said of packings, once."""
        if self.repeats or self._said:
            return []
        self._said = True
        return [Notice("the time limit ended a packing: another run may pack its steps otherwise")]

    def group_step(
        self, group: str, number: int, iteration: Iteration, run: Outcome, expected: Expected, seconds: float
    ) -> GroupStep:
        """The event of an iteration that was taken."""
        return GroupStep(
            group=group,
            iteration=number,
            jobs=tuple(iteration.jobs),
            microbatches=run.microbatches,
            tokens=run.tokens,
            seconds=seconds,
            peak_bytes=run.peak_bytes,
            capacity=self._capacity,
            job_tokens=tuple(run.tallies[name].tokens for name in iteration.jobs),
            predicted_seconds=expected.seconds,
            predicted_bytes=expected.bytes,
            bytes_by_rule=expected.by_rule,
        )


def progress(job: LiveJob, tally: Tally, grad_norm: float, rate: float, seconds: float) -> JobProgress:
    """The event of a job's step that was taken in an iteration of ``seconds``."""
    return JobProgress(
        job=job.name,
        step=job.step,
        loss=tally.mean,
        grad_norm=grad_norm,
        lr=rate,
        tokens=job.cursor.tokens,
        device_seconds=job.cursor.device_ns / NANOSECONDS,
        tokens_per_s=tally.tokens / seconds if seconds > 0 else 0.0,
    )
