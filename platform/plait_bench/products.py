"""Bytes that a product in tiles reads from a device's memory, beside its cache.

Processors take one tile of the output each, the next ones when these are done: a wave. The tiles of a wave
read the same rows and columns at the same time, so each is read once a wave. Whether it is still cached from
an earlier one depends on what was brought in since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, exp
from typing import Annotated, Literal

from plait.core.checks import at_least, check, each
from plait_bench.benchmarks import OPTIONS
from plait_bench.inputs import Count, Positive

VALUE_BYTES = 2  # of bfloat16
Replacement = Literal["random", "oldest"]


@dataclass(frozen=True, slots=True)
class Cached:
    """A device's cache, and how a product's tiles are laid over its processors.

    Attributes:
        mebibytes: of the cache.
        processors: that take a tile each.
        tile: rows and columns of the output.
        group: rows of tiles that are done column by column, before the next ones.
        replacement: what a cache that is full lets go of.
    """

    mebibytes: Positive
    processors: Count
    tile: Annotated[tuple[int, int], each(at_least(1))]
    group: Count
    replacement: Replacement = "random"

    def __post_init__(self) -> None:
        check(self, f"{OPTIONS}.cache")

    def reads(self, rows: int, columns: int, inner: int) -> float:
        """Bytes that a product of rows × inner and inner × columns reads."""
        height, width = self.tile
        brought, found = 0.0, 0.0  # bytes that came into the cache, and that were read from memory
        seen: dict[tuple[str, int], float] = {}  # by strip of an input: what had been brought in before it
        tiles = list(self._order(ceil(rows / height), ceil(columns / width)))
        for first in range(0, len(tiles), self.processors):
            wave = tiles[first : first + self.processors]
            strips = {("rows", row): height for row, _ in wave} | {("columns", at): width for _, at in wave}
            missed = sum(
                wide * inner * VALUE_BYTES * self._missing(brought - seen[strip] if strip in seen else None)
                for strip, wide in strips.items()
            )
            seen |= dict.fromkeys(strips, brought)
            found += missed
            brought += missed + len(wave) * height * width * VALUE_BYTES  # results are cached, too
        return found

    def _order(self, rows: int, columns: int) -> Iterator[tuple[int, int]]:
        """Tiles as processors take them."""
        for first in range(0, rows, self.group):
            for column in range(columns):
                for row in range(first, min(first + self.group, rows)):
                    yield row, column

    def _missing(self, since: float | None) -> float:
        """The share of a strip that is not cached, if so many bytes came in since; None: it never was."""
        size = self.mebibytes * 2**20
        if since is None:
            return 1.0
        return float(since > size) if self.replacement == "oldest" else 1.0 - exp(-since / size)


def read_again(cache: Cached, rows: int, columns: int, inner: int) -> float:
    """Bytes that a product reads beyond once."""
    once = VALUE_BYTES * inner * (rows + columns)
    return max(cache.reads(rows, columns, inner) - once, 0.0)
