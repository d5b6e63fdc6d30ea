"""The order of microbatches and optimiser steps: turns, bubble lemma, no-ops, steps.

A turn is one global batch of one group. Groups take turns, so that a job's next global batch comes late
enough. Bubble lemma, with S stages in 1F1B order: if a job's last sample of a global batch is in
microbatch k, its step can be taken once the backward of k has left the first stage, which is just before
the forward of k + S there. So the job's next global batch starts at k + S or later, and empty
microbatches (no-ops) are inserted if it would come sooner.

Merging removes microbatches, and with them distance between two global batches of another job. So it removes
no more than the following turns can spare, and fills the remaining ones evenly: a job that waits leaves the
pipeline idle, however full the microbatch that it waits for.

The position of an :class:`OptimiserStep` in a schedule is its time: on every stage, right before the forward
of the microbatch that follows it in the list; at the end of the list, after everything has drained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plait.core.plans import GlobalBatch, Microbatch, OptimiserStep
from plait.planner.packing import Item, PackedBatches, microbatch, padded
from plait.planner.subset_sums import fullest_subset

Key = tuple[str, int]  # job and step
ScheduleItem = Microbatch | OptimiserStep
Turn = Mapping[int, PackedBatches]  # by replica: one global batch of one group
NOTHING = PackedBatches((), ())


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
        """The draft with the samples ``items`` of ``batches``."""
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
        """Add samples."""
        for piece in pieces:
            self.pieces.append(piece)
            self.tokens[piece.key] = self.tokens.get(piece.key, 0) + piece.length

    def remove(self, pieces: Collection[Piece]) -> None:
        """Remove samples."""
        taken = {(piece.key, piece.position) for piece in pieces}
        kept = [piece for piece in self.pieces if (piece.key, piece.position) not in taken]
        self.pieces, self.tokens = [], {}
        self.add(kept)

    def fits(self, pieces: Sequence[Piece], capacity: int) -> bool:
        """Whether these samples fit in addition to the present ones."""
        return Draft(self.tile, [*self.pieces, *pieces]).fill <= capacity

    def microbatch(self, replica: int, index: int) -> Microbatch:
        """The finished microbatch, with segments in the order in which their global batches were added."""
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
        ready: jobs whose previous step is done by then; only their samples may move.
        most: how many sources may be emptied; None for all.

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


def turns(
    batches: Mapping[str, Sequence[GlobalBatch]], groups: Sequence[Sequence[str]]
) -> Iterator[tuple[GlobalBatch, ...]]:
    """Global batches in the order in which groups take turns; those of a group's jobs are together."""
    for place in range(max((len(own) for own in batches.values()), default=0)):
        for group in groups:
            turn = tuple(batches[job][place] for job in group if place < len(batches[job]))
            if turn:
                yield turn


@dataclass(frozen=True, slots=True)
class _Due:
    """An optimiser step and the round before which it happens."""

    round: int
    step: OptimiserStep


class _Room(NamedTuple):
    """How much a turn may move into the previous microbatch.

    Attributes:
        capacity: tokens that the previous microbatch may have afterwards: at most an even share for the
            microbatches that must remain to keep the distance.
    """

    most: int
    capacity: int


