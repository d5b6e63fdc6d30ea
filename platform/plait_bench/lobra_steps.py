"""LobRA's 7B workload step by step: its example, ways to train its tasks, replanning, buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from time import perf_counter

import numpy as np

from plait.core.errors import ConfigError
from plait.core.jobs import JobSpec
from plait.core.samples import Int64
from plait.core.settings import RunSettings
from plait.cost.profiles import ClusterProfile
from plait.planner.buckets import INTERVAL, Buckets, dynamic_buckets, fixed_buckets
from plait.planner.deployment import GAP, deploy
from plait.planner.dispatch import Float64, dispatch, spread
from plait_bench.benchmarks import OPTIONS, benchmark
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import Count, Counts, read_profile
from plait_bench.lobra import (
    ALIGNED,
    SAMPLE_STEPS,
    SEVEN,
    Assumption,
    Rows,
    Task,
    best,
    costs_of,
    deployed,
    devices_of,
    drawn_steps,
    length_based,
    limits,
    loaded_steps,
    planned,
    replicas,
)
from plait_bench.lobra_dealing import counts_by_task, dealt_seconds
from plait_bench.lobra_plans import EqualReplicas, Shape, fused_figure, plan_figures
from plait_bench.lobra_sequential import fastest
from plait_bench.progress import part

# LobRA-Sequential's buckets, of which the paper and its artifact say nothing: the paper says that tasks alone
# have "heterogeneous replicas and workload-balanced data dispatching", and names no dynamic bucketing. Those
# of Task-Fused and Task-Sequential are the artifact's seven; both are tried with others, too.
OTHERS = {
    ", buckets doubling from 512": SEVEN[1:],
    ", buckets doubling from 128": (128, *SEVEN),
}
# Its 16 boundaries of runs without dynamic bucketing.
SIXTEEN = (144, 256, 304, 512, 640, 800, 1024, 1216, 1504, 1888, 2656, 4096, 4256, 5840, 8192, 16384)
OWN = ("LobRA", "Plait")
SEQUENTIAL = ("", *OTHERS, ", buckets of 100 steps", ", dynamic buckets")


@dataclass(frozen=True, slots=True)
class ExampleOptions:
    """Options of ``lobra/worked_example``.

    Attributes:
        lengths: of the sequences of each bucket, which the paper does not print.
        counts: sequences of each bucket.
        deployment: the published one.
        shortest: other lengths of the first bucket, which are tried.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    deployment: Rows
    shortest: tuple[int, ...] = ()


@benchmark("lobra/worked_example", ExampleOptions)
def worked_example(settings: RunSettings, _jobs: Sequence[JobSpec], asked: ExampleOptions) -> Report:
    """Seconds of the example's replicas by length-based dispatch, and the best deployment for it.

    Raises:
        ConfigError: a cluster that is not described.
    """
    profile = read_profile(settings)
    every = costs_of(profile, asked.lengths)
    costs = [cost for cost in every if not cost.ramp]
    kinds = replicas(costs, asked.deployment)
    by_length = length_based(kinds, asked.counts)
    own = deploy(every, asked.counts, devices_of(profile))
    plan, took = dict(own.shape), f"Plait's plan: {own}, {own.makespan:.2f} s"
    figures = [
        Figure(name, seconds, "s", "simulated", note=took, plait=own.makespan)
        for kind, seconds in zip(kinds, by_length.seconds, strict=True)
        for name in [f"by length: {kind.cost.configuration}"]
    ]
    for shortest in asked.shortest:
        others = deployed(profile, (shortest, *asked.lengths[1:]), asked.deployment)
        found = length_based(others, asked.counts)
        for kind, seconds in zip(kinds, found.seconds, strict=True):
            name = f"by length: {kind.cost.configuration}; {shortest} tokens"
            figures.append(Figure(name, seconds, "s", "simulated"))
    proved = best(costs, asked.counts, devices_of(profile))
    balanced = dispatch(kinds, asked.counts)
    saved = 100 * (1 - balanced.makespan / by_length.makespan)
    figures.append(
        Figure("balanced dispatch saves", saved, "%", "simulated", note=f"{balanced.makespan:.2f} s")
    )
    shape = dict(proved.shape)
    for cost in costs:
        name = f"best deployment: {cost.configuration}"
        number, mine = shape.get(cost.configuration, 0), plan.get(cost.configuration, 0)
        note = f"{proved}, {proved.makespan:.2f} s; {took}"
        figures.append(Figure(name, number, "replicas", "computed", note=note, plait=mine))
    return Report("LobRA's worked example", tuple(figures), (f"Profile: {profile.source}",))


