"""Joint training against sequential transformers + PEFT: the same jobs, in one process, taking turns.

Both sides have the same dense weights, initial adapters, order of samples, learning rates and optimiser.
Sequential PEFT trains one adapter at a time; before each one, Plait trains its share of optimiser steps, so
that changes of the machine's speed affect both sides.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil
import torch

from plait.core.errors import PlaitError
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.models.load import load_model
from plait.utils.paths import cache_dir
from plait_bench.benchmarks import benchmark
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.frozen_limit import limit_figures
from plait_bench.inputs import Count, require_processor
from plait_bench.joint_side import JointRun, JointSide, load_joint_side
from plait_bench.peft_baseline import BaselineRun, PeftBaseline
from plait_bench.progress import part

GIB = 2**30
INTERVAL = 0.01  # seconds between two readings of the resident size


class Footprint:
    """Resident memory of the code inside all ``with`` blocks of this object.

    Each block adds the memory that it still holds at its end; the peak is the memory held by earlier blocks
    plus the block's own growth. Allocations between the blocks do not count. Freed memory is returned to the
    system around each block, so that one side does not reuse what the other has freed.

    Attributes:
        held_bytes: bytes held so far.
        peak_bytes: peak bytes so far.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self.peak_bytes = 0
        self._process = psutil.Process()

    def __enter__(self) -> Footprint:
        _trim()
        self._start = self._highest = self._resident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.read()
        _trim()
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + self._highest - self._start)
        self.held_bytes += self._resident() - self._start

    def read(self) -> None:
        """Record the resident size now; a thread does so continuously."""
        self._highest = max(self._highest, self._resident())

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
            self.read()


def _trim() -> None:
    """Ask the C library to return freed memory, which only works on Linux."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
        if trim is not None:
            trim(0)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of ``joint_vs_peft``.

    Attributes:
        loss_tolerance: largest difference of a step's loss between both sides, as a share of the job's mean
            loss; beyond it the benchmark fails, because then both sides do not compute the same.
        limit_rounds: how often the frozen model alone and the joint pass are measured.
    """

    loss_tolerance: float = 0.05
    limit_rounds: Count = 3


@dataclass(frozen=True, slots=True)
class Race:
    """The results of both sides, their peaks of memory, and a description of PEFT's computation."""

    joint: JointRun
    baseline: tuple[BaselineRun, ...]
    joint_bytes: int
    baseline_bytes: int
    described: str


@benchmark("joint_vs_peft", Options)
def joint_vs_peft(settings: RunSettings, jobs: Sequence[JobSpec], asked: Options) -> Report:
    """Train ``jobs`` on both sides and compare.

    Raises:
        ConfigError: there are no jobs, an option is unknown, or the device is not the CPU.
        PlaitError: a job failed, or the losses of both sides disagree.
    """
    require_processor(settings)
    with tempfile.TemporaryDirectory() as folder:
        side, race = run_race(settings, jobs, Path(folder))
    differences = loss_differences(race)
    check_agreement(differences, asked.loss_tolerance)
    figures = [*_race_figures(race), *_loss_figures(race, differences, asked.loss_tolerance)]
    base = load_model(settings.model, cache=cache_dir(), device="cpu")
    figures += limit_figures(side, base, jobs, asked.limit_rounds)
    return Report("joint_vs_peft", tuple(figures), _assumptions(settings, race, len(jobs)))


def run_race(settings: RunSettings, jobs: Sequence[JobSpec], folder: Path) -> tuple[JointSide, Race]:
    """Train every job on both sides, in turns."""
    joint_memory, baseline_memory = Footprint(), Footprint()
    with joint_memory:
        side = load_joint_side(settings, jobs)
        side.warm_up(jobs[0])
        initial = {job.name: side.initial_weights(job, folder / "initial" / job.name) for job in jobs}
        joint = JointRun.of(side, jobs, folder / "joint")
    with baseline_memory:
        baseline = PeftBaseline.load(settings)
        baseline.warm_up(jobs[0], side.split(jobs[0]))
    runs = []
    piece = part("training on both sides in turns", len(jobs))
    for turn, job in enumerate(jobs, start=1):
        piece(job.name)
        with joint_memory:
            joint.advance(turn / len(jobs))
        with baseline_memory:
            runs.append(baseline.train(job, side.split(job), initial[job.name]))
    peaks = joint_memory.peak_bytes, baseline_memory.peak_bytes
    return side, Race(joint, tuple(runs), *peaks, baseline.describe())


