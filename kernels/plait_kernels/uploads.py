"""Tables that the host makes and the device reads, sent without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device: from the host to CUDA from pinned memory, queued behind what it is to do already.

    Pinned memory that is freed is not used again before its copies are done: torch's host allocator waits for
    them. Memory that is not pinned may be, so other devices wait; meta tensors stand for CUDA's. What is on a
    device already cannot be pinned, and need not be.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type in ("cuda", "meta"))


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
