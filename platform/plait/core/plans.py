"""Plans as plain data: replicas, groups, microbatches and the order in which they run.

A plan is JSON with a schema version, so that it can be printed, kept in MLflow and run again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from plait.core.errors import InputError

SCHEMA_VERSION = 1
SplitName = Literal["train", "validation"]
Choices = dict[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of the base model on tp × pp devices; ``layer_split`` gives each stage's layer count."""

    id: int = 0
    tp: int = 1
    pp: int = 1
    layer_split: tuple[int, ...] = ()
    devices: tuple[str, ...] = ("cpu:0",)


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples of one optimiser step of one job, before they are packed.

    Attributes:
        samples: indices into the job's split.
        draws: how often each sample had come before (its epoch): part of the dropout counter.
        lengths: tokens of each sample.
        loss_weight: 1 / labelled tokens of the whole global batch.
    """

    job: str
    step: int
    samples: tuple[int, ...]
    draws: tuple[int, ...]
    lengths: tuple[int, ...]
    loss_weight: float
    split: SplitName = "train"


@dataclass(frozen=True, slots=True)
class Segment:
    """Samples of one adapter lying together inside a microbatch; fields as in :class:`GlobalBatch`."""

    job: str
    step: int
    samples: tuple[int, ...]
    draws: tuple[int, ...]
    lengths: tuple[int, ...]
    loss_weight: float
    split: SplitName = "train"

    @property
    def tokens(self) -> int:
        """Real tokens: no padding is stored."""
        return sum(self.lengths)

    def padded(self, tile: int) -> int:
        """Tokens as counted against the capacity: ⌈tokens / P⌉·P."""
        return -(-self.tokens // tile) * tile


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Segments of one or more adapters that go through the model together."""

    replica: int
    index: int
    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> int:
        """Real tokens of all segments."""
        return sum(segment.tokens for segment in self.segments)

    def padded(self, tile: int) -> int:
        """Tokens as counted against the capacity."""
        return sum(segment.padded(tile) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class OptimiserStep:
    """The point in a schedule at which a job's optimiser steps."""

    job: str
    step: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan expects; None where nothing has been measured to predict from."""

    seconds: float | None = None
    bytes: int | None = None
    device_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs trained together, with the capacity of their microbatches and the padding tile P."""

    jobs: tuple[str, ...]
    capacity: int
    tile: int = 1
    predicted: Prediction = field(default_factory=Prediction)


@dataclass(frozen=True, slots=True)
class Plan:
    """Deployment, groups and, where it is fixed in advance, the schedule.

    ``choices`` records whatever was chosen by measurement (kernel backend, tile sizes, capacity,
    admission), so that a resumed run chooses the same.
    """

    replicas: tuple[Replica, ...]
    groups: tuple[Group, ...]
    schedule: tuple[Microbatch | OptimiserStep, ...] = ()
    choices: Choices = field(default_factory=dict)
    version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote.

        Raises:
            InputError: another schema version.
        """
        raw = json.loads(text)
        if raw.get("version") != SCHEMA_VERSION:
            raise InputError(
                f"plan of schema version {raw.get('version')!r}",
                f"This release reads version {SCHEMA_VERSION}.",
                "Make the plan again with `plait plan`.",
            )
        return cls(
            replicas=tuple(_replica(item) for item in raw["replicas"]),
            groups=tuple(_group(item) for item in raw["groups"]),
            schedule=tuple(_schedule_item(item) for item in raw["schedule"]),
            choices=raw["choices"],
        )


def _replica(raw: dict[str, Any]) -> Replica:
    return Replica(**raw | {"layer_split": tuple(raw["layer_split"]), "devices": tuple(raw["devices"])})


def _group(raw: dict[str, Any]) -> Group:
    return Group(**raw | {"jobs": tuple(raw["jobs"]), "predicted": Prediction(**raw["predicted"])})


def _schedule_item(raw: dict[str, Any]) -> Microbatch | OptimiserStep:
    if "segments" not in raw:
        return OptimiserStep(**raw)
    lists = ("samples", "draws", "lengths")
    segments = (Segment(**item | {key: tuple(item[key]) for key in lists}) for item in raw["segments"])
    return Microbatch(raw["replica"], raw["index"], tuple(segments))
