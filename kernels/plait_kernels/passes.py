"""The passes between the products by Triton: RMSNorm, gated MLP, rotation. `plain` has their references.

No weight gets a gradient, since all of them are frozen.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from plait_kernels.launching import launch, room
from plait_kernels.plain import GELU_TANH
from plait_kernels.triton_backend import TRITON

_ELEMENTS = 4096  # of a program, if its rows are short
WIDEST = 16384  # features of a norm, whose rows a program holds whole; at 32768 registers spill
_COLUMNS = 1024  # of a block of a gated MLP


def by_triton(backend: str, x: Tensor) -> bool:
    """Whether these kernels take x: with the backend `triton`, where that runs."""
    return backend == TRITON.name and TRITON.runs(x.device, x.dtype)


@cache
def _kernels() -> Any:
    from plait_kernels import triton_passes

    return triton_passes


def _power(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()


def _whole_rows(rows: int, features: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid and the constants of a kernel whose programs hold whole rows.

    The constants depend on the features alone, and so do the order of a row's sum and its bits.
    """
    width = _power(features)
    block = max(1, _ELEMENTS // width)
    warps = min(16, max(4, block * width // 512))
    return (-(-rows // block),), {"BR": block, "BF": width, "num_warps": warps}


def rms(
    x: Tensor, weight: Tensor, eps: float, offset: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """total / rms(total) · (offset + weight), 1 / rms(total) for each row, and total = x + residual.

    All contiguous. Without a residual the last is x itself.
    """
    out, scales = room(x, x.shape), room(x, (*x.shape[:-1], 1), torch.float32)
    total = x if residual is None else room(x, x.shape)
    rows = scales.numel()
    if rows:
        grid, constants = _whole_rows(rows, x.shape[-1])
        sum_out = None if residual is None else total
        launch(
            _kernels().rms,
            grid,
            *(x, residual, weight, out, sum_out, scales, rows, x.shape[-1], eps, offset),
            **{"RESIDUAL": residual is not None, "ROUNDED": offset == 0, **constants},
        )
    return out, scales, total


def rms_back(
    grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor, offset: float, more: Tensor | None = None
) -> Tensor:
    """The gradient of x, which was `total`; plus ``more``, that of `total` itself."""
    dx, rows = room(x, x.shape), scales.numel()
    if rows:
        grid, constants = _whole_rows(rows, x.shape[-1])
        launch(
            _kernels().rms_back,
            grid,
            *(grad, x, weight, scales, more, dx, rows, x.shape[-1], offset),
            **{"RESIDUAL": more is not None, **constants},
        )
    return dx


def _blocks(rows: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    columns = min(_COLUMNS, _power(width))
    block = min(max(1, _ELEMENTS // 2 // columns), _power(rows))
    return (-(-rows // block), -(-width // columns)), {"BR": block, "BF": columns}


def gated(x: Tensor, kind: int) -> Tensor:
    """act(gate) · up: contiguous (..., 2n) to (..., n)."""
    width = x.shape[-1] // 2
    out = room(x, (*x.shape[:-1], width))
    if out.numel():
        rows = out.numel() // width
        grid, constants = _blocks(rows, width)
        launch(_kernels().gated, grid, x, out, rows, width, TANH=kind == GELU_TANH, **constants)
    return out


def gated_back(grad: Tensor, x: Tensor, kind: int) -> Tensor:
    """The gradient of gate and up."""
    dx, width = room(x, x.shape), grad.shape[-1]
    if grad.numel():
        rows = grad.numel() // width
        grid, constants = _blocks(rows, width)
        launch(_kernels().gated_back, grid, grad, x, dx, rows, width, TANH=kind == GELU_TANH, **constants)
    return dx


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> None:
    """Rotate in place: (rows, heads, size), whose rows may lie apart, by (rows, rotated size)."""
    rows, heads, size = x.shape
    half = cos.shape[-1] // 2
    if not rows:
        return
    width = _power(half)
    block_heads = min(max(1, _ELEMENTS // 2 // width), _power(heads))
    block = min(max(1, _ELEMENTS // 2 // width // block_heads), _power(rows))
    grid = (-(-rows // block), -(-heads // block_heads))
    launch(
        _kernels().rotate,
        grid,
        *(x, cos, sin, rows, x.stride(0), cos.stride(0), heads, size, half, -1.0 if back else 1.0),
        **{"BR": block, "BH": block_heads, "BF": width},
    )
