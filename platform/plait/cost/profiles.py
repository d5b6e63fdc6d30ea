"""Described clusters: devices, links, and the fitted profile of one model on them (conf/cluster/*.yaml)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from plait.config.fields import build
from plait.core.checks import above, at_least, check
from plait.core.errors import ConfigError, choices
from plait.cost.replica import Configuration
from plait.cost.time import HeadTime, LayerTime, TimeModel, by_degree

GIB = 1024**3
GB = 10**9
RESTART_SECONDS = 180.0  # time of a new deployment: LobRA (§5.1) says less than three minutes
OPTIONS = "cluster.options"
Size = Annotated[int, at_least(1)]


@dataclass(frozen=True, slots=True)
class Devices:
    """The machines of a cluster; without ``between_nodes_gb_per_s`` it has one node."""

    kind: str
    memory_gib: Annotated[float, above(0)]
    count: Annotated[int, above(0)]
    per_node: Annotated[int, above(0)]
    within_node_gb_per_s: Annotated[float, above(0)]
    between_nodes_gb_per_s: Annotated[float | None, above(0)] = None

    def __post_init__(self) -> None:
        check(self, f"{OPTIONS}.device")

    @property
    def memory_bytes(self) -> int:
        """Memory of one device."""
        return int(self.memory_gib * GIB)

    def link(self, devices: int) -> float:
        """Bytes per second between the stages of a replica on ``devices`` devices, over its slowest link."""
        if devices <= self.per_node or self.between_nodes_gb_per_s is None:
            return self.within_node_gb_per_s * GB
        return self.between_nodes_gb_per_s * GB


@dataclass(frozen=True, slots=True)
class ClusterProfile:
    """A cluster with the profile of one model on it.

    Attributes:
        source: where its figures come from, and what is assumed.
        configurations: tp, pp and the most tokens of a microbatch, from the table named ``table``.
        table: which of ``tables`` is used; published tables that disagree are all kept.
        shape: sizes of the model, named as in a LlamaConfig; None if they are not given.
        restart_seconds: time between saving the adapters and resuming training on other replicas.
        error: mean absolute relative error of its seconds on measurements that it was not fitted to; None if
            there are none.
        error_source: what ``error`` was measured on.
    """

    name: str
    source: str
    model: str
    dtype: str
    devices: Devices
    time: TimeModel
    configurations: tuple[Configuration, ...]
    table: str
    tables: tuple[str, ...]
    shape: Mapping[str, int] | None = None
    restart_seconds: float = RESTART_SECONDS
    error: float | None = None
    error_source: str = ""

    @property
    def kind(self) -> str:
        """The name of its devices in its configurations; "" if a cluster has one kind."""
        return self.configurations[0].kind

    @property
    def allowed(self) -> tuple[Configuration, ...]:
        """The configurations for which the cluster has enough devices."""
        return tuple(each for each in self.configurations if each.devices <= self.devices.count)

    @property
    def hidden_size(self) -> int:
        """The model's hidden size; 0 if its sizes are not given."""
        return 0 if self.shape is None else self.shape["hidden_size"]

    def recomputing(self) -> ClusterProfile:
        """The profile with activation checkpointing: the forward pass of every layer runs twice.

        The error of its seconds is unknown, because they were measured without checkpointing.
        """
        return replace(self, time=self.time.recomputing(), error=None)

    def check_model(self, model: str, *, layers: int, hidden_size: int) -> None:
        """Check that the profile is of this model, by its sizes: fine-tuned weights cost the same.

        Raises:
            ConfigError: the profile is of another model.
        """
        known = self.time.layers, self.hidden_size or hidden_size
        if known != (layers, hidden_size):
            raise ConfigError(
                f"model {model}: {layers} layers, {hidden_size} features",
                f"The profile {self.name} is of {self.model}: {known[0]} layers, {known[1]} features.",
                "Choose a profile of this model, or measure one with `plait profile`.",
            )


@dataclass(frozen=True, slots=True)
class _Time:
    layers: int
    layer: tuple[dict[str, Any], ...]
    head: tuple[dict[str, Any], ...] = ()
    forward_share: float = 1 / 3
    head_forward_share: float = 1 / 3
    error: Annotated[float | None, at_least(0)] = None
    error_source: str = ""

    def __post_init__(self) -> None:
        check(self, f"{OPTIONS}.time")

    def model(self) -> TimeModel:
        layer = by_degree(self.layer, LayerTime, f"{OPTIONS}.time.layer")
        head = by_degree(self.head, HeadTime, f"{OPTIONS}.time.head")
        return TimeModel(self.layers, layer, head, self.forward_share, self.head_forward_share)


@dataclass(frozen=True, slots=True)
class _Shape:
    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    vocab_size: Size

    def __post_init__(self) -> None:
        check(self, f"{OPTIONS}.shape")


@dataclass(frozen=True, slots=True)
class _Options:
    """``cluster.options`` as written."""

    name: str
    source: str
    model: str
    device: Devices
    time: _Time
    max_tokens: str
    max_tokens_tables: dict[str, tuple[tuple[int, int, int], ...]]
    dtype: str = "bfloat16"
    shape: _Shape | None = None
    restart_seconds: Annotated[float, at_least(0)] = RESTART_SECONDS

    def __post_init__(self) -> None:
        check(self, OPTIONS)
        if self.max_tokens not in self.max_tokens_tables:
            known = choices(self.max_tokens_tables)
            raise ConfigError(f"{OPTIONS}.max_tokens={self.max_tokens!r}", f"It must be one of {known}.")

    def configurations(self) -> tuple[Configuration, ...]:
        table = f"{OPTIONS}.max_tokens_tables.{self.max_tokens}"
        rows = self.max_tokens_tables[self.max_tokens]
        if not rows:
            raise ConfigError(
                f"{table}=[]", "A table needs a row [tp, pp, most tokens] for each kind of replica."
            )
        found: dict[tuple[int, int], Configuration] = {}
        for tp, pp, most in rows:
            if (tp, pp) in found:
                raise ConfigError(
                    f"{table} has tp={tp}, pp={pp} twice", "Each kind of replica must have only one row."
                )
            found[tp, pp] = Configuration(tp, pp, most)
        return tuple(found.values())


def cluster_profile(options: Mapping[str, Any]) -> ClusterProfile:
    """The profile that ``cluster.options`` describes.

    Raises:
        ConfigError: a key is missing or unknown, or a value is negative or of the wrong kind.
    """
    given = build(_Options, options, OPTIONS)
    return ClusterProfile(
        name=given.name,
        source=given.source,
        model=given.model,
        dtype=given.dtype,
        devices=given.device,
        time=given.time.model(),
        configurations=given.configurations(),
        table=given.max_tokens,
        tables=tuple(sorted(given.max_tokens_tables)),
        shape=None if given.shape is None else asdict(given.shape),
        restart_seconds=given.restart_seconds,
        error=given.time.error,
        error_source=given.time.error_source,
    )
