"""Greedy generation: prompts of several adapters in one batch, with a cache of keys and values.

A seam: its only caller today is evaluation by answers, and nothing here knows of jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from plait.core.errors import InputError
from plait.models.attention import AttentionRule, Heads, packed_attention
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait_kernels import Bank, RoutedSegment, Routing, RowCounters


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to continue, and the adapter to use; None: the base model without an adapter."""

    tokens: tuple[int, ...]
    adapter: str | None = None


class KeyValueCache:
    """Keys and values of every layer and sample, padded to the longest possible length.

    The first call of a layer has whole prompts, each later call one row of every sample.
    """

    def __init__(self, lengths: Tensor, room: int) -> None:
        self.lengths = lengths
        self._room = int(lengths.max()) + room
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        self, layer: int, qkv: Tensor, heads: Heads, rule: AttentionRule, context: MicrobatchContext
    ) -> Tensor:
        """Add the new keys and values, and attend over all of them; see ``AttentionStore``."""
        x = qkv.view(len(qkv), heads.total, -1)
        q, k, v = x.split([heads.query, heads.shared, heads.shared], dim=1)  # type: ignore[no-untyped-call]
        first = layer not in self._layers
        if first:
            shape = (len(self.lengths), self._room, heads.shared, x.shape[-1])
            self._layers[layer] = (x.new_zeros(shape), x.new_zeros(shape))
        keys, values = self._layers[layer]
        sample = torch.arange(len(self.lengths), device=x.device)
        if first:
            sample = sample.repeat_interleave(self.lengths)
        keys[sample, context.position_ids] = k
        values[sample, context.position_ids] = v
        if first:
            return packed_attention(qkv, heads, context.layout, rule)
        return _attend_rows(q, keys, values, context.position_ids, heads, rule)

    def keep(self, samples: Tensor) -> None:
        """Drop all other samples."""
        self.lengths = self.lengths[samples]
        self._layers = {
            layer: (keys[samples], values[samples]) for layer, (keys, values) in self._layers.items()
        }


def _attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, heads: Heads, rule: AttentionRule
) -> Tensor:
    """One query row of every sample against its keys: (samples, heads, size) to (samples, heads · size)."""
    reach = int(positions.max()) + 1
    grouped = q.reshape(len(q), heads.shared, heads.group, -1)
    scores = torch.einsum("bsgd,bksd->bsgk", grouped, keys[:, :reach]).float() * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    key = torch.arange(reach, device=q.device)
    hidden = key > positions.unsqueeze(1)
    if rule.window is not None:
        hidden |= key <= positions.unsqueeze(1) - rule.window
    scores.masked_fill_(hidden[:, None, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1).to(q.dtype)
    return torch.einsum("bsgk,bksd->bsgd", weights, values[:, :reach]).flatten(1)


def generate(
    base: BaseModel,
    prompts: Sequence[Prompt],
    bank: Bank | None,
    *,
    max_new_tokens: int,
    stop: Collection[int] | None = None,
) -> list[tuple[int, ...]]:
    """Greedy continuations of prompts, with any adapters in ``bank``, in one batch: their new tokens.

    Args:
        bank: None if no prompt has an adapter.
        max_new_tokens: most tokens of a continuation; it also ends at the model's own limit.
        stop: tokens that end a continuation and are not part of it; None: the model's own.

    Raises:
        InputError: an empty prompt, or one as long as the model's limit.
    """
    for prompt in prompts:
        if not 0 < len(prompt.tokens) < base.max_length:
            raise InputError(
                f"a prompt of {len(prompt.tokens)} tokens",
                f"A prompt has at least one token and fewer than {base.max_length}, the model's limit.",
            )
    ending = frozenset(base.stop_tokens if stop is None else stop)
    order = sorted(range(len(prompts)), key=lambda index: prompts[index].adapter or "")
    texts = _continue([prompts[index] for index in order], base, bank, max_new_tokens, ending)
    found = dict(zip(order, texts, strict=True))
    return [tuple(found[index]) for index in range(len(prompts))]


def batch_size(prompts: Sequence[Prompt], max_new_tokens: int, capacity: int) -> int:
    """How many of the first prompts, at least one, fit into ``capacity`` tokens with their continuations."""
    tokens = accumulate(len(prompt.tokens) + max_new_tokens for prompt in prompts)
    return max(1, sum(1 for _ in takewhile(lambda total: total <= capacity, tokens)))


@torch.no_grad()
def _continue(
    prompts: list[Prompt], base: BaseModel, bank: Bank | None, room: int, stop: frozenset[int]
) -> list[list[int]]:
    lengths = [len(prompt.tokens) for prompt in prompts]
    ends = torch.tensor(lengths).cumsum(0)
    cache = KeyValueCache(torch.tensor(lengths, device=base.device), room)
    tokens = torch.tensor([token for prompt in prompts for token in prompt.tokens], device=base.device)
    routing = _routing(bank, [prompt.adapter for prompt in prompts], lengths)
    context = MicrobatchContext.of(tokens, [0, *ends.tolist()], routing=routing)
    context.cache = cache
    rows = ends.to(base.device) - 1
    new: list[list[int]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    for _ in range(room):
        following = base.logits(context, rows).argmax(-1).tolist()
        going = []
        for row, token in enumerate(following):
            sample = active[row]
            if token not in stop:
                new[sample].append(token)
                if lengths[sample] + len(new[sample]) < base.max_length:
                    going.append(row)
        if not going:
            break
        cache.keep(torch.tensor(going, device=base.device))
        active = [active[row] for row in going]
        context = _one_row_each(cache, [new[sample][-1] for sample in active], base)
        context.routing = _routing(bank, [prompts[sample].adapter for sample in active], [1] * len(active))
        cache.lengths = cache.lengths + 1
        rows = torch.arange(len(active), device=base.device)
    return new


def _one_row_each(cache: KeyValueCache, tokens: list[int], base: BaseModel) -> MicrobatchContext:
    offsets = tuple(range(len(tokens) + 1))
    token_ids = torch.tensor(tokens, device=base.device)
    return MicrobatchContext(token_ids, cache.lengths, offsets, cache=cache)


def _routing(bank: Bank | None, adapters: Sequence[str | None], lengths: Sequence[int]) -> Routing | None:
    """The routing of each prompt's rows to its adapter; without dropout, so counters do not matter."""
    if bank is None:
        return None
    segments: list[RoutedSegment] = []
    start = 0
    for adapter, length in zip(adapters, lengths, strict=True):
        if segments and segments[-1].adapter == adapter:
            segments[-1] = RoutedSegment(adapter, segments[-1].start, start + length)
        else:
            segments.append(RoutedSegment(adapter, start, start + length))
        start += length
    zero = torch.zeros(start, dtype=torch.int64)
    return Routing.build(bank, segments, RowCounters(zero, zero, zero, zero), training=False)
