"""The global batches of a search's jobs, computed without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from plait.core.errors import CapacityError
from plait.core.jobs import JobSpec
from plait.core.plans import GlobalBatch
from plait.engine.catalogue import DataCatalogue
from plait.engine.steps import DataOrder, training_batch

MOST_STEPS = 64  # optimiser steps of a wave's jobs that are planned sample by sample
MOST_SAMPLES = 64_000  # of these steps, together: with huge batches, fewer steps are as alike
LEAST_STEPS = 8  # least planned steps of each phase of a wave that has many


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps in which the same jobs train together.

    Attributes:
        batches: each job's planned global batches; later ones are assumed to be like them.
    """

    batches: Mapping[str, tuple[GlobalBatch, ...]]
    steps: int

    @property
    def scale(self) -> float:
        """All steps divided by the planned ones."""
        return self.steps / len(next(iter(self.batches.values())))


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs with the global batches that are planned.

    Attributes:
        batches: each job's first global batches, at most ``most_steps``.
        longest: tokens of each job's longest sample, validation included.
        labelled_share: share of the planned tokens that count in the loss.
    """

    jobs: tuple[JobSpec, ...]
    batches: Mapping[str, tuple[GlobalBatch, ...]]
    steps: Mapping[str, int]
    longest: Mapping[str, int]
    longest_is: Mapping[str, str]
    labelled_share: float
    most_steps: int = MOST_STEPS

    @classmethod
    def of(cls, jobs: Sequence[JobSpec], data: DataCatalogue) -> Workload:
        """The workload of jobs.

        Raises:
            DataError: a job has no training sample.
        """
        ordered = sorted(jobs, key=lambda job: -job.train.priority)
        batches, steps, longest, longest_is, tokens, labelled = {}, {}, {}, {}, 0, 0
        affordable = MOST_SAMPLES // sum(job.train.global_batch for job in jobs)
        most = max(1, min(MOST_STEPS, affordable))
        for job in ordered:
            sets = data.of(job.data)
            order = DataOrder.over(job.train, sets.train)
            steps[job.name] = order.steps
            longest[job.name], longest_is[job.name] = max(
                (int(split.lengths[place]), f"row {split.rows[place]} of {name}")
                for name, split in (
                    ("its training data", sets.train),
                    ("its validation data", sets.validation),
                )
                for place in ([int(np.argmax(split.lengths))] if len(split) else [])
            )
            planned = range(1, min(order.steps, most) + 1)
            own = tuple(training_batch(job, order, sets.train, step) for step in planned)
            counted = sets.train.labelled
            tokens += sum(sum(batch.lengths) for batch in own)
            labelled += sum(int(counted[np.asarray(batch.samples)].sum()) for batch in own)
            batches[job.name] = own
        return cls(tuple(ordered), batches, steps, longest, longest_is, labelled / tokens, most)

    def phases(self, names: Sequence[str]) -> tuple[Phase, ...]:
        """The phases of these jobs training together: a phase ends when a job does, and the others
        continue."""
        ends = sorted({self.steps[name] for name in names})
        most = min(self.most_steps, max(LEAST_STEPS, MOST_STEPS // len(ends)))
        found = []
        for start, end in pairwise([0, *ends]):
            planned = min(end - start, most)
            live = [name for name in names if self.steps[name] > start]
            found.append(Phase({name: self.batches[name][:planned] for name in live}, end - start))
        return tuple(found)

    def differing(self) -> dict[str, dict[str, Any]]:
        """By job, the values of the config keys that differ between jobs."""
        known = {job.name: job.parameters() for job in self.jobs}
        every = dict.fromkeys(key for each in known.values() for key in each)
        keys = [key for key in every if len({repr(each.get(key)) for each in known.values()}) > 1]
        return {name: {key: each.get(key) for key in keys} for name, each in known.items()}

    def named(self, names: Sequence[str]) -> list[JobSpec]:
        """The jobs with these names."""
        return [job for job in self.jobs if job.name in names]

    def check_fits(self, capacity: int, where: str) -> None:
        """Check that every sample fits into a microbatch of ``capacity`` tokens.

        Raises:
            CapacityError: one does not; the message names job, length and ``where`` it should fit.
        """
        for name, length in self.longest.items():
            if length > capacity:
                raise CapacityError(
                    f"job {name} has a sample of {length} tokens ({self.longest_is[name]})",
                    f"{where} takes at most {capacity} tokens at once.",
                    "Truncate long samples (model.max_length), or use larger devices.",
                )
