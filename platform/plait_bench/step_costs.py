"""What a joint step costs: by kernels, by tokens of a microbatch, by operation, and with dropout."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from plait.config.fields import build
from plait.core.errors import ConfigError
from plait.core.jobs import JobSpec
from plait.core.plans import Microbatch
from plait.core.samples import Sample
from plait.core.settings import RunSettings
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait_bench.benchmarks import BENCHMARKS
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import OPTIONS, at_least_one
from plait_bench.joint_side import JointSide, load_joint_side
from plait_bench.progress import part

COMPARED = ("reference", "grouped")  # kernels, the slower first: ratios are over it
CAPACITIES = (128, 256, 512, 1024, 2048, 4096)
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm")
SHOWN = 5  # operations named beside the products
MOST_DROPOUT = 1.15  # what a joint step with dropout 0.1 may take, over one without
SILENT = "6"  # above USDT, the level at which Kineto reports the start and stop of a profile


def seconds_in_turns(
    text: str, names: Sequence[str], rounds: int, step: Callable[[str, int], float]
) -> dict[str, list[float]]:
    """Seconds of ``step(name, round)`` by name, ``rounds`` of each, taking turns.

    The second of a round finds warm caches, so they take turns at going first too. A warm-up round is left
    out.
    """
    seconds: dict[str, list[float]] = {name: [] for name in names}
    piece = part(text, rounds + 1)
    for number in range(rounds + 1):
        piece(f"round {number}" if number else "a warm-up")
        for name in names if number % 2 else reversed(names):
            seconds[name].append(step(name, number))
    return {name: times[1:] for name, times in seconds.items()}


# ---- by kernels -------------------------------------------------------------------------------------------


def time_backends(side: JointSide, jobs: Sequence[JobSpec], rounds: int) -> dict[str, list[float]]:
    """Seconds of a joint step over the same microbatches, by kernels."""
    microbatches = side.pack(jobs, 1, side.settings.engine.capacity_or_usual)

    def step(backend: str, number: int) -> float:
        with side.kernels(backend):
            return side.timed_step(jobs, microbatches, number + 1)

    with side.attached(jobs):
        return seconds_in_turns("the joint step by kernels", COMPARED, rounds, step)


def backend_figures(seconds: Mapping[str, Sequence[float]]) -> list[Figure]:
    """The median step of each, and the median of the rounds' ratios."""
    slow, fast = (seconds[backend] for backend in COMPARED)
    ratio = median(a / b for a, b in zip(slow, fast, strict=True))
    baseline = Baseline(median(slow), f"kernels={COMPARED[0]}", ratio=1 / ratio)
    figures = [
        Figure(f"joint step, kernels={backend}", median(seconds[backend]), "s", "measured", beside)
        for backend, beside in zip(COMPARED, (None, baseline), strict=True)
    ]
    note = f"median over {len(slow)} pairs of steps"
    return [*figures, Figure("speed, grouped over reference", ratio, "×", "measured", note=note)]


# ---- by tokens of a microbatch ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """Real tokens a second at one capacity: medians over the rounds.

    The frozen model's forward and backward pass over the same packed samples bounds joint training: what lies
    between the two is what the adapters cost.
    """

    capacity: int
    frozen: float
    joint: float


def measure_capacities(
    side: JointSide, base: BaseModel, jobs: Sequence[JobSpec], capacities: Sequence[int], rounds: int
) -> list[CapacityPoint]:
    """Forward and backward over one global batch of every job, at each capacity in turn, ``rounds`` times.

    Capacities below the longest sample are left out.
    """
    longest = max(length for job in jobs for length in side.batch(job, 1).lengths)
    plans = {capacity: side.pack(jobs, 1, capacity) for capacity in capacities if capacity >= longest}
    tokens = sum(sum(side.batch(job, 1).lengths) for job in jobs)
    frozen = {capacity: [_samples(side, jobs, each) for each in plan] for capacity, plan in plans.items()}
    seconds: dict[int, list[tuple[float, float]]] = {capacity: [] for capacity in plans}
    piece = part("frozen model and joint step by capacity", (rounds + 1) * len(plans))
    with side.attached(jobs):
        for number in range(rounds + 1):
            for capacity, plan in plans.items():
                piece(f"{capacity} tokens, {f'round {number}' if number else 'a warm-up'}")
                started = perf_counter()
                for samples in frozen[capacity]:
                    _frozen_pass(base, samples)
                between = perf_counter()
                side.pass_through(plan)
                seconds[capacity].append((between - started, perf_counter() - between))
    points = []
    for capacity, (_warm_up, *measured) in seconds.items():
        alone, joint = (tokens / median(kind) for kind in zip(*measured, strict=True))
        points.append(CapacityPoint(capacity, alone, joint))
    return points


def capacity_figures(points: Sequence[CapacityPoint]) -> list[Figure]:
    """Two lines for each capacity: the frozen model's rate, and beside it the joint one."""
    figures = []
    for point in points:
        name = f"capacity {point.capacity}"
        alone = Baseline(point.frozen, "the frozen model alone: the upper limit")
        figures += [
            Figure(f"{name}: frozen model alone", point.frozen, "tokens/s", "measured"),
            Figure(f"{name}: joint forward and backward", point.joint, "tokens/s", "measured", alone),
        ]
    return figures


