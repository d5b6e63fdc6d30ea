"""The two packing programs of LoRAFusion §4.2, for SCIP.

Stage 1 asks whether the samples fit into a given number of bins (asked downwards from a known packing,
which is the minimum of its z_b without their symmetry); stage 2 makes one bin as empty as it can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.planner.packing import Bin, Item, padded
from plait.planner.packing_fill import bin_fill
from plait.planner.solver import Limits, Program, Solution, solve


@dataclass(frozen=True, slots=True)
class Model:
    """A program with the numbers of its variables: x[item][bin] and k[bin][batch], k counted in tiles."""

    program: Program
    items: tuple[Item, ...]
    x: tuple[tuple[int, ...], ...]
    k: tuple[tuple[int, ...], ...]


def fits(
    lengths: Sequence[Sequence[int]], bins: int, *, capacity: int, tile: int, limits: Limits
) -> tuple[list[Bin] | None, Solution]:
    """Stage 1: a packing into ``bins`` bins; None where there is none or the limit struck."""
    model = _model(lengths, bins, capacity=capacity, tile=tile, emptiest=None)
    solution = solve(model.program, limits)
    return _read(model, solution), solution


def emptiest(
    lengths: Sequence[Sequence[int]], start: Sequence[Bin], *, capacity: int, tile: int, limits: Limits
) -> tuple[list[Bin] | None, Solution]:
    """Stage 2: a packing into as many bins as ``start`` has whose last bin is as empty as can be.

    The least full bin may be called the last one, so min over it is min over the least full.
    """
    ordered = sorted(start, key=lambda items: -bin_fill(items, lengths, tile))
    model = _model(lengths, len(ordered), capacity=capacity, tile=tile, emptiest=len(ordered) - 1)
    solution = solve(model.program, limits, _values(model, ordered, lengths, tile))
    return _read(model, solution), solution


def _model(
    lengths: Sequence[Sequence[int]], bins: int, *, capacity: int, tile: int, emptiest: int | None
) -> Model:
    """Σ_b x = 1; Σ_{s of a} len·x ≤ P·k; Σ_a k ≤ C / P; cost Σ_a k of the bin ``emptiest``."""
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
        program.row(((tiles, 1.0) for tiles in k[place]), lower=1.0, upper=float(units))
    return Model(program, items, x, k)


def _values(model: Model, bins: Sequence[Bin], lengths: Sequence[Sequence[int]], tile: int) -> list[float]:
    """The start: what the variables are in a known packing."""
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
