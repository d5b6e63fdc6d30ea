"""What dropout costs: the joint step of the same jobs with it over the one without, measured in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch

from plait.config.fields import build
from plait.core.errors import ConfigError
from plait.core.figures import Figure, Report
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.utils.benchmarks import BENCHMARKS
from plait.utils.progress import part
from plait_bench.joint_side import JointSide, load_joint_side


@dataclass(frozen=True, slots=True)
class Options:
    """Of the benchmark.

    Attributes:
        dropout: probability on the side that has it.
        steps: optimiser steps measured on each side, after one that is not.
    """

    dropout: float = 0.1
    steps: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.dropout < 1:
            raise ConfigError(f"bench.options.dropout={self.dropout}", "It must lie in (0, 1).")
        if self.steps < 1:
            raise ConfigError(f"bench.options.steps={self.steps}", "It must be at least 1.")


@BENCHMARKS.register("dropout_cost")
def run(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Step ``jobs`` twice, without and with dropout, in turns.

    Raises:
        ConfigError: no jobs, or an option that is unknown or out of range.
    """
    asked = build(Options, options, "bench.options")
    side = load_joint_side(settings, jobs)
    groups = [_with_dropout(jobs, rate) for rate in (0.0, asked.dropout)]
    for job in (job for group in groups for job in group):
        side.attach(job)
    seconds: tuple[list[float], list[float]] = ([], [])
    piece = part("joint steps without and with dropout", asked.steps + 1)
    for step in range(1, asked.steps + 2):
        piece("a warm-up" if step == 1 else f"pair {step - 1}")
        # The one that goes second finds warm caches: they take turns at that too.
        for which in (0, 1) if step % 2 else (1, 0):
            seconds[which].append(_step(side, groups[which], step))
    without, with_dropout = (times[1:] for times in seconds)
    ratios = [b / a for a, b in zip(without, with_dropout, strict=True)]
    return Report(
        "dropout_cost",
        (
            Figure("joint step without dropout", median(without), "s", "measured"),
            Figure(f"joint step with dropout {asked.dropout:g}", median(with_dropout), "s", "measured"),
            Figure(
                "cost of dropout",
                100 * (median(ratios) - 1),
                "% of a step",
                "measured",
                note="median over pairs of steps",
            ),
        ),
        (
            f"{len(jobs)} adapters, {asked.steps} steps of each kind, {settings.model.dtype}, "
            f"{torch.get_num_threads()} threads, capacity {settings.engine.capacity_or_usual}.",
        ),
    )


def _with_dropout(jobs: Sequence[JobSpec], rate: float) -> list[JobSpec]:
    return [
        replace(job, name=f"{job.name}-dropout-{rate:g}", adapter=replace(job.adapter, dropout=rate))
        for job in jobs
    ]


def _step(side: JointSide, jobs: Sequence[JobSpec], step: int) -> float:
    microbatches = side.pack(jobs, step, side.settings.engine.capacity_or_usual)
    started = perf_counter()
    side.pass_through(microbatches)
    side.step(jobs, step)
    return perf_counter() - started
