"""The one operation: a frozen linear layer with many adapters, differentiable in x, A and B."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from plait_kernels import reference
from plait_kernels.backends import BACKENDS, Backend, check_backend
from plait_kernels.bank import Bank, Block
from plait_kernels.chain import apply
from plait_kernels.errors import KernelError
from plait_kernels.layer import LayerCall, SiteColumns, layer_call
from plait_kernels.quantised import Weight, dense, frozen_linear
from plait_kernels.routing import Generations, Routing


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
        ctx.save_for_backward(x, *saved)
        ctx.weight, ctx.call, ctx.backend = weight, call, backend
        ctx.generations = call.routing.generations()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        call: LayerCall = ctx.call
        check_backward("multi_lora_linear", ctx.generations, call)
        x, *saved = ctx.saved_tensors
        weight = dense(ctx.weight)
        need_dx = ctx.needs_input_grad[0]
        with no_autocast(x):
            if call.owned:
                dx = ctx.backend.backward(grad, x, saved[: ctx.own], weight, call, need_dx=need_dx)
            else:
                dx = grad @ weight if need_dx else None
            if call.others:
                reference.add_backward(dx, grad, x, saved[ctx.own :], weight, call, call.others)
        return dx, None, None, None, None, None


def check_backward(name: str, generations: Generations, *calls: LayerCall) -> None:
    """Refuse a backward that would be wrong.

    Raises:
        KernelError: weights were refreshed since forward, or a second derivative is requested.
    """
    if torch.is_grad_enabled():
        raise KernelError(
            f"a second derivative of {name} (create_graph=True)",
            "the adapters' gradients go to the bank, so there is no graph through them",
            "call backward without create_graph",
        )
    if generations.refreshes == Block.refreshes:
        return
    for call in calls:
        changed = call.changed_since(generations)
        if changed:
            raise KernelError(
                f"weights of {changed} changed between forward and backward",
                "gradients belong to the weights that forward saw",
                "call backward before the optimiser's step or refresh",
            )


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off, so that the bank's dtype is used."""
    kind = x.device.type
    if _has_autocast(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return _AS_IT_IS


_AS_IT_IS = nullcontext()


@cache
def _has_autocast(kind: str) -> bool:
    """Meta tensors, which memory is computed with, have none."""
    return torch.amp.is_autocast_available(kind)


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
    check_rows(x, weight, bank, routing)
    call = layer_call(bank, routing, sites, weight.shape[0])
    chosen = checked_backend(weight, bias, call, backend)
    with no_autocast(x):
        if not call.owned and not call.others:
            return frozen_linear(x, weight, bias)
        out: Tensor = apply(_MultiLora, x, bank.anchor, weight, bias, call, chosen, trains=True)
        return out


def check_rows(x: Tensor, weight: Weight, bank: Bank, routing: Routing) -> None:
    """Refuse rows that a weight, a bank or a routing do not fit.

    Raises:
        KernelError: they do not.
    """
    if len(weight.shape) != 2 or x.shape != (routing.tokens, weight.shape[1]):
        raise KernelError(
            f"x of shape {tuple(x.shape)}, weight of shape {tuple(weight.shape)}",
            f"x is (tokens, in) with the routing's {routing.tokens} tokens, weight is (out, in)",
        )
    if routing.bank is not bank:
        raise KernelError("a routing of another bank", "a routing is built on the bank that it is used with")
    if x.dtype != bank.compute_dtype or x.device != bank.anchor.device:
        raise KernelError(
            f"x of {x.dtype} on {x.device}",
            f"x has the bank's compute dtype, {bank.compute_dtype}, and is on one device with it, "
            f"{bank.anchor.device}",
        )


def checked_backend(weight: Weight, bias: Tensor | None, call: LayerCall, name: str) -> Backend:
    """The backend; weight, bias and backend are looked at when a layer is first called with them."""
    layer, bank, backend = call.layer, call.bank, BACKENDS.get(name)
    before = layer.checked
    if backend is not None and weight is before[0] and bias is before[1] and backend is before[2]:
        return backend
    dtype, device = bank.compute_dtype, bank.anchor.device
    parts: list[Any] = [weight] if bias is None else [weight, bias]
    if any(part.dtype != dtype for part in parts):
        raise KernelError(
            f"weight and bias of {', '.join(str(part.dtype) for part in parts)}",
            f"x, weight and bias have the bank's compute dtype, {dtype}",
        )
    if any(part.device != device for part in parts):
        raise KernelError(
            f"weight and bias on {', '.join(str(part.device) for part in parts)}, the bank on {device}",
            "x, weight, bias and the bank are on one device",
        )
    if any(part.requires_grad for part in parts):
        raise KernelError(
            "a weight or bias that wants a gradient",
            "the layer is frozen: it would get none",
            "call requires_grad_(False) on it",
        )
    backend = check_backend(name, device, dtype)
    layer.checked = weight, bias, backend
    return backend
