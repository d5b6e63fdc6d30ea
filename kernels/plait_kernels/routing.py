"""Routing: which rows of a microbatch belong to which adapter, and each row's dropout counter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from plait_kernels.bank import Bank, Block
from plait_kernels.dropout import RowCounters, dropout_threshold
from plait_kernels.errors import KernelError
from plait_kernels.uploads import upload


@dataclass(frozen=True)
class RoutedSegment:
    """Rows [start, stop) of the microbatch belong to `adapter`; None: the base model alone."""

    adapter: str | None
    start: int
    stop: int


@dataclass(frozen=True)
class Span:
    """A segment with its adapter's block and its dropout in this microbatch.

    `threshold` is round(p·65536), 0 if nothing is dropped.
    """

    block: Block
    start: int
    stop: int
    threshold: int


@dataclass(frozen=True, slots=True)
class Padding:
    """To what the tables of a microbatch are filled up, so that those of others like it have the same sizes.

    What fills them up is work for no adapter, which the kernels leave at once. The rows are filled up before.

    Args:
        spans: more than there are.
        ranks: of all adapters that may have a span, rising.
        dropout: whether any of them may drop.
    """

    spans: int
    ranks: tuple[int, ...]
    dropout: bool


@dataclass(frozen=True, slots=True)
class Generations:
    """How often the weights of each adapter had been refreshed, and those of all when that was looked up."""

    refreshes: int
    of: Mapping[str, int]


@dataclass(frozen=True)
class Routing:
    """What one microbatch needs to know about its rows; built once, shared by every layer.

    Args:
        tokens: rows of the microbatch.
        spans: the segments that have an adapter and at least one row, in order of their rows.
        fused: the subset of them that is plain LoRA.
        counters: (tokens, 3) int64 counter words.
        alike: the sites of all spans' adapters, if all are plain LoRA at the same ones.
        tables: tables that a backend puts on the device, made once.
        padding: sizes of the tables; None: as large as they must be.
    """

    bank: Bank
    tokens: int
    spans: tuple[Span, ...]
    fused: tuple[Span, ...]
    counters: Tensor
    alike: frozenset[str] | None = None
    tables: dict[object, Any] = field(default_factory=dict)
    padding: Padding | None = None

    def generations(self) -> Generations:
        """Generations of its adapters now; looked up again only after weights have been refreshed."""
        found: Generations | None = self.tables.get("generations")
        if found is None or found.refreshes != Block.refreshes:
            own = {span.block.adapter: span.block.generation for span in self.spans}
            found = self.tables["generations"] = Generations(Block.refreshes, own)
        return found

    @classmethod
    def build(
        cls,
        bank: Bank,
        segments: Sequence[RoutedSegment],
        counters: RowCounters,
        *,
        training: bool,
        padding: Padding | None = None,
    ) -> Routing:
        """Check the segments against the bank and lay out the tables.

        Args:
            bank: the bank with every adapter that a segment names.
            segments: disjoint, in any order; rows of no segment belong to the base model alone. One
                adapter may own several.
            counters: for all rows of the microbatch.
            training: whether dropout is applied.
            padding: sizes of the tables; None: as large as they must be.

        Raises:
            KernelError: segments overlap or exceed the microbatch, name an adapter that is not attached, or
                are not what the padding says.
        """
        tokens = int(counters.step.numel())
        spans, end = [], 0
        for segment in sorted(segments, key=lambda segment: (segment.start, segment.stop)):
            if not end <= segment.start <= segment.stop <= tokens:
                raise KernelError(
                    f"{segment}",
                    f"segments are disjoint and lie in the microbatch's {tokens} rows",
                    f"the rows before {end} are taken",
                )
            end = segment.stop
            if segment.adapter is None or segment.start == segment.stop:
                continue
            block = bank.block(segment.adapter)
            threshold = dropout_threshold(block.dropout) if training else 0
            spans.append(Span(block, segment.start, segment.stop, threshold))
        fused = tuple(span for span in spans if span.block.variant.fused)
        targets = {span.block.targets for span in spans}
        alike = targets.pop() if len(targets) == 1 and len(fused) == len(spans) else None
        if padding is not None:
            _check(padding, spans)
        words = upload(counters.words(), bank.device)
        return cls(bank, tokens, tuple(spans), fused, words, alike, padding=padding)


def _check(padding: Padding, spans: Sequence[Span]) -> None:
    ranks = {span.block.rank for span in spans}
    drops = any(span.threshold for span in spans)
    if len(spans) >= padding.spans or not ranks <= set(padding.ranks) or drops > padding.dropout:
        raise KernelError(
            f"{padding} for {len(spans)} spans of the ranks {sorted(ranks)}",
            "it has more spans than there are, all of their ranks, and dropout if one of them drops",
            "leave the padding out",
        )
