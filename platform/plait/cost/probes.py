"""Probes: microbatches that go through the engine's own pass only to measure their memory and seconds.

Memory is the peak of CUDA's allocator or, on other devices, of counted live tensor storage. Nothing is
learnt, because adapters are zero. Seconds are of forward and backward, for decoder layers and for head and
loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from time import perf_counter

import numpy as np
import torch

from plait.cost.fitting import Fit
from plait.cost.memory import MemoryObservation, MemoryShape
from plait.cost.peaks import KnownResults, Meter, PhasePeaks, meter_of
from plait.cost.time import MicrobatchShape, TimeModel, fit_head, fit_layer
from plait.models.attention import KEEP_UP_TO
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait_kernels import Bank, RoutedSegment, Routing, RowCounters

_GRID_LENGTHS = (60, 170, 500)
_GRID_RANKS = ((8,), (64, 16), (4, 32, 8), (128,))
_GRID_LABELLED = (0.01, 0.1, 0.4, 1.0)
_DRAWN_RANKS = (4, 8, 16, 32, 64)
_DRAWN_MEANS = (80, 200, 500)
ROUNDS = 3  # through all probes, to measure seconds
SPREAD, LONGEST_DRAWN = 0.6, 2048  # of random lengths: standard deviation of the logarithm; most tokens


@dataclass(frozen=True, slots=True)
class ProbeSegment:
    """Samples of one adapter: its rank and their lengths."""

    rank: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """A microbatch to be measured: its segments and how many of its tokens are labelled."""

    segments: tuple[ProbeSegment, ...]
    labelled: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of all samples, in order."""
        return tuple(length for segment in self.segments for length in segment.lengths)


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """Options of the engine that affect memory.

    Attributes:
        targets: last parts of the names of the linears with adapters.
        backend: kernel backend of the adapters' part.
        dropout: of the adapters; Triton's kernels keep which features were dropped.
    """

    dtype: torch.dtype = torch.bfloat16
    checkpointing: bool = False
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    backend: str = "grouped"
    dropout: float = 0.0


MakeContext = Callable[[Probe, Routing], MicrobatchContext]


