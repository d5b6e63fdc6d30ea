"""The most valuable load of one replica within a makespan: knapsacks by dynamic programming.

Buckets have prices, and a replica has τ seconds. Weights that are rounded down prove an upper bound on the
worth of all choices; choices that fit in time are kept. A seam: LobRA's cost keeps buckets separate, and the
packed cost (``packed_pricing``) changes what a class of choices is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plait.core.samples import Int64
from plait.cost.replica import ReplicaCost
from plait.planner.dispatch import Float64

Int16 = npt.NDArray[np.int16]
Choices = tuple[Int64, Int64]  # for one bucket: sequences, units of time; at most one of them is taken

CLASSES = 4  # at first
BACK = (0, 1, 2, 3, 4, 6, 8, 11, 16, 24)  # units of time given up until a choice fits
TOLERANCE = 1e-7
HOLDS = 1e-9  # relative tolerance of the seconds that a pattern may take


@dataclass(frozen=True, slots=True)
class Precision:
    """How exactly a knapsack is solved.

    Attributes:
        grid: units of time in which τ is resolved.
        whole: most sequences of a bucket whose numbers are tried one by one; larger numbers are combined, and
            the rounding of their parts adds up.
            slack: a class whose relative excess over the need is at most this is not refined further.
    """

    grid: int
    whole: int
    slack: float


PRECISIONS = (Precision(2048, 16, 0.006), Precision(16384, 16, 0.001), Precision(16384, 512, 0.0005))


@dataclass(frozen=True, slots=True)
class Priced:
    """The result of pricing one configuration."""

    patterns: tuple[Int64, ...]
    limit: float


class Pricing:
    """The knapsacks of one configuration within ``tau`` seconds."""

    def __init__(self, cost: ReplicaCost, counts: Int64, tau: float) -> None:
        self._cost = cost
        self._counts = counts
        self._tau = tau
        self.alone = self._find_alone()
        self._levels = self._find_levels()

    def priced(self, prices: Float64, need: float, precision: Precision) -> Priced:
        """Patterns worth more than ``need``, at most one of each class, and an upper bound for all."""
        unit = float(prices.max(initial=0.0))
        if unit <= 0:
            return Priced((), need)
        priced = self._priced(prices / unit, need / unit, precision)  # the solvers take tiny prices for none
        return Priced(priced.patterns, max(need, priced.limit * unit))

    def _priced(self, prices: Float64, need: float, precision: Precision) -> Priced:
        found: list[Int64] = []
        limit = 0.0
        last = len(self._levels)
        ends = np.unique(np.linspace(0, last, min(CLASSES, last) + 1).round().astype(int)).tolist()
        classes = list(itertools.pairwise(ends))
        while classes:
            first, end = classes.pop()
            most, pattern = self._best(prices, need, first, end, precision)
            if most <= need:
                continue
            if pattern is not None and float(prices @ pattern) > need:
                found.append(pattern)
                limit = max(limit, most)
            elif most <= need * (1 + precision.slack) or end - first == 1:
                limit = max(limit, most)
            else:
                middle = (first + end) // 2
                classes += [(first, middle), (middle, end)]
        return Priced(tuple(found), limit)

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
        scale, whole = precision.grid / room, precision.whole
        groups = [(j, each) for j in map(int, able) for each in self._choices(j, int(sizes[j]), scale, whole)]
        return self._filled(prices, need, groups, precision.grid)

    def _filled(
        self, prices: Float64, need: float, groups: Sequence[tuple[int, Choices]], grid: int
    ) -> tuple[float, Int64 | None]:
        """An upper bound on the worth of the choices from groups of a bucket, and the best one that fits."""
        best = np.zeros(grid + 1)
        steps: list[tuple[int, Choices, Int16]] = []
        for j, (counts, weights) in groups:
            choice = np.zeros(grid + 1, dtype=np.int16)
            after = best.copy()
            for option, (number, weight) in enumerate(zip(counts, weights, strict=True), start=1):
                if weight > grid:
                    break
                value = best[: grid + 1 - weight] + prices[j] * number
                better = value > after[weight:]
                np.copyto(after[weight:], value, where=better)
                np.copyto(choice[weight:], option, where=better)
            best = after
            steps.append((j, (counts, weights), choice))
        most = float(best[-1])
        return most, None if most <= need else self._held(steps, grid)

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
        """The most valuable choice that fits in time, going back in time; None if none was found."""
        for back in BACK:
            taken = self._traced(steps, grid - back)
            if self._cost.seconds(taken) <= self._tau * (1 + HOLDS):
                return taken
        return None

    def _traced(self, steps: Sequence[tuple[int, Choices, Int16]], left: int) -> Int64:
        taken = np.zeros(len(self._counts), dtype=np.int64)
        for j, (counts, weights), choice in reversed(steps):
            option = int(choice[left])
            if option:
                taken[j] += counts[option - 1]
                left -= int(weights[option - 1])
        return np.minimum(taken, self._counts)
