"""Deployment by patterns: what one replica does within a makespan, and how much of a batch replicas cover so.

A pattern is the whole numbers of sequences that one replica of one configuration takes, with T of at most
τ seconds. A deployment reaches τ exactly where patterns on at most N devices cover the batch: a cutting
stock problem. Its linear relaxation, solved by generating columns (Gilmore and Gomory), sees whole
sequences and whole microbatches on every replica, which the linear relaxation of the dispatch does not, so
it proves far better bounds where replicas take few sequences; and its patterns, in whole numbers, are a
deployment with its dispatch.

A seam: what is proved here about one makespan holds for any search over makespans and replicas, and is tested
without one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from plait.core.samples import Int64
from plait.cost.replica import ReplicaCost
from plait.planner.dispatch import Float64, device_seconds
from plait.planner.solver import Limit, Limits, Program, solve

Int16 = npt.NDArray[np.int16]
Choices = tuple[Int64, Int64]  # of one bucket, at most one of them taken: sequences, units of time

CLASSES = 4  # of the longest microbatch, to begin with
BACK = (0, 1, 2, 3, 4, 6, 8, 11, 16, 24)  # units of time that are given up until a choice holds
HOLDS = 1e-9  # relative, of the seconds that a pattern may take


Replicas = tuple[int, ...]  # of each configuration, in the order of the costs
ROUNDS = 300  # of column generation for one makespan
TOLERANCE = 1e-7
REDUCED = 1e-6  # relative: patterns worth less than this above their need are not looked for
WHOLE_LIMITS = Limits(nodes=1, seconds=30.0)  # more nodes cover more, but descent gains as much from the rest


@dataclass(frozen=True, slots=True)
class Precision:
    """How exactly a knapsack is solved.

    Attributes:
        grid: units of time in which τ is resolved.
        whole: most sequences of a bucket whose numbers are tried one by one; more are put together, and the
            rounding of their parts adds up.
        slack: relative; a class that may hold this much more than is asked for is not looked into further.
    """

    grid: int
    whole: int
    slack: float


@dataclass(frozen=True, slots=True)
class Priced:
    """What pricing one configuration found."""

    patterns: tuple[Int64, ...]
    limit: float


class Pricing:
    """The knapsacks of one configuration within ``tau`` seconds."""

    def __init__(self, cost: ReplicaCost, counts: Int64, tau: float) -> None:
        self._cost = cost
        self._counts = counts
        self._tau = tau
        self.alone = self._alone()
        self._levels = self._longest_microbatches()

    def priced(self, prices: Float64, need: float, precision: Precision) -> Priced:
        """Patterns worth more than ``need``, at most one of each class, and what none exceeds."""
        found: list[Int64] = []
        limit = need
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

    def _longest_microbatches(self) -> Float64:
        """Seconds that the longest microbatch can have, ascending; one where nothing is paid twice."""
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

    def _alone(self) -> Int64:
        """Most sequences of each bucket by itself within τ."""
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
        """A worth that no pattern of a class exceeds, and its best pattern where that holds."""
        longest = float(self._levels[end - 1])
        room = self._tau * (1 + HOLDS) - self._cost.ramp * (self._levels[first] if self._cost.ramp else 0.0)
        if room <= 0:
            return 0.0, None
        sizes = self._largest(longest)
        able = np.flatnonzero((prices > 0) & (sizes > 0))
        if self._divisible(prices, sizes, able, room) <= need:
            return need, None
        grid = precision.grid
        best = np.zeros(grid + 1)
        steps: list[tuple[int, Choices, Int16]] = []
        for j in map(int, able):
            for counts, weights in self._choices(j, int(sizes[j]), grid / room, precision.whole):
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
        """Sequences of each bucket's largest microbatch of at most ``longest`` seconds."""
        cost = self._cost
        sizes = np.zeros(len(self._counts), dtype=np.int64)
        for j in np.flatnonzero(self.alone):
            each = cost.each[:, j]
            fitting = np.floor(((longest - cost.fixed) / each * (1 + HOLDS)).min()) if cost.ramp else np.inf
            sizes[j] = max(0, min(cost.batch[j], fitting))
        return sizes

    def _divisible(self, prices: Float64, sizes: Int64, able: Int64, room: float) -> float:
        """Worth of the best choice of divisible sequences: no whole one is worth more."""
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
        """Numbers of sequences of bucket j in groups: few one by one; many as doubling runs of full
        microbatches, and one that is not full."""
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
        """Whole units of time; of stages that differ in cost, the mean, which no slowest one is below."""
        units: Int64 = np.floor(scale * seconds.mean(axis=0) + 1e-9).astype(np.int64)
        return units

    def _held(self, steps: Sequence[tuple[int, Choices, Int16]], grid: int) -> Int64 | None:
        """The most valuable choice that holds in seconds, going back in time; None where none was found."""
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


