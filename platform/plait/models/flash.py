"""Attention of packed samples without scores in memory, by torch's flash kernels or Plait's own.

A seam: the model's attention goes through :func:`attend`, which takes the flash kernels where they compute
the rule, Plait's where there is a softcap, and the products of ``attention`` elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from plait.models.attention import AttentionRule, Heads, packed_attention
from plait.models.context import MicrobatchContext
from plait_kernels import passes
from plait_kernels.attention import WIDEST_HEAD, Capped, backward, forward
from plait_kernels.chain import apply

_DTYPES = (torch.float16, torch.bfloat16)
_NOT_EVERYWHERE = range(193, 225)  # of whose gradient some devices lack the kernel


def attend(
    qkv: Tensor, heads: Heads, context: MicrobatchContext, rule: AttentionRule, backend: str
) -> Tensor:
    """Causal attention within each sample: (tokens, query heads · head size); q and k are rotated already.

    Args:
        qkv: (tokens, (query + 2 · shared) · head size): all queries, all keys, all values of a token.
        backend: the backend of the model's kernels.
    """
    if passes.by_triton(backend, qkv):
        if takes(qkv, heads, rule):
            out: Tensor = apply(_Flash, qkv, heads, context.ends, context.longest, rule)
            return out
        own = _capped(qkv, heads, rule)
        if own is not None:
            return cast("Tensor", apply(_Capped, qkv, context.ends, context.longest, own))
    return packed_attention(qkv, heads, context.layout, rule)


def takes(qkv: Tensor, heads: Heads, rule: AttentionRule) -> bool:
    """Whether the flash kernels compute this: half precision, no softcap, heads of up to 256 features."""
    size = qkv.shape[-1] // heads.total
    sized = size <= WIDEST_HEAD and size % 8 == 0 and size not in _NOT_EVERYWHERE
    return sized and qkv.dtype in _DTYPES and rule.softcap is None and _device_has_it(qkv.device)


def _capped(qkv: Tensor, heads: Heads, rule: AttentionRule) -> Capped | None:
    """What Plait's own kernels are asked for, if they compute this: a softcap, heads of up to 256."""
    size = qkv.shape[-1] // heads.total
    if rule.softcap is None or size > WIDEST_HEAD:
        return None
    return Capped(heads.query, heads.shared, size, rule.scale, rule.softcap, rule.window)


def _device_has_it(device: torch.device) -> bool:
    if device.type != "cuda":
        return device.type == "meta"  # counted and fitted as on a CUDA device
    flash: Any = torch.backends.cuda
    return bool(flash.is_flash_attention_available()) and torch.cuda.get_device_capability(device) >= (8, 0)


class _Flash(torch.autograd.Function):
    """The flash kernels and their gradient, whose sums have a fixed order.

    What backward needs is saved by autograd, so that checkpointing can let go of it and make it again.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: Heads, ends: Tensor, longest: int, rule: AttentionRule
    ) -> Tensor:
        out, sums, state = forward_kernel(*_split(qkv, heads), ends, longest, rule)
        ctx.save_for_backward(qkv, out, sums, state)
        ctx.heads, ctx.ends, ctx.longest, ctx.rule = heads, ends, longest, rule
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        qkv, out, sums, state = ctx.saved_tensors
        query, key, value = _split(qkv, ctx.heads)
        given = query, key, value, out, sums, state, ctx.ends, ctx.longest, ctx.rule
        with _deterministic():
            found = backward_kernel(grad.reshape(out.shape), *given)
        return torch.cat(found, dim=1).flatten(1), None, None, None, None


class _Capped(torch.autograd.Function):
    """Plait's kernels of attention with a softcap, and their gradient."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, ends: Tensor, longest: int, rule: Capped) -> Tensor:
        qkv = qkv.contiguous()
        out, sums = forward(qkv, ends, longest, rule)
        ctx.save_for_backward(qkv, ends, out, sums)
        ctx.longest, ctx.rule = longest, rule
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        qkv, ends, out, sums = ctx.saved_tensors
        found = backward(grad.contiguous(), qkv, ends, ctx.longest, ctx.rule, out, sums)
        return found, None, None, None


def forward_kernel(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the logarithms of its rows' sums and the generator's state.

    The operator below torch's ``varlen_attn``, whose Python takes the host as long again. Keys are not split,
    so that a sample's bits are its own; before torch 2.13 they never are.
    """
    found = torch.ops.aten._flash_attention_forward(
        *(query, key, value, ends, ends, longest, longest, 0.0, rule.window is None, False),
        **_options(rule),
        **_unsplit(),
    )
    return found[0], found[1], found[2]


@cache
def _unsplit() -> dict[str, int]:
    schema: Any = torch.ops.aten._flash_attention_forward.default._schema
    known = any(each.name == "num_splits" for each in schema.arguments)
    return {"num_splits": 1} if known and not torch.version.hip else {}


def backward_kernel(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    state: Tensor,
    ends: Tensor,
    longest: int,
    rule: AttentionRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *(grad, query, key, value, out, sums, ends, ends, longest, longest),
        *(0.0, rule.window is None, state, state),
        **_options(rule),
    )
    return found


def _options(rule: AttentionRule) -> dict[str, Any]:
    """The scale, and the keys before and after a query's own that it sees; −1: all."""
    before = -1 if rule.window is None else rule.window - 1
    return {"scale": rule.scale, "window_size_left": before, "window_size_right": 0}


def _split(qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, (tokens, their heads, head size) each."""
    rows = qkv.view(qkv.shape[0], heads.total, -1)
    query, key, value = rows.split_with_sizes([heads.query, heads.shared, heads.shared], dim=1)
    return query, key, value


@contextmanager
def _deterministic() -> Iterator[None]:
    """Have torch sum in a fixed order, without filling new memory, as it would.

    Its own functions for this also set options of its compiler, which takes longer than a launch.
    """
    settings: Any = torch._C
    before = settings._get_deterministic_algorithms()
    only_warns = settings._get_deterministic_algorithms_warn_only()
    fills = settings._get_deterministic_fill_uninitialized_memory()
    settings._set_deterministic_algorithms(True, warn_only=False)
    settings._set_deterministic_fill_uninitialized_memory(fills and before)
    try:
        yield
    finally:
        settings._set_deterministic_algorithms(before, warn_only=only_warns)
        settings._set_deterministic_fill_uninitialized_memory(fills)
