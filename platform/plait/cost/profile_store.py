"""Profiles of models on devices, kept in the cache folder by model, device kind, dtype and engine options."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from plait.config.fields import build
from plait.core.checks import at_least, check
from plait.core.errors import ConfigError
from plait.core.settings import EngineSettings
from plait.cost.memory import MemoryModel
from plait.cost.time import TimeModel
from plait.utils.files import disk_errors, write_text

VERSION = 4  # version of the files; those of other versions are ignored
How = Literal["measured", "computed"]


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile applies to; equal keys mean equal profiles.

    Attributes:
        model: :attr:`Identity.digest`, of configuration, source and dtype.
        device: kind of device, as named by ``plait.engine.devices.device_kind``.
        threads: CPU threads; 0 on other devices.
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
        """A digest that names the key and its file."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class CapacityChoice:
    """A capacity (tokens) that was considered.

    Attributes:
        tokens_per_second: measured on a full microbatch; None if nothing ran.
        predicted_bytes: safe peak of the heaviest full microbatch with one adapter.
        fits: whether it fits into the share of the device's memory that may be used.
    """

    capacity: int
    tokens_per_second: float | None
    predicted_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """Fitted memory and time coefficients of one model on one device kind.

    Attributes:
        memory: model of peaks above static bytes, with its observations, so that training can refit it.
        capacity: the fewest tokens within a few percent of the best throughput that fits.
        how: "measured" on this device, or "computed" without weights or a device.
        memory_error: mean absolute relative error of peak − static on held-out probes.
        time_error: the same for seconds.
        depth_error: relative error of one peak extrapolated from few layers, compared with full depth.
    """

    key: ProfileKey
    model: str
    memory: MemoryModel
    time: TimeModel | None
    capacity: Annotated[int, at_least(1)]
    capacities: tuple[CapacityChoice, ...]
    targets: tuple[str, ...]
    how: How
    memory_error: float
    time_error: float | None
    depth_error: float | None = None

    def __post_init__(self) -> None:
        check(self, "profile")

    def covers(self, targets: Iterable[str]) -> bool:
        """Whether adapters on these linears (full names or last parts) take no more than was profiled."""
        return {name.rpartition(".")[2] for name in targets} <= set(self.targets)


def profile_path(key: ProfileKey, cache: Path) -> Path:
    """The path of the profile of a key, below the cache folder."""
    return cache / "profiles" / f"{key.digest}-v{VERSION}.json"


def load_profile(key: ProfileKey, *, cache: Path) -> Profile | None:
    """The stored profile of a key; None if there is none.

    Raises:
        ConfigError: the file is of another model, device or release, or was altered.
        StorageError: the file cannot be read.
    """
    path = profile_path(key, cache)
    rule = "The stored profile of this model and device must be readable."
    remedy = "Make it readable, remove it, or choose another cache folder with PLAIT_CACHE."
    with disk_errors(path, rule, remedy):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        raw = json.loads(content)
        if (version := raw.pop("version")) != VERSION:
            raise ConfigError(f"version {version!r}", f"This release reads version {VERSION}.")
        if raw.pop("sha256") != _seal(raw):
            raise ConfigError("altered", "The file must not be changed.")
        profile = build(Profile, raw, "profile")
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # ConfigError is a ValueError
        raise _unusable(path, error) from error
    if profile.key != key:
        raise _unusable(path, ConfigError(f"for {profile.key}", f"This run needs {key}."))
    return profile


def _unusable(path: Path, error: Exception) -> ConfigError:
    found = (
        error
        if isinstance(error, ConfigError)
        else ConfigError(repr(error), "The file must be a profile that Plait wrote.")
    )
    remedy = "Remove the file, or create it again with `plait profile`."
    return ConfigError(f"profile {path.name}: {found.value}", found.rule, remedy)


def _seal(raw: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def save_profile(profile: Profile, *, cache: Path) -> Path:
    """Store a profile, replacing an earlier one with the same key, and return the path.

    Raises:
        StorageError: the folder cannot be written, or the disk is full.
    """
    path = profile_path(profile.key, cache)
    remedy = "Make the folder writable, free space on its disk, or choose another with PLAIT_CACHE."
    with disk_errors(path.parent, "Profiles are kept in the cache folder.", remedy):
        write_text(path, json.dumps(profile_mapping(profile), indent=1))
    return path


def profile_mapping(profile: Profile) -> dict[str, Any]:
    """The profile as a mapping for JSON, with a digest that reveals whether the file was altered."""
    raw: dict[str, Any] = json.loads(json.dumps(asdict(profile)))
    return {"version": VERSION, "sha256": _seal(raw), **raw}


def _default_threads() -> int:
    """CPU threads that torch uses by default."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else os.cpu_count() or 1
