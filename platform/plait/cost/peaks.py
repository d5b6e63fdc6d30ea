"""The peak bytes of tensors: from CUDA's allocator, or by counting live tensor storage on other devices.

Counting works on any device, and also for meta tensors, which have no memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
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
    """

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self._counted: dict[int, weakref.ref[Any]] = {}  # by the storage's address, while it exists
        self._sizes: dict[int, int] = {}  # of these
        self._mode = _Watch(self)

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
        if address not in self._counted:
            self._counted[address] = weakref.ref(storage, lambda _: self._freed(address))
        self.live += size - self._sizes.get(address, 0)
        self._sizes[address] = size
        self.peak = max(self.peak, self.live)

    def _freed(self, address: int) -> None:
        del self._counted[address]
        self.live -= self._sizes.pop(address)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes every input and output tensor of an operation to the counter."""

    def __init__(self, counter: StorageCounter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = weakref.proxy(counter)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
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


def meter_of(device: torch.device) -> Meter:
    """The meter for this kind of device."""
    return CudaPeak(device) if device.type == "cuda" else StorageCounter()


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