def _samples(side: JointSide, jobs: Sequence[JobSpec], microbatch: Microbatch) -> list[Sample]:
    splits = {job.name: side.split(job) for job in jobs}
    return [splits[segment.job][index] for segment in microbatch.segments for index in segment.samples]


def _frozen_pass(base: BaseModel, samples: Sequence[Sample]) -> None:
    """Forward, loss at the labelled rows, and the gradient back to the embeddings; no adapter."""
    token_ids = torch.from_numpy(np.concatenate([sample.tokens for sample in samples])).long()
    labels = torch.from_numpy(np.concatenate([sample.labels for sample in samples]))
    offsets = [0, *accumulate(len(sample.tokens) for sample in samples)]
    context = MicrobatchContext.of(token_ids.to(base.device), offsets)
    hidden = start = base.embed(context).requires_grad_()
    for index in range(base.layer_count):
        hidden = base.layer(index, hidden, context)
    labelled = labels.nonzero()[:, 0].to(base.device)
    weights = torch.full((len(labelled),), 1.0 / len(labelled), device=base.device)
    loss, _ = base.loss(hidden, labelled - 1, context.token_ids[labelled], weights)
    torch.autograd.backward(loss)
    start.grad = None


# ---- by operation -----------------------------------------------------------------------------------------


def time_shares(side: JointSide, jobs: Sequence[JobSpec]) -> dict[str, float]:
    """Each operation's own share of the processor time of one joint step, its callees left out.

    The profiler slows small operations most, so their shares are upper bounds.
    """
    part("where the time of a joint step goes")
    microbatches = side.pack(jobs, 1, side.settings.engine.capacity_or_usual)
    with side.attached(jobs):
        side.pass_through(microbatches)
        os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)  # read when the first profile begins
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            side.timed_step(jobs, microbatches, 1)
    spent = {event.key: float(event.self_cpu_time_total) for event in profiler.key_averages()}
    return {name: time / sum(spent.values()) for name, time in spent.items()}


def share_figures(shares: Mapping[str, float]) -> list[Figure]:
    """The matrix products together, the largest other operations, and what is left."""
    products = sum(share for name, share in shares.items() if name in PRODUCTS)
    others = {name: share for name, share in shares.items() if name not in PRODUCTS}
    largest = sorted(others, key=lambda name: -others[name])[:SHOWN]
    named = {"matrix products": products, **{name: others.pop(name) for name in largest}}
    named["all else"] = sum(others.values())
    return [
        Figure(f"of a joint step: {name}", 100 * share, "%", "measured", note="of processor time")
        for name, share in named.items()
    ]


# ---- with dropout -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DropoutOptions:
    """Options of ``dropout_cost``.

    Attributes:
        dropout: probability on the side that has it.
        steps: optimiser steps measured on each side, after one that is not.
    """

    dropout: float = 0.1
    steps: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.dropout < 1:
            raise ConfigError(f"{OPTIONS}.dropout={self.dropout}", "It must lie in (0, 1).")
        at_least_one(self, "steps")


@BENCHMARKS.register("dropout_cost")
def dropout_cost(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """The joint step of ``jobs`` with dropout over the one without, measured in turns.

    Raises:
        ConfigError: no jobs, or an option that is unknown or out of range.
    """
    asked = build(DropoutOptions, options, OPTIONS)
    side = load_joint_side(settings, jobs)
    capacity = side.settings.engine.capacity_or_usual
    rates = {"without": 0.0, "with": asked.dropout}
    groups = {name: _with_dropout(jobs, rate) for name, rate in rates.items()}

    def step(name: str, number: int) -> float:
        group = groups[name]
        return side.timed_step(group, side.pack(group, number + 1, capacity), number + 1)

    with side.attached([job for group in groups.values() for job in group]):
        seconds = seconds_in_turns("joint steps without and with dropout", list(groups), asked.steps, step)
    ratio = median(b / a for a, b in zip(seconds["without"], seconds["with"], strict=True))
    without = Baseline(median(seconds["without"]), "without dropout", ratio, at_most=MOST_DROPOUT)
    figures = (
        Figure("joint step without dropout", median(seconds["without"]), "s", "measured"),
        Figure(
            f"joint step with dropout {asked.dropout:g}",
            median(seconds["with"]),
            "s",
            "measured",
            without,
        ),
        Figure(
            "cost of dropout",
            100 * (ratio - 1),
            "% of a step",
            "measured",
            note="median over pairs of steps",
        ),
    )
    assumption = (
        f"{len(jobs)} adapters, {asked.steps} steps of each kind, {settings.model.dtype}, "
        f"{torch.get_num_threads()} threads, capacity {capacity}."
    )
    return Report("dropout_cost", figures, (assumption,))


def _with_dropout(jobs: Sequence[JobSpec], rate: float) -> list[JobSpec]:
    return [
        replace(job, name=f"{job.name}-dropout-{rate:g}", adapter=replace(job.adapter, dropout=rate))
        for job in jobs
    ]
