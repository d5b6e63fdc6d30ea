"""The one operation: a frozen linear layer with many adapters, differentiable in x, A and B."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear

from plait_kernels import reference
from plait_kernels.backends import Backend, check_backend
from plait_kernels.bank import Bank
from plait_kernels.chain import apply
from plait_kernels.errors import KernelError
from plait_kernels.layer import LayerCall, SiteColumns, layer_call
from plait_kernels.quantised import Weight, dense, frozen_linear
from plait_kernels.routing import Routing


class _MultiLora(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        _anchor: Tensor,
        weight: Weight,
        bias: Tensor | None,
        call: LayerCall,
        backend: Backend,
    ) -> Tensor:
        whole = dense(weight)
        if call.owned:
            out, saved = backend.forward(x, whole, bias, call)
        else:
            out, saved = linear(x, whole, bias), []
        ctx.own = len(saved)
        if call.others:
            saved += reference.add_forward(out, x, whole, bias, call, call.others)
        kept = weight if isinstance(weight, Tensor) else None
        ctx.save_for_backward(x, kept, *saved)
        ctx.quantised = weight if kept is None else None
        ctx.call, ctx.backend = call, backend
        ctx.generations = call.routing.generations()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        if torch.is_grad_enabled():
            raise KernelError(
                "a second derivative of multi_lora_linear (create_graph=True)",
                "the adapters' gradients go to the bank, so there is no graph through them",
                "call backward without create_graph",
            )
        call: LayerCall = ctx.call
        changed = call.changed_since(ctx.generations)
        if changed:
            raise KernelError(
                f"weights of {changed} changed between forward and backward",
                "gradients belong to the weights that forward saw",
                "call backward before the optimiser's step or refresh",
            )
        x, kept, *saved = ctx.saved_tensors
        weight = ctx.quantised.dense() if kept is None else kept
        need_dx = ctx.needs_input_grad[0]
        with _no_autocast(x):
            if call.owned:
                dx = ctx.backend.backward(grad, x, saved[: ctx.own], weight, call, need_dx=need_dx)
            else:
                dx = grad @ weight if need_dx else None
            if call.others:
                reference.add_backward(dx, grad, x, saved[ctx.own :], weight, call, call.others)
        return dx, None, None, None, None, None


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off, so that the bank's dtype is used."""
    kind = x.device.type  # meta tensors, which memory is computed with, have no autocast
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


def multi_lora_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    sites: Sequence[SiteColumns],
    bank: Bank,
    routing: Routing,
    *,
    backend: str,
) -> Tensor:
    """Frozen linear layer plus each row's own adapter; of plain LoRA: h = x Wᵀ + b + s (D ∘ x) Aᵀ Bᵀ.

    Rows whose adapter has another variant are computed by `reference` with every backend, so their
    neighbours' results do not depend on them.

    Several layers that read the same x (q, k, v) are one call: `weight` holds their rows one after the
    other, `sites` names them in that order. In backward the adapters' gradients are added to the bank's
    accumulators, segment by segment in the order of the rows, and not returned; W and b get none.

    Args:
        x: (tokens, in), of the bank's compute dtype.
        weight: (sum of out, in), any strides (GPT-2 stores it transposed), or `Quantised`.
        bias: (sum of out,) or None.
        sites: for each part of the columns a site's name, a number of columns without adapters, or None
            for the columns that are left over.
        bank: the bank of the adapters.
        routing: routing of this microbatch.
        backend: name of a registered backend ("reference", "grouped", "triton"); `choose_backend` finds the
            best one for a device.

    Returns:
        (tokens, sum of out).

    Raises:
        KernelError: shapes, dtypes, devices, sites or backend do not fit, or W or b require a gradient. In
            backward: weights were refreshed since forward, or a second derivative is requested.
    """
    chosen = _check(x, weight, bias, bank, routing, backend)
    call = layer_call(bank, routing, sites, weight.shape[0])
    with _no_autocast(x):
        if not call.owned and not call.others:
            return frozen_linear(x, weight, bias)
        out = apply(_MultiLora, x, bank.anchor, weight, bias, call, chosen, trains=True)
        return cast("Tensor", out)


def _check(
    x: Tensor, weight: Weight, bias: Tensor | None, bank: Bank, routing: Routing, backend: str
) -> Backend:
    if (
        x.dim() != 2
        or x.shape[0] != routing.tokens
        or len(weight.shape) != 2
        or weight.shape[1] != x.shape[1]
    ):
        raise KernelError(
            f"x of shape {tuple(x.shape)}, weight of shape {tuple(weight.shape)}",
            f"x is (tokens, in) with the routing's {routing.tokens} tokens, weight is (out, in)",
        )
    if routing.bank is not bank:
        raise KernelError("a routing of another bank", "a routing is built on the bank that it is used with")
    dtype, device = bank.compute_dtype, x.device
    if x.dtype != dtype or weight.dtype != dtype or (bias is not None and bias.dtype != dtype):
        raise KernelError(
            f"x of {x.dtype}, weight of {weight.dtype}",
            f"x, weight and bias have the bank's compute dtype, {bank.compute_dtype}",
        )
    elsewhere = weight.device != device or (bias is not None and bias.device != device)
    if elsewhere or bank.anchor.device != device:
        raise KernelError(
            f"x on {x.device}, weight on {weight.device}, the bank on {bank.anchor.device}",
            "x, weight, bias and the bank are on one device",
        )
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        raise KernelError(
            "a weight or bias that wants a gradient",
            "the layer is frozen: it would get none",
            "call requires_grad_(False) on it",
        )
    return check_backend(backend, device, dtype)
