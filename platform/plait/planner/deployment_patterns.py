"""Deployment by patterns: what one replica can do within a makespan, and how much of a batch replicas cover.

A pattern gives the number of sequences of each bucket that one replica of one configuration takes, with T of
at most τ seconds. A deployment reaches τ if and only if patterns on at most N devices cover the batch, which
is a cutting-stock problem. Its linear relaxation, solved by column generation (Gilmore and Gomory), has whole
sequences and whole microbatches on every replica, unlike the linear relaxation of the dispatch, so it proves
far better bounds if replicas take few sequences. Its patterns, in whole numbers, are a deployment with its
dispatch.

A seam: what is proved here about one makespan holds for any search over makespans and replicas, and is tested
without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog

from plait.core.samples import Int64
from plait.cost.replica import ReplicaCost
from plait.planner.dispatch import SOLVED, Float64, device_seconds
from plait.planner.pricing import HOLDS, MOST_ROUNDS, PRECISIONS, TOLERANCE, Pricing, pricing_of
from plait.planner.solver import Limit, Limits, Program, solve

Replicas = tuple[int, ...]  # number for each configuration, in the order of the costs
Devices = Mapping[str, int]  # number by kind, as configurations name it; "" if there is only one kind
ROUNDS = 300  # rounds of column generation for one makespan
REDUCED = 1e-6  # patterns worth less than this above their need, relatively, are not searched for
WHOLE_LIMITS = Limits(nodes=1, seconds=30.0)  # more nodes cover more, but descent does so equally well


@dataclass(frozen=True, slots=True)
class Pattern:
    """The load of one replica: the index of its configuration in the costs, sequences by bucket, seconds."""

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
        share: share of the batch that the patterns found so far cover; if large enough, the search ends.
        most: upper bound of the share that any patterns cover.
    """

    share: float
    most: float
    replicas: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Solved:
    """A linear program's answer.

    Attributes:
        prices: price of a sequence of each bucket.
        needs: worth that a pattern of each configuration must exceed to help.
        value: objective of the dual solution.
    """

    share: float
    prices: Float64
    needs: Float64
    value: float
    replicas: tuple[float, ...]


