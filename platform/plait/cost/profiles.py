"""Described clusters: devices, links, and the fitted profile of one model on them (conf/cluster/*.yaml)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, TypeVar, cast

from plait.cost.memory import MemoryCoefficients, MemoryModel
from plait.cost.replica import Configuration
from plait.cost.time import HeadTime, LayerTime, TimeModel
from plait.errors import ConfigError, choices

T = TypeVar("T")

GIB = 1024**3
GB = 10**9
RESTART_SECONDS = 180.0  # of a new deployment: LobRA (§4.2) says less than three minutes
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
        ConfigError: a key is missing or a value is negative, missing or of the wrong kind.
    """
    tables = _need(options, "max_tokens_tables", "cluster")
    table = str(_need(options, "max_tokens", "cluster"))
    if table not in tables:
        raise ConfigError(f"cluster.max_tokens={table!r}", f"It must be one of {choices(dict(tables))}.")
    if not tables[table]:
        raise ConfigError(
            f"cluster.max_tokens_tables.{table}=[]",
            "A table has a row [tp, pp, most tokens] for each replica.",
        )
    memory = options.get("memory")
    return ClusterProfile(
        name=str(_need(options, "name", "cluster")),
        source=str(_need(options, "source", "cluster")),
        model=str(_need(options, "model", "cluster")),
        dtype=str(options.get("dtype", "bfloat16")),
        devices=_devices(_need(options, "device", "cluster")),
        time=_time(_need(options, "time", "cluster")),
        configurations=tuple(_configuration(row) for row in tables[table]),
        table=table,
        tables=tuple(sorted(tables)),
        memory=None if memory is None else _memory(memory),
        shape=None if options.get("shape") is None else _shape(options["shape"]),
        restart_seconds=_number(
            {"restart_seconds": RESTART_SECONDS, **options}, "restart_seconds", "cluster"
        ),
    )


def _shape(raw: Mapping[str, Any]) -> dict[str, int]:
    for name in raw:
        if name not in SIZES:
            raise ConfigError(f"cluster.shape.{name}", f"cluster.shape has the keys {choices(SIZES)}.")
    found = {name: int(_number(raw, name, "cluster.shape")) for name in SIZES}
    for name, value in found.items():
        if value < 1:
            raise ConfigError(f"cluster.shape.{name}={value}", "It must be at least 1.")
    return found


def _memory(raw: Mapping[str, Any]) -> MemoryModel:
    return MemoryModel.of(_built(MemoryCoefficients, raw, "cluster.memory"))


def _devices(raw: Mapping[str, Any]) -> Devices:
    between = raw.get("between_nodes_gb_per_s")
    return Devices(
        kind=str(_need(raw, "kind", "cluster.device")),
        memory_bytes=int(_number(raw, "memory_gib", "cluster.device") * GIB),
        count=int(_number(raw, "count", "cluster.device")),
        per_node=int(_number(raw, "per_node", "cluster.device")),
        within_node=_number(raw, "within_node_gb_per_s", "cluster.device") * GB,
        between_nodes=None if between is None else float(between) * GB,
    )


def _time(raw: Mapping[str, Any]) -> TimeModel:
    shares = {
        key: _number(raw, key, "cluster.time")
        for key in ("forward_share", "head_forward_share")
        if key in raw
    }
    return TimeModel(
        layers=int(_number(raw, "layers", "cluster.time")),
        layer=_by_degree(raw, "layer", LayerTime),
        head=_by_degree(raw, "head", HeadTime),
        **shares,
    )


def _by_degree(raw: Mapping[str, Any], key: str, kind: type[T]) -> dict[int, T]:
    """Rows such as {tp: 2, fixed: …, token: …} as coefficients by tensor-parallel degree."""
    found = {}
    for row in raw.get(key) or ():
        owner = f"cluster.time.{key}"
        tp = int(_number(row, "tp", owner))
        found[tp] = _built(kind, {name: value for name, value in row.items() if name != "tp"}, owner)
    return found


def _built(kind: type[T], raw: Mapping[str, Any], owner: str) -> T:
    """A dataclass of numbers from a mapping; an unknown or missing key is named."""
    known = {each.name: each for each in fields(cast(Any, kind))}
    for name in raw:
        if name not in known:
            raise ConfigError(f"{owner}.{name}", f"{owner} has the keys {choices(known)}.")
    for name, each in known.items():
        if each.default is MISSING and raw.get(name) is None:
            raise ConfigError(f"{owner}.{name} is missing", f"{owner} has the keys {choices(known)}.")
    return kind(**{str(name): _number(raw, str(name), owner) for name in raw})


def _configuration(row: Sequence[int]) -> Configuration:
    whole = isinstance(row, Sequence) and len(row) == 3 and all(type(value) is int for value in row)
    if not whole:
        raise ConfigError(f"max_tokens_tables row {row!r}", "A row is [tp, pp, most tokens].")
    return Configuration(*row)


def _number(raw: Mapping[str, Any], key: str, owner: str) -> float:
    value = _need(raw, key, owner)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{owner}.{key}={value!r}", "It must be a number.")
    return float(value)


def _need(raw: Mapping[str, Any], key: str, owner: str) -> Any:
    if raw.get(key) is None:
        raise ConfigError(f"{owner}.{key} is missing", f"{owner} has {choices(dict(raw))}.")
    return raw[key]
