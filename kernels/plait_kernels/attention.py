"""Attention with a softcap over packed samples by Triton, which torch's flash kernels do not compute.

`plain.attention` is its reference. Scores are never in memory: forward keeps a number for each row and head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import e, log2
from typing import Any

import torch
from torch import Tensor

from plait_kernels.launching import GIVEN, Launch, room
from plait_kernels.tiles import power_of_two

WIDEST_HEAD = 256
_LOG2E = log2(e)
_KEPT = 256  # launches: a layer's kinds times the longest samples and the numbers of samples


@dataclass(frozen=True, slots=True)
class Capped:
    """Attention of one layer: softcap · tanh(scale · q·k / softcap) of ``query`` heads, of which groups share
    one of ``shared`` keys and values; a query sees ``window`` keys, its own included."""

    query: int
    shared: int
    size: int
    scale: float
    softcap: float
    window: int | None = None


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Rows of queries and of keys, warps and stages of a kernel."""

    queries: int
    keys: int
    warps: int
    stages: int


# By features of a head, padded: forward, the gradient of queries, that of keys. Bits depend on them.
_HALF = {
    64: (_Tiles(128, 64, 4, 2), _Tiles(64, 64, 4, 2), _Tiles(32, 64, 8, 2)),
    128: (_Tiles(128, 64, 8, 2), _Tiles(64, 64, 8, 2), _Tiles(32, 64, 8, 2)),
    256: (_Tiles(64, 32, 8, 2), _Tiles(32, 64, 8, 1), _Tiles(32, 32, 8, 2)),
}
_SINGLE = {64: _Tiles(32, 32, 8, 1), 128: _Tiles(16, 16, 8, 1), 256: _Tiles(16, 16, 8, 1)}


@cache
def _kernels() -> Any:
    from plait_kernels import triton_attention

    return triton_attention


def forward(qkv: Tensor, ends: Tensor, longest: int, rule: Capped) -> tuple[Tensor, Tensor]:
    """The output (tokens, query · size), and log2 of each row's sum (tokens, query).

    Args:
        qkv: (tokens, (query + 2 · shared) · size), contiguous: queries, keys, values of a token.
        ends: (samples + 1,) int32, where samples begin and end.
        longest: tokens of the longest sample, or more.
    """
    out = room(qkv, (len(qkv), rule.query * rule.size))
    sums = room(qkv, (len(qkv), rule.query), torch.float32)
    _launch("attend", _kind(qkv), (longest, len(ends) - 1), rule)(qkv, ends, out, sums)
    return out, sums


def backward(
    grad: Tensor, qkv: Tensor, ends: Tensor, longest: int, rule: Capped, out: Tensor, sums: Tensor
) -> Tensor:
    """The gradient of qkv, given that of the output, contiguous."""
    dqkv, deltas = room(qkv, qkv.shape), room(sums, sums.shape)
    dq, dkv = dqkv.tensor_split((rule.query * rule.size,), dim=1)
    kind, samples = _kind(qkv), (longest, len(ends) - 1)
    _launch("query_gradient", kind, samples, rule)(grad, qkv, ends, out, sums, deltas, dq)
    _launch("key_gradient", kind, samples, rule)(grad, qkv, ends, sums, deltas, dkv)
    return dqkv


def _kind(qkv: Tensor) -> tuple[torch.device, torch.dtype]:
    """What makes a binary another one."""
    return qkv.device, qkv.dtype


@lru_cache(_KEPT)
def _launch(
    name: str, kind: tuple[torch.device, torch.dtype], samples: tuple[int, int], rule: Capped
) -> Launch:
    stage = ("attend", "query_gradient", "key_gradient").index(name)
    exact = kind[1] == torch.float32
    padded = max(64, power_of_two(rule.size))
    tiles = _SINGLE[padded] if exact else _HALF[padded][stage]
    rows, heads = (tiles.keys, rule.shared) if stage == 2 else (tiles.queries, rule.query)
    scales = (2 * _LOG2E * rule.scale / rule.softcap, rule.softcap * _LOG2E)
    return Launch(
        getattr(_kernels(), name),
        (-(-samples[0] // rows), heads, samples[1]),
        *(GIVEN,) * (4, 7, 6)[stage],
        *(rule.query, rule.shared, rule.size, rule.window or 0),
        *(scales if stage == 0 else (rule.scale, *scales)),
        **{"WINDOWED": rule.window is not None, "EXACT": exact},
        **{"BM": tiles.queries, "BN": tiles.keys, "BD": padded},
        **{"num_warps": tiles.warps, "num_stages": tiles.stages},
    )
