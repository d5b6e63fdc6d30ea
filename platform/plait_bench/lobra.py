"""LobRA's 7B workload: its deployment and its ablation compared with Plait's, and its layer times."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plait.core.checks import check
from plait.core.errors import ConfigError, DataError, InputError, choices
from plait.core.jobs import JobSpec
from plait.core.samples import Int64
from plait.core.settings import RunSettings
from plait.cost.fitting import Fit
from plait.cost.profiles import ClusterProfile
from plait.cost.replica import Configuration, ReplicaCost
from plait.cost.time import LayerTime, MicrobatchShape, TimeModel, fit_layer
from plait.planner.buckets import INTERVAL, dynamic_buckets, fixed_buckets
from plait.planner.deployment import GAP, Deployment, best_equal_replicas, deploy
from plait.planner.deployment_patterns import Devices
from plait.planner.dispatch import (
    Dispatch,
    ReplicaKind,
    check_coverage,
    device_seconds,
    dispatch,
    dispatch_of,
    relaxed_shares,
    spread,
)
from plait.planner.solver import Limits
from plait_bench.benchmarks import benchmark
from plait_bench.bucketed import BucketedCost
from plait_bench.exact import exact_deployment, exact_dispatch
from plait_bench.figures import Baseline, Figure, Published, Report
from plait_bench.inputs import Count, Positive, read_profile, shipped
from plait_bench.lengths import Family, LengthGenerator, sigma_from_skewness
from plait_bench.lobra_dealing import counts_by_task, dealt_seconds
from plait_bench.lobra_loading import loaded
from plait_bench.progress import part

TABLE_2 = "LobRA §5.2, Table 2, which has the deployment, not this number"
STEPS = ("heterogeneous replicas, length-based", "+ balanced dispatch", "+ dynamic bucketing")  # of figure 8
BOUNDARIES = (
    "The paper gives neither the boundaries of its fixed buckets, which are its artifact's here, nor its "
    "lengths. The padding of the boundaries determines what dynamic bucketing can save, the spread of the "
    "lengths what balancing can: the details show both moved."
)
OURS = "Plait's deployment, shares by replica"
SAMPLE_STEPS = 100  # the distribution is that of 100 steps' sequences, as in the paper
DEPLOY_LIMITS = Limits(nodes=500, gap=0.005, seconds=30.0)
LAYERS = 32  # layers of Llama-2-7B, which the published steps are for
COLUMNS = ("tp", "seq_len", "mbs", "time")  # columns of the table of layer times
# Boundaries of 7 fixed buckets in LobRA's artifact (PKU-DAIR/Hetu, lobra/trainer/batch_scheduler.py).
SEVEN = (256, 512, 1024, 2048, 4096, 8192, 16384)
# Its dynamic boundaries are multiples of these tokens; the paper's text has 256, and so have plans that would
# take minutes with finer ones.
ALIGNED = 16
Rows = tuple[tuple[int, int, int], ...]  # rows of a deployment: tensor and pipeline degree, replicas


@dataclass(frozen=True, slots=True)
class Task:
    """One data set of the joint batch: published mean and skewness of its lengths, and its batch size.

    Attributes:
        longest: the most tokens that its run is set up for, where the artifact's scripts say it.
        samples: sequences of the data set, where steps are taken from it as the artifact takes them.
    """

    name: str
    mean: Positive
    skewness: Positive
    batch_size: Count
    longest: Count | None = None
    samples: Count | None = None

    def __post_init__(self) -> None:
        check(self, f"task {self.name}")


@dataclass(frozen=True, slots=True)
class Assumption:
    """How lengths are drawn if only moments are published.

    Attributes:
        family: "lognormal" or "gamma".
        sigma: sigma of every task; None: the one that each task's skewness implies in the family.
        sigma_scale: factor of that sigma.
        clip: longest length.
        seed: of the draws.
    """

    family: Family = "lognormal"
    sigma: Positive | None = None
    sigma_scale: Positive = 1.0
    clip: Count = 16384
    seed: int = 0

    def __post_init__(self) -> None:
        check(self, "assumption")

    def generator(self, task: Task) -> LengthGenerator:
        """The generator of one task's lengths."""
        sigma = sigma_from_skewness(self.family, task.skewness) if self.sigma is None else self.sigma
        return LengthGenerator(self.family, task.mean, sigma * self.sigma_scale, self.clip, self.seed)

    def __str__(self) -> str:
        spread = "from skewness" if self.sigma is None else f"{self.sigma:g}"
        scale = "" if self.sigma_scale == 1.0 else f" × {self.sigma_scale:g}"
        return f"{self.family}, sigma {spread}{scale}, clip {self.clip}, seed {self.seed}"


