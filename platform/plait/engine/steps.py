"""The samples and the learning rate of each optimiser step of a job, as pure functions of its number.

The training samples form an endless stream: one seeded permutation of the split after another. A global
batch is the next slice of that stream, so it may hold the end of one epoch and the start of the next.
It does not depend on the packing, and any step can be computed without the ones before it. The rate is
constant, or decays linearly or by a cosine, after a linear warm-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import cos, pi

import numpy as np

from plait.core.errors import DataError
from plait.core.jobs import JobSpec, TrainSpec
from plait.core.plans import GlobalBatch, SplitName
from plait.core.samples import Int64, Split

_PERMUTATION = 0x50_6C_61_69_74  # sets this stream of random numbers apart from others of the same seed


@lru_cache(maxsize=256)
def permutation(seed: int, epoch: int, count: int) -> Int64:
    """The order of ``count`` samples in one epoch (count,).

    Made from a bit generator's raw output, which NumPy promises never to change; its
    ``Generator.permutation`` carries no such promise.
    """
    source = np.random.PCG64(np.random.SeedSequence([_PERMUTATION, seed, epoch]))
    keys = np.asarray(source.random_raw(count), dtype=np.uint64)
    order = np.argsort(keys, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


@dataclass(frozen=True, slots=True)
class DataOrder:
    """Which samples make up each global batch of a job.

    Attributes:
        samples: size of the training split.
        stream: samples of the whole budget; the last global batch takes what is left.
    """

    seed: int
    samples: int
    batch: int
    stream: int

    @classmethod
    def of(cls, train: TrainSpec, samples: int) -> DataOrder:
        """The order of a job over a split of ``samples`` samples.

        Raises:
            DataError: the split is empty.
        """
        if samples < 1:
            raise DataError("training split of 0 samples", "A job needs at least one training sample.")
        if train.steps is not None:
            stream = train.steps * train.global_batch
        else:
            assert train.epochs is not None  # TrainSpec holds exactly one of the two
            stream = max(1, round(train.epochs * samples))
        return cls(train.seed, samples, train.global_batch, stream)

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole budget."""
        return -(-self.stream // self.batch)

    def at(self, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Samples of ``step`` (counted from 1) and, for each, how often it had come before.

        Raises:
            IndexError: no such step in the budget.
        """
        if not 1 <= step <= self.steps:
            raise IndexError(f"step {step} of a budget of {self.steps}")
        first = (step - 1) * self.batch
        positions = range(first, min(first + self.batch, self.stream))
        draws = tuple(at // self.samples for at in positions)
        samples = tuple(
            int(permutation(self.seed, draw, self.samples)[at % self.samples])
            for at, draw in zip(positions, draws, strict=True)
        )
        return samples, draws


def training_batch(job: JobSpec, order: DataOrder, split: Split, step: int) -> GlobalBatch:
    """The global batch of one optimiser step, with its loss weight: 1 / labelled tokens of the whole.

    A batch without any labelled token has weight 0: its loss is 0 and its gradient nothing.
    """
    samples, draws = order.at(step)
    return _batch(job.name, split, step, samples, draws, "train")


def validation_batch(job: JobSpec, split: Split, step: int) -> GlobalBatch:
    """The whole validation split as one batch, to be evaluated after ``step`` optimiser steps."""
    samples = tuple(range(len(split)))
    return _batch(job.name, split, step, samples, (0,) * len(samples), "validation")


def _batch(
    job: str, split: Split, step: int, samples: tuple[int, ...], draws: tuple[int, ...], name: SplitName
) -> GlobalBatch:
    index = np.asarray(samples, dtype=np.int64)
    starts, stops = split.offsets[index], split.offsets[index + 1]
    labelled = sum(int(np.count_nonzero(split.labels[a:b])) for a, b in zip(starts, stops, strict=True))
    return GlobalBatch(
        job=job,
        step=step,
        samples=samples,
        draws=draws,
        lengths=tuple(int(length) for length in stops - starts),
        loss_weight=1.0 / labelled if labelled else 0.0,
        split=name,
    )


def warmup_steps(train: TrainSpec, steps: int) -> int:
    """Warm-up in whole steps: a value below 1 is a share of all ``steps``."""
    wanted = train.warmup_steps * steps if train.warmup_steps < 1 else train.warmup_steps
    return min(round(wanted), steps)


def learning_rate(train: TrainSpec, step: int, steps: int) -> float:
    """Rate of optimiser step ``step`` of ``steps``, counted from 1.

    Step s of W warm-up steps has s / W of the peak. Afterwards the share of the remaining budget that is
    already spent before this step sets the decay, so the first step after the warm-up has the peak and
    the last one is still above zero: no step is without effect.
    """
    warmup = warmup_steps(train, steps)
    if step <= warmup:
        return train.lr * step / warmup
    spent = (step - 1 - warmup) / (steps - warmup)
    match train.schedule:
        case "constant":
            return train.lr
        case "linear":
            return train.lr * (1.0 - spent)
        case "cosine":
            return train.lr * 0.5 * (1.0 + cos(pi * spent))
