"""Profiles of models on devices, kept in the cache folder by model, device kind, dtype and engine options."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from plait.cost.memory import MemoryCoefficients, MemoryModel, MemoryObservation, MemoryShape, Phase
from plait.cost.time import HeadTime, LayerTime, TimeModel
from plait.errors import ConfigError, StorageError
from plait.files import write_text
from plait.settings import EngineSettings

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
        cache: Plait's cache folder (``plait.paths.cache_dir()``).

    Raises:
        ConfigError: the file is of another model, device or release, or an entry is negative or missing.
    """
    path = profile_path(key, cache)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return None
    return read_profile(text, key, f"profile {path.name}")


def read_profile(text: str, key: ProfileKey, name: str) -> Profile:
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
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise ConfigError(f"{name}: {error.value}", error.rule, remedy) from error
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
    memory = raw["memory"]
    phases = {name: _phase(name, phase) for name, phase in memory["phases"].items()}
    rows = memory["logit_rows"]
    observations = tuple(
        MemoryObservation(MemoryShape(**each["shape"]), each["peaks"], each["static"])
        for each in memory["observations"]
    )
    return Profile(
        key=key,
        model=raw["model"],
        memory=MemoryModel(phases, math.inf if rows is None else rows, observations),
        time=None if raw["time"] is None else _time(raw["time"]),
        capacity=raw["capacity"],
        capacities=tuple(CapacityChoice(**each) for each in raw["capacities"]),
        targets=tuple(raw["targets"]),
        how=raw["how"],
        memory_error=raw["memory_error"],
        time_error=raw["time_error"],
        depth_error=raw.get("depth_error"),
    )


def _phase(name: str, raw: Mapping[str, float]) -> Phase:
    coefficients = {key: raw[key] for key in asdict(MemoryCoefficients())}
    if not raw["margin"] >= 0.0:
        raise ConfigError(f"memory.{name}.margin={raw['margin']}", "It must be 0 or more.")
    return Phase(MemoryCoefficients(**coefficients), raw["margin"])


def _time(raw: Mapping[str, Any]) -> TimeModel:
    return TimeModel(
        layers=raw["layers"],
        layer={row["tp"]: LayerTime(row["fixed"], row["token"], row["square"]) for row in raw["layer"]},
        head={row["tp"]: HeadTime(row["fixed"], row["labelled"]) for row in raw["head"]},
        forward_share=raw["forward_share"],
        head_forward_share=raw["head_forward_share"],
    )