def drawn_steps(tasks: Sequence[Task], assumption: Assumption, steps: int) -> Int64:
    """Lengths of ``steps`` joint steps (steps, B); every task brings its batch size to each."""
    drawn = [
        assumption.generator(task)
        .draw(steps * task.batch_size, stream=task.name)
        .reshape(steps, task.batch_size)
        for task in tasks
    ]
    return np.concatenate(drawn, axis=1)


def loaded_steps(tasks: Sequence[Task], assumption: Assumption, steps: int) -> Int64:
    """Lengths of the joint steps (steps, B) that LobRA's artifact takes from each task's data set.

    Raises:
        ConfigError: a task without a number of samples.
    """
    taken = []
    for task in tasks:
        if task.samples is None:
            raise ConfigError(f"task {task.name} without samples", "The data set's size must be given.")
        lengths = assumption.generator(task).draw(task.samples, stream=task.name)
        taken.append(loaded(lengths, task.batch_size, steps, assumption.clip))
    return np.concatenate(taken, axis=1)


def limits(profile: ClusterProfile) -> tuple[int, ...]:
    """The different most tokens of the profile's configurations, ascending."""
    return tuple(sorted({configuration.max_tokens for configuration in profile.configurations}))


def costs_of(profile: ClusterProfile, lengths: Sequence[int]) -> list[ReplicaCost]:
    """T of every configuration that fits into the profile's devices."""
    able = [each for each in profile.configurations if each.devices <= profile.devices.count]
    return [BucketedCost.of(each, lengths, profile.time) for each in able]


def devices_of(profile: ClusterProfile) -> Devices:
    """The profile's devices, as deployments are given them."""
    return {profile.kind: profile.devices.count}


def deployed(profile: ClusterProfile, lengths: Sequence[int], rows: Rows) -> list[ReplicaKind]:
    """The kinds of replica of these rows, with their costs for samples of these lengths.

    Raises:
        ConfigError: a configuration that the profile does not have.
    """
    return replicas(costs_of(profile, lengths), rows)


def planned(profile: ClusterProfile, known: Int64, *, gap: float = GAP, interval: int = ALIGNED) -> Rows:
    """Plait's deployment for a sample of steps, within ``gap`` of the proved bound if possible."""
    buckets = dynamic_buckets(known.ravel(), interval=interval, required=limits(profile))
    expected = expected_counts(buckets.counts, known.shape[1])
    plan = deploy(costs_of(profile, buckets.lengths), expected, devices_of(profile), gap=gap)
    return tuple((each.tp, each.pp, count) for each, count in plan.shape)


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


@dataclass(frozen=True, slots=True)
class DeploymentOptions:
    """Options of the comparison of deployments.

    Attributes:
        tasks: of the joint batch.
        assumptions: about lengths, each shown.
        deployment: the published one.
    """

    tasks: tuple[Task, ...]
    assumptions: tuple[Assumption, ...]
    deployment: Rows