@dataclass(frozen=True, slots=True)
class EndToEndOptions:
    """Options of ``lobra/end_to_end``.

    Attributes:
        tasks: of the joint batch.
        assumptions: about lengths; the first is what is compared.
        fused: Task-Fused's deployment.
        deployment: LobRA's.
        sequential: Task-Sequential's, by task.
        sequential_devices: of each task in LobRA-Sequential, if only these count; this is tried beside all
            devices for each.
        steps: drawn, over which is averaged.
        tried: of these, the first ones over which LobRA-Sequential is averaged beside what is compared: its
            sequences are dispatched task by task, which takes most of the time.
        choosing: at most so many steps of another draw, by which LobRA-Sequential's plan for each task is
            chosen.
        gap: to the proved bound at which planning ends.
        lacking: configurations [tp, pp] without which Plait's plan is compared, too.
        plans: assumptions about lengths under which plans alone are compared, too.
    """

    tasks: tuple[Task, ...]
    assumptions: tuple[Assumption, ...]
    fused: Rows
    deployment: Rows
    sequential: dict[str, Rows]
    steps: Count
    tried: Count
    choosing: Count
    gap: float = GAP
    lacking: tuple[Shape, ...] = ()
    plans: tuple[Assumption, ...] = ()
    sequential_devices: Count | None = None

    def __post_init__(self) -> None:
        if lost := {task.name for task in self.tasks} ^ set(self.sequential):
            raise ConfigError(f"{OPTIONS}.sequential: {sorted(lost)}", "Every task has one deployment there.")


@benchmark("lobra/end_to_end", EndToEndOptions)
def end_to_end(settings: RunSettings, _jobs: Sequence[JobSpec], asked: EndToEndOptions) -> Report:
    """Seconds of a step of all tasks: one after another or fused, on equal replicas or LobRA's, and Plait's.

    Raises:
        ConfigError: a cluster that is not described.
    """
    profile = read_profile(settings)
    figures: list[Figure] = []
    piece = part("assumptions", len(asked.assumptions))
    for number, assumption in enumerate(asked.assumptions):
        piece(str(assumption))
        label = "" if number == 0 else f"; {assumption}"
        known = drawn_steps(asked.tasks, assumption, SAMPLE_STEPS)
        figures += plan_figures(
            *(profile, known, asked.deployment, "Table 2", label),
            gap=asked.gap,
            without_pipelines=not label,
            lacking=asked.lacking,
        )
        figures.append(fused_figure(profile, known, asked.fused, "Table 2", label))
        each = _systems(profile, asked, assumption, compared=number == 0)
        seconds = {name: float(np.mean(own)) for name, own in each.items()}
        figures += [
            Figure(
                f"{name}{label}", seconds[name] * profile.devices.count, "GPU s", "simulated",
                plait=seconds["Plait"] * profile.devices.count if name == "LobRA" else None,
                note=f"{len(own)} steps",
            )
            for name, own in each.items()
        ]  # fmt: skip
        for how in ("", *OTHERS):
            saved, ours = (100 * (1 - seconds[own] / seconds[f"Task-Fused{how}"]) for own in OWN)
            name = f"LobRA saves over Task-Fused{how}{label}"
            figures.append(Figure(name, saved, "%", "simulated", note=_spread(each, how), plait=ours))
        for how in SEQUENTIAL:
            alone = each[f"LobRA-Sequential{how}"]
            faster, ours = (float(np.mean(alone)) / float(np.mean(each[own][: len(alone)])) for own in OWN)
            name = f"LobRA over LobRA-Sequential{how}{label}"
            figures.append(Figure(name, faster, "×", "simulated", note=f"{len(alone)} steps", plait=ours))
        if asked.sequential_devices and not label:
            figures.append(_on_fewer(profile, asked, asked.sequential_devices, seconds["LobRA"]))
    for assumption in asked.plans:
        known = drawn_steps(asked.tasks, assumption, SAMPLE_STEPS)
        label = f"; {assumption}"
        figures += plan_figures(profile, known, asked.deployment, "Table 2", label, gap=asked.gap)
    return Report("LobRA: a step of all tasks", tuple(figures), (f"Profile: {profile.source}",))


def _spread(each: Mapping[str, Float64], how: str) -> str:
    """How far the mean of what is saved may be off by the draws of its steps."""
    fused, own = each[f"Task-Fused{how}"], each["LobRA"]
    if len(own) == 1:
        return "1 step"
    off = np.std(own - own.mean() / fused.mean() * fused, ddof=1) / fused.mean() / len(own) ** 0.5
    return f"{len(own)} steps, standard error {100 * off:.2f}"


