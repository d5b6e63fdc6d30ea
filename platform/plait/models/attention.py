"""Causal attention of packed samples, each over itself only, by plain batched matrix products.

The rows of a microbatch are gathered into buckets of nearly equal length, for which scores, softmax and their
gradients are batched matrix products, so work is proportional to Σ length². Heads that share a key and value
(grouped queries) are rows of one product, so keys and values are never repeated. Short samples keep their
probabilities for the backward pass; long ones recompute them in blocks of rows, whose keys end at the
diagonal and begin at the sliding window, so memory grows only linearly with the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from plait.core.samples import bucket_samples
from plait.models.elementwise import MOST_KEYS, causal_softmax_, causal_softmax_back_, rotate_
from plait_kernels.chain import apply
from plait_kernels.uploads import upload

KEEP_UP_TO = 256  # length of the longest samples that keep their probabilities
ROWS = MOST_KEYS  # query rows of one block


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
    """The positions of each head's row of each token, in attention's order and in the packed order.

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
        """The layout of samples of these lengths, end to end."""
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
        device = torch.device(device)
        both = upload(torch.cat(source), device), upload(target, device)
        return cls(tuple(buckets), ends[-1], *both)

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


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Parameters of one layer's attention: scale · q·k, softcap · tanh(· / softcap), keys within window."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of query heads, and of key and value heads that groups of them share."""

    query: int
    shared: int

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.query // self.shared

    @property
    def turned(self) -> tuple[int, int]:
        """Heads that a rotary embedding rotates, queries and keys, of all."""
        return self.query + self.shared, self.total

    @property
    def total(self) -> int:
        """Heads of queries, keys and values together."""
        return self.query + 2 * self.shared


Rotation = tuple[Tensor, Tensor]  # cos, sin: (positions, rotated size)


