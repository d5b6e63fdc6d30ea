"""Deployment by patterns: what one replica does within a makespan, and how few devices cover a batch so.

A pattern is the whole numbers of sequences that one replica of one configuration takes, with T of at most
τ seconds. A deployment reaches τ exactly where patterns on at most N devices cover the batch: a cutting
stock problem. Its linear relaxation, solved by generating columns (Gilmore and Gomory), sees whole
sequences and whole microbatches on every replica, which the bounds of :mod:`plait.planner.deployment_bounds`
do not, so it proves far better ones where replicas take few sequences; and its patterns, in whole numbers,
are a deployment with its dispatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from plait.cost.replica import ReplicaCost
from plait.planner.dispatch_search import Float64, Int64

Int16 = npt.NDArray[np.int16]

GRID, FINE_GRID = 8192, 16384  # units of time that pricing tells apart: for patterns, and for bounds
WHOLE = 64  # most sequences of a bucket whose numbers are tried one by one
LEVELS, FINE_LEVELS = 12, 64  # classes of longest microbatch that pricing tells apart
ROUNDS = 200  # of column generation for one makespan
SLACKS = (0.985, 0.97, 0.95)  # of the devices: how far patterns are improved before whole ones are taken
PRECISION = 0.001  # of a refinement, relative
ATTEMPTS = 7  # makespans that a refinement tries at each end
EAGER = 0.85  # share of the allowed distance at which a deployment is looked for first
TOLERANCE = 1e-7


@dataclass(frozen=True, slots=True)
class Pattern:
    """What one replica takes: its configuration's place among the costs, sequences by bucket, seconds."""

    cost: int
    counts: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Covered:
    """The relaxation at one makespan.

    Attributes:
        devices: of the relaxation over the patterns found: an upper end of its optimum.
        proved: no fewer devices do, divisible replicas allowed: a lower end.
    """

    devices: float
    proved: float


class Patterns:
    """Patterns for one batch, gathered over makespans.

    Args:
        costs: configurations.
        counts: B_j.
    """

    def __init__(self, costs: Sequence[ReplicaCost], counts: Sequence[int] | Int64) -> None:
        self._costs = tuple(costs)
        self._counts = np.asarray(counts, dtype=np.int64)
        self._sizes = np.array([cost.configuration.devices for cost in costs], dtype=np.float64)
        self.found: dict[tuple[int, tuple[int, ...]], Pattern] = {}

    def add(self, cost: int, counts: Sequence[int] | Int64) -> Pattern:
        """Keep a pattern."""
        key = (cost, tuple(int(value) for value in counts))
        if key not in self.found:
            self.found[key] = Pattern(cost, key[1], self._costs[cost].seconds(key[1]))
        return self.found[key]

    def within(self, tau: float) -> list[Pattern]:
        """All that take at most ``tau`` seconds."""
        return [each for each in self.found.values() if each.seconds <= tau * (1 + TOLERANCE)]

    def cover(self, tau: float, devices: int, *, enough: float | None = None) -> Covered:
        """Generate patterns for ``tau`` until ``devices`` suffice the relaxation, or no pattern is missing.

        Args:
            enough: go on until so few devices suffice; None takes ``devices``.
        """
        pricing = [_Pricing(cost, self._counts, tau) for cost in self._costs]
        if not self._start(pricing, tau):
            return Covered(float("inf"), float("inf"))
        proved, active = 0.0, list(range(len(pricing)))
        for _ in range(ROUNDS):
            value, duals = self._relaxed(self.within(tau))
            if value <= (devices if enough is None else enough):
                break
            # Configurations that had nothing to give the last time are asked again only when no other has.
            improved = [place for place in active if self._improve(place, pricing[place], duals)]
            if not improved:
                others = [place for place in range(len(pricing)) if place not in active]
                improved = [place for place in others if self._improve(place, pricing[place], duals)]
            active = improved
            if not improved:
                limit = max(each.most(duals) / size for each, size in zip(pricing, self._sizes, strict=True))
                proved = float(duals @ self._counts) / max(limit, 1e-12)
                break
        return Covered(value, proved)

    def _improve(self, place: int, pricing: _Pricing, duals: Float64) -> bool:
        """Keep this configuration's patterns that are worth more than their devices; whether one is new."""
        before = len(self.found)
        for worth, counts in pricing.best(duals):
            if worth > self._sizes[place] * (1 + 1e-6):
                self.add(place, counts)
        return len(self.found) > before

    def _start(self, pricing: Sequence[_Pricing], tau: float) -> bool:
        """A pattern for each bucket by itself; whether every bucket has one."""
        able = np.zeros(len(self._counts), dtype=bool)
        for place, each in enumerate(pricing):
            for j, most in enumerate(each.alone):
                if most and self._counts[j]:
                    counts = [0] * len(self._counts)
                    counts[j] = int(most)
                    able[j] |= self.add(place, counts).seconds <= tau * (1 + TOLERANCE)
        return bool(able[self._counts > 0].all())

    def _relaxed(self, patterns: Sequence[Pattern]) -> tuple[float, Float64]:
        """Fewest devices with divisible replicas of these patterns, and the buckets' prices."""
        result, used = self._solved(patterns)
        duals = np.zeros(len(self._counts))
        duals[used] = np.maximum(0.0, -result.ineqlin.marginals)
        return float(result.fun), duals

    def _parts(self, tau: float) -> tuple[list[Pattern], Float64]:
        """Patterns within τ that the relaxation uses, and how many of each."""
        patterns = self.within(tau)
        parts = self._solved(patterns)[0].x
        kept = np.flatnonzero(parts > 1e-9)
        return [patterns[place] for place in kept], parts[kept]

    def _solved(self, patterns: Sequence[Pattern]) -> tuple[Any, Int64]:
        used = np.flatnonzero(self._counts)
        matrix = np.array([each.counts for each in patterns], dtype=np.float64)[:, used].T
        costs = self._sizes[[each.cost for each in patterns]]
        least = self._counts[used].astype(np.float64)
        return linprog(costs, A_ub=-matrix, b_ub=-least, method="highs"), used

    def dive(self, tau: float, devices: int, *, slack: float) -> list[Pattern] | None:
        """Whole replicas on at most ``devices`` that cover the batch within ``tau``; None if not found.

        The relaxation's whole part is kept, and patterns are generated anew for what is left over, until
        nothing is left; where no part is whole, the largest one is made so.
        """
        left, room, chosen = self._counts.copy(), devices, list[Pattern]()
        seeds: list[Pattern] = self.within(tau)
        while left.any():
            rest = Patterns(self._costs, left)
            for each in seeds:
                rest.add(each.cost, np.minimum(each.counts, left))
            if rest.cover(tau, room, enough=room * slack).devices > room * (1 + TOLERANCE):
                return None
            seeds, parts = rest._parts(tau)
            number = np.floor(parts + 1e-6).astype(np.int64)
            if not number.any():
                number[parts.argmax()] = 1
            for each, count in zip(seeds, number, strict=True):
                for _ in range(int(count)):
                    taken = np.minimum(each.counts, left)
                    if taken.any():
                        chosen.append(self.add(each.cost, taken))
                        left = left - taken
                        room -= int(self._sizes[each.cost])
            if room < 0:
                return None
        return chosen


