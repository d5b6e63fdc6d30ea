"""mLoRA's bubble formulas beside the simulator's shares for equal microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from plait.config.fields import build
from plait.core.figures import Figure, Report
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.cost.time import StageTime
from plait.simulate.events import BackwardFirst, GPipe, Order, Pipeline, Run, Work, simulate
from plait.utils.benchmarks import BENCHMARKS


def gpipe(stages: int, split: int) -> Fraction:
    """(D − 1) / (N + D − 1): one job, N microbatches a step."""
    return Fraction(stages - 1, split + stages - 1)


def lorapp(stages: int, jobs: int) -> Fraction:
    """max((D − L) / D, 0): L jobs in turn, unsplit, in the steady state."""
    return max(Fraction(stages - jobs, stages), Fraction(0))


def lorapp_split(stages: int, jobs: int, split: int) -> Fraction:
    """max((D − 1 + N − L·N) / (D + N − 1), 0): the same with N microbatches a step."""
    return max(Fraction(stages - 1 + split - jobs * split, stages + split - 1), Fraction(0))


def simulated_gpipe(stages: int, split: int, *, forward: int = 1, backward: int = 2) -> Fraction:
    """Idle share of a whole GPipe step of N equal microbatches."""
    run = _run(stages, 1, split, 1, GPipe([split]), forward, backward)
    return _idle(run, stages, 0, round(run.makespan))


def simulated_lorapp(stages: int, jobs: int, split: int, *, forward: int = 1, backward: int = 2) -> Fraction:
    """Idle share of LoRAPP's steady state: between two turns of the same job, after the pipeline filled."""
    turns = stages + 6
    run = _run(stages, jobs, split, turns, BackwardFirst(), forward, backward)
    starts = {span.work: round(span.start) for span in run.spans if (span.stage, span.kind) == (0, "forward")}
    begin, end = starts[(turns // 2) * jobs * split], starts[(turns - 3) * jobs * split]
    return _idle(run, stages, begin, end)


def _run(stages: int, jobs: int, split: int, turns: int, order: Order, forward: int, backward: int) -> Run:
    works = [
        Work(((f"job{job}", turn),)) for turn in range(turns) for job in range(jobs) for _ in range(split)
    ]
    seconds = [[StageTime(forward, backward)] * len(works)] * stages
    return simulate({0: Pipeline(works, seconds, order)})


def _idle(run: Run, stages: int, begin: int, end: int) -> Fraction:
    busy = sum(round(run.busy(0, stage, begin, end)) for stage in range(stages))
    return 1 - Fraction(busy, stages * (end - begin))


SOURCE = "mLoRA §3.2.2"


@dataclass(frozen=True, slots=True)
class Options:
    """Of the benchmark: every combination is checked, those with a shown D, L and N are printed.

    Attributes:
        stages: D.
        jobs: L.
        splits: N, microbatches of one global batch.
        shown: [D, L, N] of the printed lines.
    """

    stages: tuple[int, ...]
    jobs: tuple[int, ...]
    splits: tuple[int, ...]
    shown: tuple[tuple[int, int, int], ...] = ()


@BENCHMARKS.register("mlora/bubble_ratio")
def bubble_ratio(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """How many of the formulas' cases the simulator meets exactly, and some of them.

    Raises:
        ConfigError: an unknown option.
    """
    del settings, jobs
    asked = build(Options, options, "bench.options")
    lorapp_cases = [
        simulated_lorapp(stages, count, split) == lorapp_split(stages, count, split)
        for stages in asked.stages
        for count in asked.jobs
        for split in asked.splits
    ]
    gpipe_cases = [
        simulated_gpipe(stages, split) == gpipe(stages, split)
        for stages in asked.stages
        for split in asked.splits
    ]
    figures = [_met("LoRAPP cases met exactly", lorapp_cases), _met("GPipe cases met exactly", gpipe_cases)]
    for stages, count, split in asked.shown:
        name = f"LoRAPP D={stages} L={count} N={split}"
        ours, formula = simulated_lorapp(stages, count, split), lorapp_split(stages, count, split)
        figures.append(_share(name, ours, formula))
        if count == 1:
            ours, formula = simulated_gpipe(stages, split), gpipe(stages, split)
            figures.append(_share(f"GPipe D={stages} N={split}", ours, formula))
    notes = ("Equal microbatches, a backward twice as long as a forward, messages free; steady state.",)
    return Report("mlora/bubble_ratio", tuple(figures), notes)


def _met(name: str, cases: Sequence[bool]) -> Figure:
    share = 100 * sum(cases) / len(cases)
    note = f"{sum(cases)} of {len(cases)}"
    return Figure(name, share, "%", "simulated", note=note)


def _share(name: str, ours: Fraction, formula: Fraction) -> Figure:
    return Figure(
        name,
        float(100 * ours),
        "%",
        "simulated",
        published=float(100 * formula),
        source=f"{SOURCE}, formula",
        tolerance=0.0,
    )
