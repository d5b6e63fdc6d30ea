"""Dispatch of one step's sequences to the replicas of a deployment (LobRA Eq. 3).

Replicas of one kind share what their kind gets: d_kj sequences of bucket j go to the p_k replicas of
kind k, so that one of them takes e_kj = ⌈d_kj / p_k⌉ and the step takes max_k T(e_k). T grows with every
e_kj, so it is solved in e alone, covering each bucket (Σ_k p_k·e_kj ≥ B_j); any split of B_j within that
cover is an optimal d. :func:`spread` then gives up equal shares: replicas of a kind may differ by a
sequence, which Eq. 3 does not allow and which is never slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from plait.core.errors import CapacityError
from plait.cost.replica import ReplicaCost
from plait.planner.dispatch_search import (
    Float64,
    Int64,
    ReplicaKind,
    descend,
    greedy,
    makespan,
    relaxed_shares,
    rounded,
    single,
    spread_shares,
    whole_totals,
)
from plait.planner.solver import Limit, Limits, Program, Solution, solve

EXACT = Limits(nodes=10**7, seconds=600.0)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Variables of one kind and bucket.

    Attributes:
        share: e, sequences of one replica.
        microbatches: m ≥ e / b; the share itself where b = 1.
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
                values[slowest] = kind.cost.longest(row)
            values[self.tau] = max(values[self.tau], seconds)
        return values

    def shares(self, solution: Solution) -> Int64 | None:
        """The solution's shares (K, R); None where it has none."""
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


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Which sequences go where in one step.

    Attributes:
        assigned: d_kj: sequences of bucket j for all replicas of kind k together; Σ_k d_kj = B_j.
        bound: proved: no dispatch of these buckets to these replicas with equal shares is faster.
        limit_hit: which limit ended the solver; None where it ran to its end or was not asked.
        relaxed: bound of the linear relaxation, and its shares (K, R): further searches start from them.
    """

    assigned: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    bound: float
    limit_hit: Limit | None = None
    relaxed: tuple[float, Float64] | None = field(default=None, compare=False, repr=False)

    @property
    def makespan(self) -> float:
        """The step's seconds: of the slowest replica."""
        return max(self.seconds)

    @property
    def gap(self) -> float:
        """Relative distance to the bound."""
        return self.makespan / self.bound - 1.0 if self.bound > 0 else 0.0


def dispatch(kinds: Sequence[ReplicaKind], counts: Sequence[int], limits: Limits | None = None) -> Dispatch:
    """Assign counts[j] sequences of each bucket so that the slowest replica is done earliest.

    Args:
        kinds: the deployment, every kind with a cost over the same bucket lengths.
        limits: of the integer program; None takes the search of a few milliseconds alone, whose bound
            is that of the linear relaxation. :data:`EXACT` proves the optimum.

    Raises:
        CapacityError: a bucket fits into no replica.
    """
    check_coverage(kinds, counts)
    bound, fractional = relaxed_shares(kinds, counts)
    start = descend(kinds, counts, rounded(kinds, counts, fractional))
    other = greedy(kinds, counts)
    if makespan(kinds, other) < makespan(kinds, start):
        start = descend(kinds, counts, other)
    if limits is None:
        return replace(dispatch_of(kinds, counts, start, bound), relaxed=(bound, fractional))
    least = makespan(kinds, start)
    built = DispatchProgram.of(kinds, counts, most_seconds=least * (1 + 1e-9))
    solution = solve(built.program, limits, built.start(start))
    found = built.shares(solution)
    better = found is not None and makespan(kinds, found) < least - 1e-9
    return dispatch_of(
        kinds,
        counts,
        found if found is not None and better else start,
        max(bound, min(solution.bound, least)),
        solution.limit_hit,
    )


def spread(kinds: Sequence[ReplicaKind], counts: Sequence[int], chosen: Dispatch) -> Dispatch:
    """Share each kind's sequences out to its replicas one by one, evening out what ⌈d / p⌉ rounds up.

    Returns:
        A dispatch over single replicas, in the order of ``kinds``; never slower than ``chosen``.
    """
    each = single(kinds)
    equal = np.concatenate(
        [
            np.array([[value // kind.count + (replica < value % kind.count) for value in row]])
            for kind, row in zip(kinds, chosen.assigned, strict=True)
            for replica in range(kind.count)
        ]
    )
    bound, fractional = chosen.relaxed or relaxed_shares(kinds, counts)
    even = spread_shares(kinds, whole_totals(kinds, counts, fractional))
    totals = np.array(chosen.assigned, dtype=np.int64)
    starts = (equal, even, spread_shares(kinds, totals))
    descended = [descend(each, counts, start, chains=False) for start in starts]
    best = min(descended, key=lambda e: makespan(each, e))
    return dispatch_of(each, counts, descend(each, counts, best), bound)


def device_seconds(cost: ReplicaCost) -> Float64:
    """Device-seconds of one sequence of each bucket in full microbatches (R,); inf where it does not fit."""
    each = np.where(cost.batch > 0, cost.full / np.maximum(cost.batch, 1), np.inf)
    return np.asarray(each * cost.configuration.devices)


def check_coverage(kinds: Sequence[ReplicaKind], counts: Sequence[int]) -> None:
    """Every bucket with sequences in it fits into some replica.

    Raises:
        CapacityError: naming the length, and the most that fits.
    """
    for j, count in enumerate(counts):
        if count and not any(kind.cost.batch[j] for kind in kinds):
            most = max((kind.cost.configuration.max_tokens for kind in kinds), default=0)
            length = f"of {kinds[0].cost.lengths[j]} tokens" if kinds else "to dispatch"
            raise CapacityError(
                f"a sequence {length}",
                f"The largest microbatch of this deployment has {most} tokens.",
                "Shorten the sequences (model.max_length), or allow a configuration with more memory.",
            )


def dispatch_of(
    kinds: Sequence[ReplicaKind],
    counts: Sequence[int],
    shares: Int64,
    bound: float,
    limit_hit: Limit | None = None,
) -> Dispatch:
    """Shares e (K, R) as d with Σ_k d_kj = B_j and d_kj ≤ p_k·e_kj: kinds are filled in order."""
    assigned = []
    left = np.asarray(counts, dtype=np.int64)
    for kind, row in zip(kinds, shares, strict=True):
        taken = np.minimum(left, kind.count * row)
        assigned.append(tuple(int(value) for value in taken))
        left = left - taken
    seconds = tuple(
        kind.cost.seconds([-(-value // kind.count) for value in row])
        for kind, row in zip(kinds, assigned, strict=True)
    )
    return Dispatch(tuple(assigned), seconds, min(bound, max(seconds)), limit_hit)