PRECISIONS = (Precision(2048, 16, 0.006), Precision(16384, 16, 0.001), Precision(16384, 512, 0.0005))


@dataclass(frozen=True, slots=True)
class Pattern:
    """What one replica takes: its configuration's place among the costs, sequences by bucket, seconds."""

    cost: int
    counts: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Ranges:
    """Fewest and most replicas of each configuration."""

    low: Replicas
    high: Replicas


@dataclass(frozen=True, slots=True)
class Relaxed:
    """The relaxation at one makespan, with replicas and their patterns divisible.

    Attributes:
        share: of the batch that patterns found so far cover; enough of it ends the search for more.
        most: no patterns cover more.
    """

    share: float
    most: float
    replicas: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Solved:
    """A linear program's answer.

    Attributes:
        prices: of a sequence of each bucket.
        needs: what a pattern of each configuration must be worth more than to help.
        value: of the duals.
    """

    share: float
    prices: Float64
    needs: Float64
    value: float
    replicas: tuple[float, ...]


class Patterns:
    """Patterns for one batch, gathered over makespans."""

    def __init__(self, costs: Sequence[ReplicaCost], counts: Sequence[int] | Int64, devices: int) -> None:
        self._costs = tuple(costs)
        self._counts = np.asarray(counts, dtype=np.int64)
        self._used = np.flatnonzero(self._counts)
        self._devices = devices
        self._sizes = np.array([cost.configuration.devices for cost in costs], dtype=np.int64)
        self._pricing: tuple[float, tuple[Pricing, ...]] = (0.0, ())
        self._found: dict[tuple[int, tuple[int, ...]], Pattern] = {}

    @property
    def everything(self) -> Ranges:
        """Any number of replicas that the devices hold."""
        return Ranges((0,) * len(self._costs), tuple(int(most) for most in self._devices // self._sizes))

    def devices(self, replicas: Sequence[int]) -> int:
        """Devices that these replicas take."""
        return int(self._sizes @ np.asarray(replicas))

    def relax(self, tau: float, ranges: Ranges, *, exact: bool = False) -> Relaxed:
        """Generate patterns for ``tau`` until they cover the batch, or it is proved that none do."""
        pricing, most, level = self._start(tau), float("inf"), 0
        found = Relaxed(0.0, 0.0, (0.0,) * len(self._costs))
        for _ in range(ROUNDS):
            solved = self._solved(tau, ranges)
            if solved is None:
                break  # the ranges alone need more devices
            found = Relaxed(solved.share, most, solved.replicas)
            if solved.share >= 1 - TOLERANCE:
                break
            before = len(self._found)
            excess = self._priced(pricing, solved, ranges, level)
            # Duals that are too cheap by the excess are made right by the replicas, or by the devices.
            repair = min(
                float(excess @ ranges.high), float((excess / self._sizes).max(initial=0.0)) * self._devices
            )
            most = min(most, solved.value + repair)
            found = replace(found, most=most)
            if most < 1 - TOLERANCE:
                break
            if len(self._found) == before:
                level += 1
                if level == len(PRECISIONS) - (not exact):
                    break
        return found

    def enrich(self, tau: float, replicas: Replicas) -> None:
        """Generate patterns until the batch is covered with the fewest of these replicas' devices."""
        ranges = Ranges((0,) * len(replicas), replicas)
        self.relax(tau, ranges)
        pricing = self._start(tau)
        for _ in range(ROUNDS):
            solved, before = self._solved(tau, ranges, cover=True), len(self._found)
            if solved is None:
                break
            self._priced(pricing, solved, ranges, 0)
            if len(self._found) == before:
                break

    def whole(self, tau: float, replicas: Replicas) -> tuple[Int64 | None, Limit | None]:
        """A pattern found for each replica (replicas in order, R), so that little stays uncovered.

        Returns:
            None where the solver finds nothing; which limit ended it.
        """
        patterns = [each for each in self._within(tau) if replicas[each.cost] and any(each.counts)]
        program = Program()
        number = [program.variable(upper=float(replicas[each.cost]), integer=True) for each in patterns]
        worth = np.min([device_seconds(cost) for cost in self._costs], axis=0)
        for j in map(int, self._used):
            missing = program.variable(upper=float(self._counts[j]), cost=float(worth[j] / tau))
            terms = [(n, float(p.counts[j])) for n, p in zip(number, patterns, strict=True) if p.counts[j]]
            program.row([*terms, (missing, 1.0)], lower=float(self._counts[j]))
        for place, count in enumerate(replicas):
            own = [(n, 1.0) for n, p in zip(number, patterns, strict=True) if p.cost == place]
            program.row(own, upper=float(count))
        solution = solve(program, WHOLE_LIMITS)
        if not solution.values:
            return None, solution.limit_hit
        rows: list[tuple[int, ...]] = []
        for place, count in enumerate(replicas):
            own_rows = [
                p.counts
                for n, p in zip(number, patterns, strict=True)
                if p.cost == place
                for _ in range(round(solution.values[n]))
            ]
            rows += own_rows + [(0,) * len(self._counts)] * (count - len(own_rows))
        return np.array(rows, dtype=np.int64), solution.limit_hit

    def _add(self, cost: int, counts: Int64) -> Pattern:
        key = (cost, tuple(int(value) for value in counts))
        if key not in self._found:
            self._found[key] = Pattern(cost, key[1], self._costs[cost].seconds(key[1]))
        return self._found[key]

    def _within(self, tau: float) -> list[Pattern]:
        """The patterns that take at most ``tau`` seconds."""
        return [each for each in self._found.values() if each.seconds <= tau * (1 + HOLDS)]

    def _start(self, tau: float) -> tuple[Pricing, ...]:
        """The pricing at ``tau``; an idle replica and one for each bucket by itself are patterns."""
        if self._pricing[0] != tau:
            self._pricing = tau, tuple(Pricing(cost, self._counts, tau) for cost in self._costs)
            for place, each in enumerate(self._pricing[1]):
                for j in (None, *np.flatnonzero(each.alone)):
                    counts = np.zeros(len(self._counts), dtype=np.int64)
                    if j is not None:
                        counts[j] = each.alone[j]
                    self._add(place, counts)
        return self._pricing[1]

    def _priced(self, pricing: Sequence[Pricing], solved: _Solved, ranges: Ranges, level: int) -> Float64:
        """Keeps patterns that help; returns by how much one of each configuration may exceed its need."""
        excess = np.zeros(len(self._costs))
        for place, each in enumerate(pricing):
            if ranges.high[place]:
                need = max(0.0, float(solved.needs[place]))
                priced = each.priced(solved.prices, need * (1 + REDUCED) + 1e-12, PRECISIONS[level])
                for counts in priced.patterns:
                    self._add(place, counts)
                excess[place] = max(0.0, priced.limit - float(solved.needs[place]))
        return excess

    def _solved(self, tau: float, ranges: Ranges, *, cover: bool = False) -> _Solved | None:
        """The largest share of the batch that patterns cover; with ``cover``, the whole of it by few devices.

        None where that cannot be.
        """
        patterns, used = self._within(tau), self._used
        kinds = np.array([each.cost for each in patterns])
        sequences = np.array([each.counts for each in patterns], dtype=np.float64)[:, used].T
        low, high = np.array(ranges.low), np.array(ranges.high)
        floors = np.flatnonzero(low)
        ceilings = np.flatnonzero(high * self._sizes < self._devices)
        rows = np.concatenate(
            [
                -sequences,
                self._sizes[kinds][None],
                -1.0 * (kinds == floors[:, None]),
                kinds == ceilings[:, None],
            ]
        )
        share = np.zeros((len(rows), 1))
        share[: len(used), 0] = self._counts[used]
        limits = np.concatenate([np.zeros(len(used)), [self._devices], -low[floors], high[ceilings]])
        paid = self._sizes[kinds] if cover else np.zeros(len(kinds))
        result = linprog(
            np.append(paid, 0.0 if cover else -1.0),
            A_ub=np.concatenate([rows, share], axis=1),
            b_ub=limits,
            bounds=[(0, None)] * len(patterns) + [(1 if cover else 0, 1 if cover else None)],
            method="highs",
        )
        if result.x is None:
            return None
        duals = np.maximum(0.0, -result.ineqlin.marginals)
        of_buckets, of_devices, of_ranges = np.split(duals, [len(used), len(used) + 1])
        prices = np.zeros(len(self._counts))
        prices[used] = of_buckets
        needs = self._sizes * (float(cover) + of_devices[0])
        needs[floors] -= of_ranges[: len(floors)]
        needs[ceilings] += of_ranges[len(floors) :]
        parts = np.bincount(kinds, weights=result.x[:-1], minlength=len(self._costs))
        value = float(duals @ limits)
        return _Solved(float(result.x[-1]), prices, needs, value, tuple(float(part) for part in parts))
