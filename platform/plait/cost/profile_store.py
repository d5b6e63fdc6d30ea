"""Profiles of models on devices, kept in the cache folder by model, device kind, dtype and engine options."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from plait.core.errors import ConfigError, StorageError, choices
from plait.core.settings import EngineSettings
from plait.cost.memory import MemoryCoefficients, MemoryModel, MemoryObservation, MemoryShape, Phase
from plait.cost.reading import by_degree, mapping, number, rows, whole
from plait.cost.time import HeadTime, LayerTime, TimeModel
from plait.utils.files import write_text

VERSION = 2
How = Literal["measured", "computed"]


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile holds for; equal keys, equal profile.

    Attributes:
        model: :attr:`BaseModel.config_digest`: configuration, source and dtype.
        device: kind of device, as ``plait.engine.devices.device_kind`` names it.
        dtype: of weights and arithmetic.
        kernels: ``engine.kernels`` as it was asked for.
        checkpointing: activations recomputed in backward.
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
        threads = (engine.threads or default_threads()) if on_cpu else 0
        return cls(model, device, dtype, engine.kernels, engine.checkpointing, threads)

    @property
    def digest(self) -> str:
        """Names the key, and its file."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class CapacityChoice:
    """One capacity that was looked at.

    Attributes:
        capacity: most tokens of a microbatch.
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
        key: what it holds for.
        model: name of the model.
        memory: peaks above static bytes; its observations come along, so that training can refit it.
        time: seconds of microbatches; None where nothing ran (computed over tensors without memory).
        capacity: chosen: the fewest tokens within a few percent of the best throughput that fits.
        capacities: all that were looked at.
        targets: last parts of the names of the linears that the probes' adapters sat on.
        how: "measured" on this device, or "computed" without weights or a device.
        memory_error: mean absolute relative error of peak − static on held-out probes.
        time_error: the same for seconds; None without a time model.
        depth_error: relative error of one peak that was extrapolated from few layers, against the same
            at full depth; None where nothing was extrapolated.
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

    def check_model(self, digest: str, name: str) -> None:
        """The profile is one of the model with this digest.

        Raises:
            ConfigError: it is of another model.
        """
        if digest != self.key.model:
            raise ConfigError(
                f"model {name}",
                f"The profile was made with {self.model} (digest {self.key.model[:12]}).",
                "Make one of this model with `plait profile`.",
            )


def default_threads() -> int:
    """CPU threads that torch takes by itself."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else os.cpu_count() or 1


def profile_path(key: ProfileKey, cache: Path) -> Path:
    """Where the profile of a key is kept below the cache folder."""
    return cache / "profiles" / f"{key.digest}.json"


