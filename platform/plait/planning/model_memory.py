"""Memory of a described cluster's model, computed from its sizes only, and the replicas that fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from plait.core.errors import CapacityError, choices
from plait.core.jobs import AdapterSpec, JobSpec
from plait.core.plans import Microbatch
from plait.core.settings import WHOLE, EngineSettings
from plait.cost.clusters import Cluster
from plait.cost.memory import (
    LOSS,
    MemoryModel,
    MemoryObservation,
    MemoryShape,
    StaticBytes,
    linear_bytes,
)
from plait.cost.profiles import ClusterProfile
from plait.cost.replica import Configuration, balanced_split, even_split
from plait.cost.time import MicrobatchShape, TimeModel
from plait.engine.build import ELEMENT_BYTES, largest_made
from plait.models.targets import LinearInfo, layer_of, read_together, resolve_targets
from plait.planning.workload import Workload
from plait.simulate.report import RunMemory

PROBED = 2048  # tokens of the largest probed microbatch
Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory of the whole model on one device, from which that of its parts is computed.

    Attributes:
        model: model of peaks above static bytes.
        keep_up_to: longest sample that keeps its attention probabilities.
        adapters: the search's adapters, with which microbatches of unknown jobs are estimated.
    """

    model: MemoryModel
    weights: StaticBytes
    linears: tuple[LinearInfo, ...]
    element_bytes: int
    keep_up_to: int
    adapters: tuple[AdapterSpec, ...]

    def adapter_bytes(self, adapter: AdapterSpec) -> int:
        """Bytes of an adapter while it trains."""
        from plait.adapters.variants import adapter_bytes

        names = set(resolve_targets(adapter.target_modules, self.linears))
        return adapter_bytes(
            adapter, [each for each in self.linears if each.name in names], self.element_bytes
        )

    def peak(self, configuration: Configuration, layers: int, held: int) -> int:
        """Peak bytes of any device with the heaviest full microbatches, and adapters of ``held`` bytes.

        Tensor parallelism is assumed to divide weights and activations alike.
        """
        return self.fullest(configuration, layers, held)[1]

    def fullest(self, configuration: Configuration, layers: int, held: int) -> tuple[int, int]:
        """The fullest stage, and the peak bytes of any of its devices; arguments as for :meth:`peak`."""
        split = configuration.layer_split or even_split(layers, configuration.pp)
        rank = max(self._rank(adapter) for adapter in self.adapters)
        needed = [self._needed(configuration, layers, held, rank, *each) for each in enumerate(split)]
        stage = max(range(len(split)), key=needed.__getitem__)
        return stage, int(needed[stage])

    def most_layers(
        self, configuration: Configuration, layers: int, held: int, available: float
    ) -> tuple[int, ...]:
        """Most layers of each stage with which its devices need no more than ``available`` bytes."""
        counts = range(1, layers - configuration.pp + 2)
        rank = max(self._rank(adapter) for adapter in self.adapters)
        return tuple(
            bisect_right(
                counts, available, key=partial(self._needed, configuration, layers, held, rank, stage)
            )
            for stage in range(configuration.pp)
        )

    def _needed(
        self, configuration: Configuration, layers: int, held: int, rank: float, stage: int, count: int
    ) -> float:
        """Peak bytes of a device of a stage with so many of the layers; rank: the largest of any adapter."""
        shape = MemoryShape.heaviest(configuration.max_tokens, rank=rank, keep_up_to=self.keep_up_to)
        split = [0] * configuration.pp
        split[stage], split[stage - 1] = count, layers - count
        split[stage] = count  # of the only stage, too
        static = self.weights.with_adapters(held).stage(split, stage)
        peak = self.model.stage_peak(shape, static=static, layer_split=split, stage=stage)
        return peak / configuration.tp

    def sharded(self, count: int) -> ModelMemory:
        """The memory where ``count`` devices that each run all layers share their weights."""
        layers = 1 + max(layer_of(each.name) for each in self.linears)
        return replace(self, weights=self.weights.sharded(count, layers))

    def of_jobs(self, jobs: Iterable[JobSpec], labelled_share: float) -> RunMemory:
        """Memory of these jobs' microbatches, given the share of their tokens that is labelled."""
        adapters = {job.name: job.adapter for job in jobs}
        ranks = {name: self._rank(adapter) for name, adapter in adapters.items()}
        linears = {
            name: resolve_targets(adapter.target_modules, self.linears) for name, adapter in adapters.items()
        }

        def shape(microbatch: Microbatch) -> MemoryShape:
            parts = [(ranks[each.job], length) for each in microbatch.segments for length in each.lengths]
            there = {name for each in microbatch.segments for name in linears[each.job]}
            return MemoryShape.of(
                [length for _, length in parts],
                labelled=round(labelled_share * microbatch.tokens),
                ranks=[rank for rank, _ in parts],
                inputs_read=inputs_read(there, self.linears),
                keep_up_to=self.keep_up_to,
            )

        held = sum(self.adapter_bytes(adapter) for adapter in adapters.values())
        return RunMemory(self.model, self.weights.with_adapters(held), shape)

    def _rank(self, adapter: AdapterSpec) -> float:
        """The rank, times the share of linears that the adapter targets."""
        return adapter.rank * len(resolve_targets(adapter.target_modules, self.linears)) / len(self.linears)


