"""What a search will put through the model: its jobs' global batches, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plait.engine.catalogue import DataCatalogue
from plait.engine.order import DataOrder, training_batch
from plait.errors import CapacityError
from plait.jobs import JobSpec
from plait.plans import GlobalBatch

MOST_STEPS = 64  # optimiser steps of each job that are planned sample by sample


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs with the global batches that are planned.

    Attributes:
        jobs: in the order in which they are admitted.
        batches: each job's first global batches, at most ``MOST_STEPS``.
        steps: optimiser steps of each job's whole budget.
        longest: tokens of each job's longest sample, validation included.
        labelled_share: share of the planned tokens that count in the loss.
    """

    jobs: tuple[JobSpec, ...]
    batches: Mapping[str, tuple[GlobalBatch, ...]]
    steps: Mapping[str, int]
    longest: Mapping[str, int]
    labelled_share: float

    @classmethod
    def of(cls, jobs: Sequence[JobSpec], data: DataCatalogue) -> Workload:
        """The workload of jobs.

        Raises:
            DataError: a job has no training sample.
        """
        ordered = sorted(jobs, key=lambda job: -job.train.priority)
        batches, steps, longest, tokens, labelled = {}, {}, {}, 0, 0
        for job in ordered:
            sets = data.of(job.data)
            order = DataOrder.of(job.train, len(sets.train))
            steps[job.name] = order.steps
            longest[job.name] = max(int(s.lengths.max(initial=0)) for s in (sets.train, sets.validation))
            planned = range(1, min(order.steps, MOST_STEPS) + 1)
            own = tuple(training_batch(job, order, sets.train, step) for step in planned)
            counted = sets.train.labelled
            tokens += sum(sum(batch.lengths) for batch in own)
            labelled += sum(int(counted[np.asarray(batch.samples)].sum()) for batch in own)
            batches[job.name] = own
        return cls(tuple(ordered), batches, steps, longest, labelled / tokens)

    @property
    def truncated(self) -> bool:
        """Whether some job has more steps than are planned."""
        return any(self.steps[name] > len(own) for name, own in self.batches.items())

    def scale(self, names: Sequence[str]) -> float:
        """All steps of these jobs over those of them that are planned."""
        planned = sum(len(self.batches[name]) for name in names)
        return sum(self.steps[name] for name in names) / planned

    def named(self, names: Sequence[str]) -> list[JobSpec]:
        """These jobs."""
        return [job for job in self.jobs if job.name in names]

    def step_lengths(self, names: Sequence[str]) -> list[int]:
        """Lengths of every planned sample of these jobs."""
        return [length for name in names for batch in self.batches[name] for length in batch.lengths]

    def check_fits(self, capacity: int, where: str) -> None:
        """Every sample fits into a microbatch of ``capacity`` tokens.

        Raises:
            CapacityError: naming job, length and where it should have fitted.
        """
        for name, length in self.longest.items():
            if length > capacity:
                raise CapacityError(
                    f"job {name} has a sample of {length} tokens",
                    f"{where} takes at most {capacity} tokens at once.",
                    "Drop or cut long samples (data.overlong, model.max_length), or use larger devices.",
                )