class Patterns:
    """Patterns for one batch, collected over makespans."""

    def __init__(self, costs: Sequence[ReplicaCost], counts: Sequence[int] | Int64, devices: Devices) -> None:
        self._costs = tuple(costs)
        self._counts = np.asarray(counts, dtype=np.int64)
        self._used = np.flatnonzero(self._counts)
        self._devices = np.array(list(devices.values()), dtype=np.int64)
        self._sizes = np.array([cost.configuration.devices for cost in costs], dtype=np.int64)
        self._kind = np.array([list(devices).index(cost.configuration.kind) for cost in costs])
        self._pricing: tuple[float, tuple[Pricing, ...]] = (0.0, ())
        self._found: dict[tuple[int, tuple[int, ...]], Pattern] = {}
        self._rounds = 0
        self._most_rounds = MOST_ROUNDS

    @property
    def ended(self) -> bool:
        """Whether the rounds for all makespans are used up."""
        return self._rounds >= self._most_rounds

    @property
    def everything(self) -> Ranges:
        """Ranges that allow any number of replicas that fit on the devices."""
        most = self._devices[self._kind] // self._sizes
        return Ranges((0,) * len(self._costs), tuple(int(number) for number in most))

    def relax(self, tau: float, ranges: Ranges, *, exact: bool = False) -> Relaxed:
        """Generate patterns for ``tau`` until they cover the batch, or it is proved that none do."""
        nothing = (0.0,) * len(self._costs)
        if not self._holds(ranges.low):
            return Relaxed(0.0, 0.0, nothing)
        pricing, most, level = self._start(tau), float("inf"), 0
        found = Relaxed(0.0, most, nothing)
        for _ in range(ROUNDS):
            solved = self._solved(tau, ranges)
            if solved is None:
                break  # the ranges are feasible, so the solver failed, which proves nothing
            found = Relaxed(solved.share, most, solved.replicas)
            if solved.share >= 1 - TOLERANCE or self.ended:
                break
            self._rounds += 1
            before = len(self._found)
            excess = self._priced(pricing, solved, ranges, level)
            # Duals that are too low by the excess are corrected by the replicas, or by the devices.
            by_device = np.zeros(len(self._devices))
            np.maximum.at(by_device, self._kind, excess / self._sizes)
            repair = min(float(excess @ ranges.high), float(by_device @ self._devices))
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
        """Generate patterns until the batch is covered by the fewest devices of these replicas."""
        ranges = Ranges((0,) * len(replicas), replicas)
        self.relax(tau, ranges)
        pricing = self._start(tau)
        for _ in range(ROUNDS):
            solved, before = self._solved(tau, ranges, cover=True), len(self._found)
            if solved is None or self.ended:
                break
            self._rounds += 1
            self._priced(pricing, solved, ranges, 0)
            if len(self._found) == before:
                break

    def whole(self, tau: float, replicas: Replicas) -> tuple[Int64 | None, Limit | None]:
        """Choose a pattern for each replica so that little stays uncovered.

        Returns:
            The patterns (replicas in order, R), or None if the solver finds nothing; the limit that ended it.
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

    def _holds(self, replicas: Replicas) -> bool:
        """Whether the devices suffice for this many replicas of each configuration."""
        taken = np.bincount(self._kind, self._sizes * replicas, minlength=len(self._devices))
        return bool((taken <= self._devices).all())

    def _add(self, cost: int, counts: Int64) -> Pattern:
        key = (cost, tuple(int(value) for value in counts))
        if key not in self._found:
            self._found[key] = Pattern(cost, key[1], self._costs[cost].seconds(key[1]))
        return self._found[key]

    def _within(self, tau: float) -> list[Pattern]:
        """The patterns that take at most ``tau`` seconds."""
        return [each for each in self._found.values() if each.seconds <= tau * (1 + HOLDS)]

    def _start(self, tau: float) -> tuple[Pricing, ...]:
        """Start the pricing at ``tau``; the first patterns are an idle replica and one for each bucket
        alone."""
        if self._pricing[0] != tau:
            self._pricing = tau, tuple(pricing_of(cost, self._counts, tau) for cost in self._costs)
            self._most_rounds = min(each.most_rounds for each in self._pricing[1])
            for place, each in enumerate(self._pricing[1]):
                for j in (None, *np.flatnonzero(each.alone)):
                    counts = np.zeros(len(self._counts), dtype=np.int64)
                    if j is not None:
                        counts[j] = each.alone[j]
                    self._add(place, counts)
        return self._pricing[1]

    def _priced(self, pricing: Sequence[Pricing], solved: _Solved, ranges: Ranges, level: int) -> Float64:
        """Keep patterns that help; return by how much one of each configuration may exceed its need."""
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
        """The largest share of the batch that patterns cover; with ``cover``, all of it with the fewest
        devices.

        None if no answer is found: with ``cover``, there may be too few patterns or replicas; otherwise, if
        the ranges fit on the devices, the solver failed.
        """
        patterns, used = self._within(tau), self._used
        kinds = np.array([each.cost for each in patterns])
        sequences = np.array([each.counts for each in patterns], dtype=np.float64)[:, used].T
        low, high = np.array(ranges.low), np.array(ranges.high)
        floors = np.flatnonzero(low)
        ceilings = np.flatnonzero(high * self._sizes < self._devices[self._kind])
        every = np.arange(len(self._devices))[:, None]
        rows = np.concatenate(
            [
                -sequences,
                self._sizes[kinds] * (self._kind[kinds] == every),
                -1.0 * (kinds == floors[:, None]),
                kinds == ceilings[:, None],
            ]
        )
        share = np.zeros((len(rows), 1))
        share[: len(used), 0] = self._counts[used]
        limits = np.concatenate([np.zeros(len(used)), self._devices, -low[floors], high[ceilings]])
        paid = self._sizes[kinds] if cover else np.zeros(len(kinds))
        result = linprog(
            np.append(paid, 0.0 if cover else -1.0),
            A_ub=np.concatenate([rows, share], axis=1),
            b_ub=limits,
            bounds=[(0, None)] * len(patterns) + [(1 if cover else 0, 1 if cover else None)],
            method="highs",
        )
        if result.status != SOLVED:
            return None
        duals = np.maximum(0.0, -result.ineqlin.marginals)
        of_buckets, of_devices, of_ranges = np.split(duals, [len(used), len(used) + len(self._devices)])
        prices = np.zeros(len(self._counts))
        prices[used] = of_buckets
        needs = self._sizes * (float(cover) + of_devices[self._kind])
        needs[floors] -= of_ranges[: len(floors)]
        needs[ceilings] += of_ranges[len(floors) :]
        parts = np.bincount(kinds, weights=result.x[:-1], minlength=len(self._costs))
        value = float(duals @ limits)
        return _Solved(float(result.x[-1]), prices, needs, value, tuple(float(part) for part in parts))