def model_memory(
    profile: ClusterProfile,
    engine: EngineSettings,
    jobs: Sequence[JobSpec],
    *,
    quantise: str,
    say: Callable[[str], None],
) -> ModelMemory | None:
    """Memory of the cluster's model with these jobs' adapters; None if its sizes are not given.

    Raises:
        ModelError: the model lacks one of their targets.
    """
    if profile.shape is None:
        return None
    linears = llama_linears(profile.shape, profile.time.layers)
    adapters = tuple(dict.fromkeys(job.adapter for job in jobs))
    names = {
        name.rpartition(".")[2]
        for adapter in adapters
        for name in resolve_targets(adapter.target_modules, linears)
    }
    say(f"Memory of {profile.model}, without weights ...")
    size = ELEMENT_BYTES[profile.dtype]
    sizes = tuple(sorted(profile.shape.items()))
    model, keep_up_to = _observed(
        *(sizes, profile.time.layers, profile.dtype, engine.checkpointing, tuple(sorted(names))),
        any(adapter.dropout for adapter in adapters),
    )
    made = largest_made(read_together(linears).values(), size, quantise)
    weights = replace(weight_bytes(profile.shape, linears, size, quantise), made=made)
    return ModelMemory(model, weights, linears, size, keep_up_to, adapters)


@cache
def _observed(
    sizes: tuple[tuple[str, int], ...],
    layers: int,
    dtype: str,
    checkpointing: bool,
    targets: tuple[str, ...],
    drops: bool,
) -> tuple[MemoryModel, int]:
    """A model fitted to meta tensors, and the longest sample that keeps its attention probabilities."""
    import torch
    from transformers import LlamaConfig

    from plait.cost.fake_memory import observe_extrapolated
    from plait.cost.probes import ProbeOptions, probe_grid
    from plait.models.attention import KEEP_UP_TO
    from plait_kernels.loss import chunk_rows

    given: dict[str, Any] = {**dict(sizes), "num_hidden_layers": layers}
    config = LlamaConfig(**given, tie_word_embeddings=False)
    options = ProbeOptions(dtype=getattr(torch, dtype), checkpointing=checkpointing, targets=targets)
    observed = observe_extrapolated(config, probe_grid(PROBED), options)
    if drops:
        kept = _bits_kept(llama_linears(dict(sizes), 1), targets) * (1 if checkpointing else layers)
        observed = [_keeping(each, kept, in_loss=not checkpointing) for each in observed]
    return MemoryModel.fitted(observed, logit_rows=chunk_rows(config.vocab_size)), KEEP_UP_TO


def _bits_kept(layer: Iterable[LinearInfo], targets: Collection[str]) -> int:
    """Bytes a token and layer of the bits that a GPU's kernels keep of which features were dropped; they are
    computed, not probed, because Triton may not be installed here."""
    from plait_kernels.triton_launch import bits_bytes

    return sum(bits_bytes(each.in_features) for each in layer if each.name.rpartition(".")[2] in targets)


