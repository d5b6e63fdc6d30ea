"""Which jobs rest: sit an iteration out, so that the others fill their microbatches.

An iteration takes one global batch of each job, and its last microbatch is filled as far as it happens to be.
Where that leaves too much of the capacity empty, some jobs take their next step an iteration later. Which of
them leave a whole number of microbatches full is a question of subset sums, answered exactly; the packer
then has the last word.

Pure and deterministic. Only jobs of the lowest priority rest, and none three times in a row: each takes part
in at least every third iteration, and at least one trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

TRIES = 3  # sets that are packed for each number of microbatches, and in all twice as many
MOST_FEWER = 8  # microbatches that an iteration loses by rests
WORTH = 0.02  # of the capacity: what is gained at least where the wanted fill is out of reach

Packed = TypeVar("Packed", bound=Sized)


@dataclass(frozen=True, slots=True)
class NextBatch:
    """What counts of a job's next global batch.

    Attributes:
        tokens: real tokens.
        priority: of the job.
        in_a_row: iterations in which the job took part since it rested; 0 where it rested in the last one, -1
            in the last two.
    """

    tokens: int
    priority: int = 0
    in_a_row: int = 1


@dataclass(frozen=True, slots=True)
class Choice(Generic[Packed]):
    """An iteration as it is to be.

    Attributes:
        resting: places of the batches that are left out, rising.
        packed: the microbatches of the others.
        fill: share of their capacity in use.
    """

    resting: tuple[int, ...]
    packed: Packed
    fill: float


def choose_resting(
    batches: Sequence[NextBatch],
    pack: Callable[[Sequence[int]], Packed],
    *,
    capacity: int,
    min_fill: float,
) -> Choice[Packed]:
    """Choose who rests.

    Nobody does where all batches together fill their microbatches to ``min_fill``. Else those do that have
    taken part the longest and leave the others' microbatches as full as that: as many microbatches as
    possible, and about half of them at least. Where that is out of reach, it is who leaves them fullest, if
    something is gained by it.

    Args:
        batches: the next global batch of each job that may train, at least one.
        pack: makes the microbatches of the batches at these places; its answer's length is their number.
        capacity: most tokens of a microbatch.
        min_fill: share of the microbatches' capacity that is to be in use; 0 lets nobody rest.
    """
    total = sum(batch.tokens for batch in batches)

    def fill(resting: tuple[int, ...], microbatches: int) -> float:
        return (total - sum(batches[place].tokens for place in resting)) / (max(1, microbatches) * capacity)

    def without(resting: tuple[int, ...]) -> Choice[Packed]:
        packed = pack([place for place in range(len(batches)) if place not in resting])
        return Choice(resting, packed, fill(resting, len(packed)))

    least = below = -(-total // capacity)
    together: Choice[Packed] | None = None
    if least <= 1 or fill((), least) >= min_fill:
        together = without(())
        below = len(together.packed)
        if below <= 1 or together.fill >= min_fill or below > least + 1:
            return together
    best: Choice[Packed] | None = None
    for resting, microbatches in resting_sets(batches, capacity=capacity, min_fill=min_fill, below=below):
        hoped = fill(resting, microbatches)
        if hoped < min_fill:
            together = together or without(())
            if hoped < max(together.fill + WORTH, best.fill if best else 0.0):
                break  # nor is any after it as full as that
        choice = without(resting)
        if choice.fill >= min_fill:
            return choice
        if best is None or choice.fill > best.fill:
            best = choice
        if len(choice.packed) > microbatches + 1:
            break  # samples are too long for microbatches to be filled, whoever rests
    together = together or without(())
    return best if best is not None and best.fill >= together.fill + WORTH else together


def resting_sets(
    batches: Sequence[NextBatch], *, capacity: int, min_fill: float, below: int
) -> list[tuple[tuple[int, ...], int]]:
    """Who may rest so that the others fill fewer than ``below`` microbatches, and how many; the best first.

    By tokens alone. Samples may not fit as well as that, so there are a few for each number of microbatches,
    of which the later ones leave more room.
    """
    total = sum(batch.tokens for batch in batches)
    lowest = min(batch.priority for batch in batches)
    may = [at for at, batch in enumerate(batches) if batch.priority == lowest and batch.in_a_row >= 0]
    may.sort(key=lambda at: (-batches[at].in_a_row, -at))
    tokens = [batches[at].tokens for at in may]
    fewest = max(1, below // 2, below - MOST_FEWER)
    sums = _sums_of_first(tokens, most=min(total - 1, (below - fewest + 1) * capacity))
    full: list[tuple[tuple[int, ...], int]] = []
    others: list[tuple[float, tuple[int, ...], int]] = []
    for microbatches in range(below - 1, fewest - 1, -1):
        room = microbatches * capacity
        least, most = max(1, total - room), total - math.ceil(min_fill * room)
        for turn in range(TRIES):
            first = least + (most - least) * turn // TRIES
            resting = _first_within(sums, first, most)
            if resting is not None:
                full.append((_places(may, tokens, sums, *resting), microbatches))
        resting = _first_within(sums[-1:], least, total - 1)
        if resting is not None:
            fill = (total - resting[1]) / room
            others.append((-fill, _places(may, tokens, sums, len(tokens), resting[1]), microbatches))
    hopeful = [*full[: 2 * TRIES], *((places, number) for _, places, number in sorted(others)[:TRIES])]
    return list(dict.fromkeys(hopeful))


def _sums_of_first(tokens: Sequence[int], most: int) -> list[int]:
    """Bit sets of the sums, up to ``most``, that the first none, one, two, ... of these numbers reach."""
    mask, sums = (1 << (most + 1)) - 1, [1]
    for count in tokens:
        sums.append((sums[-1] | sums[-1] << count) & mask)
    return sums


def _first_within(sums: Sequence[int], least: int, most: int) -> tuple[int, int] | None:
    """The first bit set with a sum from ``least`` to ``most``, and the smallest such sum in it."""
    for first, reached in enumerate(sums):
        if above := reached >> least:
            smallest = least + (above & -above).bit_length() - 1
            if smallest <= most:
                return first, smallest
    return None


def _places(
    may: Sequence[int], tokens: Sequence[int], sums: Sequence[int], first: int, total: int
) -> tuple[int, ...]:
    """Of the first so many places, those whose tokens add up to ``total``; earlier ones where it is equal."""
    chosen = []
    for at in range(first - 1, -1, -1):
        if not sums[at] >> total & 1:
            chosen.append(may[at])
            total -= tokens[at]
    return tuple(sorted(chosen))
