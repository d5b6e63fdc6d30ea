"""LobRA's tables of configurations: tokens a second, seconds of steps, and its T beside the simulator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from plait.core.checks import NOT_EMPTY, Rule
from plait.core.errors import ConfigError
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.cost.profiles import ClusterProfile
from plait.cost.replica import Configuration, ReplicaCost, even_split
from plait.cost.time import HeadTime, LayerTime, MicrobatchShape, TimeModel
from plait.simulate.events import Work, simulate
from plait.simulate.forecast import Machine
from plait_bench.benchmarks import benchmark
from plait_bench.bucketed import BucketedCost
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import DATA, Count, read_profile
from plait_bench.lobra import Assumption, Task, drawn_steps, limits

THIRDS = "lobra_thirds.json"  # fits that leave out the first, and the second, of each three published rows
PROFILE_LACKS = 2  # place of those that the profile was not fitted to
COUNTS_OR_NULL = Rule(
    "a list of numbers at least 1, or null", lambda found: all(item is None or item >= 1 for item in found)
)
STEADY = 1_000_000  # microbatches of a step so long that filling and draining do not count


def step_cost(time: TimeModel, tp: int, pp: int, most: int, length: int) -> ReplicaCost:
    """T of one configuration for sequences of one length, by LobRA's buckets."""
    return BucketedCost.of(Configuration(tp, pp, most), [length], time)


def most_tokens(profile: ClusterProfile, tp: int, pp: int) -> int:
    """The most tokens of a microbatch of a configuration.

    Raises:
        ConfigError: the profile does not have it.
    """
    for each in profile.configurations:
        if (each.tp, each.pp) == (tp, pp):
            return each.max_tokens
    raise ConfigError(f"⟨{tp},{pp}⟩", f"The profile {profile.name} has no such configuration.")


def by_thirds(profile: ClusterProfile) -> tuple[TimeModel, ...]:
    """The time models of the first, second and last of each three rows, none of which was fitted to them."""
    fits = json.loads((DATA / THIRDS).read_text(encoding="utf-8"))
    others = [
        replace(
            profile.time,
            layer={tp: LayerTime(*row) for tp, *row in fit["layer"]},
            head={tp: HeadTime(*row) for tp, *row in fit["head"]},
        )
        for fit in fits
    ]
    others.insert(PROFILE_LACKS, profile.time)
    return tuple(others)


@dataclass(frozen=True, slots=True)
class ThroughputOptions:
    """Options of ``lobra/throughput``.

    Attributes:
        rows: tensor and pipeline degree, and tokens of a sequence.
        microbatches: of a step, which the paper does not print: the first is what is compared, the others
            show how the answer moves; null for a step without end.
    """

    rows: tuple[tuple[int, int, int], ...]
    microbatches: Annotated[tuple[int | None, ...], NOT_EMPTY, COUNTS_OR_NULL]


