"""The proven optimum of dispatch and deployment for small instances, by integer programs (LobRA Eq. 2 and 3).

The planner's searches, which need no solver for a step, are compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plait.core.samples import Int64
from plait.cost.replica import ReplicaCost
from plait.planner.deployment import Deployment, able, enumerated, maximal
from plait.planner.deployment_patterns import Devices
from plait.planner.dispatch import Dispatch, ReplicaKind, dispatch, dispatch_of, makespan, single
from plait.planner.solver import Limits, Program, Solution, solve
from plait_bench.bucketed import BucketedCost

EXACT = Limits(nodes=10**7, seconds=600.0)


def exact_deployment(
    costs: Sequence[ReplicaCost],
    counts: Sequence[int],
    devices: Devices,
    *,
    equal_shares: bool = False,
    limits: Limits = EXACT,
) -> Deployment:
    """The optimum by enumeration and integer programs.

    Args:
        equal_shares: evaluate by LobRA's T(⌈d / p⌉), replicas of one kind all taking the same; otherwise
            sequences are dispatched to single replicas, as in a step, which is never slower.

    Raises:
        CapacityError: a bucket fits into no configuration of at most ``devices`` devices.
    """

    def evaluate(kinds: tuple[ReplicaKind, ...]) -> Dispatch:
        return exact_dispatch(kinds if equal_shares else single(kinds), counts, limits)

    allowed = able(costs, counts, devices)
    return enumerated(allowed, counts, list(maximal(allowed, devices)), evaluate, gap=0.0)


def exact_dispatch(kinds: Sequence[ReplicaKind], counts: Sequence[int], limits: Limits = EXACT) -> Dispatch:
    """The best assignment with equal shares, proved unless a limit ended the solver; it starts from the
    search's.

    Raises:
        CapacityError: a bucket fits into no replica.
    """
    found = dispatch(kinds, counts)
    start = np.array(
        [[-(-d // kind.count) for d in row] for kind, row in zip(kinds, found.assigned, strict=True)]
    )
    least = found.makespan
    built = DispatchProgram.of(kinds, counts, most_seconds=least * (1 + 1e-9))
    solution = solve(built.program, limits, built.start(start))
    shares = built.shares(solution)
    if shares is None or makespan(kinds, shares) >= least - 1e-9:
        shares = start
    return dispatch_of(
        kinds, counts, shares, max(found.bound, min(solution.bound, least)), solution.limit_hit
    )


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Variables of one kind and bucket.

    Attributes:
        share: e, sequences of one replica.
        microbatches: m ≥ e / b; the share itself if b = 1.
        used, full, largest: only with a pipeline: e > 0, whether a microbatch is full, and the
            sequences of the largest microbatch.
    """

    share: int
    microbatches: int
    used: int | None = None
    full: int | None = None
    largest: int | None = None


@dataclass(frozen=True, slots=True)
class DispatchProgram:
    """minimise τ subject to T(e_k) ≤ τ for each kind and Σ_k p_k·e_kj ≥ B_j for each bucket."""

    program: Program
    tau: int
    kinds: tuple[ReplicaKind, ...]
    buckets: tuple[tuple[_Bucket, ...], ...]
    longest: tuple[int | None, ...]

    @classmethod
    def of(
        cls, kinds: Sequence[ReplicaKind], counts: Sequence[int], *, most_seconds: float
    ) -> DispatchProgram:
        """The program for these replicas and sequences; solutions above ``most_seconds`` are cut off."""
        program = Program()
        tau = program.variable(upper=most_seconds, cost=1.0)
        buckets, longest = [], []
        for kind in kinds:
            columns = tuple(_add_bucket(program, kind, j, int(counts[j])) for j in range(kind.cost.supported))
            slowest = program.variable() if kind.cost.ramp else None
            _add_seconds(program, kind.cost, columns, slowest, tau)
            buckets.append(columns)
            longest.append(slowest)
        for j, count in enumerate(counts):
            if count:
                able = [
                    (kind, columns) for kind, columns in zip(kinds, buckets, strict=True) if j < len(columns)
                ]
                program.row([(columns[j].share, float(kind.count)) for kind, columns in able], lower=count)
        return cls(program, tau, tuple(kinds), tuple(buckets), tuple(longest))

    def start(self, shares: Int64) -> list[float]:
        """Values of all variables for given shares."""
        values = [0.0] * len(self.program.costs)
        for kind, columns, slowest, row in zip(self.kinds, self.buckets, self.longest, shares, strict=True):
            for j, column in enumerate(columns):
                share, batch = int(row[j]), int(kind.cost.batch[j])
                values[column.share] = share
                values[column.microbatches] = -(-share // batch)
                for variable, value in (
                    (column.used, share > 0),
                    (column.full, share >= batch),
                    (column.largest, min(share, batch)),
                ):
                    if variable is not None:
                        values[variable] = float(value)
            seconds = kind.cost.seconds(row)
            if slowest is not None:
                assert isinstance(kind.cost, BucketedCost)
                values[slowest] = kind.cost.longest(row)
            values[self.tau] = max(values[self.tau], seconds)
        return values

    def shares(self, solution: Solution) -> Int64 | None:
        """The solution's shares (K, R); None if it has none."""
        if not solution.values:
            return None
        e = np.zeros((len(self.kinds), max(len(kind.cost.lengths) for kind in self.kinds)), dtype=np.int64)
        for k, columns in enumerate(self.buckets):
            for j, column in enumerate(columns):
                e[k, j] = round(solution.values[column.share])
        return e


def _add_bucket(program: Program, kind: ReplicaKind, j: int, count: int) -> _Bucket:
    most, batch = -(-count // kind.count), int(kind.cost.batch[j])
    share = program.variable(upper=most, integer=True)
    microbatches = share
    if batch > 1:
        microbatches = program.variable(upper=-(-most // batch), integer=True)
        program.row([(microbatches, float(batch)), (share, -1.0)], lower=0.0)
    if not kind.cost.ramp or not most:
        return _Bucket(share, microbatches)
    used = program.variable(upper=1, integer=True)
    program.row([(share, 1.0), (used, -float(most))], upper=0.0)
    if most <= batch:
        return _Bucket(share, microbatches, used, None, share)
    # largest ≥ min(share, batch): the solver chooses full, and the smaller of the two serves it best
    full = program.variable(upper=1, integer=True)
    largest = program.variable(upper=batch)
    program.row([(largest, 1.0), (full, -float(batch))], lower=0.0)
    program.row([(largest, 1.0), (share, -1.0), (full, float(most - batch))], lower=0.0)
    return _Bucket(share, microbatches, used, full, largest)


def _add_seconds(
    program: Program, cost: ReplicaCost, columns: Sequence[_Bucket], slowest: int | None, tau: int
) -> None:
    """Rows for T ≤ τ: the work of every stage, and the ramp's slowest microbatch."""
    for stage, fixed in enumerate(cost.fixed):
        terms: dict[int, float] = {tau: -1.0}
        for j, column in enumerate(columns):
            terms[column.share] = terms.get(column.share, 0.0) + float(cost.each[stage, j])
            terms[column.microbatches] = terms.get(column.microbatches, 0.0) + float(fixed)
        if slowest is not None:
            terms[slowest] = float(cost.ramp)
        program.row(list(terms.items()), upper=0.0)
        for j, column in enumerate(columns):
            if slowest is not None and column.used is not None and column.largest is not None:
                parts = [(column.used, -float(fixed)), (column.largest, -float(cost.each[stage, j]))]
                program.row([(slowest, 1.0), *parts], lower=0.0)