@dataclass(frozen=True, slots=True)
class Refined:
    """What patterns found and proved.

    Attributes:
        bound: no deployment is faster.
        replicas: a pattern for each replica of a deployment, by configuration; empty where none was found.
    """

    bound: float
    replicas: tuple[Pattern, ...]

    @property
    def makespan(self) -> float:
        """Seconds of the slowest replica; inf without replicas."""
        return max((each.seconds for each in self.replicas), default=float("inf"))


def refine(
    costs: Sequence[ReplicaCost],
    counts: Sequence[int],
    devices: int,
    *,
    bound: float,
    makespan: float,
    goal: float,
) -> Refined:
    """Search between a proved bound and a makespan that can be had, from both ends, by patterns.

    Args:
        bound: no deployment is faster.
        makespan: of a deployment that is known.
        goal: stop within this distance of the bound.
    """
    patterns = Patterns(costs, counts)
    low = start = bound
    best, high, raised = tuple[Pattern, ...](), makespan, False
    for _ in range(ATTEMPTS):
        if high <= low * (1 + goal) or high <= start * (1 + PRECISION):
            break
        near = low * (1 + EAGER * goal)
        tau = near if start < near else (start * high) ** 0.5
        if not raised and patterns.cover(tau, devices).devices > devices:
            low, start = _raise_bound(patterns, devices, start, high)
            raised = True
            continue
        found = next((f for slack in SLACKS if (f := patterns.dive(tau, devices, slack=slack))), None)
        if found is None:
            start = tau
        else:
            best = tuple(sorted(found, key=lambda each: each.cost))
            high = max(each.seconds for each in best)
    return Refined(low, best)


def _raise_bound(patterns: Patterns, devices: int, bound: float, makespan: float) -> tuple[float, float]:
    """The best bound that the relaxation proves, and the makespan from which on it has an answer."""
    low, start, high = bound, bound, makespan
    tau = low * (1 + 2 * PRECISION)
    for _ in range(ATTEMPTS):
        if not start * (1 + PRECISION) < tau < high:
            break
        covered = patterns.cover(tau, devices)
        if covered.devices <= devices:
            high = tau
        else:
            start = tau  # where it is not proved either, the bound stays where it is
            if covered.proved > devices * (1 + TOLERANCE):
                low = tau
        tau = (start * high) ** 0.5
    return low, start


