"""The order of microbatches and optimiser steps: turns, bubble lemma, no-ops, steps.

A turn is one global batch of one group. Groups take turns, so that a job's next global batch comes late
enough. Bubble lemma, with S stages in 1F1B order: where a job's last sample of a global batch is in
microbatch k, its step can be done once the backward of k has left the first stage, which is before the
forward of k + S there and not earlier; so the job's next global batch starts at k + S or later, and
empty microbatches (no-ops) are inserted where it would come sooner.

Merging takes microbatches away, and with them the distance that they keep between two global batches of
another job. So it takes no more than the turns that follow can spare, and fills those that have to stay
evenly: a job that waits leaves the pipeline idle, however full the microbatch that it waits for.

In a schedule an :class:`OptimiserStep` stands where it happens: on every stage, right before the forward
of the microbatch that follows it in the list; at the end of the list, when everything has drained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plait.core.plans import GlobalBatch, Microbatch, OptimiserStep
from plait.planner.merge import Draft, Key, merge
from plait.planner.packing import PackedBatches

ScheduleItem = Microbatch | OptimiserStep
Turn = Mapping[int, PackedBatches]  # by replica: one global batch of one group
NOTHING = PackedBatches((), ())


def turns(
    batches: Mapping[str, Sequence[GlobalBatch]], groups: Sequence[Sequence[str]]
) -> Iterator[tuple[GlobalBatch, ...]]:
    """Global batches in the order in which groups take turns, those of a group's jobs together.

    Args:
        batches: each job's global batches in order; jobs may have different numbers of them.
    """
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
    """What a turn may move into the microbatch before it.

    Attributes:
        most: microbatches that may go.
        capacity: tokens that the microbatch before it may have then: no more than the even share of those
            that have to keep the distance.
    """

    most: int
    capacity: int


class ScheduleBuilder:
    """Lays turns out into one schedule; replicas advance side by side, round by round.

    Args:
        stages: pipeline stages of each replica.
        capacity: most padded tokens of a microbatch: one for all replicas, or each its own.
        tile: padding multiple P.
        merging: whether work moves forward into the microbatch before it.
        filling: whether parts of microbatches do, where whole ones do not fit.
    """

    def __init__(
        self,
        stages: Mapping[int, int],
        *,
        capacity: int | Mapping[int, int],
        tile: int = 1,
        merging: bool = True,
        filling: bool = True,
    ) -> None:
        self._stages = dict(stages)
        self._capacity = dict.fromkeys(stages, capacity) if isinstance(capacity, int) else dict(capacity)
        self._tile, self._merging, self._filling = tile, merging, filling
        self._streams: dict[int, list[Draft]] = {replica: [] for replica in self._stages}
        self._ready: dict[str, int] = {}  # the round from which a job's next global batch may come
        self._due: list[_Due] = []

    def add(self, order: Sequence[Turn], number: int) -> None:
        """Append the next turn, ``order[number]``; the following ones are those that merging spares.

        Every job's turns must come in the order of its steps.
        """
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
        """How far a turn may merge before a job of the following ones has to wait for it."""
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
    """The schedule of all turns; see :class:`ScheduleBuilder`."""
    builder = ScheduleBuilder(stages, capacity=capacity, tile=tile, merging=merging, filling=filling)
    for number in range(len(turn_list)):
        builder.add(turn_list, number)
    return builder.schedule()
