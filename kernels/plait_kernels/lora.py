"""Plain LoRA: h = x Wᵀ + b + s (D ∘ x) Aᵀ Bᵀ. The only variant for which backends have
their own kernels."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.variant import SiteRows, TensorSpec


class Lora:
    """A (rank, in) and B (out, rank), both trained.

    S = (D ∘ x) Aᵀ; h = x Wᵀ + s S Bᵀ; dS = s dh B; dB = s dhᵀ S; dA = dSᵀ (D ∘ x); dx = dh W + D ∘ (dS A)
    (mLoRA §3.3; LoRAFusion §4.1).
    """

    name = "lora"
    fused = True
    saves = 1

    def tensors(self, in_features: int, out_features: int, rank: int) -> tuple[TensorSpec, ...]:
        """A and B."""
        return (
            TensorSpec("lora_A.weight", (rank, in_features)),
            TensorSpec("lora_B.weight", (out_features, rank), rate="b"),
        )

    def forward(self, rows: SiteRows, out: Tensor) -> tuple[Tensor, ...]:
        """Add s S Bᵀ; saves S."""
        a, b = rows.tensors
        s = rows.drop(rows.x) @ a.T
        out += rows.scale * (s @ b.T)
        return (s,)

    def backward(self, rows: SiteRows, saved: tuple[Tensor, ...], grad: Tensor, dx: Tensor | None) -> None:
        """Add dA, dB and D ∘ (dS A)."""
        (s,) = saved
        a, b = rows.tensors
        grad_a, grad_b = rows.gradients
        dh = rows.scale * grad
        ds = dh @ b
        grad_b += dh.T @ s
        grad_a += ds.T @ rows.drop(rows.x)
        if dx is not None:
            dx += rows.drop(ds @ a)


LORA = Lora()
