"""LobRA's own cost, with which its figures are compared: buckets do not share microbatches.

LobRA's T (appendix D, Eq. 12): bucket j holds sequences of length s_j; microbatches of b_j = ⌊M / s_j⌋
sequences, the last one of a bucket with the remainder; 1F1B over pp stages, so the longest microbatch
counts (pp − 1) more times. Then

    T(d) = max over stages of Σ_j [ fixed·⌈d_j / b_j⌉ + each_j·d_j ]  +  (pp − 1)·max over used
           microbatches and stages of their seconds,

which is the paper's T if all stages cost the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from plait.core.samples import Int64
from plait.cost.replica import ReplicaCost
from plait.planner.dispatch import Float64
from plait.planner.packed import packed_seconds
from plait.planner.pricing import HOLDS, Choices, Int16, Precision, Pricing, pricing_of

# Most sequences of a bucket whose numbers are tried one by one; larger numbers are combined, and the rounding
# of their parts adds up.
WHOLE, WHOLE_FINEST = 16, 512


@dataclass(frozen=True)
class BucketedCost(ReplicaCost):
    """T of a configuration whose microbatches have sequences of one bucket each."""

    @cached_property
    def linear(self) -> Float64:
        """Seconds a sequence of each bucket (n, R): by every row, T is at least Σ_j row_j·d_j."""
        return np.asarray(self.each + self.fixed[:, None] / np.maximum(self.batch, 1))

    def seconds_many(self, counts: Int64) -> Float64:
        """T of each row of ``counts`` (rows, R); inf if one of its sequences does not fit."""
        unsupported = (counts[:, self.supported :] > 0).any(axis=1)
        d, b = counts[:, : self.supported], self.batch[: self.supported]
        microbatches = np.sum(-(-d // b), axis=1)
        work = (np.outer(microbatches, self.fixed) + d @ self.each[:, : self.supported].T).max(axis=1)
        if self.ramp:
            work = work + self.ramp * self._longest(d)
        return np.where(unsupported, np.inf, work)

    def seconds_with(self, counts: Int64, buckets: Int64, more: Int64) -> Float64:
        """T of each row of ``counts`` (T, R) with ``more[m, t]`` further sequences of bucket ``buckets[m]``.

        The same as :meth:`seconds_many` of each such row, without making the rows: (M, T).
        """
        n = self.supported
        if not n:
            return np.where(more == 0, self.seconds_many(counts), np.inf)
        d, b = counts[:, :n], self.batch[:n]
        microbatches = -(-d // b)
        work = microbatches.sum(axis=1)[:, None] * self.fixed + d @ self.each[:, :n].T
        fits = buckets < n
        j = np.where(fits, buckets, 0)
        after = d[:, j].T + more
        further = -(-after // b[j][:, None]) - microbatches[:, j].T
        each = self.each.T[j][:, None, :]
        seconds = (work + further[..., None] * self.fixed + more[..., None] * each).max(axis=2)
        if self.ramp:
            largest = (self.fixed + np.minimum(after, b[j][:, None])[..., None] * each).max(axis=2)
            largest = np.where(after > 0, largest, 0.0)
            seconds = seconds + self.ramp * np.maximum(self._longest(d), largest)
        return np.where(fits[:, None] | (more == 0), seconds, np.inf)

    def longest(self, counts: Sequence[int] | Int64) -> float:
        """Seconds of the slowest stage for the largest microbatch of ``counts`` (R,)."""
        d = np.asarray(counts, dtype=np.int64)[None, : self.supported]
        return float(self._longest(d)[0])

    def _longest(self, d: Int64) -> Float64:
        size = np.minimum(d, self.batch[: self.supported])
        parts = self.fixed[:, None] + self.each[:, : self.supported] * size[:, None, :]
        return np.asarray(np.where(d > 0, parts.max(axis=1), 0.0).max(axis=1, initial=0.0))


@packed_seconds.register
def _(cost: BucketedCost, counts: Sequence[int]) -> float:
    """The cost already includes its packing."""
    return cost.seconds(counts)


class BucketedPricing(Pricing):
    """The knapsacks of one configuration within ``tau`` seconds, its buckets apart."""

    most_rounds = sys.maxsize

    def _find_levels(self) -> Float64:
        """Possible seconds of the longest microbatch, ascending; only one value if nothing counts twice."""
        cost = self._cost
        if not self.alone.any():
            return np.zeros(0)
        if not cost.ramp:
            return np.array([np.inf])
        each = [
            (cost.fixed[:, None] + cost.each[:, j, None] * np.arange(1, min(cost.batch[j], most) + 1)).max(0)
            for j, most in enumerate(self.alone)
            if most
        ]
        levels = np.unique(np.concatenate(each))
        return levels[cost.ramp * levels < self._tau]

    def _find_alone(self) -> Int64:
        """Most sequences of each bucket alone within τ."""
        most = np.zeros(len(self._counts), dtype=np.int64)
        for j in range(self._cost.supported):
            d = np.arange(1, int(self._counts[j]) + 1)
            each, b = self._cost.each[:, j, None], int(self._cost.batch[j])
            seconds = (self._cost.fixed[:, None] * -(-d // b) + each * d).max(axis=0)
            largest = (self._cost.fixed[:, None] + each * np.minimum(d, b)).max(axis=0)
            fits = seconds + self._cost.ramp * largest <= self._tau * (1 + HOLDS)
            most[j] = np.count_nonzero(fits)
        return most

    def _best(
        self, prices: Float64, need: float, first: int, end: int, precision: Precision
    ) -> tuple[float, Int64 | None]:
        """A worth that no pattern of a class exceeds, and its best pattern if that holds."""
        longest = float(self._levels[end - 1])
        room = self._tau * (1 + HOLDS) - self._cost.ramp * (self._levels[first] if self._cost.ramp else 0.0)
        if room <= 0:
            return 0.0, None
        sizes = self._largest(longest)
        able = np.flatnonzero((prices > 0) & (sizes > 0))
        if self._divisible(prices, sizes, able, room) <= need:
            return need, None
        scale, whole = precision.grid / room, WHOLE_FINEST if precision.finest else WHOLE
        groups = [(j, each) for j in map(int, able) for each in self._choices(j, int(sizes[j]), scale, whole)]
        return self._filled(prices, need, groups, precision.grid)

    def _largest(self, longest: float) -> Int64:
        """Sequences in each bucket's largest microbatch of at most ``longest`` seconds."""
        cost = self._cost
        sizes = np.zeros(len(self._counts), dtype=np.int64)
        for j in np.flatnonzero(self.alone):
            each = cost.each[:, j]
            fitting = np.floor(((longest - cost.fixed) / each * (1 + HOLDS)).min()) if cost.ramp else np.inf
            sizes[j] = max(0, min(cost.batch[j], fitting))
        return sizes

    def _divisible(self, prices: Float64, sizes: Int64, able: Int64, room: float) -> float:
        """Worth of the best choice of divisible sequences, which no choice of whole ones exceeds."""
        cost = self._cost
        seconds = (cost.fixed[:, None] / sizes[able] + cost.each[:, able]).mean(axis=0)
        most = np.where(
            sizes[able] < cost.batch[able], np.minimum(sizes[able], self.alone[able]), self.alone[able]
        )
        order = np.argsort(-prices[able] / seconds, kind="stable")
        used = np.cumsum((seconds * most)[order])
        before = np.concatenate([[0.0], used[:-1]])
        share = np.clip((room - before) / np.maximum((seconds * most)[order], 1e-300), 0.0, 1.0)
        return float((share * (prices[able] * most)[order]).sum())

    def _choices(self, j: int, size: int, scale: float, whole: int) -> list[Choices]:
        """Numbers of sequences of bucket j in groups: small numbers one by one; large ones as doubling runs
        of full microbatches, and one that is not full."""
        cost, batch = self._cost, int(self._cost.batch[j])
        most = int(self.alone[j]) if size == batch else min(size, int(self.alone[j]))
        if most <= max(whole, batch):
            d = np.arange(1, most + 1)
            return [(d, self._units(cost.fixed[:, None] * -(-d // batch) + cost.each[:, j, None] * d, scale))]
        full = (cost.fixed + cost.each[:, j] * batch)[:, None]
        groups, left, run = [], most // batch, 1
        while left > 0:
            take = min(run, left)
            groups.append((np.array([take * batch]), self._units(take * full, scale)))
            left -= take
            run *= 2
        if batch > 1:
            d = np.arange(1, batch)
            groups.append((d, self._units(cost.fixed[:, None] + cost.each[:, j, None] * d, scale)))
        return groups

    def _units(self, seconds: Float64, scale: float) -> Int64:
        """Whole units of time; if stages differ in cost, their mean, which the slowest one cannot be
        below."""
        units: Int64 = np.floor(scale * seconds.mean(axis=0) + 1e-9).astype(np.int64)
        return units

    def _held(self, steps: Sequence[tuple[int, Choices, Int16]], grid: int) -> Int64 | None:
        """The most valuable choice that fits in time; None if none was found."""
        return self._fitting(steps, grid)


@pricing_of.register
def _(cost: BucketedCost, counts: Int64, tau: float) -> Pricing:
    """As for any cost."""
    return BucketedPricing(cost, counts, tau)
