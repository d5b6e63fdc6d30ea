"""Turns a planned microbatch into arrays: token ids, sample boundaries, dropout counters, labelled rows.

A seam: every worker, and each stage of a pipeline, loads microbatches with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plait.core.messages import JobLoss
from plait.core.plans import Microbatch, Segment
from plait.core.samples import Int64, Split
from plait.models.context import MicrobatchContext
from plait_kernels import Bank, RoutedSegment, Routing, RowCounters
from plait_kernels.routing import Padding
from plait_kernels.tiles import power_of_two
from plait_kernels.uploads import upload

TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024)  # of microbatches that are filled up; then multiples


@dataclass(frozen=True, slots=True, eq=False)
class LoadedMicrobatch:
    """One microbatch ready for the model.

    Attributes:
        rows: (labelled,) int64, the rows whose next token counts, segment by segment.
        targets: (labelled,) int64, those next tokens.
        weights: (labelled,) float32, each row's share of its job's loss, times the bank's ``loss_scale``.
        counts: labelled rows of each segment.
    """

    context: MicrobatchContext
    rows: Tensor
    targets: Tensor
    weights: Tensor
    counts: tuple[int, ...]
    segments: tuple[Segment, ...]

    def sums(self, nll: Tensor) -> Tensor:
        """Each segment's loss, summed in float64 in the order of its rows; those behind are of no job."""
        own = nll[: sum(self.counts)]
        return torch.stack([part.double().sum() for part in torch.split(own, list(self.counts))])


def job_losses(counts: Sequence[int], segments: Sequence[Segment], sums: Tensor) -> tuple[JobLoss, ...]:
    """Each segment's loss as events have it, in one transfer to the host."""
    return tuple(
        JobLoss(segment.job, segment.step, total, count, segment.tokens)
        for segment, total, count in zip(segments, sums.tolist(), counts, strict=True)
    )


