"""LoRAFusion's own groups, order and merging of microbatches, as in its artifact, and packing without search.

The job with the longest samples shares a group with that of the shortest. Microbatches of a turn stand
fullest first. The last one takes the last one of the next turn, or its shortest samples; no-ops before a turn
keep the steps of its jobs apart (§4.2.2; lorafusion/solver/proposed_solver.py of CentML/lorafusion).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev

from plait.core.plans import GlobalBatch
from plait.planner.packing import Item, PackedBatches, padded
from plait.planner.schedule import Draft
from plait.simulate.events import Pipeline
from plait.simulate.forecast import Machine, schedule_work

SPREAD = 0.25  # standard deviations by which the lengths of a batch are taken below the mean


def grouped(
    trace: Mapping[str, Sequence[Sequence[int]]], *, capacity: int, stages: int
) -> tuple[tuple[str, ...], ...]:
    """Pairs of jobs, the longest samples with the shortest, while the jobs of other groups have microbatches
    enough for the stages between two steps of the pair; otherwise the longer one has a group of its own."""
    center, least = {}, {}  # by job: mean length, and microbatches of a batch that is short of it
    for job, own in trace.items():
        lengths = [length for batch in own for length in batch]
        center[job] = mean(lengths)
        short = center[job] - SPREAD * (stdev(lengths) if len(lengths) > 1 else 0.0)
        least[job] = math.ceil(len(own[0]) * short / capacity)

    def enough(*without: str) -> bool:
        return sum(count for job, count in least.items() if job not in without) >= stages - 1

    left = sorted(trace, key=lambda job: -center[job])
    if not left or not enough(left[0]):
        return tuple((job,) for job in trace)
    groups: list[tuple[str, ...]] = []
    while len(left) > 1:
        longest, *_, shortest = left
        groups.append((longest, shortest) if enough(longest, shortest) else (longest,))
        left = [job for job in left if job not in groups[-1]]
    return (*groups, *((job,) for job in left))


def next_fit(batches: Sequence[GlobalBatch], *, capacity: int, tile: int) -> PackedBatches:
    """Samples in the order of the data; one that does not fit begins the next microbatch."""
    bins: list[list[Item]] = []
    tokens: dict[int, int] = {}  # by batch, of the last microbatch
    for place, batch in enumerate(batches):
        for position, length in enumerate(batch.lengths):
            more = tokens | {place: tokens.get(place, 0) + length}
            if not bins or sum(padded(each, tile) for each in more.values()) > capacity:
                bins.append([])
                more = {place: length}
            bins[-1].append((place, position))
            tokens = more
    return PackedBatches(tuple(batches), tuple(map(tuple, bins)))


def ordered(
    packed: Sequence[PackedBatches],
    machine: Machine,
    *,
    capacity: int,
    tile: int,
    merging: bool,
    stages: int | None = None,
) -> Pipeline:
    """The pipeline of these turns in that order, rows that round a segment up to the tile computed.

    Args:
        stages: microbatches from a step of a job to its next one; None: as many as the machine has stages.
    """
    depth = stages or machine.stages
    turns = [[Draft.of(each.batches, items, tile) for items in each.bins] for each in packed]
    turns = [_fullest_first(each) for each in turns]
    if merging:
        for number in range(len(turns) - 1):
            if _far_enough(turns, number, depth):
                _merge(turns[number], turns[number + 1], capacity)
                turns[number : number + 2] = map(_fullest_first, turns[number : number + 2])
    stream = [draft for each in _apart([each for each in turns if each], depth, tile) for draft in each]
    microbatches = [draft.microbatch(0, index) for index, draft in enumerate(stream)]
    return machine.in_order([schedule_work(each, tile, computed_tile=tile) for each in microbatches])


def _jobs(turn: Sequence[Draft]) -> set[str]:
    return set[str]().union(*(draft.jobs for draft in turn))


def _far_enough(turns: Sequence[Sequence[Draft]], number: int, stages: int) -> bool:
    """Whether enough microbatches lie between a turn and the next one of its jobs."""
    own, between = _jobs(turns[number]), 0
    for later in turns[number + 1 :]:
        if own & _jobs(later):
            return between >= stages - 1
        between += len(later)
    return False


def _merge(turn: list[Draft], following: list[Draft], capacity: int) -> None:
    if not turn or not following or turn[-1].jobs & following[-1].jobs:
        return
    target, source = turn[-1], following[-1]
    for piece in sorted(source.pieces, key=lambda piece: piece.length):
        if target.fits([piece], capacity):
            target.add([piece])
            source.remove([piece])
    if not source.pieces:
        following.pop()


def _fullest_first(turn: Sequence[Draft]) -> list[Draft]:
    return sorted(turn, key=lambda draft: -draft.fill)


def _apart(turns: Sequence[list[Draft]], stages: int, tile: int) -> list[list[Draft]]:
    """With no-ops before each turn that begins a job's next step too soon: one for each microbatch that is
    too near to the step before, all turns at once, as often as it takes."""
    apart = list(turns)
    while any(soon := _too_soon(apart, stages)):
        apart = [
            each
            for turn, count in zip(apart, soon, strict=True)
            for each in (*([Draft(tile)] for _ in range(count)), turn)
        ]
    return apart


def _too_soon(turns: Sequence[Sequence[Draft]], stages: int) -> list[int]:
    """How many microbatches of each turn have a job whose other step is fewer than ``stages`` before."""
    counts, stream = [0] * len(turns), list[Draft]()
    for number, turn in enumerate(turns):
        for draft in turn:
            near = [key for each in stream[max(0, len(stream) - stages + 1) :] for key in each.tokens]
            counts[number] += any(job == own and step != at for job, step in near for own, at in draft.tokens)
            stream.append(draft)
    return counts
