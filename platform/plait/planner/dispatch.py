"""Dispatch of one step's sequences to the replicas of a deployment (LobRA Eq. 3), without a solver.

Replicas of one kind share their kind's sequences: d_kj sequences of bucket j go to the p_k replicas of kind
k, so one of them takes e_kj = ⌈d_kj / p_k⌉ and the step takes max_k T(e_k). T grows with every e_kj, so it is
solved in e only, covering each bucket (Σ_k p_k·e_kj ≥ B_j); any split of B_j within that cover is an optimal
d. :func:`spread` then drops the equal shares: replicas of a kind may differ by a sequence, which Eq. 3 does
not allow and which is never slower.

The method is a bound by linear programming, rounding, and descent by small moves: a few milliseconds per
step.

Shares e (K, R) are integers: the sequences of bucket j that one replica of kind k takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace

import numpy as np
import numpy.typing as npt

from plait.core.errors import CapacityError
from plait.core.samples import Int64
from plait.cost.replica import ReplicaCost
from plait.planner.solver import Limit

Float64 = npt.NDArray[np.float64]

MAX_MOVES = 200
CHAINS = 20  # two-step moves tried before a local optimum is accepted
EPSILON = 1e-9
SOLVED = 0  # status of scipy's linprog. 2 is no proof that there is no solution: it also stands for errors


@dataclass(frozen=True, slots=True)
class ReplicaKind:
    """``count`` replicas of one configuration."""

    cost: ReplicaCost
    count: int

    @property
    def devices(self) -> int:
        """Devices of all its replicas."""
        return self.count * self.cost.configuration.devices


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Where each sequence goes in one step.

    Attributes:
        assigned: d_kj: sequences of bucket j for all replicas of kind k together; Σ_k d_kj = B_j.
        bound: proved lower bound for all dispatches of these buckets to these replicas with equal shares.
        limit_hit: which limit ended the solver; None if it ran to its end or was not asked.
        relaxed: bound of the linear relaxation, and its shares (K, R), from which further searches start.
    """

    assigned: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    bound: float
    limit_hit: Limit | None = None
    relaxed: tuple[float, Float64] | None = field(default=None, compare=False, repr=False)

    @property
    def makespan(self) -> float:
        """The step's seconds, which are those of the slowest replica."""
        return max(self.seconds)

    @property
    def gap(self) -> float:
        """Relative distance to the bound."""
        return self.makespan / self.bound - 1.0 if self.bound > 0 else 0.0


def dispatch(kinds: Sequence[ReplicaKind], counts: Sequence[int]) -> Dispatch:
    """Assign counts[j] sequences of each bucket so that the slowest replica ends as early as possible.

    The bound is that of the linear relaxation.

    Raises:
        CapacityError: a bucket fits into no replica.
    """
    check_coverage(kinds, counts)
    bound, fractional = relaxed_shares(kinds, counts)
    start = descend(kinds, counts, rounded(kinds, counts, fractional))
    other = greedy(kinds, counts)
    if makespan(kinds, other) < makespan(kinds, start):
        start = descend(kinds, counts, other)
    return replace(dispatch_of(kinds, counts, start, bound), relaxed=(bound, fractional))


def spread(kinds: Sequence[ReplicaKind], counts: Sequence[int], chosen: Dispatch) -> Dispatch:
    """Distribute each kind's sequences over its single replicas, evening out the rounding of ⌈d / p⌉.

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
    """Device-seconds of one sequence of each bucket in full microbatches (R,); inf if it does not fit."""
    return cost.per_sequence * cost.configuration.devices


def check_coverage(kinds: Sequence[ReplicaKind], counts: Sequence[int]) -> None:
    """Check that every non-empty bucket fits into some replica.

    Raises:
        CapacityError: one does not; the message gives its length and the most that fits.
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
    """The dispatch with shares e (K, R): d with Σ_k d_kj = B_j and d_kj ≤ p_k·e_kj; kinds are filled in
    order."""
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


def makespan(kinds: Sequence[ReplicaKind], shares: Int64) -> float:
    """max_k T(e_k)."""
    return float(_loads(kinds, shares).max())


