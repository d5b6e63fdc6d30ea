"""A sharded base on a described cluster: whole replicas that share the weights of one model's layers.

A seam: it is a cluster of its own, with its own times and memory, so what plans replicas plans it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from plait.cost.clusters import Cluster
from plait.cost.profiles import ClusterProfile
from plait.cost.replica import Configuration
from plait.planning.model_memory import ModelMemory


@dataclass(frozen=True, slots=True)
class ShardedBase:
    """Devices that share a base model.

    Attributes:
        cluster: these devices, whose times count what they wait for layers.
        memory: of the model on each of them.
    """

    cluster: Cluster
    memory: ModelMemory

    def __str__(self) -> str:
        (kind,) = self.cluster.kinds
        (configuration,) = kind.configurations
        return f"{configuration}×{configuration.shards}"


def sharded_bases(cluster: Cluster, memory: ModelMemory, *, every: bool = True) -> Iterator[ShardedBase]:
    """Sharded bases on powers of two of each kind of device, and on all of a kind. Kinds whose profile has no
    times of whole layers have none.

    Args:
        every: False: only on all devices, which must be of one kind.
    """
    if not every and len(cluster.kinds) > 1:
        return
    for profile in cluster.kinds:
        most = profile.devices.count
        counts = [2**k for k in range(1, most.bit_length()) if 2**k < most] if every else []
        for count in (*counts, most):
            if count > 1 and 1 in profile.time.layer:
                yield _sharded_base(cluster, profile, count, memory)


def _sharded_base(cluster: Cluster, profile: ClusterProfile, count: int, memory: ModelMemory) -> ShardedBase:
    """Each layer is gathered from the others over the slowest link between them, while another one runs."""
    layer = memory.weights.layers / profile.time.layers
    seconds = layer * (1 - 1 / count) / profile.devices.link(count)
    most = max(each.max_tokens for each in profile.configurations)
    only = Configuration(1, 1, most, profile.kind, shards=count)
    own = replace(
        profile,
        devices=replace(profile.devices, count=count),
        time=replace(profile.time, gather=seconds),
        configurations=(only,),
    )
    return ShardedBase(replace(cluster, kinds=(own,)), memory.sharded(count))