def _systems(
    profile: ClusterProfile, asked: EndToEndOptions, assumption: Assumption, *, compared: bool
) -> dict[str, Float64]:
    """Seconds of the steps of each system; LobRA-Sequential's fewer steps if they are not what is
    ``compared``."""
    known = drawn_steps(asked.tasks, assumption, SAMPLE_STEPS)
    batches = loaded_steps(asked.tasks, assumption, asked.steps)
    own = planned(profile, known, gap=asked.gap)
    edges = {"": SEVEN, **OTHERS}
    sizes = [task.batch_size for task in asked.tasks]
    found = {
        f"Task-Fused{how}": np.array(
            [lobra_seconds(profile, asked.fused, batch, sizes, boundaries=each) for batch in batches]
        )
        for how, each in edges.items()
    }
    found["LobRA"] = np.array(
        [lobra_seconds(profile, asked.deployment, batch, sizes, boundaries=None) for batch in batches]
    )
    found["Plait"] = np.array([balanced_seconds(profile, own, batch) for batch in batches])
    fewer = min(asked.tried, asked.steps)
    number = {how: fewer if how or not compared else asked.steps for how in SEQUENTIAL}
    alone = np.zeros(asked.steps)
    several = {how: np.zeros(steps) for how, steps in number.items()}
    for task in asked.tasks:
        known = drawn_steps([task], assumption, SAMPLE_STEPS)
        batches = loaded_steps([task], assumption, asked.steps)
        size = [task.batch_size]
        alone += [lobra_seconds(profile, asked.sequential[task.name], batch, size) for batch in batches]
        rows = _plan_alone(profile, asked, assumption, task)
        boundaries = (*edges.values(), _seen(profile, known), None)
        for total, each in zip(several.values(), boundaries, strict=True):
            some = batches[: len(total)]
            total += [lobra_seconds(profile, rows, batch, size, boundaries=each) for batch in some]
    found["Task-Sequential"] = alone
    return found | {f"LobRA-Sequential{how}": each for how, each in several.items()}


def _on_fewer(profile: ClusterProfile, asked: EndToEndOptions, devices: int, joint: float) -> Figure:
    """LobRA's step of ``joint`` seconds over LobRA-Sequential in device-seconds, if each task has ``devices``
    and the others, idle or with another task, are not counted."""
    part_of_it = replace(profile, devices=replace(profile.devices, count=devices))
    assumption, seconds = asked.assumptions[0], 0.0
    for task in asked.tasks:
        rows = _plan_alone(part_of_it, asked, assumption, task)
        batches = loaded_steps([task], assumption, asked.steps)
        seconds += float(
            np.mean([lobra_seconds(part_of_it, rows, each, [task.batch_size]) for each in batches])
        )
    return Figure(
        f"each task on {devices} devices: LobRA over LobRA-Sequential",
        seconds * devices / (joint * profile.devices.count),
        "×",
        "simulated",
        note=f"{asked.steps} steps; other devices are not counted",
    )


