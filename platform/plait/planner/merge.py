"""The merge pass: work of the next global batch moves into the last microbatch before it.

Whole microbatches move while they fit, the emptiest first; then a subset of the next one fills what is
left. Samples only move forward, so what follows may only come earlier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from plait.core.plans import GlobalBatch, Microbatch
from plait.planner.packing import Item, microbatch, padded
from plait.planner.packing_fill import fullest_subset

Key = tuple[str, int]  # job and step


class Piece(NamedTuple):
    """One sample of a global batch."""

    batch: GlobalBatch
    position: int

    @property
    def key(self) -> Key:
        """Job and step."""
        return self.batch.job, self.batch.step

    @property
    def length(self) -> int:
        """Tokens."""
        return self.batch.lengths[self.position]


class Draft:
    """A microbatch that may still change; without pieces it is a no-op."""

    def __init__(self, tile: int, pieces: Iterable[Piece] = ()) -> None:
        self.tile = tile
        self.pieces: list[Piece] = []
        self.tokens: dict[Key, int] = {}
        self.add(pieces)

    @classmethod
    def of(cls, batches: Sequence[GlobalBatch], items: Sequence[Item], tile: int) -> Draft:
        """The draft that holds the samples ``items`` of ``batches``."""
        return cls(tile, (Piece(batches[batch], position) for batch, position in items))

    @property
    def fill(self) -> int:
        """Padded tokens."""
        return sum(padded(tokens, self.tile) for tokens in self.tokens.values())

    @property
    def jobs(self) -> set[str]:
        """Jobs that have samples here."""
        return {job for job, _ in self.tokens}

    def add(self, pieces: Iterable[Piece]) -> None:
        """Put samples in."""
        for piece in pieces:
            self.pieces.append(piece)
            self.tokens[piece.key] = self.tokens.get(piece.key, 0) + piece.length

    def remove(self, pieces: Collection[Piece]) -> None:
        """Take samples out."""
        gone = {(piece.key, piece.position) for piece in pieces}
        kept = [piece for piece in self.pieces if (piece.key, piece.position) not in gone]
        self.pieces, self.tokens = [], {}
        self.add(kept)

    def fits(self, pieces: Sequence[Piece], capacity: int) -> bool:
        """Whether these samples fit in beside what is there."""
        return Draft(self.tile, [*self.pieces, *pieces]).fill <= capacity

    def microbatch(self, replica: int, index: int) -> Microbatch:
        """The finished microbatch; segments in the order in which their global batches came in."""
        batches = list({piece.key: piece.batch for piece in self.pieces}.values())
        places = {(batch.job, batch.step): place for place, batch in enumerate(batches)}
        items = [(places[piece.key], piece.position) for piece in self.pieces]
        return microbatch(batches, items, replica, index)


def merge(
    target: Draft,
    sources: list[Draft],
    ready: Collection[str],
    *,
    capacity: int,
    most: int | None = None,
    filling: bool = True,
) -> int:
    """Move samples of ``sources`` into ``target``; emptied sources are removed from the list.

    Args:
        ready: jobs whose step before was done by then; only their samples may move.
        most: how many sources may be emptied; None for all.
        filling: whether a part of a source moves where not all of it fits.

    Returns:
        Tokens moved.
    """
    moved, least = 0, 0 if most is None else len(sources) - most
    while len(sources) > least:
        source = min(reversed(sources), key=lambda draft: draft.fill)
        whole = source.jobs <= set(ready) and target.fits(source.pieces, capacity)
        if not whole and not filling:
            break
        pieces = list(source.pieces) if whole else _filling(target, source, ready, capacity)
        target.add(pieces)
        source.remove(pieces)
        moved += sum(piece.length for piece in pieces)
        if source.pieces:
            break
        sources.remove(source)
    return moved


def _filling(target: Draft, source: Draft, ready: Collection[str], capacity: int) -> list[Piece]:
    """The samples of ``source`` that fill ``target`` best."""
    movable = [piece for piece in source.pieces if piece.batch.job in ready]
    if not movable:
        return []
    keys = list(dict.fromkeys(piece.key for piece in movable))
    members = [[piece for piece in movable if piece.key == key] for key in keys]
    starts = [target.tokens.get(key, 0) for key in keys]
    others = target.fill - sum(padded(start, target.tile) for start in starts)
    chosen = fullest_subset(
        [(a, p) for a, own in enumerate(members) for p in range(len(own))],
        [[piece.length for piece in own] for own in members],
        starts,
        units=(capacity - others) // target.tile,
        tile=target.tile,
    )
    return [members[a][p] for a, p in chosen]
