"""Keys and values in pages, and attention over them.

A seam: the reference in torch; a kernel that reads pages directly takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.models.attention import AttentionLayout, AttentionRule, Heads, packed_attention
from plait.models.context import MicrobatchContext


class PagedCache:
    """Keys and values of every layer in one pool of pages.

    :meth:`place` says where the rows of the next iteration belong: first single rows of requests that have
    earlier tokens, then whole prompts.
    """

    def __init__(self, pages: int, page_tokens: int, device: torch.device) -> None:
        self._pages = pages
        self._page_tokens = page_tokens
        self._device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # each (tokens of all pages, shared, size)

    def place(
        self, tables: Sequence[Sequence[int]], starts: Sequence[int], lengths: Sequence[int], decoding: int
    ) -> None:
        """Set the pages of each request, its earlier tokens and its rows; the first ``decoding`` have one."""
        longest = max(map(len, tables))
        padded = torch.tensor([[*table, *[0] * (longest - len(table))] for table in tables])
        inside = torch.arange(self._page_tokens)
        places = (padded.unsqueeze(-1) * self._page_tokens + inside).flatten(1)
        own = [
            places[row, start : start + length]
            for row, (start, length) in enumerate(zip(starts, lengths, strict=True))
        ]
        self._rows = torch.cat(own).to(self._device)
        self._decoding = decoding
        reach = max(starts[:decoding], default=0) + 1
        self._keys = places[:decoding, :reach].to(self._device)
        prompts = list(lengths[decoding:])
        self._layout = AttentionLayout.of(prompts, self._device) if prompts else None

    def attend(
        self, layer: int, qkv: Tensor, heads: Heads, rule: AttentionRule, context: MicrobatchContext
    ) -> Tensor:
        """Store the new keys and values, and attend over all of them; see ``AttentionStore``."""
        x = qkv.view(len(qkv), heads.total, -1)
        q, k, v = x.split([heads.query, heads.shared, heads.shared], dim=1)  # type: ignore[no-untyped-call]
        if layer not in self._layers:
            shape = (self._pages * self._page_tokens, heads.shared, x.shape[-1])
            self._layers[layer] = (x.new_zeros(shape), x.new_zeros(shape))
        keys, values = self._layers[layer]
        keys[self._rows] = k
        values[self._rows] = v
        count = self._decoding
        parts = []
        if count:
            positions = context.position_ids[:count]
            parts.append(attend_rows(q[:count], keys[self._keys], values[self._keys], positions, heads, rule))
        if self._layout is not None:
            parts.append(packed_attention(qkv[count:], heads, self._layout, rule))
        return torch.cat(parts)


def attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, heads: Heads, rule: AttentionRule
) -> Tensor:
    """One query row of each sample against its keys: (samples, heads, size) to (samples, heads · size).

    Args:
        keys, values: (samples, longest, shared, size), of which those up to the row's position count.
    """
    grouped = q.reshape(len(q), heads.shared, heads.group, -1)
    scores = torch.einsum("bsgd,bksd->bsgk", grouped, keys).float() * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    key = torch.arange(keys.shape[1], device=q.device)
    hidden = key > positions.unsqueeze(1)
    if rule.window is not None:
        hidden |= key <= positions.unsqueeze(1) - rule.window
    scores.masked_fill_(hidden[:, None, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1).to(q.dtype)
    return torch.einsum("bsgk,bksd->bsgd", weights, values).flatten(1)
