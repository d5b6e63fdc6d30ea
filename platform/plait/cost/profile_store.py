"""Profiles of models on devices, kept in the cache folder by model, device kind, dtype and engine options."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Literal

from plait.config.fields import build
from plait.core.errors import ConfigError, StorageError
from plait.core.settings import EngineSettings
from plait.cost.memory import MemoryCoefficients, MemoryModel, MemoryObservation, Phase
from plait.cost.time import HeadTime, LayerTime, TimeModel, by_degree
from plait.utils.files import write_text

VERSION = 2
How = Literal["measured", "computed"]


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile holds for; equal keys, equal profile.

    Attributes:
        model: :attr:`BaseModel.config_digest`: configuration, source and dtype.
        device: kind of device, as ``plait.engine.devices.device_kind`` names it.
        threads: of the CPU; 0 on other devices.
    """

    model: str
    device: str
    dtype: str
    kernels: str
    checkpointing: bool
    threads: int

    @classmethod
    def of(cls, model: str, dtype: str, device: str, engine: EngineSettings, *, on_cpu: bool) -> ProfileKey:
        """The key of a model (its digest) on this kind of device with these engine settings."""
        threads = (engine.threads or _default_threads()) if on_cpu else 0
        return cls(model, device, dtype, engine.kernels, engine.checkpointing, threads)

    @property
    def digest(self) -> str:
        """Names the key, and its file."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class CapacityChoice:
    """A capacity (tokens) that was considered.

    Attributes:
        tokens_per_second: measured on a full microbatch; None where nothing ran.
        predicted_bytes: safe peak of the heaviest full microbatch with one adapter.
        fits: into the share of the device's memory that may be used.
    """

    capacity: int
    tokens_per_second: float | None
    predicted_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """Fitted memory and time coefficients of one model on one device kind.

    Attributes:
        memory: peaks above static bytes, with its observations, so that training can refit it.
        capacity: the fewest tokens within a few percent of the best throughput that fits.
        how: "measured" on this device, or "computed" without weights or a device.
        memory_error: mean absolute relative error of peak − static on held-out probes.
        time_error: the same for seconds.
        depth_error: relative error of one peak extrapolated from few layers, against full depth.
    """

    key: ProfileKey
    model: str
    memory: MemoryModel
    time: TimeModel | None
    capacity: int
    capacities: tuple[CapacityChoice, ...]
    targets: tuple[str, ...]
    how: How
    memory_error: float
    time_error: float | None
    depth_error: float | None = None

    def covers(self, targets: Iterable[str]) -> bool:
        """Whether adapters on these linears (full names or last parts) take no more than was profiled."""
        return {name.rpartition(".")[2] for name in targets} <= set(self.targets)


@dataclass(frozen=True, slots=True)
class _StoredMemory:
    """A memory model in JSON: a phase's margin stands beside its coefficients."""

    phases: dict[str, dict[str, float]]
    observations: tuple[MemoryObservation, ...]
    logit_rows: int | None

    def __post_init__(self) -> None:
        if not self.phases or (self.logit_rows is not None and self.logit_rows < 1):
            raise ConfigError(
                f"profile.memory: {len(self.phases)} phases, logit_rows={self.logit_rows}",
                "A memory model has one phase or more; logit_rows is at least 1.",
            )

        for place, each in enumerate(self.observations):
            if min(each.static, *each.peaks.values(), *astuple(each.shape)) < 0:
                raise ConfigError(
                    f"profile.memory.observations[{place}] has a negative entry",
                    "Bytes and tokens are 0 or more.",
                )

    def model(self) -> MemoryModel:
        phases = {}
        for name, entries in self.phases.items():
            own = f"profile.memory.phases.{name}"
            wanted = {"margin", *asdict(MemoryCoefficients())}
            if missing := sorted(wanted - entries.keys()):
                raise ConfigError(f"{own}.{missing[0]} is missing", "Every coefficient is needed.")
            if entries["margin"] < 0:
                raise ConfigError(f"{own}.margin={entries['margin']}", "It must be 0 or more.")
            coefficients = {key: value for key, value in entries.items() if key != "margin"}
            phases[name] = Phase(build(MemoryCoefficients, coefficients, own), entries["margin"])
        return MemoryModel(phases, self.logit_rows or math.inf, self.observations)