class Builder:
    """Arranges turns into one schedule; replicas advance in parallel, round by round.

    Args:
        as of :func:`build_schedule`.
    """

    def __init__(
        self,
        stages: Mapping[int, int],
        *,
        capacity: int | Mapping[int, int],
        tile: int,
        merging: bool,
        filling: bool,
    ) -> None:
        self._stages = dict(stages)
        self._capacity = dict.fromkeys(stages, capacity) if isinstance(capacity, int) else dict(capacity)
        self._tile, self._merging, self._filling = tile, merging, filling
        self._streams: dict[int, list[Draft]] = {replica: [] for replica in self._stages}
        self._ready: dict[str, int] = {}  # the round from which a job's next global batch may come
        self._due: list[_Due] = []

    def add(self, order: Sequence[Turn], number: int) -> None:
        """Append the next turn, ``order[number]``; the following turns limit how much may be merged."""
        turn = order[number]
        # merging may reach one microbatch back
        begin = {replica: max(0, len(stream) - 1) for replica, stream in self._streams.items()}
        for replica, packed in turn.items():
            self._place(replica, packed, (order[later] for later in range(number + 1, len(order))))
        keys = dict.fromkeys((batch.job, batch.step) for packed in turn.values() for batch in packed.batches)
        for key in keys:
            job, step = key
            ends = (self._last(replica, key, begin[replica]) + self._stages[replica] for replica in turn)
            self._ready[job] = max(self._ready.get(job, 0), *ends)
            self._due.append(_Due(self._ready[job], OptimiserStep(job, step)))

    def schedule(self) -> tuple[ScheduleItem, ...]:
        """The whole schedule so far, steps included."""
        due = sorted(self._due, key=lambda item: item.round)  # stable: by turn within a round
        items: list[ScheduleItem] = []
        for place in range(max(map(len, self._streams.values()))):
            while due and due[0].round <= place:
                items.append(due.pop(0).step)
            for replica, stream in self._streams.items():
                if place < len(stream):
                    items.append(stream[place].microbatch(replica, place))
        return (*items, *(item.step for item in due))

    def ready(self, jobs: Iterable[str]) -> int:
        """The round from which the next global batches of these jobs may all come."""
        return max(self._ready.get(job, 0) for job in jobs)

    def take(self, replica: int) -> tuple[Microbatch, ...]:
        """What the only replica has so far; what is added from now on begins another schedule that follows
        it, and keeps the distances."""
        stream, self._streams[replica] = self._streams[replica], []
        self._ready = {job: to - len(stream) for job, to in self._ready.items() if to > len(stream)}
        self._due.clear()
        return tuple(draft.microbatch(replica, place) for place, draft in enumerate(stream))

    def _place(self, replica: int, packed: PackedBatches, following: Iterable[Turn]) -> None:
        stream = self._streams[replica]
        drafts = [Draft.of(packed.batches, items, self._tile) for items in packed.bins]
        if self._merging and stream and stream[-1].pieces:
            room = self._room(replica, drafts, following)
            ready = {job for job in _jobs(packed) if self._ready.get(job, 0) < len(stream)}
            merge(
                *(stream[-1], drafts, ready),
                capacity=room.capacity,
                most=room.most,
                filling=self._filling,
            )
        if not drafts:
            return
        last = min(reversed(drafts), key=lambda draft: draft.fill)
        drafts = [draft for draft in drafts if draft is not last]
        for draft in [*sorted(drafts, key=self._earliest), last]:
            while len(stream) < self._earliest(draft):
                stream.append(Draft(self._tile))
            stream.append(draft)

    def _room(self, replica: int, drafts: Sequence[Draft], following: Iterable[Turn]) -> _Room:
        """How much a turn may merge before a job of a following turn has to wait for it."""
        stream, capacity = self._streams[replica], self._capacity[replica]
        own = set[str]().union(*(draft.jobs for draft in drafts))
        waiting = {job: to for job, to in self._ready.items() if to > len(stream) and job not in own}
        most, level = len(drafts), float(capacity)
        place = len(stream) + len(drafts)  # where the next turn starts if nothing is merged
        tokens = stream[-1].fill + sum(draft.fill for draft in drafts)
        for turn in following:
            if not waiting:
                break
            packed = turn.get(replica, NOTHING)
            for job in _jobs(packed) & waiting.keys():
                ready = waiting.pop(job)
                most = min(most, place - ready)
                level = min(level, tokens / (ready - len(stream) + 1))
            place += len(packed.bins)
            tokens += sum(sum(batch.lengths) for batch in packed.batches)
        return _Room(max(0, most), min(capacity, max(stream[-1].fill, round(level))))

    def _earliest(self, draft: Draft) -> int:
        return max((self._ready.get(job, 0) for job in draft.jobs), default=0)

    def _last(self, replica: int, key: Key, begin: int) -> int:
        """Index of the last microbatch, from ``begin`` on, with samples of this global batch."""
        stream = self._streams[replica]
        places = range(len(stream) - 1, begin - 1, -1)
        return next((place for place in places if key in stream[place].tokens), -self._stages[replica])


def _jobs(packed: PackedBatches) -> set[str]:
    return {batch.job for batch in packed.batches}


def build_schedule(
    turn_list: Sequence[Turn],
    stages: Mapping[int, int],
    *,
    capacity: int | Mapping[int, int],
    tile: int = 1,
    merging: bool = True,
    filling: bool = True,
) -> tuple[ScheduleItem, ...]:
    """The schedule of all turns; those of a job are in the order of its steps.

    Args:
        capacity: most padded tokens of a microbatch, for all replicas or for each.
        merging: whether work moves forward into the previous microbatch.
        filling: whether parts of a microbatch move if the whole does not fit.
    """
    builder = Builder(stages, capacity=capacity, tile=tile, merging=merging, filling=filling)
    for number in range(len(turn_list)):
        builder.add(turn_list, number)
    return builder.schedule()
