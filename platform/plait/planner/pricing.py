"""The most valuable load of one replica within a makespan: knapsacks by dynamic programming.

Buckets have prices (dual values, not money), and a replica has τ seconds. Weights that are rounded down prove
an upper bound on the worth of all choices; choices that fit in time are kept.

A class of choices has a range of numbers of microbatches: the smallest determines the fixed seconds, the
largest bounds what fits. Time, each bound of what fits, and every mixture of the two give a separate
knapsack; the one with the least worth of divisible sequences is solved for whole ones. A seam: a cost with
microbatches of its own kind prices in the same way (:func:`pricing_of`), as LobRA's does in its benchmarks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from plait.core.samples import Int64
from plait.cost.replica import ReplicaCost
from plait.planner.dispatch import SOLVED, Float64

Int16 = npt.NDArray[np.int16]
Choices = tuple[Int64, Int64]  # for one bucket: sequences, units of time; at most one of them is taken

CLASSES = 4  # at first
BACK = (0, 1, 2, 3, 4, 6, 8, 11, 16, 24)  # units of time given up until a choice fits
TOLERANCE = 1e-7
HOLDS = 1e-9  # relative tolerance of the seconds that a pattern may take
MIXED = (0.0, 0.2, 0.4, 0.6, 0.8)  # shares of time in a knapsack's weights; the rest is room
MOST_DROPPED = 64  # most sequences dropped from a choice to make it fit
MOST_ROUNDS = 120  # rounds of pricing for all makespans: each takes hundredths of a second


@dataclass(frozen=True, slots=True)
class Precision:
    """How exactly a knapsack is solved.

    Attributes:
        grid: units of time in which τ is resolved.
        slack: a class whose relative excess over the need is at most this is not refined further.
        finest: whether this is the last one tried.
    """

    grid: int
    slack: float
    finest: bool = False


PRECISIONS = (Precision(2048, 0.006), Precision(16384, 0.001), Precision(16384, 0.0005, finest=True))


@dataclass(frozen=True, slots=True)
class Priced:
    """The result of pricing one configuration."""

    patterns: tuple[Int64, ...]
    limit: float


class Pricing:
    """The knapsacks of one configuration within ``tau`` seconds.

    Attributes:
        alone: most sequences of each bucket alone within τ.
        most_rounds: most rounds of pricing for all makespans.
    """

    most_rounds = MOST_ROUNDS

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
        """Numbers of microbatches that a pattern can have, ascending."""
        if not self.alone.any():
            return np.zeros(0)
        most = float(self._counts.sum())
        for fixed in self._cost.fixed:
            if fixed > 0:
                most = min(most, self._tau * (1 + HOLDS) / fixed - self._cost.ramp)
        return np.arange(1.0, np.floor(most) + 1.0)

    def _find_alone(self) -> Int64:
        """Most sequences of each bucket alone within τ."""
        most = np.zeros(len(self._counts), dtype=np.int64)
        for j in range(self._cost.supported):
            rows = np.zeros((int(self._counts[j]), len(self._counts)), dtype=np.int64)
            rows[:, j] = np.arange(1, len(rows) + 1)
            fits = self._cost.seconds_many(rows) <= self._tau * (1 + HOLDS)
            most[j] = fits.nonzero()[0].max(initial=-1) + 1
        return most

    def _best(
        self, prices: Float64, need: float, first: int, end: int, precision: Precision
    ) -> tuple[float, Int64 | None]:
        """An upper bound on the worth of the patterns of a class, and its best pattern if that fits."""
        cost, low, high = self._cost, self._levels[first], self._levels[end - 1]
        left = self._tau * (1 + HOLDS) - cost.fixed * (low + cost.ramp)
        able = np.flatnonzero((prices > 0) & (self.alone > 0))
        if left.min() <= 0 or not len(able):
            return 0.0, None
        seconds = (cost.each * (1.0 + cost.ramp / high) / left[:, None]).mean(axis=0)
        rows = np.vstack([seconds, *(share * seconds + (1 - share) * cost.room / high for share in MIXED)])
        worth = _divisible(prices[able], rows[:, able], self.alone[able])
        least, row = float(worth.min()), rows[int(np.argmin(worth)), able]
        if least > need and precision != PRECISIONS[0]:
            least, row = _surrogate(prices[able], rows[:, able], self.alone[able]) or (least, row)
        if least <= need:
            return need, None
        groups = [
            (int(j), choices)
            for j, share in zip(able, row, strict=True)
            for choices in _groups(float(share) * precision.grid, int(self.alone[j]))
        ]
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

    def _held(self, steps: Sequence[tuple[int, Choices, Int16]], grid: int) -> Int64 | None:
        """The most valuable choice that fits in time, or what remains of it without some sequences."""
        taken = self._fitting(steps, grid)
        if taken is not None:
            return taken
        taken = self._traced(steps, grid)
        for _ in range(MOST_DROPPED):
            used = np.flatnonzero(taken)
            fewer = np.repeat(taken[None], len(used), axis=0)
            fewer[np.arange(len(used)), used] -= 1
            seconds = self._cost.seconds_many(fewer)
            taken = fewer[int(np.argmin((seconds - self._cost.seconds(taken)) / self._cost.lengths[used]))]
            if self._cost.seconds(taken) <= self._tau * (1 + HOLDS):
                return taken if taken.any() else None
        return None

    def _fitting(self, steps: Sequence[tuple[int, Choices, Int16]], grid: int) -> Int64 | None:
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


@singledispatch
def pricing_of(cost: ReplicaCost, counts: Int64, tau: float) -> Pricing:
    """The knapsacks of a configuration, for its kind of cost."""
    return Pricing(cost, counts, tau)


def _divisible(prices: Float64, rows: Float64, alone: Int64) -> Float64:
    """Worth of the best choice of divisible sequences, of which each row (n, R) allows 1 in total: (n,)."""
    order = np.argsort(-prices / np.maximum(rows, 1e-300), axis=1, kind="stable")
    used = np.take_along_axis(rows * alone, order, axis=1)
    left = 1.0 - (used.cumsum(axis=1) - used)
    share = np.minimum(np.maximum(left / np.maximum(used, 1e-300), 0.0), 1.0)
    return np.asarray((share * (prices * alone)[order]).sum(axis=1))


def _surrogate(prices: Float64, rows: Float64, alone: Int64) -> tuple[float, Float64] | None:
    """Worth of the best choice of divisible sequences of which all rows (n, R) allow 1 in all, and the mean
    of the rows by which nothing is worth more; None if the solver fails."""
    found = linprog(-prices, A_ub=rows, b_ub=np.ones(len(rows)), bounds=[(0, most) for most in alone])
    if found.status != SOLVED:
        return None
    duals = np.maximum(0.0, -found.ineqlin.marginals)
    row = duals @ rows / duals.sum() if duals.any() else rows.mean(axis=0)  # without duals, everything fits
    return -float(found.fun) * (1 + TOLERANCE), row


def _groups(units: float, most: int) -> list[Choices]:
    """Numbers of sequences up to ``most``, in groups of doubling size, given the units of one sequence."""
    groups, left, run = list[Choices](), most, 1
    while left > 0:
        size = min(run, left)
        groups.append((np.array([size]), np.array([int(size * units + 1e-9)])))
        left -= size
        run *= 2
    return groups
