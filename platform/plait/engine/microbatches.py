"""Turns a planned microbatch into arrays: token ids, sample boundaries, dropout counters, labelled rows.

A seam: every worker, and each stage of a pipeline, loads microbatches with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from plait_kernels.uploads import upload


@dataclass(frozen=True, slots=True, eq=False)
class LoadedMicrobatch:
    """One microbatch ready for the model.

    Attributes:
        rows: (labelled,) int64, the rows whose next token counts, segment by segment.
        targets: (labelled,) int64, those next tokens.
        weights: (labelled,) float32, each row's share of its job's loss.
        counts: labelled rows of each segment.
    """

    context: MicrobatchContext
    rows: Tensor
    targets: Tensor
    weights: Tensor
    counts: tuple[int, ...]
    segments: tuple[Segment, ...]

    def sums(self, nll: Tensor) -> Tensor:
        """Each segment's loss, summed in float64 in the order of its rows."""
        return torch.stack([part.double().sum() for part in torch.split(nll, list(self.counts))])


def job_losses(counts: Sequence[int], segments: Sequence[Segment], sums: Tensor) -> tuple[JobLoss, ...]:
    """Each segment's loss as events have it, in one transfer to the host."""
    return tuple(
        JobLoss(segment.job, segment.step, total, count, segment.tokens)
        for segment, total, count in zip(segments, sums.tolist(), counts, strict=True)
    )


def load_microbatch(
    microbatch: Microbatch,
    split_of: Callable[[Segment], Split],
    bank: Bank,
    *,
    training: bool,
    checkpointing: bool = False,
) -> LoadedMicrobatch:
    """Gather a microbatch's tokens and lay out its routing.

    Args:
        split_of: returns the split that a segment's indices refer to.
    """
    splits = [split_of(segment) for segment in microbatch.segments]
    rows = [_rows(segment, split) for segment, split in zip(microbatch.segments, splits, strict=True)]
    tokens = _join([split.tokens[where] for split, where in zip(splits, rows, strict=True)])
    labels = [split.labels[where] for split, where in zip(splits, rows, strict=True)]
    counts = [int(np.count_nonzero(label)) for label in labels]
    labelled = np.flatnonzero(np.concatenate(labels))
    weights = np.repeat([segment.loss_weight for segment in microbatch.segments], counts)
    lengths = np.concatenate([np.asarray(segment.lengths) for segment in microbatch.segments])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    device = bank.device
    routing = _routing(microbatch, offsets, bank, training=training)
    context = MicrobatchContext.of(
        upload(torch.from_numpy(tokens), device),
        offsets.tolist(),
        routing=routing,
        checkpointing=checkpointing,
    )
    return LoadedMicrobatch(
        context=context,
        rows=upload(torch.from_numpy(labelled - 1), device),  # a sample's first token is never labelled
        targets=upload(torch.from_numpy(tokens[labelled]), device),
        weights=upload(torch.from_numpy(weights.astype(np.float32)), device),
        counts=tuple(counts),
        segments=microbatch.segments,
    )


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


def _routing(microbatch: Microbatch, offsets: Int64, bank: Bank, *, training: bool) -> Routing:
    segments, start = [], 0
    for segment in microbatch.segments:
        segments.append(RoutedSegment(segment.job, start, start + segment.tokens))
        start += segment.tokens
    lengths = np.diff(offsets)
    steps = _join([np.full(len(segment.samples), segment.step) for segment in microbatch.segments])
    samples = _join([np.asarray(segment.samples) for segment in microbatch.segments])
    draws = _join([np.asarray(segment.draws) for segment in microbatch.segments])
    counters = RowCounters(
        step=torch.from_numpy(np.repeat(steps, lengths)),
        sample=torch.from_numpy(np.repeat(samples, lengths)),
        draw=torch.from_numpy(np.repeat(draws, lengths)),
        position=torch.from_numpy(_positions(lengths)),
    )
    return Routing.build(bank, segments, counters, training=training)
