"""Memory observations of the engine's own pass for any model size, without weights or a device.

Two and three layers are measured with meta tensors and extrapolated, because every layer adds the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from plait.core.errors import ModelError
from plait.cost.memory import MemoryObservation
from plait.cost.peaks import KnownResults
from plait.cost.probes import Probe, ProbeOptions, observe
from plait.models.attention import AttentionLayout, HeadIndex
from plait.models.base import BaseModel, Identity
from plait.models.context import MicrobatchContext, Rotation
from plait.models.fuse import RotaryAttention
from plait.models.lora import GroupedLinear, linear_info
from plait_kernels import Routing, Site

_NARROW = 8  # head size of the twin
_INDEX_FIELDS = ("gather", "scatter", "gather_out", "scatter_out", "padding")
FEW, MORE = 2, 3  # layers measured; a single layer has no neighbour, so it would hold fewer activations


def fake_model(config: LlamaConfig, *, layers: int, dtype: torch.dtype) -> BaseModel:
    """The blocks of a model of ``config``'s sizes with ``layers`` layers, on the meta device.

    Raises:
        ModelError: the family's attention cannot be replaced by the engine's own.
    """
    wide = copy.deepcopy(config)
    wide.num_hidden_layers = layers
    narrow = copy.deepcopy(wide)
    narrow.head_dim, narrow.hidden_size = _NARROW, _NARROW * config.num_attention_heads
    narrow.intermediate_size, narrow.vocab_size = 2 * _NARROW, 64
    narrow.pad_token_id = narrow.bos_token_id = narrow.eos_token_id = None
    loader = cast(Any, AutoModelForCausalLM)
    with torch.random.fork_rng(devices=[]):
        twin = loader.from_config(narrow).float().eval()
        base = BaseModel(twin, cast(Any, None), Identity("fake", "fake"), config.max_position_embeddings)
    with torch.device("meta"):
        true = loader.from_config(wide).to(dtype)
    _widen(base, twin, true, dtype)
    return base


def fake_context(
    config: LlamaConfig,
    lengths: tuple[int, ...],
    routing: Routing,
    *,
    checkpointing: bool,
    dtype: torch.dtype,
) -> MicrobatchContext:
    """The context of one microbatch on the meta device, with everything that layers share."""
    heads, shared = config.num_attention_heads, int(config.num_key_value_heads or config.num_attention_heads)
    real = AttentionLayout.of(lengths)
    index = real.index(heads, shared)
    fake = {(heads, shared): HeadIndex(*(getattr(index, name).to("meta") for name in _INDEX_FIELDS))}
    layout = AttentionLayout(real.buckets, real.tokens, real.source.to("meta"), real.target.to("meta"), fake)
    tokens, size = sum(lengths), _head_size(config)
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    rotation = Rotation(
        tokens=(_meta(1, tokens, size, dtype=dtype), _meta(1, tokens, size, dtype=dtype)),
        tables=(_meta(max(lengths), size, dtype=dtype), _meta(max(lengths), size, dtype=dtype)),
    )
    ids = _meta(tokens, dtype=torch.int64)
    return MicrobatchContext(
        token_ids=ids,
        position_ids=_meta(tokens, dtype=torch.int64),
        sample_offsets=tuple(offsets),
        routing=routing,
        checkpointing=checkpointing,
        _layout=layout,
        shared={"": rotation},
    )


def _head_size(config: LlamaConfig) -> int:
    return int(config.head_dim or config.hidden_size // config.num_attention_heads)


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _widen(base: BaseModel, twin: nn.Module, true: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace the twin's weights by meta tensors of the true size."""
    linears = {name: module for name, module in true.named_modules() if isinstance(module, nn.Linear)}
    merged: set[str] = set()
    found = (linear_info(each.name, linears[each.name]) for each in base.linears)
    base.linears = tuple(each for each in found if each is not None)
    base.vocabulary = int(true.config.vocab_size)
    for group in base.groups:
        group.sites = tuple(
            Site(site.name, site.module, linears[site.name].in_features, linears[site.name].out_features)
            for site in group.sites
        )
        group.widths = [site.out_features for site in group.sites]
        group.weight = _meta(sum(group.widths), group.sites[0].in_features, dtype=dtype)
        if group.bias is not None:
            group.bias = _meta(sum(group.widths), dtype=dtype)
        merged |= {site.name for site in group.sites}
    sizes = {name: parameter.shape for name, parameter in true.named_parameters()}
    for name, parameter in list(twin.named_parameters()):
        if name.rpartition(".")[0] not in merged:
            fake = nn.Parameter(_meta(*sizes[name], dtype=dtype), requires_grad=False)
            torch.utils.swap_tensors(parameter, fake)  # type: ignore[no-untyped-call]
    for layer in base.layers:
        for module in layer.modules():
            if isinstance(module, GroupedLinear):
                module.bind()
        attentions = [module for module in layer.modules() if isinstance(module.forward, RotaryAttention)]
        if len(attentions) != 1:
            raise ModelError(
                f"{type(twin).__name__}",
                "Only models with plain rotary attention can be computed without weights.",
                "Measure this model on its device with `plait profile`.",
            )


def observe_extrapolated(
    config: LlamaConfig, probes: Iterable[Probe], options: ProbeOptions
) -> list[MemoryObservation]:
    """Peaks of the model at its full depth, extrapolated from two and three layers."""
    few = fake_model(config, layers=FEW, dtype=options.dtype)
    more = fake_model(config, layers=MORE, dtype=options.dtype)
    found, known = [], KnownResults()
    for probe in probes:
        low = _observe(few, config, probe, options, known)
        high = _observe(more, config, probe, options, known)
        at = partial(_line, layers=config.num_hidden_layers)
        peaks = {name: at(low.peaks[name], high.peaks[name]) for name in low.peaks}
        found.append(MemoryObservation(low.shape, peaks, at(low.static, high.static)))
    return found


def observe_whole(config: LlamaConfig, probe: Probe, options: ProbeOptions) -> MemoryObservation:
    """Peaks measured at full depth, with which the extrapolation is checked."""
    model = fake_model(config, layers=config.num_hidden_layers, dtype=options.dtype)
    return _observe(model, config, probe, options, KnownResults())


def depth_error(
    config: LlamaConfig, probe: Probe, options: ProbeOptions, extrapolated: MemoryObservation
) -> float:
    """(extrapolated − observed) / observed, for one probe's peak above static bytes at full depth."""
    return extrapolated.dynamic / observe_whole(config, probe, options).dynamic - 1.0


def _line(few: float, more: float, *, layers: int) -> float:
    return few + (layers - FEW) * (more - few) / (MORE - FEW)


def _observe(
    model: BaseModel, config: LlamaConfig, probe: Probe, options: ProbeOptions, known: KnownResults
) -> MemoryObservation:
    def context(probe: Probe, routing: Routing) -> MicrobatchContext:
        return fake_context(
            config, probe.lengths, routing, checkpointing=options.checkpointing, dtype=options.dtype
        )

    return observe(model, probe, options, context, known)