def load_profile(key: ProfileKey, *, cache: Path) -> Profile | None:
    """The stored profile of a key; None where there is none.

    Args:
        cache: Plait's cache folder (``plait.utils.paths.cache_dir()``).

    Raises:
        ConfigError: the file is of another model, device or release, or an entry is negative, missing or of
            the wrong kind.
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
    return read_profile(content, key, f"profile {path.name}")


def read_profile(text: str | bytes, key: ProfileKey, name: str) -> Profile:
    """A profile from what :func:`save_profile` wrote.

    Raises:
        ConfigError: as :func:`load_profile`.
    """
    remedy = "Remove the file, or make it again with `plait profile`."
    try:
        raw = json.loads(text)
        version = raw["version"]
        stored = ProfileKey(**raw["key"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{name}: {error!r}", "It must be a profile that Plait wrote.", remedy) from error
    if version != VERSION:
        raise ConfigError(f"{name}: version {version!r}", f"This release reads version {VERSION}.", remedy)
    for field, wanted in asdict(key).items():
        found = getattr(stored, field)
        if found != wanted:
            raise ConfigError(f"{name}: {field}={found!r}", f"This run has {field}={wanted!r}.", remedy)
    try:
        return _profile(raw, stored)
    except KeyError as error:
        raise ConfigError(f"{name}: {error.args[0]} is missing", "Every entry is needed.", remedy) from error
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.value}", error.rule, remedy) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{name}: {error}", "It must be a profile that Plait wrote.", remedy) from error


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
    memory = profile.memory
    return {
        "version": VERSION,
        "key": asdict(profile.key),
        "model": profile.model,
        "how": profile.how,
        "targets": list(profile.targets),
        "capacity": profile.capacity,
        "capacities": [asdict(choice) for choice in profile.capacities],
        "memory_error": profile.memory_error,
        "time_error": profile.time_error,
        "depth_error": profile.depth_error,
        "memory": {
            "logit_rows": None if math.isinf(memory.logit_rows) else memory.logit_rows,
            "phases": {
                name: {"margin": phase.margin, **asdict(phase.coefficients)}
                for name, phase in memory.phases.items()
            },
            "observations": [
                {"shape": asdict(each.shape), "peaks": dict(each.peaks), "static": each.static}
                for each in memory.observations
            ],
        },
        "time": None if profile.time is None else _time_mapping(profile.time),
    }


def _time_mapping(time: TimeModel) -> dict[str, Any]:
    return {
        "layers": time.layers,
        "forward_share": time.forward_share,
        "head_forward_share": time.head_forward_share,
        "layer": [{"tp": tp, **asdict(each)} for tp, each in time.layer.items()],
        "head": [{"tp": tp, **asdict(each)} for tp, each in time.head.items()],
    }


def _profile(raw: Mapping[str, Any], key: ProfileKey) -> Profile:
    if raw["how"] not in get_args(How):
        raise ConfigError(f"how={raw['how']!r}", f"It must be one of {choices(get_args(How))}.")
    memory_error = number(raw, "memory_error", "profile")
    others = {name: raw[name] for name in ("time_error", "depth_error") if raw.get(name) is not None}
    errors = {name: number(others, name, "profile") for name in others}
    return Profile(
        key=key,
        model=str(raw["model"]),
        memory=_memory(mapping(raw["memory"], "memory")),
        time=None if raw["time"] is None else _time(mapping(raw["time"], "time")),
        capacity=whole(raw, "capacity", "profile"),
        capacities=tuple(_capacity(each) for each in rows(raw["capacities"], "capacities")),
        targets=tuple(map(str, rows(raw["targets"], "targets"))),
        how=raw["how"],
        memory_error=memory_error,
        time_error=errors.get("time_error"),
        depth_error=errors.get("depth_error"),
    )


def _memory(raw: Mapping[str, Any]) -> MemoryModel:
    phases = mapping(raw["phases"], "memory.phases")
    if not phases:
        raise ConfigError("memory.phases={}", "A memory model has one phase or more.")
    most = math.inf if raw["logit_rows"] is None else whole(raw, "logit_rows", "memory")
    observations = tuple(_observation(each) for each in rows(raw["observations"], "memory.observations"))
    return MemoryModel({name: _phase(name, each) for name, each in phases.items()}, most, observations)


def _phase(name: str, value: object) -> Phase:
    owner = f"memory.{name}"
    raw = mapping(value, owner)
    coefficients = {key: number(raw, key, owner) for key in asdict(MemoryCoefficients())}
    if number(raw, "margin", owner) < 0.0:
        raise ConfigError(f"{owner}.margin={raw['margin']}", "It must be 0 or more.")
    return Phase(MemoryCoefficients(**coefficients), raw["margin"])


def _observation(value: object) -> MemoryObservation:
    owner = "memory.observations"
    raw = mapping(value, owner)
    peaks, shape = mapping(raw["peaks"], owner), mapping(raw["shape"], owner)
    for entries in (peaks, shape, {"static": raw["static"]}):
        for name in entries:
            if number(entries, name, owner) < 0:
                raise ConfigError(f"{owner}.{name}={entries[name]}", "It must be 0 or more.")
    return MemoryObservation(MemoryShape(**shape), dict(peaks), raw["static"])


def _capacity(value: object) -> CapacityChoice:
    raw = mapping(value, "capacities")
    speed = None if raw["tokens_per_second"] is None else number(raw, "tokens_per_second", "capacities")
    size = int(number(raw, "predicted_bytes", "capacities"))
    return CapacityChoice(whole(raw, "capacity", "capacities"), speed, size, bool(raw["fits"]))


def _time(raw: Mapping[str, Any]) -> TimeModel:
    layer = by_degree(raw["layer"], LayerTime, "time.layer")
    if layer and 1 not in layer:
        raise ConfigError("time.layer without tp=1", "Seconds are measured on one device.")
    return TimeModel(
        layers=whole(raw, "layers", "time"),
        layer=layer,
        head=by_degree(raw["head"], HeadTime, "time.head"),
        forward_share=number(raw, "forward_share", "time"),
        head_forward_share=number(raw, "head_forward_share", "time"),
    )
