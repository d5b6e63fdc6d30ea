"""Bytes that a layer with adapters moves through a device's memory, counted on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import dropout

from plait.config.fields import build
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait_bench.benchmarks import BENCHMARKS
from plait_bench.figures import Figure, Report
from plait_bench.inputs import OPTIONS, at_least_one
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
        rereads: bytes that the frozen layer's products move over those of their tensors; the first is what
            is compared.
    """

    layers: tuple[tuple[int, int, int], ...]
    rank: int
    adapters: tuple[int, ...]
    dropout: float
    rereads: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        at_least_one(self, "rank")


@BENCHMARKS.register("lorafusion/traffic")
def traffic(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Bytes of forward and backward with fused adapters over plain operators', and over the frozen layer's.

    Raises:
        ConfigError: a wrong option.
    """
    del settings, jobs
    asked = build(TrafficOptions, options, OPTIONS)
    figures = []
    for (tokens, inputs, outputs), (number, rereads) in product(asked.layers, enumerate(asked.rereads)):
        name, other = f"{tokens} × {inputs} × {outputs}", f"; products × {rereads:g}" if number else ""
        frozen, plain = (
            _moved(_plain(tokens, inputs, outputs, rank, asked.dropout)) for rank in (0, asked.rank)
        )
        more = (rereads - 1) * frozen  # in all three, as their large products are the same
        ratio = (plain + more) / (frozen + more)
        note = f"{plain / 1e6:,.0f} over {frozen / 1e6:,.0f} MB, without rereading"
        title = f"{name}: plain operators over frozen{other}"
        figures.append(Figure(title, ratio, "×", "computed", note=note))
        title = f"{name}: plain operators{other}"
        figures.append(Figure(title, (plain + more) / 2**30, "GiB", "computed"))
        for count in asked.adapters:
            shape = Shape(tokens, inputs, (outputs,), (asked.rank,) * count, asked.dropout)
            made = problem(shape, device="meta", dtype=DTYPE)
            made.train("triton")  # tables are made once for a microbatch
            fused = _moved(partial(made.train, "triton"))
            note = f"{fused / 1e6:,.0f} MB, without rereading"
            title = f"{name}, {count} adapter{'s' * (count > 1)}: fused"
            figures += [
                Figure(
                    f"{title} over plain{other}", (fused + more) / (plain + more), "×", "computed", note=note
                ),
                Figure(f"{title}{other}", (fused + more) / 2**30, "GiB", "computed"),
            ]
    notes = ("Each operator reads its inputs and writes its outputs once, except products.",)
    return Report("LoRAFusion, bytes of a layer", tuple(figures), notes)


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
            out = out + 2.0 * (dropout(x, share) @ a.T @ b.T)
        torch.autograd.backward(out, grad)

    return run
