"""The frozen weights of decoder layers, sharded among processes that each run the whole model.

A layer's weights lie end to end in one flat tensor, of which each process keeps an equal part. Before the
layer runs, forward or backward, the parts are gathered; afterwards the flat tensor's memory is given back.
While a layer runs, the next one is gathered ahead: so at most two are here. The weights stay the same tensors
all the time, so whatever has bound them need not know. All processes must run as many layers, in the same
order: of microbatches that one has less, it only gathers the weights.

A seam: a model runs its layers through it and knows nothing of who has the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from plait.models.slices import Sharing


class Sharding(Sharing, Protocol):
    """Processes that keep parts of the same weights."""

    def begin(self, whole: Tensor, own: Tensor) -> Callable[[], None]:
        """Begin to fill a flat tensor with the parts of all, in their order; what it returns waits for it."""


class LayerShard:
    """One layer's weights: this process's part, and all of them while they are gathered.

    Args:
        weights: which become views of one flat tensor, in their order.

    Attributes:
        whole_bytes: of all of them.
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
        self.whole_bytes = self._flat.untyped_storage().nbytes()
        self.gathered = True  # until all that binds views of them has done so
        self._begun: Callable[[], None] | None = None

    def begin(self) -> None:
        """Begin to gather what is not here."""
        if self.gathered or self._begun is not None:
            return
        self._resize(self.whole_bytes)
        with torch.no_grad():  # an alias: for autograd, these are the values that were saved
            self._begun = self._sharding.begin(self._flat.data, self.own)

    def gather(self) -> None:
        """See that all weights are here."""
        self.begin()
        if self._begun is not None:
            self._begun()
            self._begun = None
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
        """Most bytes of layers that are gathered at the same time."""
        return int(most_gathered([each.whole_bytes for each in self._layers]))

    def run(self, index: int, hidden: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """A layer's output, its weights being gathered in forward and in backward."""
        before, after = (
            cast("Callable[..., Tensor]", _Before.apply),
            cast("Callable[..., Tensor]", _After.apply),
        )
        return after(layer(before(hidden, self, index)), self, index)

    def gather(self, index: int, following: int) -> None:
        """See that a layer is here, and begin to gather the one that follows, if there is one."""
        self._layers[index].gather()
        if 0 <= following < len(self._layers):
            self._layers[following].begin()

    def release(self, index: int) -> None:
        """Give back a layer's memory."""
        self._layers[index].release()

    def idle(self, *, training: bool) -> None:
        """Gather what a microbatch of another process needs, and run nothing."""
        order = range(len(self._layers))
        for index in order:
            self.gather(index, index + 1)
            self.release(index)
        for index in reversed(order) if training else ():
            self.gather(index, index - 1)
            self.release(index)


def most_gathered(layers: Sequence[float]) -> float:
    """Most of these bytes of layers that are gathered at the same time: of two neighbours."""
    return max(map(sum, pairwise(layers)), default=sum(layers))


class _Before(torch.autograd.Function):
    """Stands before a layer: gathers in forward, and gives back after the layer's backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shards: LayerShards, index: int) -> Tensor:
        ctx.release = partial(shards.release, index)
        shards.gather(index, index + 1)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.release()
        return grad, None, None


class _After(torch.autograd.Function):
    """Stands after a layer: gives back in forward, and gathers before the layer's backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shards: LayerShards, index: int) -> Tensor:
        ctx.gather = partial(shards.gather, index, index - 1)
        shards.release(index)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.gather()
        return grad, None, None
