"""What a plan says, as plain data. A figure that nothing was measured for is None, never a guess."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GroupOutlook:
    """Jobs that train together.

    Attributes:
        wave: from 1; jobs of a later wave start when those before it are done.
        jobs: names.
        steps: optimiser steps of all of them.
        microbatches: of the whole budget, packed together.
        predicted_seconds: until the group's last step, from the start of its wave.
        device_seconds: its share of the devices' time.
    """

    wave: int
    jobs: tuple[str, ...]
    steps: int
    microbatches: int
    predicted_seconds: float | None = None
    device_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ReplicaOutlook:
    """Replicas of one kind.

    Attributes:
        capacity: most tokens of a microbatch.
        layer_split: layers of each pipeline stage.
        predicted_bytes: largest on one device, weights included.
        bytes_source: "estimated from the model's shape"; "" where nothing is predicted.
    """

    tp: int
    pp: int
    count: int
    capacity: int
    layer_split: tuple[int, ...] = ()
    predicted_bytes: int | None = None
    bytes_source: str = ""


@dataclass(frozen=True, slots=True)
class Outlook:
    """A plan of a search.

    Attributes:
        cluster: its name.
        devices: in words.
        profile: whose coefficients were used, or why there are none.
        gap: distance of the deployment's expected step to the proved bound; None where nothing was chosen.
        predicted_seconds: of the whole search.
        device_seconds: with Plait.
        device_seconds_alone: the same jobs one after another on the same devices.
        microbatches_alone: of the same jobs, packed one by one.
        assumptions: what the figures rest on.
    """

    cluster: str
    devices: str
    profile: str
    replicas: tuple[ReplicaOutlook, ...]
    groups: tuple[GroupOutlook, ...]
    microbatches_alone: int
    assumptions: tuple[str, ...]
    gap: float | None = None
    predicted_seconds: float | None = None
    device_seconds: float | None = None
    device_seconds_alone: float | None = None

    def mapping(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