@benchmark("lobra/throughput", ThroughputOptions)
def throughput(settings: RunSettings, _jobs: Sequence[JobSpec], asked: ThroughputOptions) -> Report:
    """Thousands of tokens per device and second of each configuration and sequence length.

    Raises:
        ConfigError: a cluster that is not described.
    """
    profile = read_profile(settings)
    figures, times = [], by_thirds(profile)
    for number, microbatches in enumerate(asked.microbatches):
        label = "" if number == 0 else f"; {microbatches or 'endless'} microbatches"
        for place, (tp, pp, length) in enumerate(asked.rows):
            most = most_tokens(profile, tp, pp)
            count = (most // length) * (microbatches or STEADY)
            seconds = step_cost(times[place % 3], tp, pp, most, length).seconds([count])
            rate = count * length / (seconds * tp * pp) / 1e3
            name = f"⟨{tp},{pp}⟩ {length}{label}"
            figures.append(Figure(name, rate, "ktokens/s/GPU", "simulated", note=f"{most} tokens at most"))
    return Report("LobRA, tokens a second by configuration", tuple(figures), (f"Profile: {profile.source}",))


@dataclass(frozen=True, slots=True)
class HomogeneousOptions:
    """Options of ``lobra/homogeneous``.

    Attributes:
        rows: tensor and pipeline degree, tokens of a sequence, and sequences of a replica, one in each
            microbatch.
    """

    rows: tuple[tuple[int, int, int, int], ...]


@benchmark("lobra/homogeneous", HomogeneousOptions)
def homogeneous(settings: RunSettings, _jobs: Sequence[JobSpec], asked: HomogeneousOptions) -> Report:
    """Seconds of a step on equal replicas, for each configuration and sequence length.

    Raises:
        ConfigError: a cluster that is not described.
    """
    profile = read_profile(settings)
    times = by_thirds(profile)
    figures = tuple(
        Figure(
            f"⟨{tp},{pp}⟩ {length}",
            step_cost(times[place % 3], tp, pp, length, length).seconds([sequences]),
            "s",
            "simulated",
            note=f"{sequences} microbatches of one sequence",
        )
        for place, (tp, pp, length, sequences) in enumerate(asked.rows)
    )
    return Report("LobRA, seconds of a step on equal replicas", figures, (f"Profile: {profile.source}",))


@dataclass(frozen=True, slots=True)
class PathOptions:
    """Options of ``lobra/critical_path``.

    Attributes:
        tasks: whose lengths are drawn.
        assumption: about lengths.
        configurations: tensor and pipeline degree.
        sequences: of a step.
        steps: drawn.
    """

    tasks: tuple[Task, ...]
    assumption: Assumption
    configurations: tuple[tuple[int, int], ...]
    sequences: Count
    steps: Count


@benchmark("lobra/critical_path", PathOptions)
def critical_path(settings: RunSettings, _jobs: Sequence[JobSpec], asked: PathOptions) -> Report:
    """T of appendix D over the seconds of the event simulator, for microbatches of different lengths.

    Raises:
        ConfigError: a cluster that is not described.
    """
    profile = read_profile(settings)
    drawn = drawn_steps(asked.tasks, asked.assumption, asked.steps)
    figures = [
        figure
        for tp, pp in asked.configurations
        for figure in _path_figures(profile, tp, pp, [each[: asked.sequences].tolist() for each in drawn])
    ]
    return Report("LobRA, T compared with the event simulator", tuple(figures), (str(asked.assumption),))


def _path_figures(profile: ClusterProfile, tp: int, pp: int, steps: Sequence[Sequence[int]]) -> list[Figure]:
    """Mean of T over the simulated seconds: longest microbatches first, as LobRA runs them, and as drawn."""
    most = most_tokens(profile, tp, pp)
    edges = [each for each in limits(profile) if each <= most]
    ratios: dict[str, list[float]] = {"longest first": [], "as drawn": []}
    for lengths in steps:
        fitting = np.asarray([min(each, most) for each in lengths])
        bucket = np.asarray(edges)[np.searchsorted(edges, fitting)]
        counts = [int((bucket == edge).sum()) for edge in edges]
        expected = BucketedCost.of(Configuration(tp, pp, most), edges, profile.time).seconds(counts)
        works = _microbatches(counts, edges, most)
        rng = np.random.default_rng(len(works))
        orders = {"longest first": works[::-1], "as drawn": [works[at] for at in rng.permutation(len(works))]}
        for name, order in orders.items():
            machine = Machine(profile.time, even_split(profile.time.layers, pp), tp)
            ratios[name].append(expected / simulate({0: machine.in_order(order)}).makespan)
    name = f"T over simulated, ⟨{tp},{pp}⟩"
    return [
        Figure(
            f"{name}, {order}",
            float(np.mean(each)),
            "×",
            "simulated",
            Baseline(1.0, "the event simulator", at_least=0.9, at_most=1.1, why=UNEVEN)
            if order == "longest first"
            else None,
            note=f"{min(each):.3f} to {max(each):.3f}",
        )
        for order, each in ratios.items()
    ]


UNEVEN = (
    "T counts (pp − 1) more of the longest microbatch; in the simulator only the first ones that fill the "
    "pipeline are that long"
)


def _microbatches(counts: Sequence[int], edges: Sequence[int], most: int) -> list[Work]:
    """Each bucket's sequences in microbatches of its own, shortest first, as LobRA forms them."""
    works = []
    for count, edge in zip(counts, edges, strict=True):
        size = most // edge
        for begin in range(0, count, size):
            here = min(size, count - begin)
            parts = (("all", 0),)
            works.append(
                Work(parts, MicrobatchShape.of([edge] * here), tokens=edge * here, padded=edge * here)
            )
    return works
