"""The passes between the products by Triton: norms, activations, rotation. `plain` has their references.

No weight gets a gradient, since all of them are frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from plait_kernels.launching import GIVEN, Launch, room
from plait_kernels.tiles import power_of_two
from plait_kernels.triton_backend import TRITON

_ELEMENTS = 4096  # of a program, if its rows are short
WIDEST = 16384  # features of a norm, whose rows a program holds whole; at 32768 registers spill
_KEPT = 256  # launches of a pass: its sizes times the rows of microbatches
_COLUMNS = 1024  # of a block of a gated MLP


def by_triton(backend: str, x: Tensor) -> bool:
    """Whether these kernels take x: with the backend `triton`, where that runs."""
    return backend == TRITON.name and TRITON.runs(x.device, x.dtype)


@cache
def _kernels() -> Any:
    from plait_kernels import triton_passes

    return triton_passes


def _whole_rows(rows: int, features: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid and the constants of a kernel whose programs hold whole rows.

    The constants depend on the features alone, and so do the order of a row's sum and its bits.
    """
    width = power_of_two(features)
    block = max(1, _ELEMENTS // width)
    warps = min(16, max(4, block * width // 512))
    return (-(-rows // block),), {"BR": block, "BF": width, "num_warps": warps}


def rms(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    residual: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    centred: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """total / rms(total) · (offset + weight) + bias, 1 / rms(total) for each row, and total = x + residual.

    All contiguous. Without a residual the last is x itself. With ``centred`` this is LayerNorm: the first two
    are of total less its row's mean.
    """
    out, scales = room(x, x.shape), room(x, (*x.shape[:-1], 1), torch.float32)
    rows = scales.numel()
    total = x if residual is None else room(x, x.shape)
    if rows:
        shape = (rows, x.shape[-1], eps, offset)
        sums = ((), ()) if residual is None else ((residual,), (total,))
        run = _rms(
            (x.device, x.dtype, weight.dtype, None if bias is None else bias.dtype),
            shape,
            added=residual is not None,
            biased=bias is not None,
            centred=centred,
        )
        run(x, *sums[0], weight, *(() if bias is None else (bias,)), out, *sums[1], scales)
    return out, scales, total


# Launches are kept by what makes a binary another one, too: the device and the dtypes.
@lru_cache(_KEPT)
def _rms(
    _kind: tuple[object, ...],
    shape: tuple[int, int, float, float],
    *,
    added: bool,
    biased: bool,
    centred: bool,
) -> Launch:
    grid, constants = _whole_rows(*shape[:2])
    other = GIVEN if added else None
    kinds = {
        "RESIDUAL": added,
        "CENTRED": centred,
        "BIASED": biased,
        "ROUNDED": shape[3] == 0 and not centred,
    }
    return Launch(
        _kernels().rms,
        grid,
        *(GIVEN, other, GIVEN, GIVEN if biased else None, GIVEN, other, GIVEN, *shape),
        **kinds,
        **constants,
    )


def rms_back(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    offset: float,
    more: Tensor | None = None,
    *,
    centred: bool = False,
) -> Tensor:
    """The gradient of x, which was `total`; plus ``more``, that of `total` itself."""
    dx, rows = room(x, x.shape), scales.numel()
    if rows:
        shape = (rows, x.shape[-1], offset)
        run = _rms_back((x.device, x.dtype, weight.dtype), shape, added=more is not None, centred=centred)
        run(grad, x, weight, scales, *(() if more is None else (more,)), dx)
    return dx


@lru_cache(_KEPT)
def _rms_back(
    _kind: tuple[object, ...], shape: tuple[int, int, float], *, added: bool, centred: bool
) -> Launch:
    grid, constants = _whole_rows(*shape[:2])
    return Launch(
        _kernels().rms_back,
        grid,
        *(GIVEN, GIVEN, GIVEN, GIVEN, GIVEN if added else None, GIVEN, *shape),
        **{"RESIDUAL": added, "CENTRED": centred, **constants},
    )


def _blocks(rows: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    columns = min(_COLUMNS, power_of_two(width))
    block = min(max(1, _ELEMENTS // 2 // columns), power_of_two(rows))
    return (-(-rows // block), -(-width // columns)), {"BR": block, "BF": columns}


def gated(x: Tensor, kind: int) -> Tensor:
    """act(gate) · up: contiguous (..., 2n) to (..., n)."""
    width = x.shape[-1] // 2
    out = room(x, (*x.shape[:-1], width))
    if out.numel():
        _by_blocks("gated", (x.device, x.dtype), (out.numel() // width, width, kind))(x, out)
    return out


def gated_back(grad: Tensor, x: Tensor, kind: int) -> Tensor:
    """The gradient of gate and up."""
    dx, width = room(x, x.shape), grad.shape[-1]
    if grad.numel():
        _by_blocks("gated_back", (x.device, x.dtype), (grad.numel() // width, width, kind))(grad, x, dx)
    return dx


@lru_cache(_KEPT)
def _by_blocks(name: str, _kind: tuple[object, ...], shape: tuple[int, int, int]) -> Launch:
    rows, width, kind = shape
    grid, constants = _blocks(rows, width)
    tensors = (GIVEN,) * (3 if name.endswith("_back") else 2)
    kernel = getattr(_kernels(), name)
    return Launch(kernel, grid, *tensors, rows, width, KIND=kind, **constants)


def activated(x: Tensor, kind: int) -> Tensor:
    """act(x), of a contiguous tensor."""
    out, width = room(x, x.shape), x.shape[-1]
    if x.numel():
        _by_blocks("activate", (x.device, x.dtype), (x.numel() // width, width, kind))(x, out)
    return out


def activated_back(grad: Tensor, x: Tensor, kind: int) -> Tensor:
    """The gradient of x."""
    dx, width = room(x, x.shape), x.shape[-1]
    if x.numel():
        _by_blocks("activate_back", (x.device, x.dtype), (x.numel() // width, width, kind))(grad, x, dx)
    return dx


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> None:
    """Rotate in place: (rows, heads, size), whose rows may lie apart, by (…, rows, rotated size)."""
    if x.shape[0]:
        strides = (x.stride(0), cos.stride(-2))
        _rotate((x.device, x.dtype, cos.dtype, sin.dtype), x.shape, cos.shape[-1] // 2, strides, back=back)(
            x, cos, sin
        )


@lru_cache(_KEPT)
def _rotate(
    _kind: tuple[object, ...], shape: Sequence[int], half: int, strides: tuple[int, int], *, back: bool
) -> Launch:
    rows, heads, size = shape
    width = power_of_two(half)
    block_heads = min(max(1, _ELEMENTS // 2 // width), power_of_two(heads))
    block = min(max(1, _ELEMENTS // 2 // width // block_heads), power_of_two(rows))
    grid = (-(-rows // block), -(-heads // block_heads))
    return Launch(
        _kernels().rotate,
        grid,
        *(GIVEN, GIVEN, GIVEN, rows, *strides, heads, size, half, -1.0 if back else 1.0),
        **{"BR": block, "BH": block_heads, "BF": width},
    )
