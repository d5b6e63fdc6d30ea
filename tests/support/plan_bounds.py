"""Plans of described clusters against the optimum by brute force, on small random workloads.

Brute force tries every number of devices of each kind, every choice of replicas, every way to share a mean
step's sequences out, and every packing of what a replica gets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.plans import GlobalBatch
from plait.core.settings import PlannerSettings, RunSettings, SearchSettings
from plait.cost.clusters import HOUR, Cluster
from plait.cost.profiles import ClusterProfile, Devices
from plait.cost.replica import Configuration, ReplicaCost
from plait.cost.time import HeadTime, LayerTime, TimeModel
from plait.planner.weighing import MeanStep
from plait.planning.described import plan_described
from plait.planning.expected import expected_step, rates_of
from plait.planning.workload import Workload

OBJECTIVES = ("device_seconds", "money", "time")
Row = tuple[int, ...]  # sequences of each bucket


@dataclass(frozen=True, slots=True)
class Outcome:
    """A plan compared with the optimum.

    Attributes:
        step: seconds of the mean step, their bound, and the least on the same devices.
        objective: the same of the objective, over every number of devices.
    """

    step: tuple[float, float, float]
    objective: tuple[float, float, float]


def compared(seed: int) -> Outcome:
    """The plan of one random workload and its optimum."""
    cluster, workload, planner = drawn(seed)
    together = RunSettings(planner=planner, search=SearchSettings(parallel=len(workload.jobs)))
    outlook = plan_described(workload, together, cluster, None, tokeniser="none")
    chosen = outlook.objective
    assert chosen is not None
    assert outlook.step_seconds is not None
    assert outlook.gap is not None
    used: dict[str, int] = {}
    for each in outlook.replicas:
        used[each.kind] = used.get(each.kind, 0) + each.count * each.tp * each.pp
    expected = expected_step(workload, [job.name for job in workload.jobs], cluster)
    optimum = Optimum(expected)
    rates = rates_of(planner.objective, cluster)
    bound = outlook.step_seconds / (1 + outlook.gap)
    return Outcome(
        (outlook.step_seconds, bound, optimum.least(used, None)),
        (chosen.value, chosen.bound, optimum.least(cluster.devices, rates)),
    )


def drawn(seed: int) -> tuple[Cluster, Workload, PlannerSettings]:
    """A random cluster of one or two kinds of devices, two jobs on it, and an objective."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(4, 7))
    names = ("a", "b") if seed % 2 else ("",)
    kinds = tuple(_kind(rng, name, layers, 2 if seed % 2 else 4) for name in names)
    prices = {each.kind: HOUR * float(rng.uniform(0.5, 3.0)) for each in kinds}
    lengths = {f"j{job}": rng.integers(20, 400, (2, int(rng.integers(1, 4)))) for job in range(2)}
    jobs = tuple(
        JobSpec(name, AdapterSpec(), TrainSpec(steps=2, batch_size=rows.shape[1]), DataSpec.of("jsonl"))
        for name, rows in lengths.items()
    )
    batches = {
        name: tuple(_batch(name, step, row) for step, row in enumerate(rows))
        for name, rows in lengths.items()
    }
    longest = {name: int(rows.max()) for name, rows in lengths.items()}
    workload = Workload(jobs, batches, dict.fromkeys(lengths, 2), longest, dict.fromkeys(lengths, "it"), 1.0)
    objective = OBJECTIVES[int(rng.integers(len(OBJECTIVES)))]
    return Cluster("drawn", kinds, prices), workload, PlannerSettings(objective=objective, slack=0.0)


