"""A frozen weight kept in 4 or 8 bits; it stands for one matrix Ŵ, made for a product and freed after it.

The layer is x Ŵᵀ + b, and the gradient of x is dh Ŵ, both in the compute dtype: what forward computed. Inputs
are not rounded to 8 bits: where a value lies between two of them, the rounding of another packing would
decide, and adapters trained together would not end as if alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from plait_kernels.chain import apply, recording
from plait_kernels.errors import KernelError

BLOCK = 64  # weights that share a scale in NF4
SCALES = 256  # scales that share a scale of their own
WRITTEN = 256 * BLOCK * SCALES  # weights that are written at a time, which bounds what that needs
# Quantiles of a normal distribution, scaled to [-1, 1], with an exact 0 (QLoRA, appendix E).
NF4_CODES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
FP8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, FP8: 448.0}  # magnitudes in 8 bits


class Part(Protocol):
    """The quantised weight of one linear layer."""

    shape: torch.Size

    def write(self, out: Tensor) -> None:
        """Write what it stands for."""

    def tensors(self) -> tuple[Tensor, ...]:
        """What it keeps."""


class Nf4:
    """A weight in blocks of 64: the nearest of 16 codes times the block's largest magnitude.

    The magnitudes less their mean are kept in 8 bits, in blocks of 256 (QLoRA's double quantisation).
    """

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape
        flat = weight.detach().float().reshape(-1)
        blocks = pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        largest = blocks.abs().amax(1)
        codes = _nearest(_quotient(blocks, largest.unsqueeze(1)), _nf4_codes(weight.device)).view(-1, 2)
        self._packed = (codes[:, 0] << 4 | codes[:, 1]).to(torch.uint8)
        self._mean = largest.mean()
        rest = pad(largest - self._mean, (0, -len(largest) % SCALES)).view(-1, SCALES)
        self._second = rest.abs().amax(1)
        near = _nearest(_quotient(rest, self._second.unsqueeze(1)), dynamic_codes(weight.device))
        self._scales = near.view(-1)[: len(largest)].to(torch.uint8)

    def write(self, out: Tensor) -> None:
        """Write what it stands for."""
        flat = out.view(-1)
        parts = (flat, self._packed, self._scales, self._second)
        sizes = (WRITTEN, WRITTEN // 2, WRITTEN // BLOCK, WRITTEN // BLOCK // SCALES)
        slices = (torch.split(part, size) for part, size in zip(parts, sizes, strict=True))
        for some in zip(*slices, strict=True):
            self._write(*some)

    def _write(self, out: Tensor, packed: Tensor, scales: Tensor, second: Tensor) -> None:
        each = second.repeat_interleave(SCALES)[: len(scales)]
        each = dynamic_codes(out.device).index_select(0, scales.int()).mul_(each).add_(self._mean)
        values = _pairs(out.device).index_select(0, packed.int()).view(torch.float32)
        values.view(-1, BLOCK).mul_(each.unsqueeze(1))
        out.copy_(values[: len(out)])

    def tensors(self) -> tuple[Tensor, ...]:
        """What it keeps."""
        return self._packed, self._scales, self._second, self._mean


class Rowwise:
    """A weight in 8 bits with a scale for each row."""

    def __init__(self, weight: Tensor, kind: torch.dtype) -> None:
        self.shape = weight.shape
        rows = weight.detach().float()
        self._scales = rows.abs().amax(1, keepdim=True) / LARGEST[kind]
        values = _quotient(rows, self._scales)
        self._values = (values.round() if kind == torch.int8 else values).to(kind)

    def write(self, out: Tensor) -> None:
        """Write what it stands for."""
        rows = max(1, WRITTEN // self.shape[1])
        parts = (out, self._values, self._scales)
        for own, values, scales in zip(*(torch.split(part, rows) for part in parts), strict=True):
            own.copy_(values.float().mul_(scales))

    def tensors(self) -> tuple[Tensor, ...]:
        """What it keeps."""
        return self._values, self._scales


class Quantised:
    """The frozen weight (out, in) of linear layers that read the same input.

    Args:
        weights: one of each layer, (out, in), of the compute dtype.
        mode: "nf4", "int8" or "fp8".

    Raises:
        KernelError: there is no such mode.
    """

    requires_grad = False

    def __init__(self, weights: Sequence[Tensor], mode: str) -> None:
        if mode not in MODES:
            raise KernelError(f"mode {mode!r}", f"A weight is quantised as {', '.join(MODES)}")
        first = weights[0]
        self.dtype, self.device, self.mode = first.dtype, first.device, mode
        self.shape = torch.Size((sum(len(each) for each in weights), first.shape[1]))
        self._parts = tuple(MODES[mode](each) for each in weights)  # blocks are each layer's own

    def dense(self) -> Tensor:
        """What it stands for, in the compute dtype."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        start = 0
        for part in self._parts:
            part.write(out[start : start + part.shape[0]])
            start += part.shape[0]
        return out

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(out, in) of each layer."""
        return [(part.shape[0], part.shape[1]) for part in self._parts]

    def tensors(self) -> tuple[Tensor, ...]:
        """What it keeps."""
        return tuple(tensor for part in self._parts for tensor in part.tensors())


Weight = Tensor | Quantised
MODES: dict[str, Callable[[Tensor], Part]] = {
    "int8": partial(Rowwise, kind=torch.int8),
    "nf4": Nf4,
    "fp8": partial(Rowwise, kind=FP8),
}


def made_bytes(sizes: Sequence[tuple[int, int]], element_bytes: int, mode: str) -> int:
    """Bytes while the weights (out, in) of layers that read the same input are made: they, and what writing
    needs beside them."""
    weights = [rows * features for rows, features in sizes]
    # NF4: indices and values of pairs, and a scale for each block; else the values.
    each = 2 + 4 + 4 / BLOCK if mode == "nf4" else 4
    return element_bytes * sum(weights) + int(each * min(WRITTEN, max(weights)))


def dense(weight: Weight) -> Tensor:
    """A weight as a tensor."""
    return weight if isinstance(weight, Tensor) else weight.dense()


def frozen_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """The frozen product (..., in) to (..., out), differentiable in x."""
    if isinstance(weight, Tensor) and not recording():
        return linear(x, weight, bias)
    return cast("Tensor", apply(_Frozen, x, weight, bias))


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return linear(x, dense(weight), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ dense(ctx.weight), None, None


# ---- codes ---------------------------------------------------------------------------------------------


@cache
def dynamic_codes(device: torch.device) -> Tensor:
    """256 numbers in [-1, 1], finer near 0: of each power of ten 10⁻ᵏ, k = 6 … 0, 2⁶⁻ᵏ numbers of either
    sign between 0.1 and 1 times it, evenly spaced; 0; and 1 (8-bit optimisers, Dettmers 2022, §2.1)."""
    found = [torch.zeros(1), torch.ones(1)]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1.0, 2**exponent + 1)
        middles = 10.0 ** (exponent - 6) * (edges[1:] + edges[:-1]) / 2
        found += [middles, -middles]
    return torch.cat(found).sort().values.to(device)


@cache
def _nf4_codes(device: torch.device) -> Tensor:
    return torch.tensor(NF4_CODES, device=device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two codes of each byte, as one element of 64 bits, which halves the look-ups."""
    codes = torch.tensor(NF4_CODES)
    byte = torch.arange(256)
    return torch.stack((codes[byte >> 4], codes[byte & 15]), dim=1).view(torch.int64).view(-1).to(device)


def _nearest(values: Tensor, codes: Tensor) -> Tensor:
    """The index of the nearest code."""
    return torch.bucketize(values, (codes[1:] + codes[:-1]) / 2)


def _quotient(values: Tensor, scales: Tensor) -> Tensor:
    """values / scales; of what is all 0, 0."""
    return values / torch.where(scales == 0, 1.0, scales)
