"""Passes between the products in plain torch: the references of `passes`, which run on every device.

They compute with the rounding of transformers' modules: in float32 inside a norm, else in the dtype of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from plait_kernels.attention import Capped

SILU, GELU_TANH, GELU = range(3)


def rms(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) · (offset + weight), and 1 / rms(x) for each row in float32.

    Without an offset the quotient is rounded to x's dtype before the product, as in Llama.
    """
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    quotient = x.float() * scale
    out = quotient.to(x.dtype) * weight if offset == 0 else quotient * (offset + weight.float())
    return out.to(x.dtype), scale


def rms_back(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, offset: float) -> Tensor:
    """The gradient of x."""
    g = grad.float() * (offset + weight.float())
    mean = (g * x.float()).mean(-1, keepdim=True)
    return (scale * (g - x.float() * (scale.square() * mean))).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float) -> Sequence[Tensor]:
    """(x − mean) / √(variance + eps) · (offset + weight) + bias; each row's mean and 1 / √(…) in float32."""
    weight = weight + offset if offset else weight
    found: tuple[Tensor, ...] = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
    return found


def layer_norm_back(
    grad: Tensor, x: Tensor, weight: Tensor, offset: float, mean: Tensor, scale: Tensor
) -> Tensor:
    """The gradient of x."""
    weight = weight + offset if offset else weight
    back = torch.ops.aten.native_layer_norm_backward
    found: Tensor = back(grad, x, weight.shape, mean, scale, weight, None, [True, False, False])[0]
    return found


def activation(gate: Tensor, kind: int) -> Tensor:
    """SiLU, GELU in its tanh form, or GELU."""
    if kind == SILU:
        return functional.silu(gate)
    return functional.gelu(gate, approximate="tanh" if kind == GELU_TANH else "none")


def activation_back(grad: Tensor, x: Tensor, kind: int) -> Tensor:
    """The gradient of x."""
    operators = torch.ops.aten
    if kind == SILU:
        found: Tensor = operators.silu_backward(grad, x)
    else:
        found = operators.gelu_backward(grad, x, approximate="tanh" if kind == GELU_TANH else "none")
    return found


def gated(x: Tensor, kind: int) -> Tensor:
    """act(gate) · up, for gate and up side by side: (..., 2n) to (..., n)."""
    gate, up = x.chunk(2, dim=-1)
    return activation(gate, kind) * up


def gated_back(grad: Tensor, x: Tensor, kind: int) -> Tensor:
    """The gradient of gate and up, side by side."""
    gate, up = x.chunk(2, dim=-1)
    with torch.enable_grad():
        leaf = gate.detach().requires_grad_()
        act = activation(leaf, kind)
    slope = torch.autograd.grad(act, leaf, grad * up)[0]
    return torch.cat((slope, grad * act.detach()), dim=-1)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> None:
    """Rotate in place (RoPE): the first half of the rotated features against the second.

    Args:
        x: (rows, heads, size), any strides.
        cos, sin: (rows, rotated size), or one that broadcasts to it.
        back: rotate the other way, which is the inverse and the gradient.
    """
    half = cos.shape[-1] // 2
    c, s = cos.unsqueeze(1), (-sin if back else sin).unsqueeze(1)
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = first * s[..., half:]
    first.mul_(c[..., :half]).addcmul_(second, s[..., :half], value=-1.0)
    second.mul_(c[..., half:]).add_(turned)


def attention(qkv: Tensor, ends: Sequence[int], rule: Capped) -> Tensor:
    """Causal attention within each sample, scores softcap · tanh(scale · q·k / softcap) in float32 or more.

    Args:
        qkv: (tokens, (query + 2 · shared) · size): queries, keys, values of a token.
        ends: where samples begin and end.
    """
    counts, parts = (rule.query, rule.shared, rule.shared), []
    for low, high in pairwise(ends):
        heads = qkv[low:high].reshape(high - low, sum(counts), rule.size).transpose(0, 1)
        q, k, v = heads.split_with_sizes(counts)
        k, v = (each.repeat_interleave(rule.query // rule.shared, dim=0) for each in (k, v))
        products = q @ k.transpose(1, 2)
        wide = products if products.dtype == torch.float64 else products.float()
        scores = rule.softcap * torch.tanh(wide * (rule.scale / rule.softcap))
        row = torch.arange(high - low, device=qkv.device)
        hidden = row[None, :] > row[:, None]
        if rule.window is not None:
            hidden |= row[:, None] - row[None, :] >= rule.window
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(qkv.dtype)
        parts.append((shares @ v).transpose(0, 1).flatten(1))
    return torch.cat(parts)
