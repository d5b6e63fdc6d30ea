"""Plans as plain data: replicas, groups, microbatches and the order in which they run.

A plan is JSON with a schema version. It is printed and kept in MLflow, and a restart reads its choices.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal, NamedTuple

SCHEMA_VERSION = 1
SplitName = Literal["train", "validation"]
Choices = dict[str, str | int | float | bool | None]


class ReplicaShape(NamedTuple):
    """How processes hold a replica together: the stages of a pipeline, each in slices of its layers."""

    pipeline: int = 1
    tensor: int = 1

    @property
    def processes(self) -> int:
        """How many they are."""
        return self.pipeline * self.tensor

    def __str__(self) -> str:
        return f"{self.tensor}x{self.pipeline}" if self.tensor > 1 else str(self.pipeline)


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of the base model on tp × pp devices.

    Attributes:
        layer_split: layers of each stage.
        capacity: most tokens of its microbatches; None if it is set elsewhere.
        speed: how fast it is, relative to the others.
    """

    id: int = 0
    tp: int = 1
    pp: int = 1
    layer_split: tuple[int, ...] = ()
    devices: tuple[str, ...] = ("cpu:0",)
    capacity: int | None = None
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples of one optimiser step of one job, before they are packed.

    Attributes:
        samples: indices into the job's split.
        draws: how often each sample had been used before (its epoch); part of the dropout counter.
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
class Segment(GlobalBatch):
    """Samples of one global batch lying together inside a microbatch."""

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
    """What a plan predicts; None if nothing was measured to predict from."""

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
    """Deployment, groups and, if it is fixed in advance, the schedule.

    ``choices`` records what was chosen by measurement. A resumed search reads the kernel backend and the
    capacity from it.
    """

    replicas: tuple[Replica, ...]
    groups: tuple[Group, ...]
    schedule: tuple[Microbatch | OptimiserStep, ...] = ()
    choices: Choices = field(default_factory=dict)
    version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)


def recorded_choices(text: str) -> Choices | None:
    """The choices in a plan that :meth:`Plan.to_json` wrote; None if it is of another schema version."""
    raw = json.loads(text)
    choices: Choices = raw["choices"]
    return choices if raw["version"] == SCHEMA_VERSION else None
