"""Search for a deployment by the numbers of its replicas, between a proved bound and a makespan that holds.

For a makespan τ, branch and bound over the replicas of each configuration: a node whose relaxation over
patterns cannot cover the batch is closed. Where all are closed, no deployment is that fast; where one
covers the batch with whole replicas, they are a candidate. Which makespans are asked for follows from the
answers. All limits are numbers of nodes and makespans, so that a search repeats exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from plait.cost.replica import ReplicaCost
from plait.planner.deployment_patterns import TOLERANCE, Patterns, Ranges, Replicas
from plait.planner.dispatch import Dispatch, dispatch, dispatch_of, spread
from plait.planner.dispatch_search import Int64, ReplicaKind, descend, single
from plait.planner.solver import Limit

NODES = 80  # of one makespan
MAKESPANS = 20  # asked for until the bracket is closed
CANDIDATES = 4  # whose patterns are rounded
PROOFS = 3  # makespans asked for with the finest precision
PRECISION = 0.001  # of makespans, relative
FIRST, MOST_GROWTH = 1.03, 1.5  # times the bound: the first makespan, and how fast it grows
# Shares of the distance to the bound that is allowed:
CLOSENESS = (0.35, 0.1)  # how far the bracket is closed before patterns are rounded
ROOM = (0.3, 0.6, 0.9)  # above the least makespan with a candidate, for patterns that are rounded
ENOUGH = 0.5  # above it, for a deployment that needs no more rounding before the proof
INTEGRAL = 1e-6


@dataclass(frozen=True, slots=True)
class Found:
    """A deployment, and what is proved of all.

    Attributes:
        kinds: with replicas.
        expected: the batch dispatched to single replicas.
        bound: no deployment is faster.
        candidates: replica counts that were looked at, the last ones first.
        limit_hit: a limit that kept the bound or the answer from being better, or "time", after which
            plans need not repeat; None where neither struck.
    """

    kinds: tuple[ReplicaKind, ...]
    expected: Dispatch
    bound: float
    candidates: tuple[Replicas, ...]
    limit_hit: Limit | None


def search(
    costs: Sequence[ReplicaCost], counts: Sequence[int], devices: int, *, bound: float, goal: float
) -> Found:
    """The best deployment that is found, within ``goal`` of the bound that is proved where that can be.

    Args:
        costs: configurations of at most ``devices`` devices that between them take every sequence.
        bound: no deployment is faster.
    """
    state = _Search(costs, counts, devices, bound, goal)
    for closeness in CLOSENESS:
        state.bracket(closeness * goal)
        state.round_patterns()
        state.prove()
        if state.done or state.reached == math.inf:
            break
        state.ask(state.reached * (1 + closeness * goal), candidates=CANDIDATES)
        state.round_patterns()
        state.prove()
        if state.done:
            break
    return state.found()


class _Search:
    """The bracket around the optimum while it closes.

    Attributes:
        low: proved.
        open: below it no candidate was found, proved or not.
        reached: least makespan that has a candidate.
        high: least makespan of a deployment.
    """

    def __init__(
        self, costs: Sequence[ReplicaCost], counts: Sequence[int], devices: int, bound: float, goal: float
    ) -> None:
        self._costs, self._counts, self._devices, self._goal = costs, counts, devices, goal
        self._patterns = Patterns(costs, counts, devices)
        self._sizes = [cost.configuration.devices for cost in costs]
        self._judged: dict[Replicas, float] = {}
        self._rounded: set[tuple[Replicas, float]] = set()
        self._best: tuple[tuple[ReplicaKind, ...], Dispatch] | None = None
        self._limit_hit: Limit | None = None
        self.low = self.open = bound
        self.reached = self.high = math.inf
        for place, size in enumerate(self._sizes):  # equal replicas, so that there is always an answer
            if costs[place].batch[np.flatnonzero(counts)[-1]]:
                self._judge(tuple(devices // size * (each == place) for each in range(len(costs))))

    @property
    def done(self) -> bool:
        return self.high <= self.low * (1 + self._goal)

    def found(self) -> Found:
        """What is known."""
        assert self._best is not None  # some configuration takes the longest sequence: it was checked
        kinds, expected = self._best
        bound = min(self.low, expected.makespan)
        order = sorted(self._judged, key=lambda replicas: (self._judged[replicas], replicas))
        struck = self._limit_hit if self._limit_hit == "time" or not self.done else None
        return Found(kinds, replace(expected, bound=bound), bound, tuple(order), struck)

    @property
    def _ending(self) -> float:
        """The makespan whose impossibility ends the search."""
        return self.high / (1 + self._goal) * (1 + PRECISION / 10)

    def bracket(self, closeness: float) -> None:
        """Ask makespans until the answer is near enough or the bracket is closed to ``closeness``."""
        growth = FIRST
        for _ in range(MAKESPANS):
            if self.done or self.reached <= self.open * (1 + closeness):
                return
            if self.reached == math.inf:
                # At the makespan of the equal replicas there is a candidate: they are one.
                tau, growth = min(self.open * growth, self.high), min(growth**2, MOST_GROWTH)
            else:
                ends = self.open * (1 + closeness) < self._ending < self.reached
                tau = self._ending if ends else (self.open * self.reached) ** 0.5
            self.ask(tau)

    def prove(self) -> None:
        """Raise the bound with the finest precision."""
        tau = min(self._ending, self.reached)
        for _ in range(PROOFS):
            if self.done or tau <= self.low * (1 + PRECISION):
                return
            self.ask(tau, exact=True)
            tau = min(self._ending, (self.low * min(tau, self.reached)) ** 0.5)

    def ask(self, tau: float, *, candidates: int = 1, exact: bool = False) -> None:
        """Branch and bound at one makespan; candidates are judged by a dispatch of some milliseconds.

        Args:
            candidates: how many; where it is more than one, others than those that are known.
        """
        found, closed = self._branched(tau, candidates, exact=exact)
        if found:
            self.reached = min(self.reached, tau)
        elif tau < self.reached:
            self.open = max(self.open, tau)
            if closed:
                self.low = max(self.low, tau)
        for replicas in found:
            self._judge(replicas)

    def round_patterns(self) -> None:
        """Give the best candidates' replicas whole patterns, and what those leave uncovered by descent."""
        best = sorted(self._judged, key=lambda replicas: (self._judged[replicas], replicas))
        for replicas in best[:CANDIDATES]:
            for share in ROOM:
                tau = self.reached * (1 + share * self._goal)
                enough = self.high <= self.reached * (1 + ENOUGH * self._goal)
                if self.done or enough or (replicas, tau) in self._rounded:
                    continue
                self._rounded.add((replicas, tau))
                self._patterns.enrich(tau, replicas)
                rows, limit_hit = self._patterns.whole(tau, replicas)
                self._limit_hit = "time" if limit_hit == "time" else self._limit_hit
                if rows is not None:
                    kinds = kinds_of(self._costs, replicas)
                    shares = completed(single(kinds), self._counts, rows)
                    self._keep(kinds, dispatch_of(single(kinds), self._counts, shares, self.low))

    def _judge(self, replicas: Replicas) -> None:
        if replicas not in self._judged:
            kinds = kinds_of(self._costs, replicas)
            expected = spread(kinds, self._counts, dispatch(kinds, self._counts))
            self._judged[replicas] = expected.makespan
            self._keep(kinds, expected)

    def _keep(self, kinds: tuple[ReplicaKind, ...], expected: Dispatch) -> None:
        if expected.makespan < self.high:
            self.high, self._best = expected.makespan, (kinds, expected)

    def _filled(self, replicas: Replicas) -> Replicas:
        """With the devices that stay idle given to the largest configurations that fit: none is slower so."""
        filled, left = list(replicas), self._devices - self._patterns.devices(replicas)
        for place in sorted(
            range(len(filled)), key=lambda each: (-self._sizes[each], self._costs[each].ramp)
        ):
            more, left = divmod(left, self._sizes[place])
            filled[place] += more
        return tuple(filled)

    def _branched(self, tau: float, most: int, *, exact: bool) -> tuple[list[Replicas], bool]:
        """Whole replicas that may do, and whether every other choice is proved impossible."""
        nodes, candidates, closed = [self._patterns.everything], list[Replicas](), True
        for _ in range(NODES):
            if not nodes or len(candidates) == most:
                break
            ranges = nodes.pop()
            relaxed = self._patterns.relax(tau, ranges, exact=exact)
            if relaxed.most < 1 - TOLERANCE:
                continue
            if relaxed.share < 1 - TOLERANCE:
                closed = False
                continue
            branches = _branches(ranges, relaxed.replicas, self._sizes)
            nodes += branches
            if not branches:
                closed = False
                whole = self._filled(tuple(round(number) for number in relaxed.replicas))
                if most == 1 or whole not in self._judged:
                    candidates.append(whole)
        if nodes and len(candidates) < most:
            self._limit_hit = self._limit_hit or "nodes"
        return candidates, closed and not nodes


