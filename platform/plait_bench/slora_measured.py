"""S-LoRA's comparisons of a layer's call on this machine: mixed ranks, and merged weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait_bench.benchmarks import benchmark
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import Count, require_processor
from plait_kernels.synthetic import Shape, problem


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """Options of ``slora/kernels`` and ``slora/merged``: a layer's call.

    Attributes:
        features: into and out of the layer.
        tokens: rows, divided evenly among the adapters.
        ranks: of the adapters; ``slora/merged`` takes the first.
        adapters: numbers of adapters that are compared, for ``slora/merged``.
        rounds: of measurements.
    """

    features: Count
    tokens: Count
    ranks: tuple[int, ...]
    adapters: tuple[int, ...] = ()
    rounds: Count = 5


def _seconds(rounds: int, *runs: Callable[[], object]) -> list[float]:
    """Median processor seconds of each, in turns, after one that does not count."""
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds + 1):
        for run, own in zip(runs, taken, strict=True):
            began = time.process_time()
            run()
            own.append(time.process_time() - began)
    return [median(own[1:]) for own in taken]


@benchmark("slora/kernels", LayerOptions)
@torch.no_grad()
def kernels(settings: RunSettings, _jobs: Sequence[JobSpec], asked: LayerOptions) -> Report:
    """The adapters' part of a layer's call with mixed ranks, over that with all of the largest.

    Raises:
        ConfigError: another device than the processor.
    """
    require_processor(settings)
    most = max(asked.ranks)
    mixed, padded = (
        problem(
            Shape(asked.tokens, asked.features, (asked.features,), ranks), device="cpu", dtype=torch.float32
        )
        for ranks in (asked.ranks, (most,) * len(asked.ranks))
    )
    own, largest, plain = _seconds(
        asked.rounds,
        lambda: mixed.run("grouped"),
        lambda: padded.run("grouped"),
        lambda: mixed.x @ mixed.weight.T,
    )
    share = sum(asked.ranks) / (most * len(asked.ranks))
    ratio = (own - plain) / max(largest - plain, 1e-9)
    note = f"{1e3 * (own - plain):.2f} over {1e3 * (largest - plain):.2f} ms; the layer {1e3 * plain:.2f}"
    work = Baseline(share, "work of the low-rank products")
    figures = [
        Figure("mixed ranks: adapters' part over padded ones'", ratio, "×", "measured", work, note),
        Figure("mixed ranks: whole call over padded ones'", own / largest, "×", "measured"),
    ]
    notes = (
        f"Ranks {list(asked.ranks)}, {asked.tokens} tokens, {asked.features} features; processor seconds.",
    )
    return Report("S-LoRA, mixed ranks in one batch", tuple(figures), notes)


@benchmark("slora/merged", LayerOptions)
@torch.no_grad()
def merged(settings: RunSettings, _jobs: Sequence[JobSpec], asked: LayerOptions) -> Report:
    """A layer's call with adapters beside the weights, over one product for each adapter's merged weights.

    Raises:
        ConfigError: another device than the processor.
    """
    require_processor(settings)
    figures = []
    counted = Baseline(1 + 2 * asked.ranks[0] / asked.features, "operations, counted")
    for count in asked.adapters:
        shape = Shape(asked.tokens, asked.features, (asked.features,), (asked.ranks[0],) * count)
        made = problem(shape, device="cpu", dtype=torch.float32)
        rows, own = made.x.chunk(count), [made.weight.clone() for _ in range(count)]

        def each(rows: Sequence[torch.Tensor] = rows, own: Sequence[torch.Tensor] = own) -> None:
            for x, weight in zip(rows, own, strict=True):
                torch.mm(x, weight.T)

        beside, apart = _seconds(asked.rounds, partial(made.run, "grouped"), each)
        name = f"{count} adapter{'s' * (count > 1)}: beside the weights over merged"
        note = f"{1e3 * beside:.2f} over {1e3 * apart:.2f} ms; {count} copies of the weights"
        figures.append(Figure(name, beside / apart, "×", "measured", counted, note))
    notes = (f"Rank {asked.ranks[0]}, {asked.tokens} tokens, {asked.features} features; processor seconds.",)
    return Report("S-LoRA, merged weights", tuple(figures), notes)