@benchmark("lobra/deploy", DeploymentOptions)
def deployment(settings: RunSettings, _jobs: Sequence[JobSpec], asked: DeploymentOptions) -> Report:
    """The published deployment's seconds over the best one's, for each assumption about lengths.

    Raises:
        ConfigError: a cluster that is not described.
    """
    profile = read_profile(settings)
    figures: list[Figure] = []
    piece = part("deployments by assumption", len(asked.assumptions))
    for assumption in asked.assumptions:
        piece(str(assumption))
        figures += compare(profile, asked.tasks, assumption, asked.deployment, detail=bool(figures))
    return Report(
        "LobRA, 7B on 16 A100-40GB: the published deployment compared with Plait's",
        tuple(figures),
        (
            f"cost model: {profile.source}",
            f"its error: {100 * (profile.error or 0.0):.1f} % ({profile.error_source})",
            f"most tokens of a microbatch: table {profile.table!r} of {', '.join(profile.tables)}",
            "makespan: T(⌈d/p⌉) of LobRA Eq. 2, integer program within 0.5 % of its bound",
        ),
    )


def expected_counts(counts: Sequence[int], batch: int) -> tuple[int, ...]:
    """B_j = ⌈B·f_j⌉ of a batch, from the counts of a large sample (LobRA Eq. 2)."""
    total = sum(counts)
    return tuple(-(-batch * count // total) for count in counts)


def compare(
    profile: ClusterProfile, tasks: Sequence[Task], assumption: Assumption, published: Rows, *, detail: bool
) -> list[Figure]:
    """Figures of one assumption: with every configuration, without pipelines as in LobRA's plan, and with
    replicas that are all equal (Task-Fused); ``detail`` marks those of a further assumption."""
    known = drawn_steps(tasks, assumption, SAMPLE_STEPS)
    buckets = dynamic_buckets(known.ravel(), required=limits(profile))
    counts = expected_counts(buckets.counts, known.shape[1])
    costs, devices = costs_of(profile, buckets.lengths), devices_of(profile)
    kinds = replicas(costs, published)
    theirs = exact_dispatch(kinds, counts, DEPLOY_LIMITS)
    figures, needs = [], _needs_largest(kinds, costs, counts)
    for name, allowed in (("all", costs), ("tp only", [cost for cost in costs if not cost.ramp])):
        ours = best(allowed, counts, devices)
        figures.append(
            Figure(
                f"{assumption}; {name}: published slower by",
                100.0 * (theirs.makespan / ours.makespan - 1.0),
                "%",
                "computed",
                Published(0.0, TABLE_2, tolerance=10.0, why=needs, weak="one-sided"),
                f"Plait: {ours}, {ours.makespan:.2f} s, bound {ours.bound:.2f} s; "
                f"published {theirs.makespan:.2f} s; {needs}",
                detail=detail,
            )
        )
    chosen = deploy(costs, counts, devices)
    equal = best_equal_replicas(costs, counts, devices)
    figures.append(
        Figure(
            f"{assumption}; equal replicas (Task-Fused) slower by",
            100.0 * (equal.makespan / chosen.makespan - 1.0),
            "%",
            "computed",
            note=f"{equal}, {equal.makespan:.2f} s; Plait by replica: {chosen}, {chosen.makespan:.2f} s",
        )
    )
    return figures


def _needs_largest(kinds: Sequence[ReplicaKind], costs: Sequence[ReplicaCost], counts: Sequence[int]) -> str:
    """The sequences that fit only into the published deployment's largest replica, and the configuration that
    would suffice for them.

    That replica pays off if the longest sequences need it, and if their share is about its share of the
    devices.
    """
    largest, *others = sorted(kinds, key=lambda kind: -kind.cost.configuration.max_tokens)
    most = max(kind.cost.configuration.max_tokens for kind in others)
    rows = [(count, int(length)) for count, length in zip(counts, largest.cost.lengths, strict=True) if count]
    number = sum(count for count, length in rows if length > most)
    share = sum(count * length for count, length in rows if length > most) / sum(
        count * length for count, length in rows
    )
    longest = rows[-1][1]
    able = [cost.configuration for cost in costs if cost.configuration.max_tokens >= longest]
    least = min(able, key=lambda each: (each.devices, each))
    return (
        f"{number} of {sum(counts)} sequences, {100 * share:.1f} % of the tokens, are for its "
        f"{largest.cost.configuration} alone; the longest, {longest} tokens, fits {least}"
    )


def best(costs: Sequence[ReplicaCost], counts: Sequence[int], devices: Devices) -> Deployment:
    """Plait's deployment by LobRA's objective, with the integer program's bound."""
    return exact_deployment(costs, counts, devices, equal_shares=True, limits=DEPLOY_LIMITS)


@dataclass(frozen=True, slots=True)
class AblationOptions:
    """Options of the ablation.

    Attributes:
        tasks: of the joint batch.
        assumptions: about lengths, each shown.
        fused: the deployment of equal replicas.
        deployment: the published one.
        steps: drawn, over which is averaged.
        boundaries: of LobRA's fixed buckets by name; None for the least padding over the sample. Task-Fused
            has :data:`SEVEN`.
    """

    tasks: tuple[Task, ...]
    assumptions: tuple[Assumption, ...]
    fused: Rows
    deployment: Rows
    steps: Count
    boundaries: dict[str, tuple[int, ...] | None]

    def __post_init__(self) -> None:
        for name, edges in self.boundaries.items():
            if edges is not None and (not edges or edges[0] < 1 or list(edges) != sorted(set(edges))):
                raise ConfigError(
                    f"bench.options.boundaries: {name}={list(edges)}", "They must rise from at least 1."
                )


@benchmark("lobra/ablation", AblationOptions)
def ablation(settings: RunSettings, _jobs: Sequence[JobSpec], asked: AblationOptions) -> Report:
    """Device-seconds saved by each step, for each assumption about lengths and fixed boundaries.

    Raises:
        ConfigError: a cluster that is not described.
    """
    profile = read_profile(settings)
    figures: list[Figure] = []
    piece = part("ablations", len(asked.assumptions))
    for assumption in asked.assumptions:
        piece(str(assumption))
        for name, (*saved, plan) in savings(profile, assumption, asked).items():
            case = f"{assumption}; fixed buckets {name}"
            for step, ours in zip(STEPS, saved, strict=True):
                last = plan if step == STEPS[-1] else None
                figures.append(Figure(f"{case}: {step}", ours, "% saved", "simulated", plait=last))
            figures.append(Figure(f"{case}: {OURS}", plan, "% saved", "simulated"))
    return Report(
        "LobRA ablation, 7B on 16 A100-40GB: device-seconds saved compared with Task-Fused",
        tuple(figures),
        (
            f"cost model: {profile.source}",
            BOUNDARIES,
        ),
    )


def savings(
    profile: ClusterProfile, assumption: Assumption, options: AblationOptions
) -> dict[str, list[float]]:
    """Percent of device-seconds saved by each of :data:`STEPS` and by :data:`OURS`, over drawn steps, by the
    name of the fixed boundaries."""
    known = drawn_steps(options.tasks, assumption, SAMPLE_STEPS)
    batches = loaded_steps(options.tasks, assumption, options.steps)
    seen = dynamic_buckets(known.ravel(), required=limits(profile))
    rows = planned(profile, known, interval=INTERVAL)  # finer ones take minutes
    seconds = {name: np.zeros(len(STEPS) + 2) for name in options.boundaries}
    for batch in batches:
        fused, moved, ours = _moving_seconds(profile, batch, options, rows)
        for name, boundaries in options.boundaries.items():
            edges = [*(boundaries or seen.lengths)]
            edges[-1] = max(edges[-1], *limits(profile))
            fixed = _fixed_seconds(profile, batch, edges, options)
            seconds[name] += [fused, *fixed, moved, ours]
    return {name: (100.0 * (1.0 - each[1:] / each[0])).tolist() for name, each in seconds.items()}


def _moving_seconds(
    profile: ClusterProfile, batch: Int64, options: AblationOptions, rows: Rows
) -> tuple[float, float, float]:
    """Seconds of one step whatever the fixed boundaries: Task-Fused, LobRA with dynamic buckets, and Plait on
    ``rows``."""
    seven, moving = fixed_buckets(batch, SEVEN), dynamic_buckets(batch, interval=ALIGNED)
    kept = dynamic_buckets(batch, interval=ALIGNED, required=limits(profile))
    fused = deployed(profile, seven.lengths, options.fused)
    theirs = deployed(profile, moving.lengths, options.deployment)
    ours = deployed(profile, kept.lengths, rows)
    balanced = dispatch(theirs, moving.counts)
    sizes = [task.batch_size for task in options.tasks]
    return (
        dealt_seconds(fused, [seven.counts], counts_by_task(seven, batch, sizes)),
        dealt_seconds(theirs, balanced.assigned, counts_by_task(moving, batch, sizes)),
        spread(ours, kept.counts, dispatch(ours, kept.counts)).makespan,
    )


def _fixed_seconds(
    profile: ClusterProfile, batch: Int64, edges: Sequence[int], options: AblationOptions
) -> tuple[float, float]:
    """Seconds of one step of LobRA with fixed boundaries: by length, and balanced."""
    fixed = fixed_buckets(batch, edges)
    kinds = deployed(profile, fixed.lengths, options.deployment)
    tasks = counts_by_task(fixed, batch, [task.batch_size for task in options.tasks])
    by_length = length_based(kinds, fixed.counts).assigned
    balanced = dispatch(kinds, fixed.counts).assigned
    return dealt_seconds(kinds, by_length, tasks), dealt_seconds(kinds, balanced, tasks)


@dataclass(frozen=True, slots=True)
class LayerMeasurement:
    """Seconds of one layer, forward and backward, for ``samples`` sequences of ``length`` tokens."""

    tp: int
    length: int
    samples: int
    seconds: float

    @property
    def shape(self) -> MicrobatchShape:
        """As a microbatch."""
        return MicrobatchShape.of([self.length] * self.samples)


def read_layer_times(path: Path) -> tuple[LayerMeasurement, ...]:
    """The rows of a CSV file with the columns tp, seq_len, mbs and time (in milliseconds), in order.

    Raises:
        DataError: the file or a column is missing, or an entry is missing, negative or no number.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "The table of layer times must be readable.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: {error}", "The table of layer times is a CSV file in UTF-8.") from error
    return tuple(_measurement(path, number, row) for number, row in enumerate(rows, start=2))


def _measurement(path: Path, line: int, row: dict[str, str | None]) -> LayerMeasurement:
    values = []
    for column in COLUMNS:
        text = row.get(column)
        try:
            value = float(text or "")
        except ValueError:
            value = math.nan
        if not (value > 0 and math.isfinite(value)):
            raise DataError(f"{path} line {line}: {column}={text!r}", "Every entry is a number above 0.")
        values.append(value)
    tp, length, samples, milliseconds = values
    return LayerMeasurement(int(tp), int(length), int(samples), milliseconds / 1e3)


def fit_by_degree(rows: Sequence[LayerMeasurement]) -> dict[int, tuple[LayerTime, Fit]]:
    """One fit for each tensor-parallel degree of the table.

    Raises:
        InputError: no rows.
    """
    if not rows:
        raise InputError("no measurements", "A fit needs some for each tensor-parallel degree.")
    degrees = sorted({row.tp for row in rows})
    return {tp: fit_layer((row.shape, row.seconds) for row in rows if row.tp == tp) for tp in degrees}


def relative_errors(rows: Sequence[LayerMeasurement], layers: dict[int, LayerTime]) -> list[float]:
    """(predicted − measured) / measured of each row."""
    return [layers[row.tp].seconds(row.shape) / row.seconds - 1.0 for row in rows]


@dataclass(frozen=True, slots=True)
class LayerTimeOptions:
    """Options of the time model's check.

    Attributes:
        table: CSV file of layer times, by name one that comes with Plait.
        held_out: rows that are not fitted to, from 0.
        steps: published seconds of steps of equal sequences, one in a microbatch, none fitted to:
            (tp, pp, tokens of a sequence, sequences of a replica, seconds).
    """

    table: Path
    held_out: tuple[int, ...]
    steps: tuple[tuple[int, int, int, int, float], ...] = ()


@benchmark("lobra/time_model", LayerTimeOptions)
def time_model(_settings: RunSettings, _jobs: Sequence[JobSpec], asked: LayerTimeOptions) -> Report:
    """Mean relative error on the held-out rows, by tensor-parallel degree and over all.

    Raises:
        ConfigError: a row held out that the table does not have.
        DataError: the table is not there or cannot be used.
    """
    rows = read_layer_times(shipped(asked.table))
    held = set(asked.held_out)
    if not held or min(held) < 0 or max(held) >= len(rows):
        raise ConfigError(
            f"bench.options.held_out of {len(held)} rows",
            f"They must be row numbers from 0 to {len(rows) - 1} of the table.",
        )
    seen = [row for index, row in enumerate(rows) if index not in held]
    unseen = [rows[index] for index in sorted(held)]
    fits = fit_by_degree(seen)
    layers = {tp: layer for tp, (layer, _) in fits.items()}
    if lost := sorted({row.tp for row in unseen} - set(layers)):
        raise ConfigError(
            f"bench.options.held_out holds every row of tp={lost[0]}", "Some must be left to fit to."
        )
    figures = step_errors(TimeModel(LAYERS, layers), asked.steps)
    for tp, (_, fit) in fits.items():
        errors = 100.0 * np.abs(relative_errors([row for row in unseen if row.tp == tp], layers))
        note = f"fitted {100.0 * fit.mean_absolute_error:.2f} %, largest held-out {errors.max():.1f} %"
        case = f"tp={tp}, {len(errors)} rows"
        figures.append(Figure(case, float(errors.mean()), "%", "computed", note=note))
    mean, fitted = (100.0 * float(np.abs(relative_errors(some, layers)).mean()) for some in (unseen, seen))
    beside = Baseline(fitted, "the error on the rows that the model was fitted to")
    figures.append(Figure(f"all, {len(unseen)} of {len(rows)} rows", mean, "%", "computed", beside))
    return Report(
        "Held-out mean relative error of layer and step seconds, Llama-2-7B on A100-40GB", tuple(figures)
    )


def step_errors(model: TimeModel, steps: Sequence[tuple[int, int, int, int, float]]) -> list[Figure]:
    """Mean relative error of steps, with its sign for each number of stages, and without over all."""
    errors: dict[int, list[float]] = {}
    for tp, stages, tokens, sequences, seconds in steps:
        cost = BucketedCost.of(Configuration(tp, stages, tokens), [tokens], model)
        errors.setdefault(stages, []).append(100.0 * (cost.seconds([sequences]) / seconds - 1.0))
    figures = [
        Figure(
            f"steps, pp={stages}",
            float(np.mean(each)),
            "%",
            "computed",
            note=f"with its sign; {len(each)} steps",
        )
        for stages, each in sorted(errors.items())
    ]
    if errors:
        every = np.abs(np.concatenate(list(errors.values())))
        figures.append(Figure(f"steps, all {len(every)}", float(every.mean()), "%", "computed"))
    return figures


def length_based(kinds: Sequence[ReplicaKind], counts: Sequence[int]) -> Dispatch:
    """LobRA's first ablation step: each bucket whole to the kind with the fewest device-seconds for it.

    Raises:
        CapacityError: a bucket fits into no replica.
    """
    check_coverage(kinds, counts)
    shares = np.zeros((len(kinds), len(counts)), dtype=np.int64)
    for j, count in enumerate(counts):
        able = [k for k, kind in enumerate(kinds) if kind.cost.batch[j]]
        k = min(able, key=lambda k: (device_seconds(kinds[k].cost)[j], k))
        shares[k, j] = -(-count // kinds[k].count)
    return dispatch_of(kinds, counts, shares, relaxed_shares(kinds, counts)[0])
