"""Passes between the products in plain torch: the references of `passes`, which run on every device.

They compute with the rounding of transformers' modules: in float32 inside a norm, else in the dtype of x.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

SILU, GELU_TANH = 0, 1


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


def activation(gate: Tensor, kind: int) -> Tensor:
    """SiLU, or GELU in its tanh form."""
    return functional.silu(gate) if kind == SILU else functional.gelu(gate, approximate="tanh")


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
