"""Described clusters of one or several kinds of devices, with their prices.

A seam: a profile describes one model on one kind of device; a cluster has one profile for each kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import yaml

from plait.config.fields import build
from plait.core.checks import Rule, above, at_least, check
from plait.core.errors import ConfigError, choices
from plait.core.settings import ClusterSettings
from plait.cost.profiles import ClusterProfile, cluster_profile
from plait.utils.paths import conf_dir
from plait.utils.spelling import did_you_mean

HOUR = 3600.0  # seconds
NAME = Rule("a name without spaces or any of : + = ⟨", lambda name: name and not set(name) & set(" :+=⟨"))


@dataclass(frozen=True, slots=True)
class Kind:
    """An entry of ``cluster.kinds``; keys that it leaves out are those of the cluster's options.

    Attributes:
        profile: another described cluster, whose devices, times and table are used.
        speed: its speed relative to the profile's.
        memory_gib: memory of one device.
    """

    name: Annotated[str, NAME]
    count: Annotated[int, at_least(1)]
    profile: str | None = None
    speed: Annotated[float, above(0)] = 1.0
    memory_gib: Annotated[float | None, above(0)] = None
    price_per_device_hour: Annotated[float | None, at_least(0)] = None

    def __post_init__(self) -> None:
        check(self, "cluster.kinds")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A described cluster.

    Attributes:
        kinds: the profile of each kind of device, all of one model.
        prices: price of a device-hour, by kind; None if a kind's price is not known.
    """

    name: str
    kinds: tuple[ClusterProfile, ...]
    prices: Mapping[str, float] | None = None

    @property
    def devices(self) -> dict[str, int]:
        """How many devices there are of each kind."""
        return {each.kind: each.devices.count for each in self.kinds}

    @property
    def layers(self) -> int:
        """Decoder layers of the model."""
        return self.kinds[0].time.layers

    @property
    def restart_seconds(self) -> float:
        """Seconds that a new deployment takes, those of the slowest kind."""
        return max(each.restart_seconds for each in self.kinds)

    @property
    def error(self) -> float | None:
        """Error of its predicted seconds: the largest of its kinds'; None if one is not known."""
        known = [each.error for each in self.kinds if each.error is not None]
        return max(known) if len(known) == len(self.kinds) else None

    def __str__(self) -> str:
        return " + ".join(f"{each.devices.count} × {each.devices.kind}" for each in self.kinds)

    def of(self, kind: str) -> ClusterProfile:
        """The profile of a kind of device."""
        return next(each for each in self.kinds if each.kind == kind)

    def with_devices(self, devices: Mapping[str, int]) -> Cluster:
        """The cluster with these numbers of devices; kinds without devices are left out."""
        kept = (
            replace(each, devices=replace(each.devices, count=devices[each.kind]))
            for each in self.kinds
            if devices.get(each.kind)
        )
        return replace(self, kinds=tuple(kept))

    def at_most(self, tokens: int) -> Cluster:
        """The cluster with at most ``tokens`` tokens in a microbatch."""
        kinds = []
        for kind in self.kinds:
            rows = (replace(each, max_tokens=min(tokens, each.max_tokens)) for each in kind.configurations)
            kinds.append(replace(kind, configurations=tuple(rows)))
        return replace(self, kinds=tuple(kinds))

    def recomputing(self) -> Cluster:
        """The same with activation checkpointing."""
        return replace(self, kinds=tuple(each.recomputing() for each in self.kinds))

    def money(self, seconds: float) -> float | None:
        """What all of its devices cost for these seconds; None if a price is not known."""
        if self.prices is None:
            return None
        return seconds / HOUR * sum(self.prices[kind] * number for kind, number in self.devices.items())


def described_cluster(settings: ClusterSettings) -> Cluster:
    """The cluster that the settings describe.

    Raises:
        ConfigError: a key is missing, unknown or wrong, or a kind's profile is of another model.
    """
    base = cluster_profile(settings.options)
    usual = settings.price_per_device_hour
    if not settings.kinds:
        return Cluster(base.name, (base,), None if usual is None else {base.kind: usual})
    asked = [build(Kind, entry, f"cluster.kinds[{place}]") for place, entry in enumerate(settings.kinds)]
    names = [each.name for each in asked]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"cluster.kinds: {choices(names)}",
            "Each kind of device must have its own name.",
            "Rename one, or merge them into one kind if they are the same.",
        )
    prices = {
        each.name: usual if each.price_per_device_hour is None else each.price_per_device_hour
        for each in asked
    }
    known = {name: price for name, price in prices.items() if price is not None}
    profiles = tuple(_of_kind(each, base) for each in asked)
    return Cluster(base.name, profiles, known if len(known) == len(names) else None)


def _of_kind(kind: Kind, base: ClusterProfile) -> ClusterProfile:
    profile = base if kind.profile is None else _named(kind.profile)
    if (profile.model, profile.time.layers) != (base.model, base.time.layers):
        raise ConfigError(
            f"cluster.kinds: {kind.name} has the profile {kind.profile} of {profile.model}",
            f"All kinds of devices in a cluster train the same model: {base.model}.",
            "Choose a profile of that model, or another cluster.",
        )
    memory = profile.devices.memory_gib if kind.memory_gib is None else kind.memory_gib
    return replace(
        profile,
        devices=replace(profile.devices, kind=kind.name, count=kind.count, memory_gib=memory),
        time=profile.time.at_speed(kind.speed),
        configurations=tuple(replace(each, kind=kind.name) for each in profile.configurations),
        error=profile.error if kind.speed == 1.0 else None,
    )


def _named(name: str) -> ClusterProfile:
    """The profile of a described cluster in ``conf/cluster``."""
    folder = conf_dir() / "cluster"
    known: Sequence[str] = sorted(path.stem for path in folder.glob("*.yaml") if path.stem != "local")
    if name not in known:
        raise ConfigError(
            f"cluster.kinds: profile={name}",
            "There is no such described cluster in conf/cluster.",
            f"{did_you_mean(name, known)}Available: {choices(known)}.",
        )
    loaded: dict[str, Any] = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    return cluster_profile(loaded["options"])
