"""Routing: which rows of a microbatch belong to which adapter, and each row's dropout counter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

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
    """

    bank: Bank
    tokens: int
    spans: tuple[Span, ...]
    fused: tuple[Span, ...]
    counters: Tensor
    alike: frozenset[str] | None = None
    tables: dict[object, Any] = field(default_factory=dict)

    def generations(self) -> Generations:
        """Generations of its adapters now; looked up again only after weights have been refreshed."""
        found = cast("Generations | None", self.tables.get("generations"))
        if found is None or found.refreshes != Block.refreshes:
            own = {span.block.adapter: span.block.generation for span in self.spans}
            found = self.tables["generations"] = Generations(Block.refreshes, own)
        return found

    @classmethod
    def build(
        cls, bank: Bank, segments: Sequence[RoutedSegment], counters: RowCounters, *, training: bool
    ) -> Routing:
        """Check the segments against the bank and lay out the tables.

        Args:
            bank: the bank with every adapter that a segment names.
            segments: disjoint, in any order; rows of no segment belong to the base model alone. One
                adapter may own several.
            counters: for all rows of the microbatch.
            training: whether dropout is applied.

        Raises:
            KernelError: segments overlap or exceed the microbatch, or name an adapter that is not attached.
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
        return cls(bank, tokens, tuple(spans), fused, upload(counters.words(), bank.device), alike)
