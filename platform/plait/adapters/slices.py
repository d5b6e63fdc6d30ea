"""The part of an adapter that a process has where several hold the model's layers together.

An adapter is whole on disk, whatever the number of processes: here its tensors are cut and joined.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from plait.models.slices import LayerSlice, Slicing
from plait_kernels import TensorSpec

DIMENSIONS = {("in", "lora_A.weight"): 1, ("out", "lora_B.weight"): 0}  # by side and tensor: what is sliced
NAME = re.compile(r"base_model\.model\.(.+)\.(lora_[AB]\.weight)$")


@dataclass(frozen=True, slots=True)
class AdapterSlices:
    """What is here of each adapter's tensors, by PEFT's names of them.

    Args:
        slices: of the layers; empty: all is here.
        slicing: the processes that have the rest.
    """

    slices: Mapping[str, LayerSlice] = field(default_factory=dict)
    slicing: Slicing | None = None

    @property
    def writes(self) -> bool:
        """Whether this process writes what all have together."""
        return self.slicing is None or self.slicing.number == 0

    def _cut(self, name: str) -> tuple[LayerSlice, int] | None:
        """The slice of a tensor, and its dimension; None if the tensor is whole."""
        found = NAME.search(name)
        part = None if found is None else self.slices.get(found[1])
        if found is None or part is None or (part.side, found[2]) not in DIMENSIONS:
            return None
        return part, DIMENSIONS[part.side, found[2]]

    def own(self, name: str, whole: Tensor) -> Tensor:
        """The part of a whole tensor that is here."""
        cut = self._cut(name)
        if cut is None:
            return whole
        part, dimension = cut
        return whole[part.own] if dimension == 0 else whole[:, part.own]

    def whole_spec(self, name: str, spec: TensorSpec) -> TensorSpec:
        """What a tensor is in the whole adapter."""
        cut = self._cut(name)
        if cut is None:
            return spec
        part, dimension = cut
        shape = tuple(part.whole if place == dimension else size for place, size in enumerate(spec.shape))
        return replace(spec, shape=shape)

    def joined(self, name: str, own: Tensor) -> Tensor:
        """The whole tensor, in main memory; all processes ask for it together."""
        cut = self._cut(name)
        if cut is None:
            return own.cpu()
        assert self.slicing is not None
        part, dimension = cut
        pieces = self.slicing.gather(own.contiguous())[:: len(part.holders)]
        return torch.cat([piece.cpu() for piece in pieces], dim=dimension)
