"""Attention of packed samples by torch's variable-length flash attention, on devices that have it.

A seam: the model's attention goes through :func:`attend`, which takes the flash kernels where they compute
the rule, and the products of ``attention`` elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from plait.models.attention import AttentionRule, Heads, packed_attention
from plait.models.context import MicrobatchContext
from plait_kernels import passes

_DTYPES = (torch.float16, torch.bfloat16)
_WIDEST_HEAD = 256


def attend(
    qkv: Tensor, heads: Heads, context: MicrobatchContext, rule: AttentionRule, backend: str
) -> Tensor:
    """Causal attention within each sample: (tokens, query heads · head size); q and k are rotated already.

    Args:
        qkv: (tokens, (query + 2 · shared) · head size): all queries, all keys, all values of a token.
        backend: the backend of the model's kernels.
    """
    if passes.by_triton(backend, qkv) and takes(qkv, heads, rule):
        return cast("Callable[..., Tensor]", _Flash.apply)(qkv, heads, context.ends, context.longest, rule)
    return packed_attention(qkv, heads, context.layout, rule)


def takes(qkv: Tensor, heads: Heads, rule: AttentionRule) -> bool:
    """Whether the flash kernels compute this: half precision, no softcap, heads of up to 256 features."""
    size = qkv.shape[-1] // heads.total
    fits = qkv.dtype in _DTYPES and rule.softcap is None and size <= _WIDEST_HEAD and size % 8 == 0
    return fits and _device_has_it(qkv.device)


def _device_has_it(device: torch.device) -> bool:
    if device.type != "cuda":
        return device.type == "meta"  # counted and fitted as on a CUDA device
    flash: Any = torch.backends.cuda
    return bool(flash.is_flash_attention_available()) and torch.cuda.get_device_capability(device) >= (8, 0)


class _Flash(torch.autograd.Function):
    """The flash kernels' own graph, differentiated with their sums in a fixed order."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: Heads, ends: Tensor, longest: int, rule: AttentionRule
    ) -> Tensor:
        rows = qkv.detach().view(len(qkv), heads.total, -1)
        parts = torch.split(rows, [heads.query, heads.shared, heads.shared], dim=1)
        leaves = [part.requires_grad_(ctx.needs_input_grad[0]) for part in parts]
        with torch.set_grad_enabled(ctx.needs_input_grad[0]):
            out = cast("Callable[..., Tensor]", varlen_attn)(
                *leaves,
                *(ends, ends, longest, longest),
                scale=rule.scale,
                window_size=(-1 if rule.window is None else rule.window - 1, 0),
                enable_gqa=heads.group > 1,
                num_splits=None if torch.version.hip else 1,  # so that a sample's bits are its own
            )
        ctx.leaves, ctx.out = leaves, out
        return out.detach().flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        with _deterministic():
            found = torch.autograd.grad(ctx.out, ctx.leaves, grad.reshape(ctx.out.shape))
        ctx.leaves = ctx.out = None
        return torch.cat(found, dim=1).flatten(1), None, None, None, None


@contextmanager
def _deterministic() -> Iterator[None]:
    """Have torch sum in a fixed order, without filling new memory, as it would."""
    deterministic: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = fills and before
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
        deterministic.fill_uninitialized_memory = fills
