"""Seconds of probes: forward and backward, decoder layers apart from head and loss, on the model's device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from plait.cost.fitting import Fit
from plait.cost.memory_probe import (
    Probe,
    ProbeOptions,
    device_context,
    probe_bank,
    probe_loss,
    probe_routing,
)
from plait.cost.shapes import MicrobatchShape
from plait.cost.time import TimeModel, fit_head, fit_layer
from plait.models import BaseModel
from plait_kernels import Bank


@dataclass(frozen=True, slots=True)
class TimeObservation:
    """Seconds of one microbatch; ``layers`` of all decoder layers with the embedding."""

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
        """Of the whole microbatch."""
        return self.layers + self.head


def probe_shape(probe: Probe) -> MicrobatchShape:
    """What seconds are predicted from."""
    ranks = [segment.rank for segment in probe.segments for _ in segment.lengths]
    return MicrobatchShape.of(probe.lengths, labelled=probe.labelled, ranks=ranks)


def observe_seconds(
    model: BaseModel, probes: Iterable[Probe], options: ProbeOptions, *, repeats: int = 3
) -> list[TimeObservation]:
    """Seconds of each probe: the least of ``repeats`` rounds through all of them, after one that warms up.

    The least, because whatever disturbs only adds; rounds, so that a disturbance hits all probes alike.
    """
    chosen = list(probes)
    rows: list[list[tuple[float, ...]]] = [[] for _ in chosen]
    for round_ in range(repeats + 1):
        for probe, seconds in zip(chosen, rows, strict=True):
            measured = _pass(model, probe, options, probe_bank(model, probe, options))
            if round_:
                seconds.append(measured)
    return [
        TimeObservation(probe_shape(probe), *(min(part) for part in zip(*seconds, strict=True)))
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
    """(predicted − measured) / measured of whole microbatches."""
    return tuple(time.microbatch(each.shape) / each.total - 1.0 for each in observations)


def _pass(model: BaseModel, probe: Probe, options: ProbeOptions, bank: Bank) -> tuple[float, ...]:
    """Seconds of forward and backward through the layers, and of forward and backward of head and loss."""
    context = device_context(model, probe, probe_routing(probe, bank), options)
    begin = _now(model)
    hidden = model.embed(context)
    for index in range(model.layer_count):
        hidden = model.layer(index, hidden, context)
    through = _now(model)
    rows = hidden.detach().requires_grad_()  # cut here, so that backward can be timed in two parts
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
