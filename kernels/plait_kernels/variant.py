"""Adapter variants as the kernels see them: their tensors, and how forward and backward use these.

Plain LoRA (`lora`) is one. Another variant needs no kernels: its rows are computed by `reference`, whichever
backend computes the rows of plain LoRA in the same microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of an adapter at one site.

    Args:
        name: as PEFT stores it, after the layer's name: "lora_A.weight".
        shape: its sizes.
        trains: whether the optimiser steps it. One that does not has neither gradient nor moments.
        rate: its learning rate: "a", or "b", which LoRA+ raises.
    """

    name: str
    shape: tuple[int, ...]
    trains: bool = True
    rate: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class SiteRows:
    """One segment's rows at one site, with the adapter's tensors there.

    Args:
        x: (rows, in), the layer's input.
        weight: (out, in), frozen.
        bias: (out,), frozen, or None; not given in backward.
        tensors: in the variant's order, in the compute dtype.
        gradients: float32 accumulators for the gradients of the trained tensors, in the variant's order.
        scale: alpha / rank, or alpha / sqrt(rank) for rsLoRA.
        drop: D ∘ a tensor of x's shape; the same mask in forward and backward.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    tensors: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    scale: float
    drop: Callable[[Tensor], Tensor]


class Variant(Protocol):
    """One kind of adapter."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def fused(self) -> bool:
        """Whether the backends' own kernels compute it: only if it is plain LoRA, A and B trained."""

    @property
    def saves(self) -> int:
        """How many tensors `forward` saves for `backward`."""

    def tensors(self, in_features: int, out_features: int, rank: int) -> tuple[TensorSpec, ...]:
        """The tensors at a site; names, `trains` and `rate` are the same at every site."""

    def forward(self, rows: SiteRows, out: Tensor) -> tuple[Tensor, ...]:
        """Change `out` (rows, out), which holds x Wᵀ + b, in place; return what backward needs."""

    def backward(self, rows: SiteRows, saved: tuple[Tensor, ...], grad: Tensor, dx: Tensor | None) -> None:
        """Add to `rows.gradients`, and to `dx` (rows, in), which holds grad W, if it is given.

        Args:
            grad: (rows, out), the gradient of the output.
        """
