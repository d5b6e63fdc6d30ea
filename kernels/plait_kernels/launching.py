"""The one place from which Triton kernels, and the products beside them, are launched.

So launches can be counted without a device, and cost the host on meta tensors what they cost on a device: the
meta kernel of torch's `addmm` is a decomposition in Python that takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Note = Callable[[Any, tuple[object, ...]], None]
_notes: list[Note] = []


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
    """Launch a kernel; its first argument is a tensor. On meta tensors it does nothing, as operators do."""
    for note in _notes:
        note(kernel, arguments)
    first = arguments[0]
    if not isinstance(first, Tensor) or not first.is_meta:
        kernel[grid](*arguments, **constants)


def room(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of a shape, else like another. Torch's `new_empty` of meta tensors is in Python."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


class _AddProduct:
    arg_names = ("out_", "x", "matrix")


def add_product(out: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
    """out += x M by the vendor's library."""
    for note in _notes:
        note(_AddProduct, (out, x, matrix))
    return out if out.is_meta else out.addmm_(x, matrix)


@contextmanager
def noted(note: Note) -> Iterator[None]:
    """Call ``note`` with the kernel and the arguments of each launch."""
    _notes.append(note)
    try:
        yield
    finally:
        _notes.remove(note)
