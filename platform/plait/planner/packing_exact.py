"""Two-stage packing: the fewest microbatches first, then the least full one as empty as possible.

First-fit decreasing is the start and the fallback. Filling by subset sums usually meets the lower bounds
immediately; SCIP runs only if a bound is open: always while a microbatch may be saved, and for the least full
one if the instance is small or the gap wide. A later answer is used only if it is strictly better, so the
result is never worse than greedy. All limits count nodes and rounds, so the same samples give the same plan
everywhere; time is only a safety net, and it is reported if that limit ended a solve.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from plait.core.plans import GlobalBatch
from plait.planner.packing import Bin, Item, PackedBatches, check_fits, first_fit_decreasing, padded
from plait.planner.solver import Limit, Limits, Program, Solution, solve
from plait.planner.subset_sums import MOST_UNITS, bin_fill, bins_bound, fill_bins, fill_bound, least_fill

MOST_FILLED = 1024  # samples times rounds of filling with tiles, if there is more than one round
MOST_VISITED = 8_000_000  # samples times bins times rounds, without tiles: seconds
Method = Literal["greedy", "subset sums", "milp"]


@dataclass(frozen=True, slots=True)
class Model:
    """A program with the indices of its variables: x[item][bin] and k[bin][batch], with k in tiles."""

    program: Program
    items: tuple[Item, ...]
    x: tuple[tuple[int, ...], ...]
    k: tuple[tuple[int, ...], ...]


def fits(
    lengths: Sequence[Sequence[int]], bins: int, *, capacity: int, tile: int, limits: Limits
) -> tuple[list[Bin] | None, Solution]:
    """Stage 1: a packing into ``bins`` bins; None if there is none or a limit ended the search."""
    model = _model(lengths, bins, capacity=capacity, tile=tile, emptiest=None)
    solution = solve(model.program, limits)
    return _read(model, solution), solution


def emptiest(
    lengths: Sequence[Sequence[int]], start: Sequence[Bin], *, capacity: int, tile: int, limits: Limits
) -> tuple[list[Bin] | None, Solution]:
    """Stage 2: a packing into as many bins as ``start`` has, with the last bin as empty as possible.

    The least full bin can always be numbered last, so minimising the last bin minimises the least full one.
    """
    ordered = sorted(start, key=lambda items: -bin_fill(items, lengths, tile))
    model = _model(lengths, len(ordered), capacity=capacity, tile=tile, emptiest=len(ordered) - 1)
    solution = solve(model.program, limits, _values(model, ordered, lengths, tile))
    return _read(model, solution), solution


def _model(
    lengths: Sequence[Sequence[int]], bins: int, *, capacity: int, tile: int, emptiest: int | None
) -> Model:
    """Σ_b x = 1; Σ_s x ≥ 1; Σ_{s of a} len·x ≤ P·k; Σ_a k ≤ C / P; cost Σ_a k of the bin ``emptiest``.

    Each bin has a sample: an empty one would mean one bin less, which stage 1 would find.
    """
    program, units = Program(), capacity // tile
    items = tuple((a, p) for a, batch in enumerate(lengths) for p in range(len(batch)))
    x = tuple(tuple(program.variable(upper=1, integer=True) for _ in range(bins)) for _ in items)
    k = tuple(
        tuple(
            program.variable(upper=units, integer=True, cost=float(tile) if place == emptiest else 0.0)
            for _ in lengths
        )
        for place in range(bins)
    )
    for row in x:
        program.row(((variable, 1.0) for variable in row), lower=1.0, upper=1.0)
    for place in range(bins):
        for batch, tiles in enumerate(k[place]):
            terms = [(x[i][place], float(lengths[a][p])) for i, (a, p) in enumerate(items) if a == batch]
            program.row([*terms, (tiles, -float(tile))], upper=0.0)
        program.row(((row[place], 1.0) for row in x), lower=1.0)
        program.row(((tiles, 1.0) for tiles in k[place]), upper=float(units))
    return Model(program, items, x, k)


def _values(model: Model, bins: Sequence[Bin], lengths: Sequence[Sequence[int]], tile: int) -> list[float]:
    """The variables' values in a known packing, as a start."""
    values = [0.0] * len(model.program.costs)
    numbers = {item: number for number, item in enumerate(model.items)}
    for place, members in enumerate(bins):
        tokens = [0] * len(lengths)
        for item in members:
            values[model.x[numbers[item]][place]] = 1.0
            tokens[item[0]] += lengths[item[0]][item[1]]
        for variable, amount in zip(model.k[place], tokens, strict=True):
            values[variable] = float(padded(amount, tile) // tile)
    return values


def _read(model: Model, solution: Solution) -> list[Bin] | None:
    if not solution.values:
        return None
    bins: list[Bin] = [[] for _ in model.k]
    for item, row in zip(model.items, model.x, strict=True):
        place = max(range(len(row)), key=lambda b: solution.values[row[b]])
        bins[place].append(item)
    return bins


@dataclass(frozen=True, slots=True)
class PackingLimits:
    """How much work the packer may spend on one global batch of a group.

    Attributes:
        rounds: attempts to fill by subset sums, fewer for large batches; 0 skips this.
        exact_samples: SCIP proves the optimum up to this many samples (``exact_nodes`` is a guard).
        nodes: branch-and-bound nodes above that; 0 never runs SCIP there.
        gap: above ``exact_samples``, a least full microbatch is good enough if its distance to the bound is
            within this share of the capacity.
        seconds: processor time, a safety net for each call of SCIP.
        variables: a program with more samples times microbatches is not solved.
    """

    rounds: int = 8
    exact_samples: int = 10
    exact_nodes: int = 200_000
    nodes: int = 50
    gap: float = 0.1
    seconds: float = 10.0
    variables: int = 4000


GREEDY = PackingLimits(rounds=0, exact_samples=0, nodes=0)


@dataclass(frozen=True, slots=True)
class Packing:
    """A packing with its distance to the bounds.

    Attributes:
        bins: (batch, position) of the samples of each microbatch, the fullest first, the least full last.
        bins_bound: lower bound of the number of microbatches.
        fill_bound: lower bound of ``fill`` with this number of microbatches.
        limit_hit: limit that stopped SCIP before it proved the optimum, None otherwise.
    """

    bins: tuple[tuple[tuple[int, int], ...], ...]
    fill: int
    bins_bound: int
    fill_bound: int
    method: Method
    limit_hit: Limit | None = None


def solve_packing(
    lengths: Sequence[Sequence[int]], *, capacity: int, tile: int = 1, limits: PackingLimits | None = None
) -> Packing:
    """Pack samples, each of which must fit alone."""
    limits = limits or PackingLimits()
    # without padding, the batch of a sample does not matter, and one batch has fewer symmetries
    merged, names = _merge(lengths) if tile == 1 else (lengths, None)
    state = _Search(merged, capacity, tile, limits)
    state.greedy()
    state.subset_sums()
    state.fewer_bins()
    state.emptier_bin()
    result = state.result()
    if names is None:
        return result
    return replace(result, bins=tuple(tuple(sorted(names[p] for _, p in items)) for items in result.bins))


def _merge(lengths: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[tuple[int, int]]]:
    names = [(a, p) for a, batch in enumerate(lengths) for p in range(len(batch))]
    return [[lengths[a][p] for a, p in names]], names


class _Search:
    """The best packing so far and what is proved about it."""

    def __init__(
        self, lengths: Sequence[Sequence[int]], capacity: int, tile: int, limits: PackingLimits
    ) -> None:
        self.lengths, self.capacity, self.tile, self.limits = lengths, capacity, tile, limits
        self.samples = sum(map(len, lengths))
        self.bins_bound = bins_bound(lengths, capacity=capacity, tile=tile)
        self.fill_bounds: dict[int, int] = {}
        self.bins: list[Bin] = []
        self.method: Method = "greedy"
        self.limit_hit: Limit | None = None

    def greedy(self) -> None:
        self.bins = first_fit_decreasing(self.lengths, capacity=self.capacity, tile=self.tile)

    def subset_sums(self) -> None:
        if self.tile > 1 and self.capacity // self.tile > MOST_UNITS:
            return
        visited = max(1, self.samples * len(self.bins))
        affordable = max(1, MOST_FILLED // self.samples) if self.tile > 1 else MOST_VISITED // visited
        for turn in range(min(self.limits.rounds, affordable)):
            if self.settled():
                return
            bins = fill_bins(self.lengths, capacity=self.capacity, tile=self.tile, turn=turn)
            self._keep_if_better(bins, "subset sums")

    def fewer_bins(self) -> None:
        """Stage 1: ask SCIP for one microbatch less until it proves that there is none."""
        while len(self.bins) > self.bins_bound and self._may_solve():
            bins, solution = fits(
                self.lengths,
                len(self.bins) - 1,
                capacity=self.capacity,
                tile=self.tile,
                limits=replace(self._solver_limits(), solutions=1),
            )
            if bins is not None:
                self._keep_if_better(bins, "milp")
            elif solution.status == "infeasible":
                self.bins_bound = len(self.bins)
            else:
                self._struck(solution.limit_hit)
                return

    def emptier_bin(self) -> None:
        """Stage 2: ask SCIP to empty one microbatch, if the bound is open and worth it."""
        if self.settled() or len(self.bins) == 1 or not self._may_solve():
            return
        open_tokens = least_fill(self.bins, self.lengths, self.tile) - self.fill_bound()
        if self.samples > self.limits.exact_samples and open_tokens <= self.limits.gap * self.capacity:
            return
        bins, solution = emptiest(
            self.lengths, self.bins, capacity=self.capacity, tile=self.tile, limits=self._solver_limits()
        )
        if bins is not None:
            self._keep_if_better(bins, "milp")
        if solution.status == "optimal":
            self.fill_bounds[len(self.bins)] = least_fill(self.bins, self.lengths, self.tile)
        else:
            self._struck(solution.limit_hit)

    def settled(self) -> bool:
        """Whether both bounds are met."""
        if len(self.bins) > self.bins_bound:
            return False
        return least_fill(self.bins, self.lengths, self.tile) == self.fill_bound()

    def fill_bound(self) -> int:
        bins = len(self.bins)
        if bins not in self.fill_bounds:
            self.fill_bounds[bins] = fill_bound(self.lengths, bins, capacity=self.capacity, tile=self.tile)
        return self.fill_bounds[bins]

    def result(self) -> Packing:
        ordered = sorted(self.bins, key=lambda items: -bin_fill(items, self.lengths, self.tile))
        return Packing(
            bins=tuple(tuple(sorted(items)) for items in ordered),
            fill=bin_fill(ordered[-1], self.lengths, self.tile),
            bins_bound=self.bins_bound,
            fill_bound=self.fill_bound(),
            method=self.method,
            limit_hit=self.limit_hit,
        )

    def _keep_if_better(self, bins: list[Bin], method: Method) -> None:
        if self._rank(bins) < self._rank(self.bins):
            self.bins, self.method = bins, method

    def _rank(self, bins: list[Bin]) -> tuple[int, int]:
        return len(bins), least_fill(bins, self.lengths, self.tile)

    def _struck(self, limit: Limit | None) -> None:
        """Note a limit that ended a stage; the clock's is kept, because only it makes a plan unrepeatable."""
        if self.limit_hit != "time":
            self.limit_hit = limit or self.limit_hit

    def _may_solve(self) -> bool:
        return self._solver_limits().nodes > 0 and self.samples * len(self.bins) <= self.limits.variables

    def _solver_limits(self) -> Limits:
        small = self.samples <= self.limits.exact_samples
        nodes = self.limits.exact_nodes if small else self.limits.nodes
        return Limits(nodes=nodes, seconds=self.limits.seconds)


def packed_batches(
    batches: Sequence[GlobalBatch], *, capacity: int, tile: int = 1, limits: PackingLimits | None = None
) -> PackedBatches:
    """Pack the global batches of one group on one replica; the least full microbatch is last.

    Raises:
        CapacityError: a sample alone is longer than the capacity.
    """
    check_fits(batches, capacity=capacity, tile=tile)
    if not any(batch.lengths for batch in batches):
        return PackedBatches(tuple(batches), ())
    packing = solve_packing([batch.lengths for batch in batches], capacity=capacity, tile=tile, limits=limits)
    gap = packing.fill - packing.fill_bound if len(packing.bins) == packing.bins_bound else capacity
    return PackedBatches(tuple(batches), packing.bins, gap, packing.limit_hit)


def pack_all(
    batches: Sequence[Sequence[GlobalBatch]],
    *,
    capacity: int,
    tile: int = 1,
    limits: PackingLimits | None = None,
    pool: Executor | None = None,
) -> list[PackedBatches]:
    """:func:`packed_batches` for many groups' global batches, which do not depend on each other.

    Args:
        pool: executor in which to solve them in parallel; None solves them here, one after another.
    """
    work = partial(packed_batches, capacity=capacity, tile=tile, limits=limits)
    if pool is None:
        return [work(item) for item in batches]
    return list(pool.map(work, batches, chunksize=max(1, len(batches) // 64)))
