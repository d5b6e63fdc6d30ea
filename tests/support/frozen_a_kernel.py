"""LoRA of which B alone trains, as the kernels see it: needs nothing of plait."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait_kernels import Lora, SiteRows, TensorSpec


class FrozenA(Lora):
    """LoRA with A as it was initialised."""

    name = "frozen_a"
    fused = False

    def tensors(self, in_features: int, out_features: int, rank: int) -> tuple[TensorSpec, ...]:
        a, b = super().tensors(in_features, out_features, rank)
        return replace(a, trains=False), b

    def backward(self, rows: SiteRows, saved: tuple[Tensor, ...], grad: Tensor, dx: Tensor | None) -> None:
        (s,), (a, b), (grad_b,) = saved, rows.tensors, rows.gradients
        dh = rows.scale * grad
        grad_b += dh.T @ s
        if dx is not None:
            dx += rows.drop(dh @ b @ a)
