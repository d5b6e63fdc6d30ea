"""LoRAFusion's own order and merging of packed microbatches, as in its artifact, and packing without search.

Its microbatches stand fullest first. The last one of a turn takes the last one of the next turn, or its
shortest samples (§4.2.2.4; lorafusion/solver/proposed_solver.py of CentML/lorafusion); no-ops keep a job's
steps apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.core.plans import GlobalBatch
from plait.planner.packing import Item, PackedBatches, padded
from plait.planner.schedule import Draft
from plait.simulate.events import Pipeline
from plait.simulate.forecast import Machine, schedule_work


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
    turns = [sorted(each, key=lambda draft: -draft.fill) for each in turns]
    if merging:
        for number in range(len(turns) - 1):
            if _far_enough(turns, number, depth):
                _merge(turns[number], turns[number + 1], capacity)
    stream = _apart([draft for each in turns for draft in each], depth, tile)
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


def _apart(drafts: Sequence[Draft], stages: int, tile: int) -> list[Draft]:
    """With a no-op wherever a job's next step would begin before the last one has ended."""
    stream: list[Draft] = []
    last: dict[tuple[str, int], int] = {}
    for draft in drafts:
        before = [last[job, step - 1] for job, step in draft.tokens if (job, step - 1) in last]
        while len(stream) < max(before, default=-stages) + stages:
            stream.append(Draft(tile))
        last |= dict.fromkeys(draft.tokens, len(stream))
        stream.append(draft)
    return stream
