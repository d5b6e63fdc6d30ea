"""Which replicas to run (LobRA Eq. 2): how many of each configuration, for expected batches.

The search is by branch and bound over patterns; small instances are enumerated where the optimum is to be
proved. Either way the answer carries a proved bound over all configurations, not only over those it tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from plait.core.errors import CapacityError
from plait.cost.replica import Configuration, ReplicaCost
from plait.planner.deployment_bounds import relaxation_bound
from plait.planner.deployment_branching import kinds_of, search
from plait.planner.deployment_patterns import Replicas
from plait.planner.dispatch import EXACT, Dispatch, check_coverage, device_seconds, dispatch, spread
from plait.planner.dispatch_search import (
    ReplicaKind,
    makespan,
    relaxed_shares,
    single,
    spread_shares,
    whole_totals,
)
from plait.planner.solver import Limit, Limits


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
