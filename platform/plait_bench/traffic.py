"""Bytes that a layer with adapters moves through a device's memory, counted on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, native_dropout

from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait_bench.benchmarks import benchmark
from plait_bench.figures import Figure, Report
from plait_bench.inputs import Count
from plait_bench.products import Cached, Replacement, read_again
from plait_kernels.counting import counted
from plait_kernels.synthetic import Shape, problem

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """Options of ``lorafusion/traffic``.

    Attributes:
        layers: tokens, features into the layer, and out of it.
        rank: of the adapters.
        adapters: that share the rows.
        dropout: of the adapters.
        cache: of the device, beside which the frozen layer's products read their tensors.
        replacements: what a full cache lets go of; the first is what is compared.
    """

    layers: tuple[tuple[int, int, int], ...]
    rank: Count
    adapters: tuple[int, ...]
    dropout: float
    cache: Cached
    replacements: tuple[Replacement, ...] = ("random",)


@benchmark("lorafusion/traffic", TrafficOptions)
def traffic(_settings: RunSettings, _jobs: Sequence[JobSpec], asked: TrafficOptions) -> Report:
    """Bytes of forward and backward: fused adapters over plain operators, and these over the frozen layer."""
    figures = []
    for tokens, inputs, outputs in asked.layers:
        name = f"{tokens} × {inputs} × {outputs}"
        frozen, plain = (
            _moved(_plain(tokens, inputs, outputs, rank, asked.dropout)) for rank in (0, asked.rank)
        )
        fused = {count: _fused(tokens, inputs, outputs, count, asked) for count in asked.adapters}
        for number, replacement in enumerate(asked.replacements):
            cache, other = replace(asked.cache, replacement=replacement), f"; {replacement}" if number else ""
            # in all three, as their large products are the same
            again = read_again(cache, tokens, outputs, inputs) + read_again(cache, tokens, inputs, outputs)
            figures += _beside(name, other, again, frozen, plain, fused)
    notes = (
        "Each operator reads its inputs and writes its outputs once, except the frozen layer's products.",
    )
    return Report("LoRAFusion, bytes of a layer", tuple(figures), notes)


def _beside(
    name: str, other: str, again: float, frozen: int, plain: int, fused: Mapping[int, int]
) -> list[Figure]:
    """A layer's figures, if its frozen products read so many bytes again."""
    ratio = (plain + again) / (frozen + again)
    note = f"{plain / 1e6:,.0f} over {frozen / 1e6:,.0f} MB, and {again / 1e6:,.0f} that products read again"
    figures = [
        Figure(f"{name}: plain operators over frozen{other}", ratio, "×", "computed", note=note),
        Figure(f"{name}: plain operators{other}", (plain + again) / 2**30, "GiB", "computed"),
    ]
    for count, own in fused.items():
        title = f"{name}, {count} adapter{'s' * (count > 1)}: fused"
        ratio, note = (own + again) / (plain + again), f"{own / 1e6:,.0f} MB, without reading again"
        figures += [
            Figure(f"{title} over plain{other}", ratio, "×", "computed", note=note),
            Figure(f"{title}{other}", (own + again) / 2**30, "GiB", "computed"),
        ]
    return figures


def _fused(tokens: int, inputs: int, outputs: int, adapters: int, asked: TrafficOptions) -> int:
    """Bytes of forward and backward with fused adapters."""
    made = problem(
        Shape(tokens, inputs, (outputs,), (asked.rank,) * adapters, asked.dropout), device="meta", dtype=DTYPE
    )
    made.train("triton")  # tables are made once for a microbatch
    made.x.grad = None  # a gradient that is there would be added to
    return _moved(partial(made.train, "triton"))


def _moved(run: Callable[[], None]) -> int:
    with counted() as counts:
        run()
    return counts.bytes


def _plain(tokens: int, inputs: int, outputs: int, rank: int, share: float) -> Callable[[], None]:
    """Forward and backward as plain operators; rank 0: of the frozen layer alone."""

    def made(*size: int, grad: bool = True) -> Tensor:
        return torch.empty(*size, dtype=DTYPE, device="meta", requires_grad=grad)

    x, weight, grad = (
        made(tokens, inputs),
        made(outputs, inputs, grad=False),
        made(tokens, outputs, grad=False),
    )
    a, b = made(rank, inputs), made(outputs, rank)

    def run() -> None:
        out = x @ weight.T
        if rank:
            # one operator with a mask of bytes, as on a GPU; on meta tensors torch's dropout would be four
            out = out + 2.0 * (native_dropout(x, share, True)[0] @ a.T @ b.T)
        torch.autograd.backward(out, grad)

    return run