def gather(microbatch: Microbatch, split_of: Callable[[Segment], Split]) -> Gathered:
    """Gather a microbatch's tokens; ``split_of`` returns the split that a segment's indices refer to."""
    segments = microbatch.segments
    splits = [split_of(segment) for segment in segments]
    rows = [_rows(segment, split) for segment, split in zip(segments, splits, strict=True)]
    tokens = _join([split.tokens[where] for split, where in zip(splits, rows, strict=True)])
    labels = [split.labels[where] for split, where in zip(splits, rows, strict=True)]
    counts = [int(np.count_nonzero(label)) for label in labels]
    labelled = np.flatnonzero(np.concatenate(labels))
    weights = np.repeat([segment.loss_weight for segment in segments], counts)
    return Gathered(
        microbatch,
        tokens=tokens,
        lengths=np.concatenate([np.asarray(segment.lengths) for segment in segments]),
        steps=_join([np.full(len(segment.samples), segment.step) for segment in segments]),
        samples=_join([np.asarray(segment.samples) for segment in segments]),
        draws=_join([np.asarray(segment.draws) for segment in segments]),
        rows=labelled - 1,  # a sample's first token is never labelled
        targets=tokens[labelled],
        weights=weights.astype(np.float32),
        counts=tuple(counts),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A microbatch's arrays on the host.

    Attributes:
        lengths, steps, samples, draws: of each sample: its tokens, and words of its dropout counters.
        rows, targets, weights, counts: as of :class:`LoadedMicrobatch`.
        padding: sizes of the routing's tables; None: as large as they must be.
    """

    microbatch: Microbatch
    tokens: Int64
    lengths: Int64
    steps: Int64
    samples: Int64
    draws: Int64
    rows: Int64
    targets: Int64
    weights: npt.NDArray[np.float32]
    counts: tuple[int, ...]
    padding: Padding | None = None

    def filled(self, sizes: Sizes) -> Gathered:
        """The same with samples of no job behind, and labelled rows of no weight there."""
        more = _even(sizes.tokens - len(self.tokens), sizes.samples - len(self.lengths))
        labelled = sizes.labelled - len(self.rows)
        nothing = np.zeros(len(more), np.int64)
        return replace(
            self,
            tokens=_join([self.tokens, np.zeros(int(more.sum()), np.int64)]),
            lengths=_join([self.lengths, more]),
            steps=_join([self.steps, nothing]),
            samples=_join([self.samples, nothing]),
            draws=_join([self.draws, nothing]),
            rows=_join([self.rows, np.full(labelled, sizes.tokens - 1)]),
            targets=_join([self.targets, np.zeros(labelled, np.int64)]),
            weights=np.concatenate([self.weights, np.zeros(labelled, np.float32)]),
            padding=Padding(sizes.samples, sizes.ranks, sizes.dropout),
        )

    def loaded(self, bank: Bank, *, training: bool, checkpointing: bool = False) -> LoadedMicrobatch:
        """Send it to the device."""
        device = bank.device
        context = MicrobatchContext.of(
            upload(torch.from_numpy(self.tokens), device),
            np.concatenate([[0], np.cumsum(self.lengths)]).tolist(),
            routing=self._routing(bank, training=training),
            checkpointing=checkpointing,
        )
        return LoadedMicrobatch(
            context=context,
            rows=upload(torch.from_numpy(self.rows), device),
            targets=upload(torch.from_numpy(self.targets), device),
            weights=upload(torch.from_numpy(self.weights * np.float32(bank.loss_scale)), device),
            counts=self.counts,
            segments=self.microbatch.segments,
        )

    def _routing(self, bank: Bank, *, training: bool) -> Routing:
        segments, start = [], 0
        for segment in self.microbatch.segments:
            segments.append(RoutedSegment(segment.job, start, start + segment.tokens))
            start += segment.tokens
        counters = RowCounters(
            step=torch.from_numpy(np.repeat(self.steps, self.lengths)),
            sample=torch.from_numpy(np.repeat(self.samples, self.lengths)),
            draw=torch.from_numpy(np.repeat(self.draws, self.lengths)),
            position=torch.from_numpy(_positions(self.lengths)),
        )
        return Routing.build(bank, segments, counters, training=training, padding=self.padding)


@dataclass(frozen=True, slots=True)
class Sizes:
    """To what a microbatch is filled up, and what else decides what a device is asked for, whatever is in it.

    Attributes:
        tokens, samples, labelled: of the microbatch; segments are filled up to as many as samples.
        ranks: of all adapters that are attached.
        dropout: whether one of these has any.
        targets: names of the sites that one of its adapters has.
    """

    tokens: int
    samples: int
    labelled: int
    ranks: tuple[int, ...]
    dropout: bool
    targets: frozenset[str]

    @classmethod
    def of(cls, gathered: Gathered, bank: Bank, *, longest: int) -> Sizes | None:
        """The sizes of a microbatch for training; None if an adapter is no plain LoRA, or a sample of what
        fills it up would have more than ``longest`` tokens."""
        blocks = [bank.block(segment.job) for segment in gathered.microbatch.segments]
        if not all(block.variant.fused for block in blocks):
            return None
        samples = max(8, power_of_two(len(gathered.lengths) + 1))
        least = len(gathered.tokens) + samples - len(gathered.lengths)  # one token each
        tokens = next((size for size in TOKENS if size >= least), -(-least // TOKENS[-1]) * TOKENS[-1])
        more = _even(tokens - len(gathered.tokens), samples - len(gathered.lengths))
        if more.max() > longest:
            return None
        every = [block for block in bank.blocks.values() if block.variant.fused]
        return cls(
            tokens,
            samples,
            min(tokens, max(64, power_of_two(len(gathered.rows)))),
            tuple(sorted({block.rank for block in every})),
            dropout=any(block.dropout for block in every),
            targets=frozenset().union(*(block.targets for block in blocks)),
        )


def _even(whole: int, parts: int) -> Int64:
    """``whole`` divided as evenly as possible."""
    edges = np.arange(parts + 1) * whole // parts
    return np.diff(edges)


def _rows(segment: Segment, split: Split) -> Int64:
    """Indices of the segment's tokens in its split (tokens,)."""
    lengths = np.asarray(segment.lengths)
    starts = split.offsets[np.asarray(segment.samples)]
    return np.asarray(np.repeat(starts, lengths) + _positions(lengths), dtype=np.int64)


def _positions(lengths: Int64) -> Int64:
    """Each row's position in its sample, samples end to end."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)


def _join(parts: list[npt.NDArray[Any]]) -> Int64:
    return np.concatenate(parts).astype(np.int64)
