"""Which replicas to run (LobRA Eq. 2): how many of each configuration, for expected batches.

The search is by branch and bound over patterns; small instances are enumerated where the optimum is to be
proved. Either way the answer carries a proved bound over all configurations, not only over those it tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from plait.core.errors import CapacityError
from plait.cost.replica import Configuration, ReplicaCost
from plait.planner.deployment_patterns import TOLERANCE, Patterns, Ranges, Replicas
from plait.planner.dispatch import (
    EXACT,
    Dispatch,
    check_coverage,
    device_seconds,
    dispatch,
    dispatch_of,
    spread,
)
from plait.planner.dispatch_search import (
    Int64,
    ReplicaKind,
    descend,
    makespan,
    relaxed_shares,
    single,
    spread_shares,
    whole_totals,
)
from plait.planner.solver import Limit, Limits


def relaxation_bound(costs: Sequence[ReplicaCost], counts: Sequence[int], devices: int) -> float:
    """Σ_j B_j · (fewest device-seconds of a sequence of bucket j) / devices.

    Every sequence on the configuration that spends the fewest device-seconds on it, devices perfectly busy.
    """
    cheapest = np.min([device_seconds(cost) for cost in costs], axis=0)
    used = np.asarray(counts) > 0
    return float((np.asarray(counts)[used] * cheapest[used]).sum() / devices)


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


@dataclass(frozen=True, slots=True)
class DeployOptions:
    """How a deployment is judged and how long it is searched for.

    Attributes:
        equal_shares: judge by LobRA's T(⌈d / p⌉), replicas of one kind all taking the same; otherwise
            sequences are shared out replica by replica, which is never slower and what a step does.
        exact: prove the optimum by enumeration and integer programs; for small instances.
        gap: stop within this distance of the bound.
        enumerate_up_to: deployments that are enumerated instead of searched.
        judged: most deployments whose dispatch is worked out.
    """

    equal_shares: bool = False
    exact: bool = False
    gap: float = 0.01
    enumerate_up_to: int = 4_000
    judged: int = 60
    limits: Limits = field(default_factory=lambda: EXACT)


@dataclass(frozen=True, slots=True)
class Deployment:
    """The replicas chosen and what is expected of them.

    Attributes:
        kinds: configurations with their number of replicas.
        expected: dispatch of the expected batch: over single replicas, or over kinds with equal shares.
        bound: proved over every deployment of these configurations and devices.
        relaxation: the linear relaxation's bound, the one that papers print.
        judged: deployments whose dispatch was worked out.
        limit_hit: a limit that weakened the bound or ended the search; None where neither happened.
    """

    kinds: tuple[ReplicaKind, ...]
    expected: Dispatch
    bound: float
    relaxation: float
    judged: int
    limit_hit: Limit | None

    @property
    def makespan(self) -> float:
        """Expected seconds of a step."""
        return self.expected.makespan

    @property
    def gap(self) -> float:
        """Distance of the makespan to the proved bound, relative."""
        return self.makespan / self.bound - 1.0

    @property
    def shape(self) -> tuple[tuple[Configuration, int], ...]:
        """Configurations with their number of replicas."""
        return tuple((kind.cost.configuration, kind.count) for kind in self.kinds)

    def __str__(self) -> str:
        return ", ".join(f"{configuration}×{count}" for configuration, count in self.shape)


def propose(costs: Sequence[ReplicaCost], devices: int) -> tuple[ReplicaCost, ...]:
    """LobRA's proposal (appendix A): the best throughput for each number of devices and length.

    A configuration competes with copies of smaller ones on as many devices; of equals, the one with the
    fewest pipeline stages stays, since the ramp is not in the throughput.
    """
    chosen: dict[int, ReplicaCost] = {}
    sizes = sorted({cost.configuration.devices for cost in costs})
    for size in sizes:
        for j in range(len(costs[0].lengths)):
            able = [c for c in costs if c.configuration.devices <= size and c.batch[j]]
            if able and size <= devices:
                best = min(
                    able, key=lambda c: (round(float(device_seconds(c)[j]), 12), c.ramp, c.configuration)
                )
                chosen[id(best)] = best
    return tuple(cost for cost in costs if id(cost) in chosen)


def deploy(
    costs: Sequence[ReplicaCost],
    counts: Sequence[int],
    devices: int,
    options: DeployOptions | None = None,
) -> Deployment:
    """The deployment with the least expected makespan.

    Args:
        costs: every configuration that the cluster allows, over the same bucket lengths.
        counts: B_j, sequences of each bucket in the expected batch.
        devices: N.

    Raises:
        CapacityError: a bucket fits into no configuration of at most ``devices`` devices.
    """
    options = options or DeployOptions()
    able = [cost for cost in costs if cost.configuration.devices <= devices]
    if not able:
        raise CapacityError(f"{devices} devices", "No configuration is that small.", "Add devices.")
    check_coverage([ReplicaKind(cost, 1) for cost in able], counts)
    relaxation = relaxation_bound(able, counts, devices)
    whole = list(_maximal(able, devices, options.enumerate_up_to + 1))
    few = len(whole) <= options.enumerate_up_to
    if options.exact or (options.equal_shares and few):
        every = whole if few else list(_maximal(able, devices, None))
        return _enumerated(able, counts, every, devices, relaxation, options)
    if options.equal_shares:
        return _searched(able, counts, devices, relaxation, options)
    found = search(able, counts, devices, bound=relaxation, goal=options.gap)
    judged = len(found.candidates)
    plan = Deployment(found.kinds, found.expected, found.bound, relaxation, judged, found.limit_hit)
    if plan.gap <= options.gap or not few:
        return plan
    other = _enumerated(able, counts, whole, devices, max(relaxation, plan.bound), options)
    best = min(plan, other, key=lambda each: each.makespan)
    bound = min(max(plan.bound, other.bound), best.makespan)
    return replace(best, bound=bound, relaxation=relaxation, judged=judged + other.judged)


def judge(kinds: Sequence[ReplicaKind], counts: Sequence[int], options: DeployOptions) -> Dispatch:
    """The expected batch dispatched to one deployment, as ``options`` say."""
    if options.exact and not options.equal_shares:
        return dispatch(single(kinds), counts, options.limits)
    found = dispatch(kinds, counts, options.limits if options.exact else None)
    return found if options.equal_shares else spread(kinds, counts, found)


def _enumerated(
    costs: Sequence[ReplicaCost],
    counts: Sequence[int],
    deployments: Sequence[Replicas],
    devices: int,
    relaxation: float,
    options: DeployOptions,
) -> Deployment:
    """Judge deployments by ascending bound until no bound is left below the best."""
    bounded = sorted(
        (relaxed_shares(kinds, counts)[0], p)
        for p in deployments
        if _covers(kinds := kinds_of(costs, p), counts)
    )
    best, bounds, judged, limit_hit = None, [], 0, None
    for bound, p in bounded:
        if best is not None and bound >= best.expected.makespan * (1 - options.gap * (not options.exact)):
            bounds.append(bound)
            break
        kinds = kinds_of(costs, p)
        found, judged = judge(kinds, counts, options), judged + 1
        limit_hit = limit_hit or found.limit_hit
        bounds.append(max(bound, found.bound if options.exact else bound))
        if best is None or found.makespan < best.expected.makespan:
            best = Deployment(kinds, found, 0.0, relaxation, 0, None)
    assert best is not None  # coverage was checked
    bound = min([*bounds, best.makespan])
    if options.equal_shares and not options.exact and best.makespan > bound * (1 + options.gap):
        proved = search(costs, counts, devices, bound=relaxation, goal=options.gap)
        bound = min(max(bound, proved.bound), best.makespan)
    return Deployment(best.kinds, best.expected, bound, relaxation, judged, limit_hit)


def _searched(
    costs: Sequence[ReplicaCost],
    counts: Sequence[int],
    devices: int,
    relaxation: float,
    options: DeployOptions,
) -> Deployment:
    """With equal shares: candidates of the search without them, and replacements of replicas of the best."""
    proved = search(costs, counts, devices, bound=relaxation, goal=options.gap)
    proposal = {id(cost) for cost in propose(costs, devices)}
    seen: dict[Replicas, float] = {}

    def quick(p: Replicas) -> float:
        if p not in seen:
            kinds = kinds_of(costs, p)
            seen[p] = _quick_makespan(kinds, counts) if _covers(kinds, counts) else float("inf")
        return seen[p]

    best = min(proved.candidates, key=quick)
    while len(seen) < options.judged * 10:
        neighbours = [p for p in _neighbours(costs, best, proposal) if p not in seen]
        better = min(neighbours, key=quick, default=best)
        if quick(better) >= quick(best):
            break
        best = better
    able = (p for p in seen if seen[p] < float("inf"))  # others leave a sequence without a replica
    finalists = sorted(able, key=lambda p: (seen[p], p))[: max(1, options.judged // 10)]
    found = [(judge(kinds_of(costs, p), counts, options), p) for p in finalists]
    expected, p = min(found, key=lambda item: item[0].makespan)
    bound = min(proved.bound, expected.makespan)
    return Deployment(kinds_of(costs, p), expected, bound, relaxation, len(seen), proved.limit_hit)


def _quick_makespan(kinds: Sequence[ReplicaKind], counts: Sequence[int]) -> float:
    """Seconds with sequences shared out one by one but not improved."""
    _, fractional = relaxed_shares(kinds, counts)
    return makespan(single(kinds), spread_shares(kinds, whole_totals(kinds, counts, fractional)))


def _neighbours(costs: Sequence[ReplicaCost], p: Replicas, proposal: set[int]) -> Iterator[Replicas]:
    """Deployments that replace one replica, or two of one kind, by others on as many devices."""
    allowed = [i for i, cost in enumerate(costs) if id(cost) in proposal]
    for i, count in enumerate(p):
        for taken in range(1, min(count, 2) + 1):
            freed = taken * costs[i].configuration.devices
            for added in _maximal([costs[k] for k in allowed], freed, 200):
                q = list(p)
                q[i] -= taken
                for k, more in zip(allowed, added, strict=True):
                    q[k] += more
                if tuple(q) != p:
                    yield tuple(q)


def _maximal(costs: Sequence[ReplicaCost], devices: int, most: int | None) -> Iterator[Replicas]:
    """Every choice of replica counts that leaves no room for another replica; at most ``most`` of them.

    More replicas are never slower: an added one may stay idle.
    """
    sizes = [cost.configuration.devices for cost in costs]
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    p = [0] * len(sizes)

    def place(position: int, left: int) -> Iterator[Replicas]:
        if position == len(order):
            if left < min(sizes):
                yield tuple(p)
            return
        i = order[position]
        for count in range(left // sizes[i], -1, -1):
            p[i] = count
            yield from place(position + 1, left - count * sizes[i])
        p[i] = 0

    yield from itertools.islice(place(0, devices), most)


def _covers(kinds: Sequence[ReplicaKind], counts: Sequence[int]) -> bool:
    longest = max(int(np.flatnonzero(np.asarray(counts))[-1]), 0)
    return any(kind.cost.batch[longest] for kind in kinds)


@dataclass(frozen=True, slots=True)
class Change:
    """Whether to leave a deployment for another, when jobs have joined or left.

    Attributes:
        pays: the seconds saved over the steps that are left exceed the restart.
        saved: seconds saved in all, the restart taken off; negative where it costs.
        break_even: steps after which the restart has paid for itself; None where it never does.
    """

    pays: bool
    saved: float
    break_even: int | None


def best_equal_replicas(costs: Sequence[ReplicaCost], counts: Sequence[int], devices: int) -> Deployment:
    """As many replicas of one configuration as fit, of the configuration with the least makespan.

    What a system without heterogeneous replicas can do at best (LobRA's Task-Fused), and the choice of one
    configuration and capacity by throughput (LoRAFusion's parallelism profiler).

    Raises:
        CapacityError: no configuration takes all sequences.
    """
    last = max(j for j, count in enumerate(counts) if count)
    found = []
    for cost in costs:
        number = devices // cost.configuration.devices
        if number and cost.batch[last]:
            kinds = (ReplicaKind(cost, number),)
            found.append((spread(kinds, counts, dispatch(kinds, counts)), kinds))
    if not found:
        raise CapacityError(
            f"a sequence of {costs[0].lengths[last]} tokens on {devices} devices",
            "No configuration takes it.",
            "Shorten the sequences (model.max_length), or add devices.",
        )
    expected, kinds = min(found, key=lambda item: item[0].makespan)
    relaxation = relaxation_bound(costs, counts, devices)
    return Deployment(kinds, expected, min(expected.bound, expected.makespan), relaxation, len(found), None)


def weigh_change(
    *, current_seconds: float, new_seconds: float, steps_left: int, restart_seconds: float
) -> Change:
    """Compare the expected seconds of a step now and after a restart over the steps that are left."""
    gained = current_seconds - new_seconds
    saved = gained * steps_left - restart_seconds
    break_even = int(-(-restart_seconds // gained)) if gained > 0 else None
    return Change(saved > 0, saved, break_even)
