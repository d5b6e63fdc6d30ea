"""What one replica can do within a makespan if sequences are packed together: the knapsacks of that cost.

A class has a range of numbers of microbatches: the smallest determines the fixed seconds, the largest bounds
what fits. Time, each bound of what fits, and every mixture of the two give a separate knapsack; the one with
the least worth of divisible sequences is solved for whole ones. A seam: ``deployment_patterns`` asks either
cost for patterns in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

from plait.core.samples import Int64
from plait.cost.packed import PackedCost
from plait.planner.dispatch import SOLVED, Float64
from plait.planner.pricing import HOLDS, PRECISIONS, TOLERANCE, Choices, Int16, Precision, Pricing

MIXED = (0.0, 0.2, 0.4, 0.6, 0.8)  # shares of time in a knapsack's weights; the rest is room
MOST_DROPPED = 64  # most sequences dropped from a choice to make it fit


class PackedPricing(Pricing):
    """The knapsacks of one configuration within ``tau`` seconds, its sequences packed together."""

    _cost: PackedCost

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

    def _held(self, steps: Sequence[tuple[int, Choices, Int16]], grid: int) -> Int64 | None:
        """The most valuable choice that fits in time, or what remains of it without some sequences."""
        taken = super()._held(steps, grid)
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
