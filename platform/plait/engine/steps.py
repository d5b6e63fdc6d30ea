"""The samples and the learning rate of each optimiser step of a job, as pure functions of its number.

The training samples form an endless stream: one seeded permutation of the split after another. A global
batch is the next slice of that stream, so it may hold the end of one epoch and the start of the next.
In a mixture, each source has its own stream, and shuffled blocks with fixed shares decide which one is next.
The order does not depend on the packing, and any step can be computed without the ones before it. The rate is
constant, or decays linearly or by a cosine, after a linear warm-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from math import cos, gcd, lcm, pi

import numpy as np

from plait.core.errors import DataError
from plait.core.jobs import JobSpec, TrainSpec
from plait.core.plans import GlobalBatch, SplitName
from plait.core.samples import Int64, Share, Split

_PERMUTATION = 0x50_6C_61_69_74  # distinguishes this stream of random numbers from others of the same seed
MOST_REPEATED = (
    10_000  # samples of a step that has rows more than once; more is a mistake that stalls a search
)
LONGEST_BLOCK = 1000  # samples of a mixture after which every source has had its share


@lru_cache(maxsize=256)
def permutation(seed: int, epoch: int, count: int, stream: tuple[int, ...] = ()) -> Int64:
    """The order of ``count`` samples in one epoch (count,).

    Args:
        stream: distinguishes the orders of a mixture's sources; () if there is only one.

    Made from a bit generator's raw output, which NumPy promises never to change; its
    ``Generator.permutation`` carries no such promise.
    """
    source = np.random.PCG64(np.random.SeedSequence([_PERMUTATION, seed, epoch, *stream]))
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
        shares: the parts of a mixture; empty: all samples count alike.
    """

    seed: int
    samples: int
    batch: int
    stream: int
    shares: tuple[Share, ...] = ()

    @classmethod
    def over(cls, train: TrainSpec, split: Split) -> DataOrder:
        """The order of a job over a split.

        Raises:
            DataError: as :meth:`of`.
        """
        return cls.of(train, len(split), split.shares)

    @classmethod
    def of(cls, train: TrainSpec, samples: int, shares: tuple[Share, ...] = ()) -> DataOrder:
        """The order of a job over a split of ``samples`` samples. An epoch has this many samples, independent
        of the shares.

        Raises:
            DataError: the split is empty, or much smaller than a step.
        """
        if samples < 1:
            raise DataError("training split of 0 samples", "A job needs at least one training sample.")
        if train.global_batch > max(samples, MOST_REPEATED):
            raise DataError(
                f"train.batch_size={train.batch_size}, train.accumulation={train.accumulation}",
                f"There are {samples:,} samples to train on, and a step may repeat them up to "
                f"{MOST_REPEATED:,} samples.",
                "Choose a smaller batch, or fewer accumulation steps.",
            )
        if train.steps is not None:
            stream = train.steps * train.global_batch
        else:
            assert train.epochs is not None  # TrainSpec has exactly one of the two
            stream = max(1, round(train.epochs * samples))
        return cls(train.seed, samples, train.global_batch, stream, shares)

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole budget."""
        return -(-self.stream // self.batch)

    def at(self, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Samples of ``step`` (counted from 1) and, for each, how often it was used before.

        Raises:
            IndexError: the budget has no such step.
        """
        if not 1 <= step <= self.steps:
            raise IndexError(f"step {step} of a budget of {self.steps}")
        first = (step - 1) * self.batch
        positions = range(first, min(first + self.batch, self.stream))
        place = self._place if self.shares else partial(self._of_source, 0, self.samples, ())
        samples, draws = zip(*map(place, positions), strict=True)
        return samples, draws

    def _of_source(self, first: int, samples: int, stream: tuple[int, ...], item: int) -> tuple[int, int]:
        """The ``item``-th sample of a source, whose samples begin at ``first``, and how often it was used
        before."""
        draw, at = divmod(item, samples)
        return first + int(permutation(self.seed, draw, samples, stream)[at]), draw

    def _place(self, at: int) -> tuple[int, int]:
        """The sample at a position of a mixture's stream. In each block every source has its quota."""
        quotas = block_quotas(tuple(share.weight for share in self.shares))
        block, place = divmod(at, sum(quotas))
        slot = int(permutation(self.seed, block, sum(quotas), (0,))[place])
        source = 0
        while slot >= quotas[source]:
            slot -= quotas[source]
            source += 1
        first = sum(share.samples for share in self.shares[:source])
        item = block * quotas[source] + slot
        return self._of_source(first, self.shares[source].samples, (1 + source,), item)


@lru_cache(maxsize=64)
def block_quotas(weights: tuple[float, ...]) -> tuple[int, ...]:
    """How many samples of a block come from each source of a mixture: whole numbers in the ratio of the
    weights. Where they would need a block of more than ``LONGEST_BLOCK``, the nearest that do not.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = lcm(*(each.denominator for each in exact))
    whole = [int(each * scale) for each in exact]
    if sum(whole) // gcd(*whole) > LONGEST_BLOCK:
        total = sum(exact)
        whole = [max(1, round(LONGEST_BLOCK * each / total)) for each in exact]
    return tuple(each // gcd(*whole) for each in whole)


def training_batch(job: JobSpec, order: DataOrder, split: Split, step: int) -> GlobalBatch:
    """The global batch of one optimiser step, with its loss weight: 1 / labelled tokens of the whole.

    A batch without any labelled token has weight 0, so its loss and its gradient are 0.
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

    Step s of W warm-up steps has s / W of the peak. Afterwards, the decay follows the share of the remaining
    budget that was spent before this step, so the first step after the warm-up has the peak rate and the last
    one is still above zero: every step has an effect.
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