def _plan_alone(profile: ClusterProfile, asked: EndToEndOptions, assumption: Assumption, task: Task) -> Rows:
    """LobRA-Sequential's plan for a task: the fastest found for steps of another draw of its data set, spread
    over as many as count, since the loader's first ones have the longest sequences."""
    known = drawn_steps([task], assumption, SAMPLE_STEPS)
    mean = planned(profile, known, gap=asked.gap)
    others = loaded_steps([task], replace(assumption, seed=assumption.seed + 1), asked.steps)
    others = others[:: -(-asked.steps // asked.choosing)]

    @cache
    def seconds(rows: Rows) -> float:
        return float(np.mean([lobra_seconds(profile, rows, each, [task.batch_size]) for each in others]))

    starts = (mean, asked.sequential[task.name])
    return fastest(profile, starts, min(int(known.max()), max(limits(profile))), seconds)


def _seen(profile: ClusterProfile, known: Int64) -> tuple[int, ...]:
    """Boundaries that pad the sequences of a sample least."""
    return tuple(dynamic_buckets(known.ravel(), interval=ALIGNED, required=limits(profile)).lengths)


def lobra_seconds(
    profile: ClusterProfile,
    rows: Rows,
    batch: Int64,
    sizes: Sequence[int],
    *,
    boundaries: Sequence[int] | None = SEVEN,
) -> float:
    """Seconds of LobRA and its baselines: balanced dispatch over fixed boundaries or, without any, dynamic
    ones, then each task's sequences dealt to the replicas of a kind as its artifact does.

    A sequence that fits nowhere is cut.

    Args:
        sizes: sequences of each task in ``batch``, in order.
    """
    cut = np.minimum(batch, _longest(profile, rows))
    dynamic = boundaries is None
    made = dynamic_buckets(cut, interval=ALIGNED) if dynamic else _bucketed(profile, rows, cut, boundaries)
    return _dealt(profile, rows, made, cut, sizes)


def _dealt(profile: ClusterProfile, rows: Rows, made: Buckets, cut: Int64, sizes: Sequence[int]) -> float:
    """Seconds with LobRA's balanced dispatch of the sequences ``cut`` in buckets, dealt by task."""
    kinds = deployed(profile, made.lengths, rows)
    tasks = counts_by_task(made, cut, sizes)
    assigned = [made.counts] if len(kinds) == 1 else dispatch(kinds, made.counts).assigned
    return dealt_seconds(kinds, assigned, tasks)


def balanced_seconds(
    profile: ClusterProfile, rows: Rows, batch: Int64, *, boundaries: Sequence[int] | None = None
) -> float:
    """Seconds with Plait's dispatch to single replicas over dynamic buckets, or fixed ones; a sequence that
    fits nowhere is cut."""
    made = _bucketed(profile, rows, batch, boundaries)
    kinds = deployed(profile, made.lengths, rows)
    return spread(kinds, made.counts, dispatch(kinds, made.counts)).makespan


def _bucketed(profile: ClusterProfile, rows: Rows, batch: Int64, boundaries: Sequence[int] | None) -> Buckets:
    most = _longest(profile, rows)
    cut = np.minimum(batch, most)
    if boundaries is None:
        return dynamic_buckets(cut, interval=ALIGNED, required=limits(profile))
    return fixed_buckets(cut, sorted({most, *(each for each in boundaries if each < most)}))


def _longest(profile: ClusterProfile, rows: Rows) -> int:
    """The most tokens of a sequence that fits into one of the replicas."""
    shapes = {(tp, pp) for tp, pp, _ in rows}
    return max(each.max_tokens for each in profile.configurations if (each.tp, each.pp) in shapes)


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Options of the benchmarks of single steps.

    Attributes:
        tasks: of the joint batch.
        assumption: about lengths.
        deployment: the published one.
        steps: drawn.
        buckets: numbers of buckets that are compared.
        alternatives: other assumptions about lengths, where they are tried.
    """

    tasks: tuple[Task, ...]
    assumption: Assumption
    deployment: Rows
    steps: Count
    buckets: Counts = (16,)
    alternatives: tuple[Assumption, ...] = ()


@benchmark("lobra/buckets", StepOptions)
def bucket_numbers(settings: RunSettings, _jobs: Sequence[JobSpec], asked: StepOptions) -> Report:
    """Padding and seconds of a step of LobRA by the number of dynamic buckets.

    Raises:
        ConfigError: a cluster that is not described.
    """
    profile = read_profile(settings)
    batches = loaded_steps(asked.tasks, asked.assumption, asked.steps)
    sizes = [task.batch_size for task in asked.tasks]
    seconds, padding = {}, {}
    for number in asked.buckets:
        made = [dynamic_buckets(batch, buckets=number, interval=ALIGNED) for batch in batches]
        each = [
            _dealt(profile, asked.deployment, own, batch, sizes)
            for own, batch in zip(made, batches, strict=True)
        ]
        seconds[number] = float(np.mean(each))
        padded = sum(sum(np.multiply(own.lengths, own.counts)) for own in made)
        padding[number] = 100 * (1 - sum(own.tokens for own in made) / padded)
    first, last = asked.buckets[0], asked.buckets[-1]
    figures = [
        *(Figure(f"{number} buckets: padding", share, "%", "computed") for number, share in padding.items()),
        *(
            Figure(f"{number} buckets: seconds over {first}'s", took / seconds[first], "×", "simulated")
            for number, took in seconds.items()
        ),
    ]
    if STABLE in seconds:
        stable = Baseline(1.0, f"{last} buckets", at_least=0.95, at_most=1.05, why=TRADE)
        ratio = seconds[STABLE] / seconds[last]
        figures.append(Figure(f"{STABLE} buckets: seconds over {last}'s", ratio, "×", "simulated", stable))
    return Report("LobRA, number of buckets", tuple(figures), (str(asked.assumption),))


STABLE = 12  # buckets beyond which LobRA's time stays the same
TRADE = "more buckets pad less; T's only cost of one is microbatches that are not full"


@benchmark("lobra/case_study", StepOptions)
def case_study(settings: RunSettings, _jobs: Sequence[JobSpec], asked: StepOptions) -> Report:
    """Seconds of each kind of replica in one step: by length, balanced, and with dynamic buckets.

    Raises:
        ConfigError: a cluster that is not described.
    """
    profile = read_profile(settings)
    batch = drawn_steps(asked.tasks, asked.assumption, 1)[0]
    fixed, moving = fixed_buckets(batch, SIXTEEN), dynamic_buckets(batch, interval=ALIGNED)
    figures = []
    for name, buckets in (("by length", fixed), ("balanced", fixed), ("balanced, dynamic buckets", moving)):
        kinds = deployed(profile, buckets.lengths, asked.deployment)
        how = length_based if name == "by length" else dispatch
        found = how(kinds, buckets.counts)
        for kind, seconds in zip(kinds, found.seconds, strict=True):
            figures.append(Figure(f"{name}: {kind.cost.configuration}", seconds, "s", "simulated"))
        idle = 1 - sum(kind.devices * each for kind, each in zip(kinds, found.seconds, strict=True)) / (
            sum(kind.devices for kind in kinds) * found.makespan
        )
        figures.append(Figure(f"{name}: devices idle", 100 * idle, "%", "simulated"))
    return Report("LobRA, replicas in one step", tuple(figures), (str(asked.assumption),))


@benchmark("lobra/sequential_plans", StepOptions)
def sequential_plans(settings: RunSettings, _jobs: Sequence[JobSpec], asked: StepOptions) -> Report:
    """Devices of a replica of the best equal replicas for each task alone.

    Raises:
        ConfigError: a cluster that is not described.
    """
    profile = read_profile(settings)
    figures = []
    for number, assumption in enumerate((asked.assumption, *asked.alternatives)):
        label = "" if number == 0 else f"; {assumption}"
        for task in asked.tasks:
            known = drawn_steps([task], assumption, asked.steps)
            each = EqualReplicas.of(profile, known, task.longest)
            name = f"{task.name}: devices of a replica"
            figures.append(each.figure(f"{name}{label}", each.by_seconds()))
            if number == 0:
                figures.append(each.figure(f"{name}; by throughput", each.by_throughput()))
                drawn = EqualReplicas.of(profile, known)
                figures.append(drawn.figure(f"{name}, longest as drawn", drawn.by_seconds()))
    return Report("LobRA, equal replicas for each task", tuple(figures), (str(asked.assumption),))


NOT_BEST = "below 1 where the plan of a single step, a heuristic one, is the slower"


@benchmark("lobra/two_stage", StepOptions)
def two_stage(settings: RunSettings, _jobs: Sequence[JobSpec], asked: StepOptions) -> Report:
    """Planning each step beside dispatch to a fixed deployment: seconds of planning, and of the step.

    Raises:
        ConfigError: a cluster that is not described.
    """
    profile = read_profile(settings)
    batches = drawn_steps(asked.tasks, asked.assumption, SAMPLE_STEPS + asked.steps)
    fixed = planned(profile, batches[:SAMPLE_STEPS], interval=INTERVAL)
    seconds: dict[str, list[float]] = {"each": [], "fixed": []}
    ratios, others = [], 0
    piece = part("steps", asked.steps)
    for number, batch in enumerate(batches[SAMPLE_STEPS:]):
        piece(str(number + 1))
        begin = perf_counter()
        replanned = planned(profile, batch[None], interval=INTERVAL)  # finer ones take minutes a step
        seconds["each"].append(perf_counter() - begin)
        begin = perf_counter()
        decomposed = balanced_seconds(profile, fixed, batch)
        seconds["fixed"].append(perf_counter() - begin)
        ratios.append(decomposed / balanced_seconds(profile, replanned, batch))
        others += sorted(replanned) != sorted(fixed)
    longer, again = median(seconds["each"]), median(seconds["fixed"])
    return Report(
        "LobRA, two stages compared with planning every step",
        (
            Figure("largest T decomposed over T origin", max(ratios), "×", "simulated"),
            Figure("least T decomposed over T origin", min(ratios), "×", "simulated", note=NOT_BEST),
            Figure("mean T decomposed over T origin", float(np.mean(ratios)), "×", "simulated"),
            Figure("steps whose own plan is another", others, "steps", "computed", note=f"of {asked.steps}"),
            Figure("planning each step", longer, "s", "measured"),
            Figure("bucketing and dispatch alone", again, "s", "measured",
                   Baseline(longer, "planning each step", at_most=1.0)),
        ),
        (str(asked.assumption),),
    )  # fmt: skip
