"""Tensor parallelism: processes that hold the same layers together, each a slice of every one.

A seam: what the model and the adapters ask of the others (:class:`~plait.models.slices.Slicing`) goes through
one group of processes. They run the same microbatches. Hidden states are the same in all of them, bit by bit,
and so are the sides of adapters that are whole; gradients of these are added up once, before a step, in the
order of the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from plait.distributed.exchange import LONGEST, Result, add_in_order, over_link, spread
from plait.models.slices import LayerSlice, Slicing
from plait_kernels import Site
from plait_kernels.bank import GRADIENTS, Block


class TensorGroup:
    """The processes of one stage, as one of them sees them.

    Args:
        ranks: of all of them in the group of all processes, in their order.
        number: of this one among them.
    """

    def __init__(self, ranks: Sequence[int], number: int, device: torch.device) -> None:
        self.number = number
        self.count = len(ranks)
        self._device = device
        self._group = dist.new_group(list(ranks), timeout=LONGEST, use_local_synchronization=True)

    def add(self, tensor: Tensor) -> None:
        """Put the sum over all into a contiguous tensor; the same bits in all.

        Raises:
            LostProcessError: one of them died.
        """
        _try(lambda: dist.all_reduce(tensor, group=self._group))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """This tensor of each, in their order, on the device.

        Raises:
            LostProcessError: one of them died.
        """
        own = tensor.to(self._device).contiguous()
        parts = [torch.empty_like(own) for _ in range(self.count)]
        _try(lambda: dist.all_gather(parts, own, group=self._group))
        return parts


class ShardGroup(TensorGroup):
    """All processes, each with a part of the weights of one model."""

    def begin(self, whole: Tensor, own: Tensor) -> Callable[[], None]:
        """Begin to fill a flat tensor with the parts of all, in their order; what is returned waits for it.

        Raises:
            LostProcessError: one of them died; what is returned, too.
        """
        gather = partial(dist.all_gather_into_tensor, whole, own, group=self._group, async_op=True)
        begun = _try(gather)

        def wait() -> None:
            _try(begun.wait)

        return wait


def _try(action: Callable[[], Result]) -> Result:
    rule = "Processes that hold the same layers together add up hidden states and gradients."
    return over_link(action, "the other slices", rule)


class SharedSides:
    """The sides of adapters that several processes have, of which each has computed a part of the gradient.

    Args:
        slices: what is here of each linear layer.
    """

    def __init__(self, group: Slicing, slices: Mapping[str, LayerSlice], sites: Sequence[Site]) -> None:
        self._group = group
        self._slices = slices
        self._sites = {site.name: site for site in sites}

    def complete(self, block: Block) -> float:
        """Add up the gradients of a job's shared sides; the sum of squares of its whole gradient here.

        By site and in float64: the same in all processes, bit by bit.
        """
        everyone = range(self._group.count)
        sums: dict[range, list[Tensor]] = {everyone: []}
        whole, sliced = [], []
        for name in block.layout.specs:
            part, (a, b) = self._slices[name], block.at(self._sites[name], GRADIENTS)
            mine, theirs = (a, b) if part.side == "in" else (b, a)
            sums[everyone].append(theirs)
            if len(part.holders) > 1:
                sums.setdefault(part.holders, []).append(mine)
            whole.append(theirs)
            sliced.append(mine if part.holders[0] == self._group.number else mine[:0])
        if not whole:
            return 0.0
        for holders, gradients in sums.items():
            self._add_up(gradients, holders)
        return self._squares(whole, sliced)

    def _add_up(self, gradients: Sequence[Tensor], holders: range) -> None:
        """Put the sums over the holders into these tensors; all processes do so together."""
        vector = torch.cat([each.flatten() for each in gradients])
        add_in_order(vector, lambda piece: self._group.gather(piece)[holders.start : holders.stop])
        spread(vector, gradients)

    def _squares(self, whole: Sequence[Tensor], sliced: Sequence[Tensor]) -> float:
        parts = self._group.gather(torch.stack([each.double().square().sum() for each in sliced]))
        total = torch.stack([each.double().square().sum() for each in whole])
        for part in parts:
            total = total + part
        return float(total.sum())