def relaxed_shares(kinds: Sequence[ReplicaKind], counts: Sequence[int]) -> tuple[float, Float64]:
    """The least makespan with fractional shares, full microbatches and no ramp, which is a bound; its shares.

    The bound holds for any distribution of sequences, also for unequal ones among replicas of one kind.
    """
    supported = [kind.cost.supported for kind in kinds]
    if len(kinds) == 1:  # nothing to decide
        each = np.array([counts]) / kinds[0].count
        return float((kinds[0].cost.linear @ each[0]).max(initial=0.0)), each
    first = np.concatenate([[0], np.cumsum(supported)])
    rows, limits = [], []
    for k, kind in enumerate(kinds):
        for seconds in kind.cost.linear:
            row = np.zeros(first[-1] + 1)
            row[first[k] : first[k + 1]] = seconds[: supported[k]]
            row[-1] = -1.0
            rows.append(row)
            limits.append(0.0)
    for j, count in enumerate(counts):
        row = np.zeros(first[-1] + 1)
        for k, kind in enumerate(kinds):
            if j < supported[k]:
                row[first[k] + j] = -kind.count
        rows.append(row)
        limits.append(-float(count))
    cost = np.zeros(first[-1] + 1)
    cost[-1] = 1.0
    from scipy.optimize import linprog  # slow to import, and one replica needs no dispatch

    result = linprog(cost, A_ub=np.array(rows), b_ub=limits, method="highs-ds")
    shares = np.zeros((len(kinds), len(counts)))
    if result.status != SOLVED:
        costs, replicas = [kind.cost for kind in kinds], sum(kind.count for kind in kinds)
        return least_alone(costs, counts, [1.0] * len(kinds)) / replicas, shares
    for k in range(len(kinds)):
        shares[k, : supported[k]] = result.x[first[k] : first[k + 1]]
    return float(result.fun), shares


def least_alone(costs: Sequence[ReplicaCost], counts: Sequence[int], prices: Sequence[float]) -> float:
    """What no way to share sequences out costs less than, at a price of each configuration's second: every
    bucket where it costs least. Weaker than a linear program, for when its solver fails."""
    return sum(
        count
        * min(
            price * float(cost.linear[:, j].mean())
            for cost, price in zip(costs, prices, strict=True)
            if cost.batch[j]
        )
        for j, count in enumerate(counts)
        if count
    )


def rounded(kinds: Sequence[ReplicaKind], counts: Sequence[int], fractional: Float64) -> Int64:
    """Whole shares that cover every bucket: rounded down, then longest bucket first to the earliest to
    end."""
    e: Int64 = np.floor(fractional + EPSILON).astype(np.int64)
    each = np.array([kind.count for kind in kinds])
    for j in reversed(range(len(counts))):
        able = [k for k, kind in enumerate(kinds) if kind.cost.batch[j]]
        while each @ e[:, j] < counts[j]:
            trial = {k: _with(e[k], j, 1) for k in able}
            k = min(able, key=lambda k: (kinds[k].cost.seconds(trial[k]), k))
            e[k] = trial[k]
    return e


def greedy(kinds: Sequence[ReplicaKind], counts: Sequence[int]) -> Int64:
    """Longest bucket first, each round of sequences to the kind that ends earliest by full microbatches."""
    e = np.zeros((len(kinds), len(counts)), dtype=np.int64)
    load = [0.0] * len(kinds)
    each = [kind.count for kind in kinds]
    for j in reversed(range(len(counts))):
        price = {k: float(kind.cost.per_sequence[j]) for k, kind in enumerate(kinds) if kind.cost.batch[j]}
        ends = [(load[k] + seconds, k) for k, seconds in price.items()]
        heapify(ends)
        left = int(counts[j])
        while left > 0:
            end, k = ends[0]
            heapreplace(ends, (end + price[k], k))
            e[k, j] += 1
            load[k] = end
            left -= each[k]
    return e


def single(kinds: Sequence[ReplicaKind]) -> list[ReplicaKind]:
    """Every replica as a separate kind, in order."""
    return [ReplicaKind(kind.cost, 1) for kind in kinds for _ in range(kind.count)]


