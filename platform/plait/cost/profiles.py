"""Described clusters: devices, links, and the fitted profile of one model on them (conf/cluster/*.yaml)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.core.errors import ConfigError, choices
from plait.cost.memory import MemoryCoefficients, MemoryModel
from plait.cost.reading import by_degree, mapping, need, number, numbers, rows, whole
from plait.cost.replica import Configuration
from plait.cost.time import HeadTime, LayerTime, TimeModel

GIB = 1024**3
GB = 10**9
RESTART_SECONDS = 180.0  # of a new deployment: LobRA (§5.1) says less than three minutes
TABLES = "cluster.options.max_tokens_tables"
KEYS = (
    "name",
    "source",
    "model",
    "dtype",
    "shape",
    "device",
    "restart_seconds",
    "time",
    "max_tokens",
    "max_tokens_tables",
    "memory",
)
BETWEEN = "between_nodes_gb_per_s"
DEVICE_KEYS = ("kind", "memory_gib", "count", "per_node", "within_node_gb_per_s", BETWEEN)
SHARES = ("forward_share", "head_forward_share")
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


@dataclass(frozen=True, slots=True)
class Devices:
    """The machines of a cluster.

    Attributes:
        kind: device name.
        memory_bytes: of one device.
        count: of all devices.
        per_node: devices of one node.
        within_node: bytes a second between two devices of a node.
        between_nodes: bytes a second between two nodes; None where there is one node.
    """

    kind: str
    memory_bytes: int
    count: int
    per_node: int
    within_node: float
    between_nodes: float | None = None

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "count", "per_node", "within_node", "between_nodes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"cluster.device.{name}={value}", "It must be above 0.")

    def link(self, devices: int) -> float:
        """Bytes a second between stages of a replica on so many devices: of the slowest link that it has."""
        if devices <= self.per_node or self.between_nodes is None:
            return self.within_node
        return self.between_nodes


@dataclass(frozen=True, slots=True)
class ClusterProfile:
    """A cluster with the profile of one model on it.

    Attributes:
        name: of the profile.
        source: where its figures come from, and what is assumed.
        model: which base model was profiled.
        dtype: of its arithmetic.
        configurations: tp, pp and the most tokens of a microbatch, from the table named ``table``.
        table: which of ``tables`` is used; published tables that disagree are all kept.
        memory: fitted memory model, None where no figures were published.
        shape: sizes of the model as a LlamaConfig names them, None where they are not given.
        restart_seconds: between saving the adapters and training on with other replicas.
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
    memory: MemoryModel | None = None
    shape: Mapping[str, int] | None = None
    restart_seconds: float = RESTART_SECONDS

    def __post_init__(self) -> None:
        if self.restart_seconds < 0:
            raise ConfigError(f"cluster.restart_seconds={self.restart_seconds}", "It must be 0 or more.")

    @property
    def allowed(self) -> tuple[Configuration, ...]:
        """The configurations of the table that the cluster has enough devices for."""
        return tuple(each for each in self.configurations if each.devices <= self.devices.count)

    def recomputing(self) -> ClusterProfile:
        """The same with activation checkpointing: the forward pass of every layer runs twice."""
        return replace(self, time=self.time.recomputing())

    def check_model(self, model: str, *, layers: int, hidden_size: int) -> None:
        """The profile is one of this model, told by its sizes: fine-tuned weights cost the same.

        Raises:
            ConfigError: it is of another model.
        """
        known = self.time.layers, (self.shape or {"hidden_size": hidden_size})["hidden_size"]
        if known != (layers, hidden_size):
            raise ConfigError(
                f"model {model}: {layers} layers, {hidden_size} features",
                f"The profile {self.name} is of {self.model}: {known[0]} layers, {known[1]} features.",
                "Choose a profile of this model, or measure one with `plait profile`.",
            )


def cluster_profile(options: Mapping[str, Any]) -> ClusterProfile:
    """The profile that ``cluster.options`` describes.

    Raises:
        ConfigError: a key is missing or unknown, or a value is negative or of the wrong kind.
    """
    options = mapping(options, "cluster.options", KEYS)
    tables = mapping(need(options, "max_tokens_tables", "cluster.options"), TABLES)
    table = str(need(options, "max_tokens", "cluster.options"))
    if table not in tables:
        raise ConfigError(f"cluster.options.max_tokens={table!r}", f"It must be one of {choices(tables)}.")
    restart = {"restart_seconds": RESTART_SECONDS, **options}
    return ClusterProfile(
        name=str(need(options, "name", "cluster.options")),
        source=str(need(options, "source", "cluster.options")),
        model=str(need(options, "model", "cluster.options")),
        dtype=str(options.get("dtype", "bfloat16")),
        devices=_devices(need(options, "device", "cluster.options")),
        time=_time(need(options, "time", "cluster.options")),
        configurations=_configurations(tables[table], f"{TABLES}.{table}"),
        table=table,
        tables=tuple(sorted(tables)),
        memory=None if options.get("memory") is None else _memory(options["memory"]),
        shape=None if options.get("shape") is None else _shape(options["shape"]),
        restart_seconds=number(restart, "restart_seconds", "cluster.options"),
    )


def _shape(value: object) -> dict[str, int]:
    raw = mapping(value, "cluster.options.shape", SIZES)
    return {name: whole(raw, name, "cluster.options.shape") for name in SIZES}


def _memory(value: object) -> MemoryModel:
    return MemoryModel.of(numbers(MemoryCoefficients, value, "cluster.options.memory"))


def _devices(value: object) -> Devices:
    owner = "cluster.options.device"
    raw = mapping(value, owner, DEVICE_KEYS)
    for name in DEVICE_KEYS:
        if name != "kind" and raw.get(name) is not None and not number(raw, name, owner) > 0:
            raise ConfigError(f"{owner}.{name}={raw[name]}", "It must be above 0.")
    return Devices(
        kind=str(need(raw, "kind", owner)),
        memory_bytes=int(number(raw, "memory_gib", owner) * GIB),
        count=whole(raw, "count", owner),
        per_node=whole(raw, "per_node", owner),
        within_node=number(raw, "within_node_gb_per_s", owner) * GB,
        between_nodes=None if raw.get(BETWEEN) is None else number(raw, BETWEEN, owner) * GB,
    )


def _time(value: object) -> TimeModel:
    owner = "cluster.options.time"
    raw = mapping(value, owner, ("layers", "layer", "head", *SHARES))
    return TimeModel(
        layers=whole(raw, "layers", owner),
        layer=by_degree(need(raw, "layer", owner), LayerTime, f"{owner}.layer"),
        head=by_degree(raw.get("head") or (), HeadTime, f"{owner}.head"),
        **{key: number(raw, key, owner) for key in SHARES if key in raw},
    )


def _configurations(value: object, owner: str) -> tuple[Configuration, ...]:
    found: dict[tuple[int, int], Configuration] = {}
    for row in rows(value, owner):
        if not (isinstance(row, Sequence) and len(row) == 3 and all(type(each) is int for each in row)):
            raise ConfigError(f"{owner}: row {row!r}", "A row is [tp, pp, most tokens].")
        tp, pp, most = row
        if (tp, pp) in found:
            raise ConfigError(f"{owner} has tp={tp}, pp={pp} twice", "Each kind of replica has one row.")
        found[tp, pp] = Configuration(tp, pp, most)
    if not found:
        raise ConfigError(f"{owner}=[]", "A table has a row [tp, pp, most tokens] for each replica.")
    return tuple(found.values())
