"""Which process holds what: replicas are held by stages, and these by slices of their layers.

A seam: everything that processes tell each other directly goes to those that it names. Processes are numbered
by replica, stage and slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from plait.core.plans import ReplicaShape


@dataclass(frozen=True, slots=True)
class Position:
    """Where a process is.

    Attributes:
        replica, stage, slice: numbers of what it holds.
        slices: the processes that hold its stage together.
        stages: the processes with its slice of each stage of its replica.
    """

    replica: int
    stage: int
    slice: int
    slices: range
    stages: range


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers that are in one stage of each replica; ``holders``: its processes, by replica."""

    layers: range
    holders: tuple[range, ...]

    @property
    def processes(self) -> tuple[int, ...]:
        """All that hold it."""
        return tuple(chain(*self.holders))


class Layout:
    """The processes of all replicas.

    Args:
        layers: of every stage of every replica.
    """

    def __init__(self, shapes: Sequence[ReplicaShape], layers: Sequence[Sequence[range]]) -> None:
        self.shapes, self.layers = shapes, layers
        self._first = [0, *accumulate(shape.processes for shape in shapes)]

    def position(self, process: int) -> Position:
        """Where a process is."""
        replica = next(number for number, end in enumerate(self._first[1:]) if process < end)
        first, end, tensor = self._first[replica], self._first[replica + 1], self.shapes[replica].tensor
        stage, part = divmod(process - first, tensor)
        return Position(replica, stage, part, self._holders(replica, stage), range(first + part, end, tensor))

    def _holders(self, replica: int, stage: int) -> range:
        tensor = self.shapes[replica].tensor
        first = self._first[replica] + stage * tensor
        return range(first, first + tensor)

    def pieces(self) -> list[Piece]:
        """All layers, in pieces that no replica cuts."""
        found, begin = [], 0
        for end in sorted({each.stop for own in self.layers for each in own}):
            holders = tuple(
                self._holders(replica, next(stage for stage, each in enumerate(own) if begin in each))
                for replica, own in enumerate(self.layers)
            )
            found.append(Piece(range(begin, end), holders))
            begin = end
        return found