def packed_attention(
    qkv: Tensor, heads: Heads, layout: AttentionLayout, rule: AttentionRule, rotation: Rotation | None = None
) -> Tensor:
    """Causal attention within each sample: (tokens, query heads · head size).

    Args:
        qkv: (tokens, (query + 2 · shared) · head size): all queries, all keys, all values of a token.
        rotation: cos and sin by position, to rotate queries and keys here (RoPE over the halves of a head);
            None if they are rotated already or not at all.
    """
    return cast(Tensor, apply(_PackedAttention, qkv, heads, layout, rule, rotation))


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        heads: Heads,
        layout: AttentionLayout,
        rule: AttentionRule,
        rotation: Rotation | None,
    ) -> Tensor:
        index = layout.index(heads.query, heads.shared)
        size = qkv.shape[-1] // heads.total
        rows = qkv.reshape(-1, size).index_select(0, index.gather)
        if rotation is not None:
            _rotate(rows, layout, heads, rotation)
        out = rows.new_empty(len(index.gather_out), size)
        kept: list[Tensor] = []
        for bucket in layout.buckets:
            q, k, v = _parts(rows, layout, bucket, heads)
            kept += _forward(q, k, v, _part(out, bucket, heads), rule)
        ctx.save_for_backward(rows, *kept, *(rotation or ()))
        ctx.heads, ctx.layout, ctx.rule, ctx.rotated = heads, layout, rule, rotation is not None
        return out.index_select(0, index.scatter_out).view(-1, heads.query * size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows, *kept = ctx.saved_tensors
        rotation = (kept.pop(-2), kept.pop(-1)) if ctx.rotated else None
        heads, layout = ctx.heads, ctx.layout
        index = layout.index(heads.query, heads.shared)
        size = rows.shape[-1]
        grads = grad.reshape(-1, size).index_select(0, index.gather_out)
        grads.index_fill_(0, index.padding, 0.0)
        back = torch.empty_like(rows)
        for bucket in layout.buckets:
            into = _parts(back, layout, bucket, heads)
            probabilities = kept.pop(0) if _keeps(bucket.length, ctx.rule) else None
            given = _parts(rows, layout, bucket, heads)
            _backward(given, _part(grads, bucket, heads), into, ctx.rule, probabilities)
        if rotation is not None:
            _rotate(back, layout, heads, rotation, back=True)
        return back.index_select(0, index.scatter).view(-1, heads.total * size), None, None, None, None


def _part(rows: Tensor, bucket: Bucket, heads: Heads, *, count: int = 0, first: int = 0) -> Tensor:
    """One bucket's (samples · shared, heads a group · length, size) view of a block of rows."""
    count = count or heads.query
    start = first + bucket.start * count
    rows = rows[start : start + bucket.rows * count]
    return rows.view(bucket.samples * heads.shared, -1, rows.shape[-1])


def _parts(rows: Tensor, layout: AttentionLayout, bucket: Bucket, heads: Heads) -> tuple[Tensor, ...]:
    padded = len(layout.source)
    return (
        _part(rows, bucket, heads),
        _part(rows, bucket, heads, count=heads.shared, first=padded * heads.query),
        _part(rows, bucket, heads, count=heads.shared, first=padded * (heads.query + heads.shared)),
    )


def _rotate(
    rows: Tensor, layout: AttentionLayout, heads: Heads, rotation: Rotation, *, back: bool = False
) -> None:
    """Rotate queries and keys in place; positions count from 0 in every sample."""
    for bucket in layout.buckets:
        for part in _parts(rows, layout, bucket, heads)[:2]:
            rotate_(part.view(-1, part.shape[-1]), *rotation, bucket.length, back=back)


def _keeps(length: int, rule: AttentionRule) -> bool:
    return length <= min(KEEP_UP_TO, ROWS) and rule.softcap is None


def _blocks(length: int, rule: AttentionRule) -> list[tuple[int, int, int]]:
    """Blocks of query rows [start, stop), each with ``low``, the first key that it may see."""
    starts = range(0, length, ROWS)
    window = rule.window or length
    return [(start, min(start + ROWS, length), max(0, start - window + 1)) for start in starts]


def _hidden(start: int, stop: int, low: int, rule: AttentionRule, device: torch.device) -> Tensor:
    """(rows, keys), whether a row does not see a key."""
    row = torch.arange(start, stop, device=device).unsqueeze(1)
    key = torch.arange(low, stop, device=device)
    hidden = key > row
    if rule.window is not None:
        hidden |= key <= row - rule.window
    return hidden


def _probabilities(
    q: Tensor, k: Tensor, block: tuple[int, int, int], rule: AttentionRule
) -> tuple[Tensor, Tensor | None]:
    """Softmax of the scores of query rows [start, stop) and keys [low, stop), for a block (start, stop, low).

    Returns (batch, group · rows, keys), and tanh of the capped scores if there is a cap.
    """
    scores = torch.bmm(q, k.transpose(1, 2))
    start, stop, low = block
    simple = rule.softcap is None and start == low == 0
    if simple and causal_softmax_(scores, stop, rule.window, rule.scale):
        return scores, None
    hidden = _hidden(start, stop, low, rule, q.device).repeat(q.shape[1] // (stop - start), 1)
    if rule.softcap is None:  # masked, not added to: a score that is not finite would stay so
        return torch.softmax(scores.mul_(rule.scale).masked_fill_(hidden, -torch.inf), dim=-1), None
    capped = scores.float().mul_(rule.scale / rule.softcap).tanh_()
    return torch.softmax((capped * rule.softcap).masked_fill_(hidden, -torch.inf), dim=-1).to(q.dtype), capped


def _forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, rule: AttentionRule) -> Sequence[Tensor]:
    """Fill ``out`` (batch, group · length, size) for one bucket; return the probabilities that are kept."""
    length = k.shape[1]
    if length <= ROWS:
        probabilities, _ = _probabilities(q, k, (0, length, 0), rule)
        torch.bmm(probabilities, v, out=out)
        return [probabilities] if _keeps(length, rule) else []
    for start, stop, low in _blocks(length, rule):
        rows, into = _rows(q, length, start, stop), _rows(out, length, start, stop)
        flat = rows.reshape(len(q), -1, q.shape[-1])
        probabilities, _ = _probabilities(flat, k[:, low:stop], (start, stop, low), rule)
        into.copy_(torch.bmm(probabilities, v[:, low:stop]).view(into.shape))
    return []


def _rows(x: Tensor, length: int, start: int, stop: int) -> Tensor:
    """Query rows [start, stop) of every head: (batch, group, rows, size), a view."""
    return x.view(len(x), -1, length, x.shape[-1])[:, :, start:stop]


def _backward(
    given: Sequence[Tensor], grad: Tensor, into: Sequence[Tensor], rule: AttentionRule, kept: Tensor | None
) -> None:
    """Fill the gradients of one bucket's queries, keys and values."""
    (q, k, v), (dq, dk, dv) = given, into
    length = k.shape[1]
    if length <= ROWS:
        capped = None
        if kept is None:
            kept, capped = _probabilities(q, k, (0, length, 0), rule)
        ds = _score_gradient(grad, kept, capped, v, rule, length)
        torch.bmm(kept.transpose(1, 2), grad, out=dv)
        torch.bmm(ds, k, out=dq)
        torch.bmm(ds.transpose(1, 2), q, out=dk)
        return
    sums_k, sums_v = torch.zeros_like(dk, dtype=torch.float32), torch.zeros_like(dv, dtype=torch.float32)
    for start, stop, low in _blocks(length, rule):
        flat = _rows(q, length, start, stop).reshape(len(q), -1, q.shape[-1])
        rows = _rows(grad, length, start, stop).reshape(len(q), -1, q.shape[-1])
        probabilities, capped = _probabilities(flat, k[:, low:stop], (start, stop, low), rule)
        ds = _score_gradient(rows, probabilities, capped, v[:, low:stop], rule, 0)
        target = _rows(dq, length, start, stop)
        target.copy_(torch.bmm(ds, k[:, low:stop]).view(target.shape))
        sums_k[:, low:stop] += torch.bmm(ds.transpose(1, 2), flat)
        sums_v[:, low:stop] += torch.bmm(probabilities.transpose(1, 2), rows)
    dk.copy_(sums_k)
    dv.copy_(sums_v)


def _score_gradient(
    grad: Tensor, probabilities: Tensor, capped: Tensor | None, v: Tensor, rule: AttentionRule, length: int
) -> Tensor:
    """Gradient of q·k, the scale included: P ∘ (dP − Σ P ∘ dP), through the softcap if there is one.

    ``length`` is that of a whole bucket, or 0 for a block of rows.
    """
    dp = torch.bmm(grad, v.transpose(1, 2))
    simple = capped is None and length > 0
    if simple and causal_softmax_back_(dp, probabilities, length, rule.window, rule.scale):
        return dp
    ds = torch.ops.aten._softmax_backward_data(dp, probabilities, -1, dp.dtype)
    if capped is not None:
        ds = ds.mul_((1.0 - capped.square()).to(ds.dtype))
    return cast(Tensor, ds.mul_(rule.scale))
