"""The layout of packed samples for attention: buckets of nearly equal length, each computed as one batch.

Every sample attends to itself alone. A bucket pads its samples to its longest and takes only as many as keep
the padded area within ``MAX_WASTE`` of the real one, so that work stays in proportion to Σ length².
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.core.padding import bucket_samples


@dataclass(frozen=True, slots=True)
class Bucket:
    """Samples padded to one length: rows [start, start + samples · length) of the padded order."""

    length: int
    samples: int
    start: int

    @property
    def rows(self) -> int:
        """Padded rows."""
        return self.length * self.samples


@dataclass(frozen=True, slots=True, eq=False)
class HeadIndex:
    """Where each head's row of each token lies, in attention's order and in the packed order.

    Attention's order: first all queries, then all keys, then all values; within each: bucket, sample,
    head, position.

    Attributes:
        gather: rows of the packed (tokens · (heads + 2 · shared)) matrix in attention's order.
        scatter: rows of attention's order in the packed order, (tokens · (heads + 2 · shared)).
        gather_out: rows of a packed (tokens · heads) matrix in the queries' order.
        scatter_out: rows of the queries' order in the packed order, (tokens · heads).
        padding: rows of the queries' order that are padding.
    """

    gather: Tensor
    scatter: Tensor
    gather_out: Tensor
    scatter_out: Tensor
    padding: Tensor


@dataclass(slots=True, eq=False)
class AttentionLayout:
    """The padded order of a microbatch's rows.

    Attributes:
        buckets: consecutive in the padded order.
        tokens: rows of the microbatch.
        source: (padded rows,) int64, the packed row of each padded row; padding repeats its sample's last.
        target: (tokens,) int64, the padded row of each packed row.
    """

    buckets: tuple[Bucket, ...]
    tokens: int
    source: Tensor
    target: Tensor
    _indices: dict[tuple[int, int], HeadIndex] = field(default_factory=dict)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> AttentionLayout:
        """The layout of samples of these lengths, which lie end to end."""
        ends = torch.tensor(lengths).cumsum(0).tolist()
        buckets: list[Bucket] = []
        source, target = [], torch.empty(ends[-1], dtype=torch.int64)
        for members in bucket_samples(lengths):
            longest = lengths[members[0]]
            start = buckets[-1].start + buckets[-1].rows if buckets else 0
            for turn, sample in enumerate(members):
                first = ends[sample] - lengths[sample]
                source.append(first + torch.arange(longest).clamp_(max=lengths[sample] - 1))
                target[first : ends[sample]] = start + turn * longest + torch.arange(lengths[sample])
            buckets.append(Bucket(longest, len(members), start))
        return cls(tuple(buckets), ends[-1], torch.cat(source).to(device), target.to(device))

    def index(self, heads: int, shared: int) -> HeadIndex:
        """The index for layers with ``heads`` query heads and ``shared`` key and value heads."""
        key = (heads, shared)
        if key not in self._indices:
            self._indices[key] = self._index(heads, shared)
        return self._indices[key]

    def _index(self, heads: int, shared: int) -> HeadIndex:
        total, padded = heads + 2 * shared, len(self.source)
        parts = ((heads, 0), (shared, heads), (shared, heads + shared))
        gather = torch.cat([self._gather(count, total, first) for count, first in parts])
        scatter = torch.cat([self._scatter(count) + padded * first for count, first in parts], dim=1)
        real = torch.zeros(padded, dtype=torch.bool, device=self.source.device)
        real[self.target] = True
        filler = [
            (~real[bucket.start : bucket.start + bucket.rows])
            .view(bucket.samples, 1, bucket.length)
            .expand(-1, heads, -1)
            .flatten()
            for bucket in self.buckets
        ]
        return HeadIndex(
            gather,
            scatter.flatten(),
            self._gather(heads, heads, 0),
            self._scatter(heads).flatten(),
            torch.cat(filler).nonzero().squeeze(1),
        )

    def _gather(self, count: int, total: int, first: int) -> Tensor:
        head = first + torch.arange(count, device=self.source.device).view(1, count, 1)
        return torch.cat(
            [
                (
                    self.source[bucket.start : bucket.start + bucket.rows].view(bucket.samples, 1, -1) * total
                    + head
                ).flatten()
                for bucket in self.buckets
            ]
        )

    def _scatter(self, count: int) -> Tensor:
        head = torch.arange(count, device=self.target.device)
        rows = torch.empty(self.tokens, count, dtype=torch.int64, device=self.target.device)
        for bucket in self.buckets:
            mine = (self.target >= bucket.start) & (self.target < bucket.start + bucket.rows)
            inside = self.target[mine] - bucket.start
            sample, position = inside // bucket.length, inside % bucket.length
            base = (bucket.start + sample * bucket.length) * count + position
            rows[mine] = base.unsqueeze(1) + head * bucket.length
        return rows
