"""Keys and values in the pool's pages, and attention over them.

A seam: on a CPU, requests with few rows go through compiled code, which reads the pages; others, and those on
other devices, through torch, which copies keys and values out of them, and is the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.models.attention import AttentionLayout, AttentionRule, Heads, packed_attention
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait.models.elementwise import PagesShape, attend_pages, compiled

FEW = 8  # rows of one request for which compiled code is the faster
GATHERED = 2**25  # elements of keys and values that are copied out of their pages at once


class _Sizes:
    """A cache that stores nothing, and notes what a token's keys and values would take."""

    def __init__(self) -> None:
        self.elements = 1

    def attend(
        self, _layer: int, qkv: Tensor, heads: Heads, rule: AttentionRule, context: MicrobatchContext
    ) -> Tensor:
        """See ``AttentionStore``."""
        self.elements = max(self.elements, 2 * heads.shared * (qkv.shape[-1] // heads.total))
        return packed_attention(qkv, heads, context.layout, rule)


@torch.no_grad()
def token_elements(base: BaseModel) -> int:
    """Most elements of one token's keys and values in a layer, found by running one token."""
    sizes = _Sizes()
    zero = torch.zeros(1, dtype=torch.int64, device=base.device)
    base.hidden(MicrobatchContext(zero, zero, (0, 1), cache=sizes))
    return sizes.elements


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests with equally many rows and earlier tokens.

    Attributes:
        rows, positions: (requests, rows).
        pages, inside: (requests, longest), where their keys are.
    """

    rows: Tensor
    positions: Tensor
    pages: Tensor
    inside: Tensor


class PagedCache:
    """Keys and values of every layer in pages of the pool.

    :meth:`place` says where the rows of the next iteration belong: first rows that have earlier tokens, then
    whole prompts.

    Args:
        pool: each layer's pages, (pages, elements).
    """

    def __init__(self, pool: Sequence[Tensor], page_tokens: int) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._device = pool[0].device
        self._few = 0 if compiled("attend", pool[0]) is None else FEW

    def place(
        self, tables: Sequence[Sequence[int]], starts: Sequence[int], lengths: Sequence[int], begun: int
    ) -> None:
        """Set the pages of each request, its earlier tokens and its rows; the first ``begun`` requests have
        earlier tokens, the others none."""
        longest = max(map(len, tables))
        padded = torch.tensor([[*table, *[0] * (longest - len(table))] for table in tables])
        counts = torch.tensor(lengths)
        owner = torch.repeat_interleave(torch.arange(len(tables)), counts)
        ends = counts.cumsum(0)
        positions = torch.arange(len(owner)) - (ends - counts - torch.tensor(starts))[owner]
        self._rows = self._at(padded[owner, positions // self._page_tokens], positions)
        self._begun = int(ends[begun - 1]) if begun else 0
        firsts = ends - counts
        self._tables, self._longest = padded, self._page_tokens * longest
        few = ((counts <= self._few) & (torch.arange(len(tables)) < begun))[owner].nonzero()[:, 0]
        self._direct = torch.stack((few, owner[few], positions[few]), dim=1)
        self._groups = []
        for rows in sorted({length for length in lengths[:begun] if length > self._few}):
            own = (counts[:begun] == rows).nonzero()[:, 0]
            self._groups.append(self._group(padded[own], firsts[own], rows, positions))
        prompts = list(lengths[begun:])
        self._layout = AttentionLayout.of(prompts, self._device) if prompts else None

    def _group(self, tables: Tensor, firsts: Tensor, rows: int, positions: Tensor) -> _Group:
        """Requests with equally many rows, of which each begins at one of ``firsts``."""
        own = firsts[:, None] + torch.arange(rows)
        keys = torch.arange(int(positions[own].max()) + 1)
        pages, inside = self._at(tables[:, keys // self._page_tokens], keys)
        return _Group(own.to(self._device), positions[own].to(self._device), pages, inside)

    def _at(self, pages: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        inside = (positions % self._page_tokens).expand_as(pages)
        return pages.to(self._device), inside.to(self._device)

    def attend(
        self, layer: int, qkv: Tensor, heads: Heads, rule: AttentionRule, context: MicrobatchContext
    ) -> Tensor:
        """Store the new keys and values, and attend over all of them; see ``AttentionStore``."""
        del context  # as placed
        x = qkv.view(len(qkv), heads.total, -1)
        shape = (self._page_tokens, 2, heads.shared, x.shape[-1])
        stored = self._pool[layer][:, : math.prod(shape)].view(-1, *shape)
        stored[self._rows] = x[:, heads.query :].view(len(x), *shape[1:])
        out = torch.empty(len(x), heads.query * x.shape[-1], dtype=qkv.dtype, device=qkv.device)
        if len(self._direct):
            self._attend_directly(out, qkv, self._pool[layer], heads, rule)
        for group in self._groups:
            most = max(1, GATHERED // (group.pages.shape[1] * math.prod(shape[1:])))
            for first in range(0, len(group.rows), most):
                some = slice(first, first + most)
                rows = group.rows[some]
                keys, values = stored[group.pages[some], group.inside[some]].unbind(2)
                q = x[rows, : heads.query]
                out[rows] = attend_rows(q, keys, values, group.positions[some], heads, rule)
        if self._layout is not None:
            out[self._begun :] = packed_attention(qkv[self._begun :], heads, self._layout, rule)
        return out

    def _attend_directly(
        self, out: Tensor, qkv: Tensor, pool: Tensor, heads: Heads, rule: AttentionRule
    ) -> None:
        sizes = self._page_tokens, pool.shape[1], heads.shared, heads.group, qkv.shape[1] // heads.total
        window, cap = rule.window or self._longest, rule.softcap or 0.0
        rule_and_sizes = PagesShape(*sizes, window, rule.scale, cap)
        attend_pages(out, qkv, pool, self._tables, self._direct, rule_and_sizes)


def attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, heads: Heads, rule: AttentionRule
) -> Tensor:
    """Query rows against their samples' keys: (samples, rows, heads, size) to (samples, rows, heads · size).

    Args:
        keys, values: (samples, longest, shared, size), of which those up to a row's position count. The
            others may hold anything.
        positions: (samples, rows), rising in a sample.
    """
    grouped = q.reshape(*q.shape[:2], heads.shared, heads.group, -1)
    scores = torch.einsum("brsgd,bksd->brsgk", grouped, keys).float() * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    key = torch.arange(keys.shape[1], device=q.device)
    hidden = key > positions.unsqueeze(2)
    if rule.window is not None:
        hidden |= key <= positions.unsqueeze(2) - rule.window
    scores.masked_fill_(hidden[:, :, None, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1).to(q.dtype)
    unseen = hidden.all(1)[..., None, None]
    values = values.masked_fill(unseen, 0.0)  # no weight would hide what is not finite
    return torch.einsum("brsgk,bksd->brsgd", weights, values).flatten(2)