def _branches(ranges: Ranges, replicas: Sequence[float], sizes: Sequence[int]) -> list[Ranges]:
    """Fewer and more replicas of the configuration that is least whole by devices, the nearer one last."""
    parts = [abs(number - round(number)) * size for number, size in zip(replicas, sizes, strict=True)]
    place = max(range(len(parts)), key=lambda each: parts[each])
    if parts[place] <= INTEGRAL:
        return []
    below = math.floor(replicas[place])
    low, high = list(ranges.low), list(ranges.high)
    high[place], low[place] = below, below + 1
    both = [Ranges(ranges.low, tuple(high)), Ranges(tuple(low), ranges.high)]
    return both if replicas[place] - below >= 0.5 else both[::-1]


def completed(replicas: Sequence[ReplicaKind], counts: Sequence[int], rows: Int64) -> Int64:
    """Shares of single replicas that take each sequence once: surplus from the slowest, what is missing to
    those that end earliest, then moves that help."""
    shares = rows.copy()
    for j in reversed(range(len(counts))):
        surplus = int(shares[:, j].sum()) - counts[j]
        step = -1 if surplus > 0 else 1
        for _ in range(abs(surplus)):
            after = shares.copy()
            after[:, j] += step
            able = [k for k, each in enumerate(replicas) if each.cost.batch[j] and after[k, j] >= 0]
            ends = {k: replicas[k].cost.seconds((shares if step < 0 else after)[k]) for k in able}
            chosen = max(able, key=lambda k: step * -ends[k])
            shares[chosen, j] += step
    return descend(replicas, counts, shares)


def kinds_of(costs: Sequence[ReplicaCost], replicas: Replicas) -> tuple[ReplicaKind, ...]:
    """The configurations that have replicas, with their number."""
    return tuple(ReplicaKind(cost, count) for cost, count in zip(costs, replicas, strict=True) if count)
