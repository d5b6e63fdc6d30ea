"""What the benchmark compares backends with: torch LoRA by autograd, and the same in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from plait_kernels.bank import COMPUTE, GRADIENTS
from plait_kernels.dropout import keep_scale
from plait_kernels.fast_dropout import keep
from plait_kernels.synthetic import Problem

Leaves = list[list[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Check:
    """RMS errors against float64, relative to the truth's RMS: a backend's, and torch LoRA's.

    `right`: all are finite and none is more than twice torch LoRA's.
    """

    errors: dict[str, float]
    torch_errors: dict[str, float]
    right: bool


def _leaves(made: Problem, dtype: torch.dtype) -> Leaves:
    """A and B of every span and site, as leaves of autograd."""
    return [
        [
            (_leaf(a, dtype), _leaf(b, dtype))
            for a, b in (span.block.at(site, COMPUTE) for site in made.bank.sites)
        ]
        for span in made.routing.spans
    ]


def _leaf(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy: in float32 the bank's own would change with its gradients, which are in the same buffer."""
    return weight.detach().to(dtype, copy=True).requires_grad_()


def _lora(made: Problem, x: Tensor, leaves: Leaves, masks: list[list[Tensor]] | None) -> Tensor:
    """Each adapter's two products for its own rows, concatenated, without sums of full size.

    `masks`: masks by span and site, in place of torch's own dropout.
    """
    pieces = []
    for number, span in enumerate(made.routing.spans):
        rows, parts = x[span.start : span.stop], []
        for index, (a, b) in enumerate(leaves[number]):
            own = rows
            if span.threshold and masks is not None:
                own = torch.where(masks[number][index], rows * keep_scale(span.threshold), 0.0)
            elif span.threshold:
                own = torch.dropout(rows, span.threshold / 65536, train=True)
            parts.append(linear(linear(own, a), b) * span.block.scale)
        pieces.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
    low_rank = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return linear(x, made.weight.to(x.dtype)) + low_rank


def torch_lora(made: Problem) -> Callable[[Tensor], Tensor]:
    """LoRA as usually written in torch: for each adapter, two products and torch's own dropout."""
    leaves = _leaves(made, made.x.dtype)
    return lambda x: _lora(made, x, leaves, None)


def _masks(made: Problem) -> list[list[Tensor]]:
    return [
        [
            keep(
                *(span.block.seed, site.module, made.routing.counters[span.start : span.stop]),
                *(made.x.shape[1], span.threshold),
            )
            for site in made.bank.sites
        ]
        for span in made.routing.spans
    ]


def _results(made: Problem, dtype: torch.dtype, masks: list[list[Tensor]]) -> dict[str, Tensor]:
    x, leaves = made.x.detach().to(dtype).requires_grad_(), _leaves(made, dtype)
    out = _lora(made, x, leaves, masks)
    torch.autograd.backward(out, made.grad.to(dtype))
    pairs = [pair for span in leaves for pair in span]
    return _named(out.detach(), x.grad, [a.grad for a, _ in pairs], [b.grad for _, b in pairs])


def _named(
    out: Tensor, dx: Tensor | None, da: Sequence[Tensor | None], db: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    flat: dict[str, list[Tensor | None]] = {"out": [out], "dx": [dx], "dA": [*da], "dB": [*db]}
    return {
        name: torch.cat([tensor.double().flatten() for tensor in tensors if tensor is not None])
        for name, tensors in flat.items()
    }


def rms(tensor: Tensor) -> float:
    """Root mean square."""
    return float(tensor.double().square().mean().sqrt())


def check(made: Problem, backend: str) -> Check:
    """Compare output and all gradients of a backend with float64, as well as torch LoRA's in the same
    dtype."""
    masks = _masks(made)
    made.bank.zero_gradients()
    x = made.x.detach().requires_grad_()
    out = made.run(backend, x)
    torch.autograd.backward(out, made.grad)
    pairs = [span.block.at(site, GRADIENTS) for span in made.routing.spans for site in made.bank.sites]
    got = _named(out.detach(), x.grad, [a for a, _ in pairs], [b for _, b in pairs])
    truth, plain = _results(made, torch.float64, masks), _results(made, made.x.dtype, masks)
    sizes = {name: rms(tensor) or 1.0 for name, tensor in truth.items()}
    errors = {name: rms(got[name] - truth[name]) / sizes[name] for name in truth}
    unfused = {name: rms(plain[name] - truth[name]) / sizes[name] for name in truth}
    right = all(errors[name] <= 2 * unfused[name] for name in truth)  # false also if it is NaN
    return Check(errors, unfused, right)
