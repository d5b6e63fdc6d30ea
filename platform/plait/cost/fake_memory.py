"""Memory observations of the engine's own pass for any model size, without weights or a device.

Two and three layers are measured over meta tensors and extrapolated: every layer adds the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from transformers import LlamaConfig

from plait.cost.fake_model import fake_context, fake_model
from plait.cost.memory import MemoryObservation
from plait.cost.memory_probe import Probe, ProbeOptions, observe
from plait.models import BaseModel, MicrobatchContext
from plait_kernels import Routing

FEW, MORE = 2, 3  # layers measured; a single layer has no neighbour whose activations it holds


def observe_extrapolated(
    config: LlamaConfig, probes: Iterable[Probe], options: ProbeOptions
) -> list[MemoryObservation]:
    """Peaks of the model at its full depth, from two and three layers."""
    few = fake_model(config, layers=FEW, dtype=options.dtype)
    more = fake_model(config, layers=MORE, dtype=options.dtype)
    found = []
    for probe in probes:
        low = _observe(few, config, probe, options)
        high = _observe(more, config, probe, options)
        at = partial(_line, layers=config.num_hidden_layers)
        peaks = {name: at(low.peaks[name], high.peaks[name]) for name in low.peaks}
        found.append(MemoryObservation(low.shape, peaks, at(low.static, high.static)))
    return found


def observe_whole(config: LlamaConfig, probe: Probe, options: ProbeOptions) -> MemoryObservation:
    """Peaks at full depth, measured: what the extrapolation is checked with."""
    model = fake_model(config, layers=config.num_hidden_layers, dtype=options.dtype)
    return _observe(model, config, probe, options)


def depth_error(
    config: LlamaConfig, probe: Probe, options: ProbeOptions, extrapolated: MemoryObservation
) -> float:
    """(extrapolated − observed) / observed of one probe's peak above static bytes, at full depth."""
    return extrapolated.dynamic / observe_whole(config, probe, options).dynamic - 1.0


def _line(few: float, more: float, *, layers: int) -> float:
    return few + (layers - FEW) * (more - few) / (MORE - FEW)


def _observe(model: BaseModel, config: LlamaConfig, probe: Probe, options: ProbeOptions) -> MemoryObservation:
    def context(probe: Probe, routing: Routing) -> MicrobatchContext:
        return fake_context(
            config, probe.lengths, routing, checkpointing=options.checkpointing, dtype=options.dtype
        )

    return observe(model, probe, options, context)
