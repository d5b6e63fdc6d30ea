"""What the processes of a run tell each other directly: sums of gradients and copies of adapters.

A seam: stages and shards will exchange in other ways, through the same groups. Sums are added in the order of
the processes, so their bits do not depend on who was first.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

PIECE = 2**20  # numbers that are gathered at a time: bounds the memory of a sum


class Exchange:
    """A process's membership in the group of all processes.

    Args:
        store: file in which they find each other; a new one for each group.
        seconds: longest wait for the others.

    Attributes:
        received: bytes that came from other processes so far.
    """

    def __init__(
        self, store: str, process: int, processes: int, device: torch.device, seconds: float
    ) -> None:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=FileStore(store, processes),
            rank=process,
            world_size=processes,
            timeout=timedelta(seconds=seconds),
        )
        self.received = 0
        self._first = process == 0
        self._processes = processes
        self._device = device

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum over all processes into each of these vectors, which all have in the same order."""
        for tensor in tensors:
            for piece in torch.split(tensor, PIECE):
                parts = [torch.empty_like(piece) for _ in range(self._processes)]
                dist.all_gather(parts, piece.contiguous())
                self.received += (self._processes - 1) * piece.nbytes
                piece.copy_(parts[0])
                for part in parts[1:]:
                    piece.add_(part)

    def share(self, tensor: Tensor) -> None:
        """Copy a tensor of the first process to all others."""
        sent = tensor.to(self._device)
        dist.broadcast(sent, src=0)
        self.received += 0 if self._first else sent.nbytes
        if sent is not tensor:
            tensor.copy_(sent)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
