"""The tensors of a file in safetensors' format, as views of its bytes, or part by part in the same memory.

A seam: the library copies each of hundreds of tensors twice, which a server that reads adapters for its
requests feels; it feels new pages of memory even more. A map of the file would copy nothing, but if the file
is cut off meanwhile, the process ends.
"""

from __future__ import annotations

import functools
import json
import os
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
Bounds = np.ndarray[Any, np.dtype[np.int64]]
_Entry = tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int, int]
SPARE_BYTES = 128 << 20  # of memory that is kept for the next files
CACHED_BYTES = 256 << 10  # of a header that is kept; that of hundreds of sites has half of it
PART_BYTES = 3 << 19  # of a file that are read at once, so that they are still in a core's cache when used


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
        entries, begin = _found(file, size)
        if not values:
            return {
                name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape, *_ in entries
            }
        whole = MEMORY.take(size - begin)
        into: Any = whole.numpy()
        if file.readinto(into) != len(whole):
            raise ValueError("the file is shorter than it was")
        return _views(whole, entries)


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """Where the tensors of a file lie.

    Attributes:
        dtype: of all of them.
        names: in their order in the file.
        bounds: (tensors, 2) int64, the first byte of each in the file, and the one after its last.
    """

    dtype: torch.dtype
    names: tuple[str, ...]
    bounds: Bounds


def locate_tensors(path: Path) -> Located | None:
    """Where a file's tensors lie; None if they have several dtypes, overlap, or begin where a dtype may not.

    Raises:
        As :func:`read_tensors`.
    """
    with path.open("rb") as file:
        entries, begin = _found(file, path.stat().st_size)
    own = sorted((entry for entry in entries if entry[-1]), key=lambda entry: entry[4])
    dtypes = {dtype for _, dtype, *_ in own}
    if len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    firsts = np.array([begin + entry[4] for entry in own], dtype=np.int64)
    ends = firsts + np.array([entry[-1] * dtype.itemsize for entry in own], dtype=np.int64)
    if (firsts[1:] < ends[:-1]).any() or (firsts % dtype.itemsize).any():
        return None
    return Located(dtype, tuple(entry[0] for entry in own), np.stack((firsts, ends), axis=1))


def read_parts(path: Path, bounds: Bounds) -> Iterator[tuple[slice, int]]:
    """Read tensors, some at a time, into the same memory: which ones, and what their addresses there are more
    than their first bytes in the file.

    Args:
        bounds: see :class:`Located`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is shorter than it was.
    """
    firsts, ends = bounds.T.tolist()
    room = max(PART_BYTES, int((bounds[:, 1] - bounds[:, 0]).max()))
    memory = MEMORY.take(room)
    into: Any = memory.numpy()
    view, address = memoryview(into), memory.data_ptr()
    with path.open("rb", buffering=0) as file:
        start = 0
        while start < len(ends):
            begin = firsts[start]
            stop = bisect_right(ends, begin + room)
            _read_exactly(file.fileno(), view[: ends[stop - 1] - begin], begin)
            yield slice(start, stop), address - begin
            start = stop


def _read_exactly(file: int, into: memoryview, begin: int) -> None:
    while into:  # a file system may give less than it is asked for
        read = os.preadv(file, [into], begin)
        if not read:
            raise ValueError("the file is shorter than it was")
        into, begin = into[read:], begin + read


def expect_file(path: Path) -> None:
    """Have the system read a file that is needed soon, without waiting; it may not."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


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


def _found(file: BufferedReader, size: int) -> tuple[tuple[_Entry, ...], int]:
    """The entries of an open file of so many bytes, and where its tensors begin."""
    length = int.from_bytes(file.read(LENGTH), "little")
    begin = LENGTH + length
    if begin > size:
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header = file.read(length)
    return (_kept_entries if length <= CACHED_BYTES else _entries)(header, size - begin), begin


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
