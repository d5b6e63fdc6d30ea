"""Tables that the host makes and the device reads, sent without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from plait_kernels.errors import KernelError


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device: from the host to CUDA from pinned memory, queued behind what it is to do already.

    Pinned memory that is freed is not used again before its copies are done: torch's host allocator waits for
    them. Memory that is not pinned may be, so other devices wait; meta tensors stand for CUDA's. What is on a
    device already cannot be pinned, and need not be.

    Raises:
        KernelError: as for :class:`Places`, or uploads are :func:`refused`.
    """
    return _into[-1].take(tensor, device) if _into else _sent(tensor, device)


def pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned memory.

    ``Tensor.pin_memory`` first asks the driver whether it is pinned already, which took half a millisecond
    on an H100's host.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = pinned(tensor)
    return tensor.to(device, non_blocking=device.type in ("cuda", "meta"))


class Places:
    """Tensors of a device that stay where they are: each time, the uploads go into those of the first time.

    What was recorded with them finds the new values there.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, torch.device]] = []  # as asked for: cuda, not cuda:0
        self._next = 0
        self._known = False

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Have the uploads inside go here.

        Raises:
            KernelError: they are not as many, as large and of the same types as the first time.
        """
        self._next = 0
        _into.append(self)
        try:
            yield
        finally:
            _into.pop()
        self._check(self._next == len(self._kept), f"{self._next} uploads")
        self._known = True

    def take(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The next place, with a tensor's values."""
        number, self._next = self._next, self._next + 1
        if not self._known:
            self._kept.append((torch.empty(tensor.shape, dtype=tensor.dtype, device=device), device))
        self._check(number < len(self._kept), f"upload {number + 1}")
        place, asked = self._kept[number]
        same = (place.shape, place.dtype, asked) == (tensor.shape, tensor.dtype, device)
        self._check(same, f"upload {number + 1}, {tuple(tensor.shape)} {tensor.dtype} for {device}")
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = pinned(tensor)
        return place.copy_(tensor, non_blocking=device.type in ("cuda", "meta"))

    def _check(self, right: bool, found: str) -> None:
        if not right:
            kept = [(tuple(each.shape), each.dtype) for each, _ in self._kept]
            raise KernelError(found, f"the uploads are always these: {kept}", "fill all of them up alike")


class _Refused(Places):
    def take(self, tensor: Tensor, device: torch.device) -> Tensor:
        raise KernelError(
            f"an upload of {tuple(tensor.shape)} {tensor.dtype} to {device}",
            "what is recorded sends nothing: a replay would read the host's memory of then",
            "send it before",
        )


_into: list[Places] = []


@contextmanager
def refused() -> Iterator[None]:
    """Refuse uploads inside."""
    _into.append(_Refused())
    try:
        yield
    finally:
        _into.pop()


def together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The host's tensors on a device, sent as one; each begins at a multiple of 16 bytes."""
    ends, total = [], 0
    for tensor in tensors:
        ends.append(total + tensor.numel() * tensor.element_size())
        total = -(-ends[-1] // 16) * 16
    whole = torch.zeros(total, dtype=torch.uint8)
    parts = []
    for tensor, end in zip(tensors, ends, strict=True):
        parts.append(slice(end - tensor.numel() * tensor.element_size(), end))
        whole[parts[-1]].view(tensor.dtype).copy_(tensor.flatten())
    sent = upload(whole, device)
    return [
        sent[part].view(tensor.dtype).view(tensor.shape) for tensor, part in zip(tensors, parts, strict=True)
    ]


def table(values: Sequence[object], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of these values on a device."""
    return upload(torch.tensor(values, dtype=dtype), device)


def distance(tensor: Tensor, origin: Tensor) -> int:
    """Elements from one allocation to another, so that kernels add an offset to a typed pointer."""
    return (tensor.data_ptr() - origin.data_ptr()) // tensor.element_size()
