"""The frozen weights of decoder layers, sharded among processes that each run the whole model.

A layer's weights lie end to end in one flat tensor, of which each process keeps an equal part. Before the
layer runs, forward or backward, the parts are gathered; afterwards the flat tensor's memory is given back.
The weights stay the same tensors all the time, so whatever has bound them need not know. All processes must
run as many layers, in the same order: of microbatches that one has less, it only gathers the weights.

A seam: a model runs its layers through it and knows nothing of who has the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class Sharding(Protocol):
    """The processes that keep parts of the same weights, as one of them sees them.

    Attributes:
        number: of this one.
        count: how many there are.
    """

    number: int
    count: int

    def fill(self, whole: Tensor, own: Tensor) -> None:
        """Fill a flat tensor with the parts of all, in their order."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """This tensor of each, in their order."""


class LayerShard:
    """One layer's weights: this process's part, and all of them while they are gathered.

    Args:
        weights: which become views of one flat tensor, in their order.
    """

    def __init__(self, weights: Sequence[Tensor], sharding: Sharding) -> None:
        first = weights[0]
        size = sum(each.numel() for each in weights)
        part = -(-size // sharding.count)
        self._sharding = sharding
        self._flat = torch.zeros(part * sharding.count, dtype=first.dtype, device=first.device)
        start = 0
        for each in weights:
            view = self._flat[start : start + each.numel()].view(each.shape)
            view.copy_(each)
            each.data = view
            start += each.numel()
        self.own = self._flat[sharding.number * part :][:part].clone()
        self._bytes = self._flat.untyped_storage().nbytes()
        self.gathered = True  # until all that binds views of them has done so

    @property
    def whole_bytes(self) -> int:
        """Bytes of all its weights."""
        return self._bytes

    def gather(self) -> None:
        """See that all weights are here."""
        if self.gathered:
            return
        self._resize(self._bytes)
        with torch.no_grad():  # an alias: for autograd, these are the values that were saved
            self._sharding.fill(self._flat.data, self.own)
        self.gathered = True

    def release(self) -> None:
        """Give back the memory of all but the own part."""
        self._resize(0)
        self.gathered = False

    def _resize(self, size: int) -> None:
        """As the storage's own ``resize_``, but what counts memory (plait.cost.peaks) sees it."""
        torch.ops.inductor.resize_storage_bytes_(self._flat.data, size)


class LayerShards:
    """The shards of all layers of a model."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._layers: list[LayerShard] = []

    def add(self, weights: Sequence[Tensor]) -> LayerShard:
        """The next layer's shard, still gathered."""
        self._layers.append(LayerShard(weights, self._sharding))
        return self._layers[-1]

    def tensors(self) -> Iterator[Tensor]:
        """This process's parts."""
        return (each.own for each in self._layers)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the largest layer, which is gathered while it runs."""
        return max(each.whole_bytes for each in self._layers)

    def run(self, index: int, hidden: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """A layer's output, its weights being gathered in forward and in backward."""
        shard = self._layers[index]
        before, after = (
            cast("Callable[..., Tensor]", _Before.apply),
            cast("Callable[..., Tensor]", _After.apply),
        )
        return after(layer(before(hidden, shard)), shard)

    def idle(self, *, training: bool) -> None:
        """Gather what a microbatch of another process needs, and run nothing."""
        for shard in [*self._layers, *(reversed(self._layers) if training else ())]:
            shard.gather()
            shard.release()


class _Before(torch.autograd.Function):
    """Stands before a layer: gathers in forward, and gives back after the layer's backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shard: LayerShard) -> Tensor:
        ctx.shard = shard
        shard.gather()
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.shard.release()
        return grad, None


class _After(torch.autograd.Function):
    """Stands after a layer: gives back in forward, and gathers before the layer's backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shard: LayerShard) -> Tensor:
        ctx.shard = shard
        shard.release()
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.shard.gather()
        return grad, None
