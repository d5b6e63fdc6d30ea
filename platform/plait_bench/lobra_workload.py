"""LobRA's workloads: tasks with published moments, an assumed length distribution, a described cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plait.core.errors import ConfigError, choices
from plait.core.samples import Int64
from plait.cost.lengths import Family, LengthGenerator, sigma_from_skewness
from plait.cost.profiles import ClusterProfile
from plait.cost.replica import ReplicaCost
from plait.planner.buckets import BUCKETS, Buckets, dynamic_buckets, expected_counts
from plait.planner.dispatch_search import ReplicaKind

Rows = tuple[tuple[int, int, int], ...]  # of a deployment: tensor and pipeline degree, replicas


@dataclass(frozen=True, slots=True)
class Task:
    """One data set of the joint batch: published mean and skewness of its lengths, and its batch size."""

    name: str
    mean: float
    skewness: float
    batch_size: int

    def __post_init__(self) -> None:
        if not (self.mean > 0 and self.skewness > 0 and self.batch_size >= 1):
            raise ConfigError(
                f"task {self.name}: mean={self.mean}, skewness={self.skewness}, batch_size={self.batch_size}",
                "Mean and skewness must be above 0, the batch size at least 1.",
            )


@dataclass(frozen=True, slots=True)
class Assumption:
    """How lengths are drawn where only moments are published.

    Attributes:
        family: "lognormal" or "gamma".
        sigma: of every task; None takes what each task's skewness implies in the family.
        sigma_scale: times that sigma.
        clip: longest length.
        seed: of the draws.
    """

    family: Family = "lognormal"
    sigma: float | None = None
    sigma_scale: float = 1.0
    clip: int = 16384
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clip < 1 or self.sigma_scale <= 0 or (self.sigma is not None and self.sigma <= 0):
            raise ConfigError(f"assumption {self}", "Sigma and its scale must be above 0, clip at least 1.")

    def generator(self, task: Task) -> LengthGenerator:
        """The generator of one task's lengths."""
        sigma = sigma_from_skewness(self.family, task.skewness) if self.sigma is None else self.sigma
        return LengthGenerator(self.family, task.mean, sigma * self.sigma_scale, self.clip, self.seed)

    def __str__(self) -> str:
        spread = "from skewness" if self.sigma is None else f"{self.sigma:g}"
        scale = "" if self.sigma_scale == 1.0 else f" × {self.sigma_scale:g}"
        return f"{self.family}, sigma {spread}{scale}, clip {self.clip}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Workload:
    """Tasks trained jointly under one assumption; lengths of ``steps`` global batches (steps, B)."""

    assumption: Assumption
    batches: Int64

    @classmethod
    def draw(cls, tasks: Sequence[Task], assumption: Assumption, steps: int) -> Workload:
        """Lengths of ``steps`` steps; every task brings its batch size to each."""
        drawn = [
            assumption.generator(task)
            .draw(steps * task.batch_size, stream=task.name)
            .reshape(steps, task.batch_size)
            for task in tasks
        ]
        return cls(assumption, np.concatenate(drawn, axis=1))

    @property
    def batch(self) -> int:
        """B, sequences of one step."""
        return int(self.batches.shape[1])

    def buckets(self, profile: ClusterProfile, *, buckets: int = BUCKETS) -> Buckets:
        """Boundaries from all steps together, with the configurations' limits among them."""
        return dynamic_buckets(self.batches.ravel(), buckets=buckets, required=limits(profile))

    def expected(self, buckets: Buckets) -> tuple[int, ...]:
        """B_j of the expected step."""
        return expected_counts(buckets.counts, self.batch)


def limits(profile: ClusterProfile) -> tuple[int, ...]:
    """The different most tokens of the profile's configurations, ascending."""
    return tuple(sorted({configuration.max_tokens for configuration in profile.configurations}))


def costs_of(profile: ClusterProfile, lengths: Sequence[int], devices: int) -> list[ReplicaCost]:
    """T of every configuration that fits into ``devices``."""
    able = [each for each in profile.configurations if each.devices <= devices]
    return [ReplicaCost.of(each, lengths, profile.time) for each in able]


def replicas(costs: Sequence[ReplicaCost], deployment: Rows) -> list[ReplicaKind]:
    """Kinds of a deployment given as rows [tp, pp, replicas].

    Raises:
        ConfigError: a configuration that the profile does not have.
    """
    by_shape = {(cost.configuration.tp, cost.configuration.pp): cost for cost in costs}
    kinds = []
    for tp, pp, count in deployment:
        if (tp, pp) not in by_shape:
            have = choices([str(cost.configuration) for cost in costs])
            raise ConfigError(f"a deployment with ⟨{tp},{pp}⟩", f"The profile has {have}.")
        kinds.append(ReplicaKind(by_shape[tp, pp], count))
    return kinds
