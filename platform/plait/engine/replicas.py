"""The replicas of a run: how many tokens each takes at once, and how fast it is.

A seam: capacities and speeds are given, or follow from what the devices say; everything after this reads one
list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from plait.core.errors import ConfigError
from plait.core.plans import Replica, ReplicaShape
from plait.core.settings import WHOLE, RunSettings
from plait.cost.memory import linear_bytes
from plait.cost.profile_store import Profile
from plait.cost.replica import balanced_split
from plait.cost.time import MicrobatchShape, TimeModel, arithmetic_time
from plait.engine.admission import LEAST_CAPACITY, Admission
from plait.engine.worker import HeldPart, WorkerFacts
from plait.models.targets import LinearInfo, layer_of


def replicas_of(facts: WorkerFacts, settings: RunSettings, profile: Profile | None) -> tuple[Replica, ...]:
    """Every replica with its capacity and speed.

    If no capacities are given, all have ``engine.capacity``; for a device with less memory than others it is
    halved until a usual job fits.
    """
    whole, given = settings.engine.capacity_or_usual, facts.capacities or settings.cluster.replica_capacities
    most = max(facts.replica_bytes)
    found = []
    for number, device in enumerate(facts.devices):
        capacity = given[number] if given else whole
        if not given and facts.replica_bytes[number] < most:
            capacity, _ = fitting_capacity(facts.of(facts.parts[number]), settings, profile)
        speed = facts.speeds[number] if facts.speeds else 1.0
        tensor, split = facts.parts[number][0].tensor, facts.splits[number]
        own = split if facts.staged else ()
        found.append(Replica(number, tensor, len(split), own, (device,), capacity, speed))
    return tuple(found)


def fitting_capacity(facts: WorkerFacts, settings: RunSettings, profile: Profile | None) -> tuple[int, bool]:
    """The run's capacity, halved until a usual job fits into the memory of one replica; whether it fits."""
    capacity = settings.engine.capacity_or_usual
    while True:
        engine = replace(settings.engine, capacity=capacity)
        own = replace(settings, engine=engine, cluster=replace(settings.cluster, capacities=()))
        admission = Admission(facts, own, profile)
        fits = admission.fits([admission.usual])
        if fits or capacity // 2 < LEAST_CAPACITY:
            return capacity, fits
        capacity //= 2


def dispatch_time(facts: WorkerFacts, profile: Profile | None) -> TimeModel:
    """By what samples are dispatched: the stored profile's seconds, else the arithmetic of the model."""
    if profile is not None and profile.time is not None:
        return profile.time
    shape = facts.shape
    return model_time(facts.linears, shape.layers, shape.hidden, shape.vocabulary)


def model_time(linears: Sequence[LinearInfo], layers: int, hidden: int, vocabulary: int) -> TimeModel:
    """Seconds by the arithmetic of a model with these linears."""
    weights = sum(each.in_features * each.out_features for each in linears)
    return arithmetic_time(layers, weights=weights, hidden=hidden, vocabulary=vocabulary)


def stage_layers(time: TimeModel, stages: int, split: Sequence[int], capacity: int) -> list[range]:
    """The layers of each stage; without a given split, such that the slowest one is as fast as possible.

    Raises:
        ConfigError: the split is not one of this model, or there are more stages than layers.
    """
    split = split or balanced_split(time, stages, MicrobatchShape.of([capacity]))
    if sum(split) != time.layers or len(split) != stages:
        raise ConfigError(
            f"cluster.layer_split={list(split)}",
            f"It has the layers of each of {stages} stages, {time.layers} in all.",
            "Leave it out: then the stages are balanced.",
        )
    return [range(*each) for each in pairwise([0, *accumulate(split)])]


def cut(
    facts: WorkerFacts,
    settings: RunSettings,
    replicas: Sequence[ReplicaShape],
    memory_bytes: int,
    sliced: Mapping[int, tuple[LinearInfo, ...]] | None = None,
) -> tuple[tuple[HeldPart, ...], ...]:
    """What the processes of replicas would hold of a model that is not loaded yet.

    A head without weights of its own is the embedding once more, on another stage.

    Args:
        sliced: all linears with their sizes in one of so many slices.

    Raises:
        ConfigError: as for :func:`stage_layers`.
    """
    time, given = dispatch_time(facts, None), settings.cluster.layer_split
    found = []
    for stages, tensor in replicas:
        if stages == 1 == tensor:
            found.append(facts.whole(memory_bytes))
            continue
        split = given if len(given) == stages else ()
        held = part_of(facts, settings.model.quantise, memory_bytes, tensor, (sliced or {}).get(tensor, ()))
        layers = stage_layers(time, stages, split, settings.engine.capacity_or_usual)
        found.append(tuple(part for own in layers for part in [held(own)] * tensor))
    return tuple(found)


def part_of(
    facts: WorkerFacts, quantise: str, memory_bytes: int, tensor: int, sliced: tuple[LinearInfo, ...]
) -> Callable[[range], HeldPart]:
    """What a process of a stage would hold of a model that is not loaded yet, by the stage's layers."""
    shape = facts.shape
    weights, end = _weights(facts, quantise)
    up_to = [0.0, *accumulate(weights)]

    def held(layers: range) -> HeldPart:
        own = up_to[layers.stop] - up_to[layers.start]
        own += end * ((layers.start == 0) + (layers.stop == shape.layers))
        return HeldPart(layers, int(own / tensor), memory_bytes, shape.made_bytes, tensor, linears=sliced)

    return held


def sharded(facts: WorkerFacts, count: int) -> WorkerFacts:
    """The facts of each of ``count`` processes that share the weights of the layers: always here is its part
    of every layer, and all that is in no layer; whole layers are while they run."""
    from plait.models.shards import most_gathered  # imports torch, which the coordinator does not

    weights, _ = _weights(facts, WHOLE)  # quantised ones are not shared
    own = facts.shape.weight_bytes - int(sum(weights) * (1 - 1 / count))
    shape = replace(facts.shape, weight_bytes=own, gathered_bytes=int(most_gathered(weights)))
    return replace(facts, shape=shape)


def _weights(facts: WorkerFacts, quantise: str) -> tuple[list[float], int]:
    """Bytes of each layer and of an embedding, of a model that is not loaded yet.

    What is neither embedding, head nor a linear counts with the layers, evenly.
    """
    shape = facts.shape
    weights = [0.0] * shape.layers
    for each in facts.linears:
        weights[layer_of(each.name)] += linear_bytes(
            each.out_features, each.in_features, shape.element_bytes, quantise
        )
    end = shape.vocabulary * shape.hidden * shape.element_bytes
    ends = 1 if shape.weight_bytes - sum(weights) < 1.5 * end else 2
    rest = max(0.0, shape.weight_bytes - sum(weights) - ends * end) / shape.layers
    return [each + rest for each in weights], end