def _kind(rng: np.random.Generator, name: str, layers: int, most: int) -> ClusterProfile:
    layer = {
        tp: LayerTime(
            float(rng.uniform(0, 0.5)), float(rng.uniform(0.002, 0.03)), float(rng.choice([0.0, 1e-5]))
        )
        for tp in (1, 2)
    }
    head = {tp: HeadTime(float(rng.uniform(0, 0.3)), float(rng.uniform(0, 0.02))) for tp in (1, 2)}
    shapes = ((1, 1, int(rng.choice([400, 600, 1000]))), (1, 2, 600), (2, 1, 800))
    return ClusterProfile(
        name=f"drawn {name}",
        source="drawn",
        model="drawn",
        dtype="bfloat16",
        devices=Devices(name or "device", 80.0, int(rng.integers(1, most + 1)), 8, 100.0),
        time=TimeModel(layers, layer, head),
        configurations=tuple(Configuration(*shape, kind=name) for shape in shapes),
        table="drawn",
        tables=("drawn",),
    )


def _batch(job: str, step: int, lengths: Sequence[int]) -> GlobalBatch:
    places = tuple(range(len(lengths)))
    tokens = tuple(int(length) for length in lengths)
    return GlobalBatch(job, step + 1, places, tuple(0 for _ in places), tokens, 1.0)


class Optimum:
    """The optimum of a mean step by brute force."""

    def __init__(self, expected: MeanStep) -> None:
        self._costs = expected.costs
        self._counts = tuple(expected.counts)
        self.seconds = cache(self._packed)
        self._makespan = cache(self._shared)

    def least(self, devices: Mapping[str, int], rates: Mapping[str, float] | None) -> float:
        """Least objective of any choice of replicas on at most these devices; the makespan without rates."""
        best = float("inf")
        for replicas in self._choices(devices):
            rate = 1.0
            if rates is not None:
                rate = sum(
                    rates[self._costs[c].configuration.kind] * self._costs[c].configuration.devices
                    for c in replicas
                )
            best = min(best, rate * self._makespan(replicas, self._counts))
        return best

    def _choices(self, devices: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
        """Every multiset of configurations that the devices hold."""
        for size in range(1, sum(devices.values()) + 1):
            for chosen in itertools.combinations_with_replacement(range(len(self._costs)), size):
                taken: dict[str, int] = {}
                for c in chosen:
                    own = self._costs[c].configuration
                    taken[own.kind] = taken.get(own.kind, 0) + own.devices
                if all(number <= devices.get(kind, 0) for kind, number in taken.items()):
                    yield chosen

    def _shared(self, replicas: tuple[int, ...], row: Row) -> float:
        """Least makespan of these replicas with these sequences."""
        first, *others = replicas
        if not others:
            return float(self.seconds(first, row))
        best = float("inf")
        for own in itertools.product(*(range(count + 1) for count in row)):
            seconds = self.seconds(first, own)
            if seconds < best:
                rest = tuple(count - taken for count, taken in zip(row, own, strict=True))
                best = min(best, max(seconds, self._makespan(tuple(others), rest)))
        return best

    def _packed(self, c: int, row: Row) -> float:
        """Least T of one replica over every packing of its sequences."""
        cost = self._costs[c]
        places = [j for j, count in enumerate(row) for _ in range(count)]
        if not places:
            return 0.0
        if any(not cost.batch[j] for j in places):
            return float("inf")
        return min(_seconds(cost, bins) for bins in _packings(places, cost))


def _packings(places: Sequence[int], cost: ReplicaCost) -> Iterator[list[list[int]]]:
    """Every way to put sequences of these buckets into microbatches."""
    if not places:
        yield []
        return
    *others, last = places
    most = cost.configuration.max_tokens
    for bins in _packings(others, cost):
        yield [*bins, [last]]
        for k, own in enumerate(bins):
            if sum(int(cost.lengths[j]) for j in own) + int(cost.lengths[last]) <= most:
                yield [*bins[:k], [*own, last], *bins[k + 1 :]]


def _seconds(cost: ReplicaCost, bins: Sequence[Sequence[int]]) -> float:
    """T of these microbatches, written out stage by stage."""
    stages = range(len(cost.fixed))
    times = [[float(cost.fixed[s] + sum(cost.each[s, j] for j in own)) for own in bins] for s in stages]
    return max(map(sum, times)) + cost.ramp * max(map(max, times))