class _Pricing:
    """Most valuable pattern of one configuration within τ: a knapsack over time, by dynamic programming."""

    def __init__(self, cost: ReplicaCost, counts: Int64, tau: float) -> None:
        self._cost = cost
        self._counts = counts
        self._tau = tau
        self.alone = self._alone()
        self._classes, self._fine = self._ramp_classes(LEVELS), self._ramp_classes(FINE_LEVELS)

    def best(self, prices: Float64) -> list[tuple[float, Int64]]:
        """Value and sequences of each ramp class's best pattern; times are rounded up, so that they hold."""
        return [self._fill(prices, *each, up=True) for each in self._classes]

    def most(self, prices: Float64) -> float:
        """No pattern is worth more; times are rounded down."""
        return max((self._fill(prices, *each, up=False)[0] for each in self._fine), default=0.0)

    def _ramp_classes(self, levels: int) -> list[tuple[float, float]]:
        """(least, most) seconds of the longest microbatch; one class where nothing is paid twice."""
        cost = self._cost
        if not cost.ramp:
            return [(0.0, float("inf"))]
        seconds = sorted(
            {
                float((cost.fixed + cost.each[:, j] * size).max())
                for j in np.flatnonzero(self._counts[: cost.supported])
                for size in range(1, int(min(cost.batch[j], self._counts[j])) + 1)
            }
        )
        if not seconds:
            return []
        places = np.unique(np.linspace(0, len(seconds) - 1, min(levels, len(seconds))).round().astype(int))
        ends = [seconds[place] for place in places]
        starts = [seconds[0], *(seconds[place + 1] for place in places[:-1])]
        return [(s, e) for s, e in zip(starts, ends, strict=True) if cost.ramp * s < self._tau]

    def _alone(self) -> Int64:
        """Most sequences of each bucket by itself within τ."""
        most = np.zeros(len(self._counts), dtype=np.int64)
        for j in range(self._cost.supported):
            d = np.arange(1, int(self._counts[j]) + 1)
            rows = np.zeros((len(d), len(self._counts)), dtype=np.int64)
            rows[:, j] = d
            fits = self._cost.seconds_many(rows) <= self._tau
            most[j] = d[fits].max(initial=0)
        return most

    def _fill(self, prices: Float64, least: float, longest: float, *, up: bool) -> tuple[float, Int64]:
        """The knapsack for patterns whose longest microbatch takes between ``least`` and ``longest``."""
        cost = self._cost
        paid = longest if up and cost.ramp else least
        room = self._tau - cost.ramp * paid
        none = np.zeros(len(self._counts), dtype=np.int64)
        if room <= 0:
            return 0.0, none
        grid = GRID if up else FINE_GRID
        best = np.zeros(grid + 1)
        steps: list[tuple[int, Int64, Int64, Int16]] = []
        for j in np.flatnonzero((prices > 0) & (self._counts > 0) & (cost.batch > 0)):
            for counts, weights in self._groups(int(j), longest, grid / room, up=up):
                choice = np.zeros(grid + 1 if up else 0, dtype=np.int16)
                after = best.copy()
                for option, (number, weight) in enumerate(zip(counts, weights, strict=True), start=1):
                    if weight > grid:
                        break
                    value = best[: grid + 1 - weight] + prices[j] * number
                    if up:
                        np.copyto(choice[weight:], option, where=value > after[weight:])
                    np.maximum(after[weight:], value, out=after[weight:])
                best = after
                steps.append((int(j), counts, weights, choice))
        return float(best[-1]), self._trace(steps) if up else none

    def _trace(self, steps: Sequence[tuple[int, Int64, Int64, Int16]]) -> Int64:
        taken = np.zeros(len(self._counts), dtype=np.int64)
        left = GRID
        for j, counts, weights, choice in reversed(steps):
            option = int(choice[left])
            if option:
                taken[j] += counts[option - 1]
                left -= int(weights[option - 1])
        return np.minimum(taken, self._counts)

    def _groups(self, j: int, longest: float, scale: float, *, up: bool) -> list[tuple[Int64, Int64]]:
        """Choices (sequences, units of time) of bucket j, at most one of each group: doubling runs of full
        microbatches, and one that is not full."""
        cost, count = self._cost, int(self._counts[j])
        batch = int(cost.batch[j])
        sizes = np.arange(1, batch + 1)
        seconds = cost.fixed[:, None] + cost.each[:, j, None] * sizes
        allowed = int(np.count_nonzero(seconds.max(axis=0) <= longest * (1 + 1e-12)))
        most = min(count, int(self.alone[j])) if allowed == batch else min(allowed, count)
        if most <= WHOLE:
            d = np.arange(1, most + 1)
            every = cost.fixed[:, None] * -(-d // batch) + cost.each[:, j, None] * d
            return [(d, self._units(every, scale, up=up))] if most else []
        groups, full, run = [], most // batch, 1
        while full > 0:
            take = min(run, full)
            groups.append((np.array([take * batch]), take * seconds[:, -1:]))
            full -= take
            run *= 2
        if batch > 1:
            groups.append((sizes[:-1], seconds[:, :-1]))
        return [(counts, self._units(each, scale, up=up)) for counts, each in groups]

    def _units(self, seconds: Float64, scale: float, *, up: bool) -> Int64:
        """Stages differ in cost: the slowest counts for patterns, the mean of all for bounds."""
        scaled = scale * (seconds.max(axis=0) if up else seconds.mean(axis=0))
        whole = np.ceil(scaled - 1e-9) if up else np.floor(scaled + 1e-9)
        units: Int64 = whole.astype(np.int64)
        return units
