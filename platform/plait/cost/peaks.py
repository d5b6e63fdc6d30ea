"""The peak bytes of tensors: from CUDA's allocator, or by counting live tensor storage on other devices.

Counting works on any device, and also for meta tensors, which have no memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CudaPeak:
    """Reads CUDA's allocator, with the same interface as :class:`StorageCounter`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> CudaPeak:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def live(self) -> int:
        """Current bytes of all tensors."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak(self) -> int:
        """Most bytes since :meth:`restart`."""
        return torch.cuda.max_memory_allocated(self._device)

    def restart(self) -> None:
        """Reset the peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def add(self, _tensor: torch.Tensor) -> None:
        """Do nothing: the allocator knows of every tensor."""


class StorageCounter:
    """Counts bytes of all live storages that operations inside the ``with`` block made or used.

    Every storage counts once, however many views it has, and is removed when its last tensor is freed. If it
    is resized, it counts with its new size from the next operation on it.

    Args:
        known: results of operations on meta tensors, shared by those who count the same ones again.
    """

    def __init__(self, known: KnownResults | None = None) -> None:
        self.live = 0
        self.peak = 0
        self._counted: dict[int, weakref.ref[Any]] = {}  # by the storage's address, while it exists
        self._sizes: dict[int, int] = {}  # of these
        self._mode = _Watch(self, known)

    def __enter__(self) -> StorageCounter:
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def restart(self) -> None:
        """Reset the peak; live storages still count."""
        self.peak = self.live

    def add(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage, once."""
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        before = self._sizes.get(address)
        if before == size:
            return  # most are, many times over
        if before is None:
            self._counted[address] = weakref.ref(storage, partial(self._freed, address))
            before = 0
        self._sizes[address] = size
        self.live += size - before
        if self.live > self.peak:
            self.peak = self.live

    def _freed(self, address: int, _storage: object) -> None:
        del self._counted[address]
        self.live -= self._sizes.pop(address)


class KnownResults:
    """Runs operations; those on meta tensors whose result's sizes are known from one alike are not computed
    again, since torch computes them in Python: layer after layer does the same.

    Known are a single new contiguous tensor and the first argument as it was, of operations in place; but not
    ``set_``, which gives that argument another one's storage.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[torch.Size, torch.dtype] | None] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The operation's result, or one of its sizes."""
        key = _key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        if key in self._known:
            found = self._known[key]
            return args[0] if found is None else torch.empty(found[0], dtype=found[1], device="meta")
        before = _whole_form(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        out = func(*args, **kwargs)
        if before is not None and out is args[0] and _whole_form(out) == before:
            self._known[key] = None
        elif _is_new(out, args):
            self._known[key] = (out.shape, out.dtype)
        return out


def _key(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """What the sizes of an operation's result depend on; None if it is not one on meta tensors only, or
    depends on more than sizes."""
    if getattr(func, "overloadpacket", None) is torch.ops.aten.set_:
        return None
    found: list[Hashable] = [func]
    for each in args:
        if isinstance(each, torch.Tensor):
            if not each.is_meta:
                return None
            found.append(_form(each))
        elif isinstance(each, list):
            if any(isinstance(part, torch.Tensor) for part in each):
                return None
            found.append(tuple(each))
        else:
            found.append((type(each), each))
    for name, value in kwargs.items():
        if isinstance(value, (torch.Tensor, list)):
            return None
        found.append((name, type(value), value))
    return tuple(found)


def _form(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype


def _whole_form(tensor: torch.Tensor) -> Hashable:
    return _form(tensor), tensor.storage_offset(), tensor.untyped_storage().nbytes()


def _is_new(out: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is a contiguous meta tensor with a storage of its own, of its size."""
    if not isinstance(out, torch.Tensor) or not out.is_meta or not out.is_contiguous():
        return False
    storage = out.untyped_storage()
    others = (each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor))
    return storage.nbytes() == out.nbytes and storage._cdata not in others


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes every input and output tensor of an operation to the counter."""

    def __init__(self, counter: StorageCounter, known: KnownResults | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = weakref.proxy(counter)
        self._known = known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        out = func(*args, **given) if self._known is None else self._known.run(func, args, given)
        add = self._counter.add
        for leaf in (out, *args):
            if isinstance(leaf, torch.Tensor):
                add(leaf)
            elif isinstance(leaf, (tuple, list)):
                for each in leaf:
                    if isinstance(each, torch.Tensor):
                        add(each)
        return out


Meter = CudaPeak | StorageCounter


def meter_of(device: torch.device, known: KnownResults | None = None) -> Meter:
    """The meter for this kind of device, and results of operations on meta tensors."""
    return CudaPeak(device) if device.type == "cuda" else StorageCounter(known)


class PhasePeaks:
    """Records the peak bytes of each phase of a microbatch; does nothing without a meter."""

    def __init__(self, meter: Meter | None = None) -> None:
        self._meter = meter
        self.static = self.live
        self.phases: dict[str, int] = {}
        if meter is not None:
            meter.restart()

    @property
    def live(self) -> int:
        """Bytes that are in use now."""
        return 0 if self._meter is None else self._meter.live

    def end(self, phase: str) -> None:
        """End a phase and record its peak bytes."""
        if self._meter is not None:
            self.phases[phase] = self._meter.peak
            self._meter.restart()