@dataclass(frozen=True, slots=True)
class _StoredTime:
    """A time model in JSON: a row for each tensor-parallel degree."""

    layers: int
    forward_share: float
    head_forward_share: float
    layer: tuple[dict[str, Any], ...]
    head: tuple[dict[str, Any], ...]

    def model(self) -> TimeModel:
        layer = by_degree(self.layer, LayerTime, "profile.time.layer")
        if layer and 1 not in layer:
            raise ConfigError("profile.time.layer without tp=1", "Seconds are measured on one device.")
        head = by_degree(self.head, HeadTime, "profile.time.head")
        return TimeModel(self.layers, layer, head, self.forward_share, self.head_forward_share)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A profile in JSON."""

    version: int
    key: ProfileKey
    model: str
    how: How
    targets: tuple[str, ...]
    capacity: int
    capacities: tuple[CapacityChoice, ...]
    memory_error: float
    time_error: float | None
    depth_error: float | None
    memory: _StoredMemory
    time: _StoredTime | None

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ConfigError(f"profile.capacity={self.capacity}", "It must be at least 1.")


def profile_path(key: ProfileKey, cache: Path) -> Path:
    """Where the profile of a key is kept below the cache folder."""
    return cache / "profiles" / f"{key.digest}.json"


def load_profile(key: ProfileKey, *, cache: Path) -> Profile | None:
    """The stored profile of a key; None where there is none.

    Raises:
        ConfigError: the file is of another model, device or release, or an entry is missing or wrong.
        StorageError: the file cannot be read.
    """
    path = profile_path(key, cache)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(
            f"{path}: {error.strerror}",
            "The stored profile of this model and device must be readable.",
            "Make it readable, remove it, or choose another cache folder with PLAIT_CACHE.",
        ) from error
    try:
        return _read(content, key)
    except ConfigError as error:
        remedy = "Remove the file, or make it again with `plait profile`."
        raise ConfigError(f"profile {path.name}: {error.value}", error.rule, remedy) from error


def _read(content: bytes, key: ProfileKey) -> Profile:
    try:
        raw = json.loads(content)
        version = raw["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(repr(error), "It must be a profile that Plait wrote.") from error
    if version != VERSION:
        raise ConfigError(f"version {version!r}", f"This release reads version {VERSION}.")
    stored = build(_Stored, raw, "profile")
    for name, wanted in asdict(key).items():
        found = getattr(stored.key, name)
        if found != wanted:
            raise ConfigError(f"{name}={found!r}", f"This run has {name}={wanted!r}.")
    return Profile(
        key=key,
        model=stored.model,
        memory=stored.memory.model(),
        time=None if stored.time is None else stored.time.model(),
        capacity=stored.capacity,
        capacities=stored.capacities,
        targets=stored.targets,
        how=stored.how,
        memory_error=stored.memory_error,
        time_error=stored.time_error,
        depth_error=stored.depth_error,
    )


def save_profile(profile: Profile, *, cache: Path) -> Path:
    """Store a profile in the place of an earlier one of the same key; the path.

    Raises:
        StorageError: the folder cannot be written, or the disk is full.
    """
    path = profile_path(profile.key, cache)
    try:
        write_text(path, json.dumps(profile_mapping(profile), indent=1))
    except OSError as error:
        raise StorageError(
            f"{path.parent}: {error.strerror}",
            "Profiles are kept in the cache folder.",
            "Make the folder writable, free space on its disk, or choose another with PLAIT_CACHE.",
        ) from error
    return path


def profile_mapping(profile: Profile) -> dict[str, Any]:
    """For JSON; infinite numbers, which JSON has not, as None."""
    memory, time = profile.memory, profile.time
    phases = {
        name: {"margin": phase.margin, **asdict(phase.coefficients)} for name, phase in memory.phases.items()
    }
    stored_memory = _StoredMemory(
        phases, memory.observations, None if math.isinf(memory.logit_rows) else int(memory.logit_rows)
    )
    stored_time = (
        None
        if time is None
        else _StoredTime(
            time.layers,
            time.forward_share,
            time.head_forward_share,
            tuple({"tp": tp, **asdict(each)} for tp, each in time.layer.items()),
            tuple({"tp": tp, **asdict(each)} for tp, each in time.head.items()),
        )
    )
    return asdict(
        _Stored(
            VERSION,
            profile.key,
            profile.model,
            profile.how,
            profile.targets,
            profile.capacity,
            profile.capacities,
            profile.memory_error,
            profile.time_error,
            profile.depth_error,
            stored_memory,
            stored_time,
        )
    )


def _default_threads() -> int:
    """CPU threads that torch takes by itself."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else os.cpu_count() or 1