def _keeping(observed: MemoryObservation, more: int, *, in_loss: bool) -> MemoryObservation:
    """What would have been observed if so many more bytes a token were kept of the layers' forward; with
    checkpointing they are not kept while the loss is computed."""
    bytes_ = more * observed.shape.tokens
    peaks = {name: peak + bytes_ * (in_loss or name != LOSS) for name, peak in observed.peaks.items()}
    return replace(observed, peaks=peaks)


def llama_linears(sizes: Sizes, layers: int) -> tuple[LinearInfo, ...]:
    """The linears of a model with Llama's architecture, given the sizes in a LlamaConfig."""
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    shared = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    parts = (
        ("self_attn.q_proj", hidden, hidden),
        ("self_attn.k_proj", hidden, shared),
        ("self_attn.v_proj", hidden, shared),
        ("self_attn.o_proj", hidden, hidden),
        ("mlp.gate_proj", hidden, inner),
        ("mlp.up_proj", hidden, inner),
        ("mlp.down_proj", inner, hidden),
    )
    return tuple(
        LinearInfo(f"model.layers.{layer}.{name}", inside, outside)
        for layer in range(layers)
        for name, inside, outside in parts
    )


def weight_bytes(
    sizes: Sizes, linears: Sequence[LinearInfo], element_bytes: int, quantise: str = WHOLE
) -> StaticBytes:
    """Weights of a model with Llama's architecture and an untied head, without norms and biases (a
    millionth)."""
    rows = element_bytes * sizes["vocab_size"] * sizes["hidden_size"]
    layers = sum(
        linear_bytes(each.out_features, each.in_features, element_bytes, quantise) for each in linears
    )
    return StaticBytes(layers, embedding=rows, head=rows)


def inputs_read(names: Collection[str], linears: Iterable[LinearInfo]) -> float:
    """Share of the linears' input features that ``names`` read; an input read by several counts once."""
    groups = read_together(linears).values()
    read = sum(group[0].in_features for group in groups if any(each.name in names for each in group))
    return read / sum(group[0].in_features for group in groups)


def fitting(
    cluster: Cluster, memory: ModelMemory | None, workload: Workload, *, share: float, together: int
) -> Cluster:
    """The cluster with those configurations of its tables for which it has enough devices and memory.

    A capacity whose heaviest microbatch needs too much memory is halved, down to the longest sample. Kinds of
    devices on which nothing fits are left out.

    Args:
        memory: memory of the model; None assumes that the tables' capacities fit.

    Raises:
        CapacityError: there are too few devices for any configuration, or the longest sample fits into none.
    """
    allowed = [each for each in cluster.kinds if each.allowed]
    if not allowed:
        raise _too_few(cluster.kinds[0])
    most = max(each.max_tokens for kind in allowed for each in kind.allowed)
    workload.check_fits(most, " and ".join(map(_where, allowed)))
    if memory is None:
        return replace(cluster, kinds=tuple(replace(each, configurations=each.allowed) for each in allowed))
    held = held_together(memory, workload, together)
    longest = max(workload.longest.values())
    available = {each.kind: share * each.devices.memory_bytes for each in allowed}
    share_labelled = workload.labelled_share
    found = [
        (each, _within(each, memory, longest, held, available[each.kind], share_labelled)) for each in allowed
    ]
    if max((each.max_tokens for _, fitting in found for each in fitting), default=0) < longest:
        raise _too_little(allowed, memory, workload, held, share)
    return replace(
        cluster, kinds=tuple(replace(each, configurations=fitting) for each, fitting in found if fitting)
    )


def held_together(memory: ModelMemory, workload: Workload, together: int) -> int:
    """Bytes of the largest adapters of so many jobs."""
    sizes = (memory.adapter_bytes(job.adapter) for job in workload.jobs)
    return sum(sorted(sizes, reverse=True)[:together])


def _where(profile: ClusterProfile) -> str:
    devices = profile.devices
    return f"{devices.count} × {devices.kind} of {devices.memory_bytes / 2**30:g} GiB"


