"""What dropout costs a joint step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated

import torch

from plait.core.checks import FRACTION, above
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait_bench.benchmarks import benchmark
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import Count
from plait_bench.joint_side import load_joint_side
from plait_bench.progress import part

MOST_DROPOUT = 1.15  # what a joint step with dropout 0.1 may take, over one without


def _seconds_in_turns(
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


@dataclass(frozen=True, slots=True)
class DropoutOptions:
    """Options of ``dropout_cost``.

    Attributes:
        dropout: probability on the side that has it.
        steps: optimiser steps measured on each side, after one that is not.
    """

    dropout: Annotated[float, above(0), FRACTION] = 0.1
    steps: Count = 20


@benchmark("dropout_cost", DropoutOptions)
def dropout_cost(settings: RunSettings, jobs: Sequence[JobSpec], asked: DropoutOptions) -> Report:
    """The joint step of ``jobs`` with dropout over the one without, measured in turns.

    Raises:
        ConfigError: no jobs, or an option that is unknown or out of range.
    """
    side = load_joint_side(settings, jobs)
    capacity = side.settings.engine.capacity_or_usual
    rates = {"without": 0.0, "with": asked.dropout}
    groups = {name: _with_dropout(jobs, rate) for name, rate in rates.items()}

    def step(name: str, number: int) -> float:
        group = groups[name]
        return side.timed_step(group, side.pack(group, number + 1, capacity), number + 1)

    with side.attached([job for group in groups.values() for job in group]):
        seconds = _seconds_in_turns("joint steps without and with dropout", list(groups), asked.steps, step)
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
