"""Chooses the replicas to run (LobRA Eq. 2): how many of each configuration, for expected batches.

For a makespan τ, branch and bound over the replicas of each configuration closes a node if its relaxation
over patterns cannot cover the batch. If all nodes are closed, no deployment is that fast; if a node covers
the batch with whole replicas, these are a candidate. The answers decide which makespan is tried next. Small
instances are enumerated if the bound is still open. Every answer comes with a bound proved over all
configurations, and all limits count nodes and makespans, so a search repeats exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog

from plait.core.errors import CapacityError
from plait.core.samples import Int64
from plait.cost.replica import Configuration, ReplicaCost
from plait.planner.deployment_patterns import Devices, Patterns, Ranges, Replicas
from plait.planner.dispatch import (
    SOLVED,
    Dispatch,
    Float64,
    ReplicaKind,
    check_coverage,
    descend,
    dispatch,
    dispatch_of,
    least_alone,
    relaxed_shares,
    single,
    spread,
)
from plait.planner.packed import as_packed
from plait.planner.pricing import TOLERANCE
from plait.planner.solver import Limit

GAP = 0.01  # relative distance to the bound that is good enough
FEW = 16  # at most this many deployments are enumerated before the search
ENUMERATED = 4_000  # at most this many are enumerated if the search leaves the bound open
NODES = 80  # most nodes for one makespan
MAKESPANS = 20  # most makespans tried until the bracket is closed
CANDIDATES = 4  # candidates whose patterns are rounded
PROOFS = 3  # makespans tried with the finest precision
PRECISION = 0.001  # relative precision of makespans
FIRST, MOST_GROWTH = 1.03, 1.5  # the first makespan, times the bound, and its largest growth
# Shares of the allowed distance to the bound:
CLOSENESS = (0.35, 0.1)  # width of the bracket at which patterns are rounded
ROOM = (0.3, 0.6, 0.9)  # distance above the least makespan with a candidate at which patterns are rounded
ENOUGH = 0.5  # distance above it at which a deployment needs no more rounding before the proof
INTEGRAL = 1e-6
Evaluate = Callable[[tuple[ReplicaKind, ...]], Dispatch]


@dataclass(frozen=True, slots=True)
class Deployment:
    """The chosen replicas and their expected makespan.

    Attributes:
        kinds: configurations with their number of replicas.
        expected: dispatch of the expected batch, over single replicas or over kinds with equal shares.
        bound: lower bound proved for every deployment of these configurations and devices.
        limit_hit: a limit that weakened the bound or ended the search; None if neither happened.
    """

    kinds: tuple[ReplicaKind, ...]
    expected: Dispatch
    bound: float
    limit_hit: Limit | None = None

    @property
    def makespan(self) -> float:
        """Expected seconds of a step."""
        return self.expected.makespan

    @property
    def gap(self) -> float:
        """Relative distance of the makespan to the proved bound."""
        return self.makespan / self.bound - 1.0

    @property
    def shape(self) -> tuple[tuple[Configuration, int], ...]:
        """Configurations with their number of replicas."""
        return tuple((kind.cost.configuration, kind.count) for kind in self.kinds)

    @property
    def single(self) -> tuple[Configuration, ...]:
        """The configuration of every replica, in order."""
        return tuple(configuration for configuration, count in self.shape for _ in range(count))

    @property
    def devices(self) -> dict[str, int]:
        """How many devices of each kind its replicas use."""
        found: dict[str, int] = {}
        for each in self.single:
            found[each.kind] = found.get(each.kind, 0) + each.devices
        return found

    def __str__(self) -> str:
        return ", ".join(f"{configuration}×{count}" for configuration, count in self.shape)


def deploy(
    costs: Sequence[ReplicaCost],
    counts: Sequence[int],
    devices: Devices,
    *,
    gap: float = GAP,
    most_enumerated: int = ENUMERATED,
) -> Deployment:
    """The deployment with the least expected makespan, with sequences dispatched to single replicas.

    Args:
        costs: every configuration that the cluster allows, over the same bucket lengths.
        counts: B_j, sequences of each bucket in the expected batch.

    Raises:
        CapacityError: a bucket fits into no configuration of at most ``devices`` devices.
    """
    allowed = able(costs, counts, devices)
    every = list(itertools.islice(maximal(allowed, devices), most_enumerated + 1))
    few = len(every) <= FEW and most_enumerated > 0
    other = _enumerated(allowed, counts, every, gap) if few else None
    if other is not None and other.gap <= gap:
        return other
    plan = search(allowed, counts, devices, bound=relaxation_bound(allowed, counts, devices), goal=gap)
    if plan.gap <= gap or len(every) > most_enumerated:
        return plan
    other = other or _enumerated(allowed, counts, every, gap)
    best = min(plan, other, key=lambda each: each.makespan)
    return replace(best, bound=min(max(plan.bound, other.bound), best.makespan))


def best_equal_replicas(costs: Sequence[ReplicaCost], counts: Sequence[int], devices: Devices) -> Deployment:
    """As many replicas of one configuration as fit, for the configuration with the least makespan.

    This is the best that a system without heterogeneous replicas can do (LobRA's Task-Fused), and the choice
    of one configuration and capacity by throughput (LoRAFusion's parallelism profiler).

    Raises:
        CapacityError: no configuration takes all sequences.
    """
    last = max(j for j, count in enumerate(counts) if count)
    found = []
    for cost in costs:
        number = devices.get(cost.configuration.kind, 0) // cost.configuration.devices
        if number and cost.batch[last]:
            kinds = (ReplicaKind(cost, number),)
            found.append((_packed_by_replica(kinds, counts), kinds))
    if not found:
        raise CapacityError(
            f"a sequence of {costs[0].lengths[last]} tokens on {sum(devices.values())} devices",
            "No configuration takes it.",
            "Shorten the sequences (model.max_length), or add devices.",
        )
    expected, kinds = min(found, key=lambda item: item[0].makespan)
    return Deployment(kinds, expected, min(expected.bound, expected.makespan))


def relaxation_bound(costs: Sequence[ReplicaCost], counts: Sequence[int], devices: Devices) -> float:
    """A lower bound in seconds for all deployments of ``devices``: sequences, replicas and devices divisible.

    It minimises τ, where configuration c's devices are busy for D_c device-seconds: at least as long as each
    of its stages works on its sequences, with full microbatches and no ramp. The D_c of one kind of device
    add up to at most N·τ.
    """
    rows, limits, busy = _busy_rows(costs, counts)
    kinds = np.zeros((len(devices), rows.shape[1] + 1))
    for row, (kind, number) in zip(kinds, devices.items(), strict=True):
        own = [cost.configuration.kind == kind for cost in costs]
        row[busy:-1], row[-1] = own, -float(number)
    price = np.zeros(rows.shape[1] + 1)
    price[-1] = 1.0
    rows = np.concatenate([np.pad(rows, ((0, 0), (0, 1))), kinds])
    result = linprog(price, A_ub=rows, b_ub=[*limits, *[0.0] * len(devices)], method="highs-ds")
    if result.status != SOLVED:
        sizes = [float(cost.configuration.devices) for cost in costs]
        return least_alone(costs, counts, sizes) / sum(devices.values())
    return float(result.fun) * (1 - TOLERANCE)


def least_cost(costs: Sequence[ReplicaCost], counts: Sequence[int], rates: Mapping[str, float]) -> float:
    """A lower bound on the cost for any number of devices, given the ``rates`` per device-second; all
    divisible."""
    rows, limits, busy = _busy_rows(costs, counts)
    price = np.zeros(rows.shape[1])
    price[busy:] = [rates[cost.configuration.kind] for cost in costs]
    result = linprog(price, A_ub=rows, b_ub=limits, method="highs-ds")
    if result.status != SOLVED:
        each = [rates[cost.configuration.kind] * cost.configuration.devices for cost in costs]
        return least_alone(costs, counts, each)
    return float(result.fun) * (1 - TOLERANCE)


def _busy_rows(costs: Sequence[ReplicaCost], counts: Sequence[int]) -> tuple[Float64, list[float], int]:
    """Rows and limits for the assigned sequences and busy devices, and the index of the first D_c.

    Variables: the sequences of each pair of configuration and bucket, then the D_c.
    """
    used = [j for j, count in enumerate(counts) if count]
    pairs = [(c, j) for c, cost in enumerate(costs) for j in used if cost.batch[j]]
    busy, rows = len(pairs), []
    for c, cost in enumerate(costs):
        for seconds in cost.linear:
            row = np.zeros(busy + len(costs))
            for place, (owner, j) in enumerate(pairs):
                if owner == c:
                    row[place] = cost.configuration.devices * seconds[j]
            row[busy + c] = -1.0
            rows.append(row)
    for j in used:
        row = np.zeros(busy + len(costs))
        row[[place for place, (_, bucket) in enumerate(pairs) if bucket == j]] = -1.0
        rows.append(row)
    limits = [0.0] * (len(rows) - len(used)) + [-float(counts[j]) for j in used]
    return np.array(rows), limits, busy


def search(
    costs: Sequence[ReplicaCost], counts: Sequence[int], devices: Devices, *, bound: float, goal: float
) -> Deployment:
    """The best deployment found, within ``goal`` of the proved bound if possible.

    Args:
        costs: configurations that fit on the devices and together accept every sequence.
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
    """The search for the optimum, with the bracket around it.

    Attributes:
        low: proved lower bound.
        open: below it no candidate was found, whether proved or not.
        reached: least makespan with a candidate.
        high: least makespan of a deployment.
    """

    def __init__(
        self, costs: Sequence[ReplicaCost], counts: Sequence[int], devices: Devices, bound: float, goal: float
    ) -> None:
        self._costs, self._counts, self._devices, self._goal = costs, counts, devices, goal
        self._patterns = Patterns(costs, counts, devices)
        self._sizes = [cost.configuration.devices for cost in costs]
        self._kinds = [cost.configuration.kind for cost in costs]
        self._makespans: dict[Replicas, float] = {}
        self._rounded: set[tuple[Replicas, float]] = set()
        self._best: tuple[tuple[ReplicaKind, ...], Dispatch] | None = None
        self._limit_hit: Limit | None = None
        self.low = self.open = bound
        self.reached = self.high = math.inf
        for place, size in enumerate(self._sizes):  # equal replicas first, so that there is always an answer
            if costs[place].batch[np.flatnonzero(counts)[-1]]:
                number = devices[self._kinds[place]] // size
                self._evaluate(self._filled(tuple(number * (each == place) for each in range(len(costs)))))

    @property
    def done(self) -> bool:
        return self.high <= self.low * (1 + self._goal)

    def found(self) -> Deployment:
        """The best deployment, with the bound proved for all."""
        assert self._best is not None  # it was checked that some configuration accepts the longest sequence
        kinds, expected = self._best
        bound = min(self.low, expected.makespan)
        struck = self._limit_hit if self._limit_hit == "time" or not self.done else None
        return Deployment(kinds, replace(expected, bound=bound), bound, struck)

    @property
    def _ending(self) -> float:
        """The makespan whose impossibility ends the search."""
        return self.high / (1 + self._goal) * (1 + PRECISION / 10)

    def bracket(self, closeness: float) -> None:
        """Try makespans until the answer is good enough or the bracket is closed to ``closeness``."""
        growth = FIRST
        for _ in range(MAKESPANS):
            if self.done or self.reached <= self.open * (1 + closeness):
                return
            if self.reached == math.inf:
                # At the makespan of the equal replicas, these are a candidate.
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
        """Branch and bound at one makespan; candidates are evaluated by a dispatch that takes milliseconds.

        Args:
            candidates: how many to find; if more than one, they differ from those already known.
        """
        found, closed = self._branched(tau, candidates, exact=exact)
        if found:
            self.reached = min(self.reached, tau)
        elif tau < self.reached:
            self.open = max(self.open, tau)
            if closed:
                self.low = max(self.low, tau)
        for replicas in found:
            self._evaluate(replicas)

    def round_patterns(self) -> None:
        """Give the best candidates' replicas whole patterns, and assign what these leave uncovered by
        descent."""
        best = sorted(self._makespans, key=lambda replicas: (self._makespans[replicas], replicas))
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

    def _evaluate(self, replicas: Replicas) -> None:
        if replicas not in self._makespans:
            kinds = kinds_of(self._costs, replicas)
            expected = _by_replica(kinds, self._counts)
            self._makespans[replicas] = expected.makespan
            self._keep(kinds, expected)

    def _keep(self, kinds: tuple[ReplicaKind, ...], expected: Dispatch) -> None:
        if expected.makespan < self.high:
            expected = as_packed(single(kinds), expected)
        if expected.makespan < self.high:
            self.high, self._best = expected.makespan, (kinds, expected)

    def _filled(self, replicas: Replicas) -> Replicas:
        """The replicas with idle devices used for the largest configurations that fit, which is never
        slower."""
        filled, left = list(replicas), dict(self._devices)
        for number, size, kind in zip(replicas, self._sizes, self._kinds, strict=True):
            left[kind] -= number * size
        for place in sorted(
            range(len(filled)), key=lambda each: (-self._sizes[each], self._costs[each].ramp)
        ):
            more, left[self._kinds[place]] = divmod(left[self._kinds[place]], self._sizes[place])
            filled[place] += more
        return tuple(filled)

    def _branched(self, tau: float, most: int, *, exact: bool) -> tuple[list[Replicas], bool]:
        """Whole replicas that may suffice, and whether every other choice is proved impossible."""
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
                if most == 1 or whole not in self._makespans:
                    candidates.append(whole)
        if (nodes and len(candidates) < most) or self._patterns.ended:
            self._limit_hit = self._limit_hit or "nodes"
        return candidates, closed and not nodes


def _branches(ranges: Ranges, replicas: Sequence[float], sizes: Sequence[int]) -> list[Ranges]:
    """Two branches, with fewer and with more replicas of the most fractional configuration, by devices; the
    nearer one is last."""
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
    """Shares of single replicas that cover each sequence once: a surplus is taken from the slowest, missing
    sequences go to those that end earliest, then moves that help are made."""
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


def able(costs: Sequence[ReplicaCost], counts: Sequence[int], devices: Devices) -> list[ReplicaCost]:
    """The configurations that fit on the devices.

    Raises:
        CapacityError: none does, or a bucket fits into none of them.
    """
    found = [cost for cost in costs if cost.configuration.devices <= devices.get(cost.configuration.kind, 0)]
    if not found:
        raise CapacityError(
            f"{sum(devices.values())} devices", "No configuration is that small.", "Add devices."
        )
    check_coverage([ReplicaKind(cost, 1) for cost in found], counts)
    return found


def _by_replica(kinds: Sequence[ReplicaKind], counts: Sequence[int]) -> Dispatch:
    """The expected batch dispatched to single replicas, by a search that takes milliseconds."""
    return spread(kinds, counts, dispatch(kinds, counts))


def _packed_by_replica(kinds: Sequence[ReplicaKind], counts: Sequence[int]) -> Dispatch:
    return as_packed(single(kinds), _by_replica(kinds, counts))


def _enumerated(
    costs: Sequence[ReplicaCost], counts: Sequence[int], deployments: Sequence[Replicas], gap: float
) -> Deployment:
    return enumerated(costs, counts, deployments, lambda kinds: _packed_by_replica(kinds, counts), gap=gap)


def enumerated(
    costs: Sequence[ReplicaCost],
    counts: Sequence[int],
    deployments: Sequence[Replicas],
    evaluate: Evaluate,
    *,
    gap: float,
) -> Deployment:
    """Evaluate deployments by ascending bound until none can beat the best, or beat it by ``gap``."""
    longest = np.flatnonzero(counts)[-1]
    bounded = sorted(
        (_least(kinds_of(costs, p), counts), p)
        for p in deployments
        if any(cost.batch[longest] for cost, count in zip(costs, p, strict=True) if count)
    )
    best, bounds, limit_hit = None, [], None
    for bound, p in bounded:
        if best is not None and bound >= best.makespan * (1 - gap):
            bounds.append(bound)
            break
        kinds = kinds_of(costs, p)
        found = evaluate(kinds)
        limit_hit = limit_hit or found.limit_hit
        bounds.append(max(bound, found.bound))
        if best is None or found.makespan < best.makespan:
            best = Deployment(kinds, found, 0.0)
    assert best is not None  # coverage was checked
    return replace(best, bound=min([*bounds, best.makespan]), limit_hit=limit_hit)


def _least(kinds: Sequence[ReplicaKind], counts: Sequence[int]) -> float:
    """A lower bound on the makespan of these replicas; for a single one, it is its T."""
    alone = kinds[0].cost.seconds(counts) if [kind.count for kind in kinds] == [1] else 0.0
    return max(alone, relaxed_shares(kinds, counts)[0])


def maximal(costs: Sequence[ReplicaCost], devices: Devices) -> Iterator[Replicas]:
    """All choices of replica counts that leave no room for another replica.

    More replicas are never slower, because an added one may stay idle.
    """
    sizes = [cost.configuration.devices for cost in costs]
    kinds = [cost.configuration.kind for cost in costs]
    least = {kind: min(size for size, own in zip(sizes, kinds, strict=True) if own == kind) for kind in kinds}
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    p = [0] * len(sizes)
    left = dict(devices)

    def place(position: int) -> Iterator[Replicas]:
        if position == len(order):
            if all(left[kind] < size for kind, size in least.items()):
                yield tuple(p)
            return
        i = order[position]
        most = left[kinds[i]] // sizes[i]
        left[kinds[i]] -= most * sizes[i]
        for count in range(most, -1, -1):
            p[i] = count
            yield from place(position + 1)
            left[kinds[i]] += sizes[i] * (count > 0)
        p[i] = 0

    return place(0)
