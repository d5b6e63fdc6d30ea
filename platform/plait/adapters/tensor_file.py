"""The tensors of a file in safetensors' format, as views of its bytes.

A seam: the library copies each of hundreds of tensors twice, which a server that reads adapters for its
requests feels. A map of the file would copy nothing, but if the file is cut off meanwhile, the process ends.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Sequence
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
LENGTH = 8  # bytes at the file's beginning: the header's length
Memory = np.ndarray[tuple[int], np.dtype[np.uint8]]
_Entry = tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int, int]
SPARE_BYTES = 128 << 20  # of memory that is kept for the next files
CACHED_BYTES = 256 << 10  # of a header that is kept; that of hundreds of sites has half of it


def read_tensors(path: Path, *, values: bool = True) -> dict[str, Tensor]:
    """The tensors by name, all views of one buffer.

    Args:
        values: False: they are on the meta device, and only the header is read.

    Raises:
        OSError: the file cannot be read.
        ValueError, TypeError, KeyError, AttributeError, RecursionError: it is not of this format, or cut off.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        header, begin = _header(file, size)
        entries = (_kept_entries if len(header) <= CACHED_BYTES else _entries)(header, size - begin)
        if not values:
            return {
                name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape, *_ in entries
            }
        whole = MEMORY.take(size - begin)
        into: Any = whole.numpy()
        if file.readinto(into) != len(whole):
            raise ValueError("the file is shorter than it was")
        return _views(whole, entries)


class _Memory:
    """Memory of files that were read and are no longer needed, for others.

    Where adapters come and go, most of the time of reading one would be that of the system's empty pages.
    Memory comes back in any thread at any time, even within a line of this class, so there is no lock: what
    is spare changes by single operations on a dictionary.
    """

    def __init__(self) -> None:
        self._spare: dict[int, Memory] = {}  # by identity

    def take(self, size: int) -> Tensor:
        """So many bytes, with any content; they come back when no tensor has them any more."""
        memory = self._memory(size)
        whole = memory[:size]
        weakref.finalize(whole, self._give_back, memory).atexit = False
        return torch.from_numpy(whole)

    def _memory(self, size: int) -> Memory:
        fitting = [each for each in tuple(self._spare.values()) if size <= len(each) <= 2 * size]
        for each in sorted(fitting, key=len):
            if self._spare.pop(id(each), None) is not None:  # else another thread has it
                return each
        return np.empty(size, dtype=np.uint8)

    def _give_back(self, memory: Memory) -> None:
        if sum(map(len, tuple(self._spare.values()))) + len(memory) <= SPARE_BYTES:
            self._spare[id(memory)] = memory


MEMORY = _Memory()


def _header(file: BufferedReader, size: int) -> tuple[bytes, int]:
    length = int.from_bytes(file.read(LENGTH), "little")
    if length > size - LENGTH:
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    return file.read(length), LENGTH + length


def _entries(header: bytes, size: int) -> tuple[_Entry, ...]:
    """Each tensor's name, dtype, shape, strides, first byte of so many, and elements.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, RecursionError: as :func:`read_tensors`.
    """
    read = json.loads(header)
    read.pop("__metadata__", None)
    found: list[_Entry] = []
    for name, entry in read.items():
        dtype, shape, (first, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        sizes = [first, end, *shape]
        if not all(type(each) is int and each >= 0 for each in sizes) or end > size:
            raise ValueError(f"{name}: shape {shape}, bytes {first} to {end} of {size}")
        if end - first != prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: {end - first} bytes for {shape} of {entry['dtype']}")
        if prod(max(each, 1) for each in shape) * dtype.itemsize >= 1 << 63:  # though it has no elements
            raise ValueError(f"{name}: shape {shape} is too large")
        strides = tuple(prod(shape[number + 1 :]) for number in range(len(shape)))
        found.append((name, dtype, tuple(shape), strides, first, prod(shape)))
    return tuple(found)


# Adapters of one rank on the same layers have the same header.
_kept_entries = functools.lru_cache(maxsize=64)(_entries)


def _views(whole: Tensor, entries: Sequence[_Entry]) -> dict[str, Tensor]:
    """The tensors among a file's bytes; one that does not begin where its dtype may is a copy. One without
    elements has no bytes there."""
    typed = {
        dtype: whole[: len(whole) // dtype.itemsize * dtype.itemsize].view(dtype)
        for dtype in {dtype for _, dtype, _, _, _, elements in entries if elements}
    }
    views = {}
    for name, dtype, shape, strides, first, elements in entries:
        number, off = divmod(first, dtype.itemsize)
        if not elements:
            views[name] = torch.empty(shape, dtype=dtype)
        elif off:
            end = first + elements * dtype.itemsize
            views[name] = whole[first:end].clone().view(dtype).view(shape)
        else:
            views[name] = typed[dtype].as_strided(shape, strides, number)
    return views
