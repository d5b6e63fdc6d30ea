"""A variant of LoRA that is in no package: B alone trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from plait.adapters.lora import Lora
from plait_kernels import SiteRows, TensorSpec


class FrozenA(Lora):
    """LoRA with A as it was initialised. PEFT has no word for it: its folder is one of plain LoRA."""

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

    def rejects(self, config: Mapping[str, Any], /) -> str:
        return f"peft_type={config['peft_type']!r}"