def spread_shares(kinds: Sequence[ReplicaKind], totals: Int64) -> Int64:
    """Shares of single replicas from totals d (K, R): each kind's sequences evened out among its replicas.

    Longest bucket first: ⌊d / p⌋ to each replica, and the remainder to those with the least load.
    """
    rows = []
    for kind, total in zip(kinds, totals, strict=True):
        e = np.repeat((total // kind.count)[None], kind.count, axis=0)
        load = np.full(kind.count, kind.cost.seconds(e[0]))
        for j in reversed(range(len(total))):
            extra = int(total[j] % kind.count)
            if extra:
                lightest = np.argsort(load, kind="stable")[:extra]
                e[lightest, j] += 1
                load[lightest] += kind.cost.per_sequence[j]
        rows.append(e)
    return np.concatenate(rows)


def whole_totals(kinds: Sequence[ReplicaKind], counts: Sequence[int], fractional: Float64) -> Int64:
    """Whole totals d (K, R) with Σ_k d_kj = B_j near fractional shares, by largest remainder."""
    wanted = fractional * np.array([kind.count for kind in kinds])[:, None]
    totals: Int64 = np.floor(wanted + EPSILON).astype(np.int64)
    for j, count in enumerate(counts):
        order = np.argsort(totals[:, j] - wanted[:, j], kind="stable")
        missing = int(count) - int(totals[:, j].sum())
        totals[order[:missing], j] += 1
    return totals


def descend(
    kinds: Sequence[ReplicaKind], counts: Sequence[int], shares: Int64, *, chains: bool = True
) -> Int64:
    """Move sequences away from the slowest replicas while that helps, one move at a time or, with ``chains``,
    also two."""
    costs = {id(kind.cost): kind.cost for kind in kinds}
    same = [(cost, np.flatnonzero([kind.cost is cost for kind in kinds])) for cost in costs.values()]
    state = _State(kinds, np.asarray(counts), shares.copy(), _loads(kinds, shares), same)
    for _ in range(MAX_MOVES):
        better = _best_move(state) or (_best_chain(state) if chains else None)
        if better is None:
            break
        state = better
    return state.shares


@dataclass(frozen=True, slots=True)
class _State:
    kinds: Sequence[ReplicaKind]
    counts: Int64
    shares: Int64
    loads: Float64
    same_cost: Sequence[tuple[ReplicaCost, Int64]]  # kinds of one configuration are decided in one call


@dataclass(frozen=True, slots=True)
class _Moves:
    """Moves that take one sequence of bucket ``buckets[i]`` from each replica of ``source`` and give
    ``added[i, k]`` to each replica of kind k, with the resulting loads.
    """

    source: int
    buckets: Int64  # (M,)
    source_load: Float64  # (M,)
    target_load: Float64  # (M, K); inf if the bucket does not fit or k is the source
    added: Int64  # (M, K)


def _moves(state: _State, source: int) -> _Moves:
    kinds, shares = state.kinds, state.shares
    each = np.array([kind.count for kind in kinds])
    buckets = np.flatnonzero(shares[source] > 0)
    index = np.arange(len(buckets))
    lighter = np.repeat(shares[source][None], len(buckets), axis=0)
    lighter[index, buckets] -= 1
    surplus = each @ shares[:, buckets] - state.counts[buckets]
    deficit = np.maximum(0, each[source] - surplus)
    added = -(-deficit[:, None] // each[None, :])
    target_load = np.full((len(buckets), len(kinds)), np.inf)
    for cost, targets in state.same_cost:
        target_load[:, targets] = cost.seconds_with(shares[targets], buckets, added[:, targets])
    target_load[:, source] = np.inf
    return _Moves(source, buckets, kinds[source].cost.seconds_many(lighter), target_load, added)


def _apply(state: _State, moves: _Moves, move: int, target: int) -> _State:
    shares, loads = state.shares.copy(), state.loads.copy()
    bucket = moves.buckets[move]
    shares[moves.source, bucket] -= 1
    shares[target, bucket] += moves.added[move, target]
    loads[moves.source] = moves.source_load[move]
    loads[target] = moves.target_load[move, target]
    return replace(state, shares=shares, loads=loads)


def _best_move(state: _State) -> _State | None:
    """The state after the single move that leaves source and target lowest; None if none helps."""
    moves = _moves(state, int(state.loads.argmax()))
    if not len(moves.buckets):
        return None
    worst = np.maximum(moves.source_load[:, None], moves.target_load)
    move, target = np.unravel_index(int(worst.argmin()), worst.shape)
    if worst[move, target] >= state.loads.max() - EPSILON:
        return None
    return _apply(state, moves, int(move), int(target))


def _best_chain(state: _State) -> _State | None:
    """The first pair of moves that helps: slowest to k, then k to another; None if none does."""
    most = state.loads.max()
    moves = _moves(state, int(state.loads.argmax()))
    for flat in np.argsort(moves.target_load, axis=None, kind="stable")[:CHAINS]:
        move, target = (int(value) for value in np.unravel_index(flat, moves.target_load.shape))
        if not np.isfinite(moves.target_load[move, target]) or moves.source_load[move] >= most:
            continue
        after = _apply(state, moves, move, target)
        second = _moves(after, target)
        if not len(second.buckets):
            continue
        worst = np.maximum(second.source_load[:, None], second.target_load)
        index, end = (int(value) for value in np.unravel_index(int(worst.argmin()), worst.shape))
        final = _apply(after, second, index, end)
        if final.loads.max() < most - EPSILON:
            return final
    return None


def _loads(kinds: Sequence[ReplicaKind], shares: Int64) -> Float64:
    return np.array([kind.cost.seconds(row) for kind, row in zip(kinds, shares, strict=True)])


def _with(row: Int64, bucket: int, more: int) -> Int64:
    changed = row.copy()
    changed[bucket] += more
    return changed