def loss_differences(race: Race) -> dict[str, list[float]]:
    """By job: |Plait's loss − PEFT's| of each optimiser step, as a share of the job's mean loss with PEFT."""
    found = {}
    for theirs in race.baseline:
        mean = sum(theirs.losses) / len(theirs.losses)
        ours = race.joint.losses[theirs.job]
        found[theirs.job] = [abs(a - b) / mean for a, b in zip(ours, theirs.losses, strict=True)]
    return found


def check_agreement(differences: Mapping[str, Sequence[float]], tolerance: float) -> None:
    """Check that no step's losses differ by more than ``tolerance``; PlaitError otherwise."""
    job, values = max(differences.items(), key=lambda item: max(item[1]))
    largest = max(values)
    if not largest <= tolerance:
        raise PlaitError(
            f"{job}, step {values.index(largest) + 1}: losses differ by {largest:.3g} of the job's mean loss",
            f"The losses may differ by at most {tolerance:g} (bench.options.loss_tolerance).",
            "No speed is reported if the losses differ. Find out what changed on either side.",
        )


def _race_figures(race: Race) -> list[Figure]:
    seconds = sum(run.seconds for run in race.baseline)
    tokens = sum(run.tokens for run in race.baseline)
    rates = tokens / seconds, race.joint.tokens / race.joint.seconds
    return [
        Figure("PEFT, one after another: training", seconds, "s", "measured"),
        Figure("Plait, joint: training", race.joint.seconds, "s", "measured", _peft(seconds, at_most=1.0)),
        Figure("PEFT: real tokens", rates[0], "tokens/s", "measured"),
        Figure("Plait: real tokens", rates[1], "tokens/s", "measured", _peft(rates[0], at_least=1.0)),
        Figure("speed, Plait over PEFT", seconds / race.joint.seconds, "×", "measured"),
        Figure("PEFT: peak memory", race.baseline_bytes / GIB, "GiB", "measured", note="one adapter"),
        Figure(
            "Plait: peak memory",
            race.joint_bytes / GIB,
            "GiB",
            "measured",
            _peft(race.baseline_bytes / GIB),
            note=f"{len(race.baseline)} adapters",
        ),
        Figure("memory, Plait over PEFT", race.joint_bytes / race.baseline_bytes, "×", "measured"),
    ]


def _peft(value: float, *, at_most: float | None = None, at_least: float | None = None) -> Baseline:
    return Baseline(value, "transformers + PEFT, one adapter after another", None, at_most, at_least)


def _loss_figures(race: Race, differences: Mapping[str, Sequence[float]], tolerance: float) -> list[Figure]:
    last = [run.losses[-1] for run in race.baseline]
    ours = [race.joint.losses[run.job][-1] for run in race.baseline]
    allowed = Baseline(100 * tolerance, "bench.options.loss_tolerance", at_most=1.0)
    largest = max(max(values) for values in differences.values())
    return [
        Figure("PEFT: mean loss of the last steps", sum(last) / len(last), "nats", "measured"),
        Figure(
            "Plait: mean loss of the last steps",
            sum(ours) / len(ours),
            "nats",
            "measured",
            _peft(sum(last) / len(last)),
        ),
        Figure(
            "largest difference of a step's loss",
            100 * largest,
            "% of its job's mean",
            "measured",
            allowed,
        ),
    ]


def _assumptions(settings: RunSettings, race: Race, jobs: int) -> tuple[str, ...]:
    tokens = sum(run.tokens for run in race.baseline)
    padding = 1 - tokens / sum(run.positions for run in race.baseline)
    return (
        f"{jobs} adapters, {race.joint.steps} optimiser steps, {tokens} real tokens; {settings.model.dtype}, "
        f"{torch.get_num_threads()} threads, capacity {settings.engine.capacity_or_usual}.",
        f"PEFT pads: {padding:.0%} of its positions. Both sides took turns in one process; loading the model "
        "and making adapters is not timed.",
        race.described,
    )
