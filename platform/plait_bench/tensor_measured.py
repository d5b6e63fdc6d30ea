"""Tensor parallelism, measured: bytes that processes add up for a microbatch, beside the paper's count.

Each process has a slice of every layer of one model, as in training. Bytes are counted where the model asks
the others for a sum, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from plait.adapters.slices import AdapterSlices
from plait.adapters.variants import attach
from plait.core.jobs import AdapterSpec, JobSpec
from plait.core.settings import ModelSettings, RunSettings
from plait.distributed.tensor import TensorGroup
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait.models.load import load_model
from plait.utils.paths import cache_dir
from plait_bench.benchmarks import benchmark
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.gloo_processes import answers, gloo_processes
from plait_bench.inputs import Count
from plait_bench.progress import part
from plait_kernels import Bank, RoutedSegment, Routing, RowCounters

SPEC = AdapterSpec(rank=8, target_modules="all-linear", dropout=0.0)
EDGES = "embedding and head have sums of their own; the first layer's input needs no gradient"


@dataclass(frozen=True, slots=True)
class TensorOptions:
    """Options of the benchmark of tensor parallelism.

    Attributes:
        slices: processes that hold every layer together.
        tokens: of the microbatch, all labelled.
    """

    slices: Count = 3
    tokens: Count = 256


class CountingGroup(TensorGroup):
    """Also counts the bytes of what is added up."""

    added = 0

    def add(self, tensor: Tensor) -> None:
        """Put the sum over all into a contiguous tensor."""
        self.added += tensor.numel() * tensor.element_size()
        super().add(tensor)


@dataclass(frozen=True, slots=True)
class Counted:
    """Bytes that one process put into sums, and the sizes that the paper's count is made of."""

    forward: int
    backward: int
    layers: int
    hidden: int
    value: int


def count(settings: ModelSettings, asked: TensorOptions) -> list[Counted]:
    """Run one microbatch, forward and backward, over processes.

    Raises:
        LostProcessError: a process died or hangs.
    """
    with gloo_processes(asked.slices, _serve, settings, asked) as links:
        return answers(links, "a slice is lost")


def _serve(number: int, link: Connection, settings: ModelSettings, asked: TensorOptions) -> None:
    group = CountingGroup(range(asked.slices), number, torch.device("cpu"))
    base = load_model(settings, cache=cache_dir())
    base.install(backend="reference")
    base.take_slice(group)
    link.send(_count(base, group, asked.tokens))


def _count(base: BaseModel, group: CountingGroup, length: int) -> Counted:
    bank = Bank(base.sites, device="cpu", compute_dtype=torch.float32)
    slices = AdapterSlices(base.slices, base.slicing)
    names = [site.name for site in base.sites]
    attach(bank, "job", SPEC, names, seed=0, weight_of=base.frozen_weight, slices=slices)
    bank.refresh()
    row = torch.arange(length)
    none = torch.zeros_like(row)
    routing = Routing.build(
        bank, [RoutedSegment("job", 0, length)], RowCounters(none, none, none, row), training=True
    )
    context = MicrobatchContext.of(row % base.vocabulary, (0, length), routing=routing)
    before = group.added
    hidden = base.hidden(context)
    loss, _ = base.loss(hidden, row, row % base.vocabulary, torch.full((length,), 1 / length))
    forward = group.added - before
    loss.backward()  # type: ignore[no-untyped-call]
    layers = len(base.own)
    backward = group.added - before - forward
    return Counted(forward, backward, layers, hidden.shape[-1], hidden.element_size())


@benchmark("mlora/tensor_measured", TensorOptions)
def tensor_measured(settings: RunSettings, _jobs: Sequence[JobSpec], asked: TensorOptions) -> Report:
    """Bytes that each process adds up for one microbatch, beside two sums a layer in each direction.

    Raises:
        ConfigError: a wrong option.
        ModelError: the model's layers do not divide.
        LostProcessError: a process died or hangs.
    """
    part(f"a microbatch over {asked.slices} processes")
    first, *_ = count(settings.model, asked)
    one = asked.tokens * first.hidden * first.value
    figures = [
        Figure(
            f"{asked.slices} slices, {name}: added up",
            added / 2**20,
            "MiB",
            "measured",
            Baseline(sums * first.layers * one / 2**20, by, at_least=0.9, at_most=1.1, why=EDGES),
            note=f"{first.layers} layers of {first.hidden} features, {asked.tokens} tokens",
        )
        for name, added, sums, by in (
            ("forward", first.forward, 2, "2 sums a layer"),
            ("backward", first.backward, 2, "2 sums a layer"),
            ("a microbatch", first.forward + first.backward, 4, "4 sums a layer, as in mLoRA's Figure 10"),
        )
    ]
    return Report("Tensor parallelism, bytes added up", tuple(figures), ())