def probe_grid(capacity: int) -> tuple[Probe, ...]:
    """Twelve probes that separate the features of the memory model.

    Tokens are halved from the capacity down, in three series; lengths, ranks and the share of labelled tokens
    vary in other orders, down to so few that all logits fit into one chunk.
    """
    found = []
    for index in range(12):
        tokens = max(16, capacity >> (index % 4))
        ranks = _GRID_RANKS[(index // 2) % 4]
        lengths = _ragged(tokens // len(ranks), _GRID_LENGTHS[index % 3])
        share = _GRID_LABELLED[(index + index // 4) % 4]
        segments = tuple(ProbeSegment(rank, lengths) for rank in ranks)
        found.append(Probe(segments, max(1, int(tokens * share))))
    return tuple(found)


def _ragged(tokens: int, mean: int) -> tuple[int, ...]:
    """Lengths between 0.5 and 1.5 times the mean that add up to ``tokens``."""
    lengths: list[int] = []
    left = tokens
    while left > 0:
        lengths.append(min(left, max(1, int(mean * (0.5 + (0.618 * (len(lengths) + 1)) % 1.0)))))
        left -= lengths[-1]
    return tuple(lengths)


def drawn_probe(rng: np.random.Generator, most: int) -> Probe:
    """A random ragged microbatch of 1 to 4 adapters and up to ``most`` tokens, 10 to 100 % labelled."""
    adapters = int(rng.integers(1, 5))
    least = min(256, most // 2)
    tokens = max(1, int(np.exp(rng.uniform(np.log(least), np.log(most)))) // adapters)
    segments = []
    for _ in range(adapters):
        mean, seed = float(rng.choice(_DRAWN_MEANS)), int(rng.integers(2**31))
        # lognormal lengths with this mean
        raw = np.random.default_rng(seed).lognormal(math.log(mean) - SPREAD**2 / 2, SPREAD, tokens)
        drawn = np.clip(np.rint(raw), 1, LONGEST_DRAWN).astype(np.int64)
        ends = np.minimum(np.cumsum(drawn), tokens)
        lengths = np.diff(ends[: np.searchsorted(ends, tokens) + 1], prepend=0)
        segments.append(ProbeSegment(int(rng.choice(_DRAWN_RANKS)), tuple(int(length) for length in lengths)))
    return Probe(tuple(segments), max(1, int(tokens * adapters * rng.uniform(0.1, 1.0))))


def observe_device(
    model: BaseModel, probes: Iterable[Probe], options: ProbeOptions
) -> list[MemoryObservation]:
    """Peaks on the model's own device."""

    def context(probe: Probe, routing: Routing) -> MicrobatchContext:
        return device_context(model, probe, routing, options)

    return [observe(model, probe, options, context) for probe in probes]


def device_context(
    model: BaseModel, probe: Probe, routing: Routing | None, options: ProbeOptions
) -> MicrobatchContext:
    """The probe's context on the model's own device; every token is the first of the vocabulary."""
    offsets = (0, *accumulate(probe.lengths))
    ids = torch.zeros(offsets[-1], dtype=torch.int64, device=model.device)
    return MicrobatchContext.of(ids, offsets, routing=routing, checkpointing=options.checkpointing)


def probe_bank(model: BaseModel, probe: Probe, options: ProbeOptions) -> Bank:
    """A bank with one adapter for each of the probe's segments, and the backend chosen."""
    bank = Bank(model.sites, device=model.device, compute_dtype=options.dtype)
    sites = [site.name for site in model.sites if site.name.rpartition(".")[2] in options.targets]
    for index, segment in enumerate(probe.segments):
        bank.attach(str(index), rank=segment.rank, scale=1.0, dropout=options.dropout, seed=0, sites=sites)
    model.install(backend=options.backend)
    return bank


def probe_loss(model: BaseModel, probe: Probe, hidden: torch.Tensor) -> torch.Tensor:
    """Loss of as many hidden rows as the probe has labelled tokens."""
    zeros = partial(torch.zeros, probe.labelled, device=model.device)
    loss, _ = model.loss(hidden, zeros(dtype=torch.int64), zeros(dtype=torch.int64), zeros())
    return loss


def probe_routing(probe: Probe, bank: Bank, first: int = 0) -> Routing:
    """Which rows have which adapter; these are named by numbers from ``first`` on."""
    routed, start = [], 0
    for index, segment in enumerate(probe.segments):
        routed.append(RoutedSegment(str(first + index), start, start + sum(segment.lengths)))
        start += sum(segment.lengths)
    counters = RowCounters(*(torch.zeros(start, dtype=torch.int64) for _ in range(4)))
    return Routing.build(bank, routed, counters, training=True)


def observe(
    model: BaseModel,
    probe: Probe,
    options: ProbeOptions,
    context: MakeContext,
    known: KnownResults | None = None,
) -> MemoryObservation:
    """Measure one probe, after a tiny one that makes what the bank makes once and keeps.

    Args:
        known: results of operations on meta tensors, where several probes are measured with them.
    """
    tiny = tuple(replace(segment, lengths=(2,)) for segment in probe.segments)
    warm_up = Probe(tiny, len(tiny))
    with meter_of(model.device, known) as meter:
        bank = probe_bank(model, probe, options)
        _run(model, warm_up, context, bank, meter)
        peaks = _run(model, probe, context, bank, meter)
    return MemoryObservation(probe_shape(model, probe, options), dict(peaks.phases), peaks.static)


def probe_shape(model: BaseModel, probe: Probe, options: ProbeOptions) -> MemoryShape:
    """The shape from which a probe's memory is predicted; its adapters are on the targets of ``options``."""
    sites = [site.name for site in model.sites if site.name.rpartition(".")[2] in options.targets]
    inputs = [(group.names, group.sites[0].in_features) for group in model.groups]
    read = sum(features for names, features in inputs if not set(names).isdisjoint(sites))
    share = len(sites) / len(model.sites)
    return MemoryShape.of(
        probe.lengths,
        labelled=probe.labelled,
        ranks=[segment.rank * share for segment in probe.segments for _ in segment.lengths],
        inputs_read=read / sum(features for _, features in inputs),
        keep_up_to=KEEP_UP_TO,
    )


def _run(model: BaseModel, probe: Probe, context: MakeContext, bank: Bank, meter: Meter) -> PhasePeaks:
    """Run forward, loss and backward as the worker does; the peak of each."""
    peaks = PhasePeaks(meter)
    through = context(probe, probe_routing(probe, bank))  # kept until the end, as the worker does
    hidden = model.hidden(through)
    peaks.end("forward")
    loss = probe_loss(model, probe, hidden)
    peaks.end("loss")
    loss.backward()  # type: ignore[no-untyped-call]
    peaks.end("backward")
    return peaks


@dataclass(frozen=True, slots=True)
class TimeObservation:
    """Seconds of one microbatch; ``layers`` covers all decoder layers and the embedding."""

    shape: MicrobatchShape
    layers_forward: float
    layers_backward: float
    head_forward: float
    head_backward: float

    @property
    def layers(self) -> float:
        """Forward and backward of the decoder layers."""
        return self.layers_forward + self.layers_backward

    @property
    def head(self) -> float:
        """Forward and backward of head and loss."""
        return self.head_forward + self.head_backward

    @property
    def total(self) -> float:
        """Seconds of the whole microbatch."""
        return self.layers + self.head


def observe_seconds(
    model: BaseModel, probes: Iterable[Probe], options: ProbeOptions
) -> list[TimeObservation]:
    """Seconds of each probe: the minimum of ``ROUNDS`` rounds through all of them, after a warm-up round.

    The minimum, because disturbances only add time; in rounds, so that a disturbance affects all probes
    alike.
    """
    chosen = list(probes)
    rows: list[list[tuple[float, ...]]] = [[] for _ in chosen]
    for round_ in range(ROUNDS + 1):
        for probe, seconds in zip(chosen, rows, strict=True):
            measured = _pass(model, probe, options, probe_bank(model, probe, options))
            if round_:
                seconds.append(measured)
    return [
        TimeObservation(
            MicrobatchShape.of(probe.lengths, labelled=probe.labelled),
            *(min(part) for part in zip(*seconds, strict=True)),
        )
        for probe, seconds in zip(chosen, rows, strict=True)
    ]


def fit_seconds(observations: Sequence[TimeObservation], layers: int) -> tuple[TimeModel, Fit, Fit]:
    """The time model of these observations, with the fits of layers and of head and loss.

    Raises:
        InputError: no observations.
    """
    layer, layer_fit = fit_layer((each.shape, each.layers / layers) for each in observations)
    head, head_fit = fit_head((each.shape, each.head) for each in observations)
    body, ends = sum(each.layers for each in observations), sum(each.head for each in observations)
    time = TimeModel(
        layers,
        {1: layer},
        {1: head},
        forward_share=sum(each.layers_forward for each in observations) / body,
        head_forward_share=sum(each.head_forward for each in observations) / ends,
    )
    return time, layer_fit, head_fit


def seconds_errors(time: TimeModel, observations: Iterable[TimeObservation]) -> tuple[float, ...]:
    """(predicted − measured) / measured, for whole microbatches."""
    return tuple(time.microbatch(each.shape) / each.total - 1.0 for each in observations)


def _pass(model: BaseModel, probe: Probe, options: ProbeOptions, bank: Bank) -> tuple[float, ...]:
    """Seconds of forward and backward through the layers, and of forward and backward of head and loss."""
    context = device_context(model, probe, probe_routing(probe, bank), options)
    begin = _now(model)
    hidden = model.hidden(context)
    through = _now(model)
    rows = hidden.detach().requires_grad_()  # detached here, so that backward can be timed in two parts
    loss = probe_loss(model, probe, rows)
    lost = _now(model)
    torch.autograd.backward(loss)
    back = _now(model)
    torch.autograd.backward(hidden, rows.grad)
    return through - begin, _now(model) - back, lost - through, back - lost


def _now(model: BaseModel) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return perf_counter()
