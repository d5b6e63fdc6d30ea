"""Lower bounds of a step's seconds over every deployment of a number of devices.

Two bounds, both for any way to share sequences out. :func:`relaxation_bound` is the linear relaxation:
every sequence on the configuration that spends the fewest device-seconds on it, devices perfectly busy.
:func:`bisection` asks a small mixed-integer program, for a makespan τ, whether whole replicas can do
the work in τ; the smallest τ not proved impossible is the better bound, and its answers are candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plait.cost.replica import ReplicaCost
from plait.planner.dispatch import device_seconds
from plait.planner.dispatch_search import Int64
from plait.planner.solver import Limit, Limits, Program, solve

Counts = tuple[int, ...]  # replicas of each configuration, in the order of the costs

PRECISION = 0.002  # of the bisection, relative
RAMP_LEVELS = 4  # classes of longest microbatch that the program tells apart, for each configuration
BOUND_LIMITS = Limits(nodes=2_000, seconds=10.0)


@dataclass(frozen=True, slots=True)
class Bisection:
    """What the bisection proved and found.

    Attributes:
        bound: proved; no deployment is faster.
        candidates: replica counts that may reach makespans near the bound, most promising first.
        limit_hit: a program stopped early, and the bound is weaker for it.
    """

    bound: float
    candidates: tuple[Counts, ...]
    limit_hit: Limit | None


def relaxation_bound(costs: Sequence[ReplicaCost], counts: Sequence[int], devices: int) -> float:
    """Σ_j B_j · (fewest device-seconds of a sequence of bucket j) / devices."""
    cheapest = np.min([device_seconds(cost) for cost in costs], axis=0)
    used = np.asarray(counts) > 0
    return float((np.asarray(counts)[used] * cheapest[used]).sum() / devices)


def bisection(costs: Sequence[ReplicaCost], counts: Sequence[int], devices: int) -> Bisection:
    """Bracket the least makespan that whole replicas allow; sequences stay divisible."""
    low = max(relaxation_bound(costs, counts, devices), _longest_alone(costs, counts)) * (1 - 1e-9)
    high, tau = float("inf"), low * (1 + PRECISION)
    candidates: list[Counts] = []
    limit_hit: Limit | None = None
    while high > low * (1 + PRECISION):
        program, replicas = _program(costs, counts, devices, tau)
        solution = solve(program, BOUND_LIMITS)
        if solution.status == "infeasible":
            low = tau
        else:
            high = tau
            limit_hit = limit_hit or solution.limit_hit
            if solution.values:
                candidates.append(_counts(solution.values, replicas))
        tau = low * 1.05 if high == float("inf") else (low * high) ** 0.5
    return Bisection(low, tuple(dict.fromkeys(reversed(candidates))), limit_hit)


def _longest_alone(costs: Sequence[ReplicaCost], counts: Sequence[int]) -> float:
    """Seconds of the longest sequence by itself on the fastest replica that takes it."""
    last = max(j for j, count in enumerate(counts) if count)
    alone = np.zeros(len(counts), dtype=np.int64)
    alone[last] = 1
    return min(cost.seconds(alone) for cost in costs)


def _program(
    costs: Sequence[ReplicaCost], counts: Sequence[int], devices: int, tau: float
) -> tuple[Program, list[list[int]]]:
    """Fewest devices whose replicas can do all work in ``tau``; infeasible where more are needed.

    A replica belongs to a ramp class: its longest microbatch takes at least the class's seconds, so that
    (pp − 1) times as much is lost, and no bucket may make a microbatch that reaches the next class.
    """
    program = Program()
    replicas: list[list[int]] = []
    cover: list[list[tuple[int, float]]] = [[] for _ in counts]
    for cost in costs:
        size = cost.configuration.devices
        levels = _levels(cost)
        columns = []
        for level, following in zip(levels, [*levels[1:], float("inf")], strict=True):
            room = tau - cost.ramp * level
            most = _most_alone(cost, counts, room, following)
            if not most.any():
                continue
            p = program.variable(upper=devices // size, integer=True, cost=float(size))
            columns.append(p)
            work: list[list[tuple[int, float]]] = [[(p, -room)] for _ in cost.fixed]
            for j in map(int, np.flatnonzero(most)):
                d = program.variable(upper=float(counts[j]))
                cover[j].append((d, 1.0))
                program.row([(d, 1.0), (p, -float(most[j]))], upper=0.0)
                for stage, fixed in enumerate(cost.fixed):
                    work[stage].append((d, float(cost.each[stage, j] + fixed / cost.batch[j])))
            for terms in work:
                program.row(terms, upper=0.0)
        replicas.append(columns)
    for terms, count in zip(cover, counts, strict=True):
        if count:
            program.row(terms, lower=float(count))
    sizes = zip(costs, replicas, strict=True)
    program.row(
        [(p, float(cost.configuration.devices)) for cost, columns in sizes for p in columns],
        upper=float(devices),
    )
    return program, replicas


def _levels(cost: ReplicaCost) -> list[float]:
    """Lower ends of the ramp classes, ascending, from the shortest microbatch there can be."""
    if not cost.ramp:
        return [0.0]
    full = np.unique(cost.full[: cost.supported])
    shortest = float((cost.fixed + cost.each[:, 0]).max())
    picked = full[np.linspace(0, len(full) - 1, min(RAMP_LEVELS, len(full))).round().astype(int)]
    return sorted({shortest, *(float(level) for level in picked)})


def _most_alone(cost: ReplicaCost, counts: Sequence[int], room: float, following: float) -> Int64:
    """Most sequences of each bucket that one replica can do by itself in ``room`` seconds (R,).

    None where already its smallest microbatch reaches the next ramp class; no more than the largest
    microbatch below that class where the full one reaches it.
    """
    most = np.zeros(len(counts), dtype=np.int64)
    for j in range(cost.supported):
        d = np.arange(1, int(counts[j]) + 1)
        each, b = cost.each[:, j, None], int(cost.batch[j])
        seconds = (cost.fixed[:, None] * -(-d // b) + each * d).max(axis=0)
        longest = (cost.fixed[:, None] + each * np.minimum(d, b)).max(axis=0)
        allowed = (seconds <= room * (1 + 1e-9)) & ((longest < following) | (cost.ramp == 0))
        most[j] = np.count_nonzero(allowed)
    return most


def _counts(values: Sequence[float], replicas: Sequence[Sequence[int]]) -> Counts:
    return tuple(round(sum(values[p] for p in columns)) for columns in replicas)
