"""A quantised base model beside the same in its dtype: speed, memory and losses of one search's jobs.

Both sides train the same jobs in one process, taking turns, so that changes of the machine's speed affect
both. The quantised one begins, so that what a process allocates once counts against it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Annotated

import torch

from plait.core.checks import one_of
from plait.core.jobs import JobSpec
from plait.core.settings import QUANTISED, WHOLE, RunSettings
from plait_bench.benchmarks import benchmark
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import Count, require_processor
from plait_bench.joint_side import JointRun, load_joint_side
from plait_bench.joint_vs_peft import GIB, Footprint
from plait_bench.progress import part

MIB = 2**20


@dataclass(frozen=True, slots=True)
class QuantisedOptions:
    """Options of ``quantised_base``.

    Attributes:
        quantise: how the one side's base model is quantised.
        turns: into how many parts the training is cut.
        loss_tolerance: by what share the mean loss of the later half of the steps may be higher than with
            dense weights. One step alone is too few tokens: its loss differs by more before any training.
        slowdown: how much longer training may take.
    """

    quantise: Annotated[str, one_of(*QUANTISED)] = "int8"
    turns: Count = 4
    loss_tolerance: float = 0.02
    slowdown: float = 1.1


@dataclass(slots=True, eq=False)
class _Side:
    """The jobs on one base model.

    Attributes:
        weight_bytes: bytes of the base model.
        memory: resident memory of loading and training.
        seconds: of the processor, in training.
    """

    run: JointRun
    weight_bytes: int
    memory: Footprint
    seconds: float = 0.0

    @classmethod
    def of(cls, settings: RunSettings, jobs: Sequence[JobSpec], folder: Path) -> _Side:
        memory = Footprint()
        with memory:
            side = load_joint_side(settings, jobs)
            side.warm_up(jobs[0])
            run = JointRun.of(side, jobs, folder)
        return cls(run, side.model.weight_bytes, memory)

    def advance(self, share: float) -> None:
        """Train until this share of all steps is done."""
        started = process_time()
        with self.memory:
            self.run.advance(share)
        self.seconds += process_time() - started

    @property
    def rate(self) -> float:
        """Real tokens a second of the processor."""
        return self.run.tokens / self.seconds

    @property
    def losses(self) -> list[float]:
        """The mean loss of each job over the later half of its steps."""
        return [mean(losses[len(losses) // 2 :]) for losses in self.run.losses.values()]


@benchmark("quantised_base", QuantisedOptions)
def quantised_base(settings: RunSettings, jobs: Sequence[JobSpec], asked: QuantisedOptions) -> Report:
    """Train ``jobs`` on dense and on quantised weights and compare.

    Raises:
        ConfigError: there are no jobs, an option is wrong, or the device is not the CPU.
        PlaitError: a job failed.
    """
    require_processor(settings)
    modes = {
        mode: replace(settings, model=replace(settings.model, quantise=mode))
        for mode in (asked.quantise, WHOLE)
    }
    with tempfile.TemporaryDirectory() as folder:
        sides = {mode: _Side.of(each, jobs, Path(folder) / mode) for mode, each in modes.items()}
        piece = part("training on both base models in turns", asked.turns)
        for turn in range(1, asked.turns + 1):
            piece(f"turn {turn}")
            for side in sides.values():
                side.advance(turn / asked.turns)
    other, dense = sides.values()
    name = settings.model.dtype
    figures = _figures(asked, name, dense, other)
    assumption = (
        f"{len(jobs)} adapters, {dense.run.steps} optimiser steps and {dense.run.tokens} real tokens on each "
        f"side; {name}, {torch.get_num_threads()} threads, capacity {settings.engine.capacity_or_usual}. "
        "Both load dense weights first, which the peak contains."
    )
    return Report("quantised_base", figures, (assumption,))


def _figures(asked: QuantisedOptions, name: str, dense: _Side, other: _Side) -> tuple[Figure, ...]:
    mode = asked.quantise
    largest = max(abs(theirs - own) / own for own, theirs in zip(dense.losses, other.losses, strict=True))
    speed = Baseline(dense.rate, name, at_least=1 / asked.slowdown)
    weights = Baseline(dense.weight_bytes / MIB, name, at_most=1.0)
    peak = Baseline(dense.memory.peak_bytes / GIB, name)
    loss = Baseline(mean(dense.losses), name, at_most=1 + asked.loss_tolerance)
    return (
        Figure(f"{mode}: real tokens", other.rate, "tokens/s", "measured", speed, "seconds of the processor"),
        Figure(f"{mode}: base model", other.weight_bytes / MIB, "MiB", "measured", weights),
        Figure(f"{mode}: peak memory", other.memory.peak_bytes / GIB, "GiB", "measured", peak),
        Figure(f"{mode}: mean loss of the later steps", mean(other.losses), "nats", "measured", loss),
        Figure("largest difference of a job's later losses", 100 * largest, "%", "measured"),
    )
