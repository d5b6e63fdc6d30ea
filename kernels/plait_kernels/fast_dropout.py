"""Dropout of one segment at several sites at once: compiled on a CPU, eager torch elsewhere."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from plait_kernels.compiled import load_library
from plait_kernels.dropout import drop_by, keep_mask, keep_scale

# Eager Philox holds some twenty int64 tensors: on a CPU few rows keep them in the cache, elsewhere many keep
# the device busy.
_EAGER_ELEMENTS = {"cpu": 2**15}
_EAGER_ELEMENTS_ELSEWHERE = 2**25


@functools.cache
def dropout_library() -> ctypes.CDLL | None:
    """The functions of dropout.c; None if they cannot be built."""
    library = load_library(
        Path(__file__).with_name("dropout.c"), "dropout runs in plain torch, many times slower"
    )
    if library is None:
        return None
    pointer, long, word, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32, ctypes.c_float
    library.keep.argtypes = [pointer, pointer, long, long, long, word, word, word, ctypes.c_int]
    library.keep.restype = None
    for function in (library.drop_f32, library.drop_bf16):
        function.argtypes = [
            *(pointer, pointer, long, pointer, long, pointer, pointer),
            *(long, long, long, long, pointer, word, word, real, real, ctypes.c_int),
        ]
        function.restype = None
    return library


def _has_memory(tensor: Tensor) -> bool:
    """Whether compiled code may read it: on a CPU, and not a fake tensor, which has no address."""
    return tensor.device.type == "cpu" and type(tensor) in (Tensor, torch.nn.Parameter)


def _eager_mask(
    seed: int, module: int, counters: Tensor, features: int, threshold: int, first: int
) -> Tensor:
    elements = _EAGER_ELEMENTS.get(counters.device.type, _EAGER_ELEMENTS_ELSEWHERE)
    chunks = [
        keep_mask((seed, module), rows, features, threshold, first)
        for rows in torch.split(counters, max(1, elements // features))
    ]
    return torch.cat(chunks)


def keep(seed: int, module: int, counters: Tensor, features: int, threshold: int, first: int = 0) -> Tensor:
    """The mask (rows, features), True if a feature is kept, from (rows, 3) counter words.

    ``first``: of the features, of all of the layer.
    """
    library = dropout_library() if _has_memory(counters) else None
    if library is None:
        return _eager_mask(seed, module, counters, features, threshold, first)
    out = torch.empty(counters.shape[0], features, dtype=torch.bool)
    library.keep(
        *(out.data_ptr(), counters.data_ptr(), counters.shape[0], features),
        *(first, seed, module % 2**32, threshold, torch.get_num_threads()),
    )
    return out


def drop(
    x: Tensor,
    seed: int,
    modules: Sequence[int],
    counters: Tensor,
    threshold: int,
    first: int = 0,
    *,
    total: Tensor | None = None,
    part: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """D ∘ x for every module, and in place total += factor·Σ over modules of D ∘ part.

    Args:
        x: (rows, features).
        seed: first word of the key, below 2**32.
        modules: second word of the key, one for each site.
        counters: (rows, 3) int64 counter words, contiguous.
        threshold: round(p·65536).
        first: of the features, of all of the layer.
        total: (rows, features), or None.
        part: (modules, rows, features), contiguous, if `total` is given.
        factor: factor of `part`.

    Returns:
        (modules, rows, features).
    """
    rows, features = x.shape
    compiled = _has_memory(x) and x.dtype in (torch.float32, torch.bfloat16)
    library = dropout_library() if compiled else None
    if library is None or x.stride(1) != 1 or (total is not None and total.stride(1) != 1):
        return _drop_by_masks(
            x, seed, modules, counters, threshold, first, total=total, part=part, factor=factor
        )
    out = x.new_empty(len(modules), rows, features)
    function = library.drop_f32 if x.dtype == torch.float32 else library.drop_bf16
    function(
        *(out.data_ptr(), x.data_ptr(), x.stride(0)),
        *(None, 0) if total is None else (total.data_ptr(), total.stride(0)),
        None if part is None else part.data_ptr(),
        *(counters.data_ptr(), rows, features, first, len(modules)),
        (ctypes.c_uint32 * len(modules))(*(module % 2**32 for module in modules)),
        *(seed, threshold, keep_scale(threshold), factor * keep_scale(threshold), torch.get_num_threads()),
    )
    return out


def _drop_by_masks(
    x: Tensor,
    seed: int,
    modules: Sequence[int],
    counters: Tensor,
    threshold: int,
    first: int,
    *,
    total: Tensor | None,
    part: Tensor | None,
    factor: float,
) -> Tensor:
    out = x.new_empty(len(modules), *x.shape)
    for index, module in enumerate(modules):
        kept = keep(seed, module, counters, x.shape[1], threshold, first)
        out[index] = drop_by(kept, x, threshold)
        if total is not None and part is not None:
            total += torch.where(kept, part[index] * (factor * keep_scale(threshold)), 0.0)
    return out