def _too_few(profile: ClusterProfile) -> CapacityError:
    least = min(profile.configurations, key=lambda each: each.devices)
    return CapacityError(
        f"{_where(profile)} for {profile.model}",
        f"The table {profile.table!r} has no replica for so few devices: {least} takes {least.devices}.",
        "Describe more devices (cluster.options.device.count), or choose another table "
        f"(cluster.options.max_tokens: {choices(profile.tables)}) or cluster.",
    )


def _too_little(
    profiles: Sequence[ClusterProfile], memory: ModelMemory, workload: Workload, held: int, share: float
) -> CapacityError:
    """The error if the longest sample fits into no replica, with what the nearest one needs."""
    name, longest = max(workload.longest.items(), key=lambda each: each[1])
    needs = [(replace(each, max_tokens=longest), profile) for profile in profiles for each in profile.allowed]
    best, profile = min(
        needs, key=lambda each: memory.peak(each[0], each[1].time.layers, held) / each[1].devices.memory_bytes
    )
    stage, need = memory.fullest(best, profile.time.layers, held)
    where = f"stage {stage + 1} of {best}" if best.pp > 1 else str(best)
    available = share * profile.devices.memory_bytes
    return CapacityError(
        f"job {name} has a sample of {longest} tokens ({workload.longest_is[name]}): with it alone {where} "
        f"takes {need / 2**30:.1f} GiB on a device",
        f"At most {available / 2**30:.1f} GiB may be used of each of {_where(profile)} "
        f"(planner.memory_share={share}).",
        "Set engine.checkpointing=true if it is not set, truncate long samples (model.max_length), train "
        "fewer jobs at once (search.parallel), or describe more or larger devices.",
    )


def _within(
    profile: ClusterProfile,
    memory: ModelMemory,
    longest: int,
    held: int,
    available: float,
    labelled_share: float,
) -> tuple[Configuration, ...]:
    """The configurations that fit, each with that capacity and split with which the slowest stage takes the
    fewest seconds a token."""
    found = []
    for configuration in profile.allowed:
        options = []
        for capacity in _capacities(configuration.max_tokens, longest):
            smaller = replace(configuration, max_tokens=capacity)
            shape = MicrobatchShape.of([capacity], labelled=round(labelled_share * capacity))
            split, balanced = _split(profile.time, smaller, shape, memory, held, available)
            if split:
                option = smaller if balanced else replace(smaller, layer_split=split)
                options.append((_slowest(profile.time, smaller, split, longest, labelled_share), option))
            if balanced:  # with smaller microbatches the stages take longer
                break
        if options:
            found.append(min(options, key=lambda each: each[0])[1])
    return tuple(found)


def _split(
    time: TimeModel,
    configuration: Configuration,
    shape: MicrobatchShape,
    memory: ModelMemory,
    held: int,
    available: float,
) -> tuple[tuple[int, ...], bool]:
    """The fastest split that fits, and whether no other is faster; nothing if none fits."""
    pp, tp = configuration.pp, configuration.tp
    most = memory.most_layers(configuration, time.layers, held, available)
    if min(most) < 1 or sum(most) < time.layers:
        return (), False
    split = balanced_split(time, pp, shape, tp=tp, most_layers=most)
    return split, split == balanced_split(time, pp, shape, tp=tp)


def _slowest(
    time: TimeModel, configuration: Configuration, split: Sequence[int], longest: int, labelled_share: float
) -> float:
    """Seconds a token of the slowest stage, with full microbatches."""
    capacity = configuration.max_tokens
    full, rest = divmod(capacity, min(longest, capacity))
    lengths = [min(longest, capacity)] * full + [rest] * (rest > 0)
    shape = MicrobatchShape.of(lengths, labelled=round(labelled_share * capacity))
    stages = (
        time.stage(shape, tp=configuration.tp, layers=count, last=stage == len(split) - 1).total
        for stage, count in enumerate(split)
    )
    return max(stages) / capacity


def _capacities(most: int, longest: int) -> Sequence[int]:
    """``most``, its repeated halves that fit the longest sample, and finally the length of that sample.

    A configuration that does not fit the longest sample is for shorter ones and is halved freely.
    """
    least = longest if longest <= most else 1
    found = [most]
    while found[-1] // 2 >= least:
        found.append(found[-1] // 2)
    return found if found[-1] == least else [*found, least]
