"""Output head and cross-entropy over labelled rows, in chunks, so that all logits never exist at once.

With the backend `triton` a chunk's gradient replaces its logits, so each costs its own bytes and not six
times as many, and chunks are larger: the head is read once for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear

from plait_kernels.errors import KernelError
from plait_kernels.launching import launch
from plait_kernels.triton_backend import TRITON

CHUNK_LOGITS = 2**24  # logits of one chunk: 64 MiB in float32
FUSED_CHUNK_BYTES = 2**27  # of one whose gradient is made in place
_BLOCK = 4096  # logits of a row at once


@dataclass(frozen=True)
class VocabularySlice:
    """The rows of the head that this process has, where others have the rest.

    Args:
        first: its first token.
        gather: this tensor of each process, in their order.
        add: put the sum over all processes into a tensor.
    """

    first: int
    gather: Callable[[Tensor], list[Tensor]]
    add: Callable[[Tensor], None]


class Head:
    """The frozen head: logits = scale·(h Wᵀ + b), then softcap·tanh(logits / softcap) if there is one."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        scale: float | None,
        own: VocabularySlice | None = None,
    ) -> None:
        self.weight, self.bias, self.softcap, self.scale, self.own = weight, bias, softcap, scale, own

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocabulary) float32."""
        logits = linear(hidden, self.weight, self.bias).float()
        if self.scale is not None:
            logits *= self.scale
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def normalised(
        self, logits: Tensor, targets: Tensor, share: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The logarithm of each row's sum over all tokens and the logit of its target; that target's column
        here, and its share of the loss, which is 0 where another process has it."""
        normaliser = logits.logsumexp(dim=1)
        if self.own is None:
            index = targets[:, None]
            return normaliser, logits.gather(1, index)[:, 0], index, share
        here = (targets >= self.own.first) & (targets < self.own.first + logits.shape[1])
        index = torch.where(here, targets - self.own.first, 0)[:, None]
        chosen = torch.where(here, logits.gather(1, index)[:, 0], 0.0)
        parts = torch.stack(self.own.gather(torch.stack((normaliser, chosen))))
        return parts[:, 0].logsumexp(dim=0), parts[:, 1].sum(dim=0), index, torch.where(here, share, 0.0)

    def hidden_gradient(self, grad: Tensor, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of the hidden rows from that of the logits, which is overwritten."""
        if self.softcap is not None:
            grad *= logits.div_(self.softcap).square_().neg_().add_(1.0)
        if self.scale is not None:
            grad *= self.scale
        return grad.to(dtype) @ self.weight


def _chunk(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    weights: Tensor,
    rows: slice,
    nll: Tensor,
    grad_hidden: Tensor | None,
) -> None:
    """Fill ``rows`` of nll and of the hidden rows' gradient; its logits are freed before the next chunk."""
    logits = head.logits(hidden[rows])
    normaliser, chosen, index, taken = head.normalised(logits, targets[rows], weights[rows])
    nll[rows] = normaliser - chosen
    if grad_hidden is not None:
        grad = torch.exp(logits - normaliser[:, None]).mul_(weights[rows, None])
        grad.scatter_add_(1, index, -taken[:, None])
        grad_hidden[rows] = head.hidden_gradient(grad, logits, hidden.dtype)


def fused_chunk(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    weights: Tensor,
    rows: slice,
    nll: Tensor,
    grad_hidden: Tensor | None,
) -> None:
    """The same by Triton, in place of the logits."""
    from plait_kernels import triton_loss

    logits = linear(hidden[rows], head.weight, head.bias)
    launch(
        triton_loss.cross_entropy,
        (logits.shape[0],),
        *(logits, targets[rows], weights[rows], nll[rows], logits.shape[1]),
        *(1.0 if head.scale is None else head.scale, 1.0 if head.softcap is None else head.softcap),
        **{"GRADIENT": grad_hidden is not None, "SCALED": head.scale is not None},
        **{"CAPPED": head.softcap is not None, "BLOCK": _BLOCK, "num_warps": 8},
    )
    if grad_hidden is not None:
        torch.mm(logits, head.weight, out=grad_hidden[rows])


class _LabelledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, targets: Tensor, weights: Tensor, chunk: int, fused: bool
    ) -> tuple[Tensor, Tensor]:
        needed = ctx.needs_input_grad[0]
        run = fused_chunk if fused else _chunk
        grad_hidden = torch.empty_like(hidden) if needed else None
        nll = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            run(hidden, head, targets, weights, slice(start, start + chunk), nll, grad_hidden)
        if grad_hidden is not None and head.own is not None:
            head.own.add(grad_hidden)
        ctx.save_for_backward(grad_hidden)
        ctx.mark_non_differentiable(nll)
        return (weights * nll).sum(), nll

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        if torch.is_grad_enabled():
            raise KernelError(
                "a second derivative of labelled_cross_entropy (create_graph=True)",
                "its gradient is made in forward, so there is no graph through it",
                "call backward without create_graph",
            )
        (grad_hidden,) = ctx.saved_tensors
        if grad_hidden is None:
            return None, None, None, None, None, None
        return (grad_hidden * grad).to(grad_hidden.dtype), None, None, None, None, None


_apply = cast("Callable[..., tuple[Tensor, Tensor]]", _LabelledCrossEntropy.apply)


def labelled_cross_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    chunk: int | None = None,
    backend: str = "",
    own: VocabularySlice | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of labelled rows through a frozen output head.

    The gradient of `hidden` is made in forward, chunk by chunk, since it is linear in the gradient of the
    loss; the head gets none.

    Args:
        hidden: (rows, hidden), the labelled rows after the final norm.
        head_weight: (vocabulary, hidden), any strides.
        head_bias: (vocabulary,) or None.
        targets: (rows,) int64 token ids.
        weights: (rows,) float32, each row's share of its job's loss (1 / labelled tokens of its batch).
        softcap: logits become softcap·tanh(logits / softcap), after `scale` (Gemma 2).
        scale: logits are multiplied by it.
        chunk: rows at once, the same in all processes; by default as many as `chunk_rows` says.
        backend: the backend of the model's kernels; `triton` makes the gradient in place of the logits.
        own: which tokens the head here has, if other processes have the others; None: all.

    Returns:
        loss = Σ weights·nll, a float32 scalar, and nll (rows,) float32, detached.

    Raises:
        KernelError: targets or weights are not one for each row.
    """
    rows = hidden.shape[0]
    if targets.shape != (rows,) or weights.shape != (rows,):
        raise KernelError(
            f"targets {tuple(targets.shape)}, weights {tuple(weights.shape)} for {rows} hidden rows",
            "each labelled row has one target and one weight",
        )
    fused = backend == TRITON.name and TRITON.runs(hidden.device, hidden.dtype) and own is None
    if chunk is None:
        chunk = chunk_rows(head_weight.shape[0], backend, hidden.element_size())
    head = Head(head_weight, head_bias, softcap, scale, own)
    # The kernel takes one after the other, and weights may be one number expanded.
    return _apply(hidden, head, targets.contiguous(), weights.float().contiguous(), chunk, fused)


def chunk_rows(vocabulary: int, backend: str = "", element_bytes: int = 4) -> int:
    """Labelled rows whose logits exist at once, with a backend in a dtype of so many bytes.

    A multiple of 4 where there are so many, so that each chunk's numbers begin at a multiple of 16 bytes: of
    others Triton makes a binary of its own.
    """
    logits = FUSED_CHUNK_BYTES // element_bytes if backend == TRITON.name else CHUNK_LOGITS
    rows = max(1, logits // vocabulary)
    return rows - rows % 4 if rows > 4 else rows
