"""mLoRA's bubble formulas beside the simulator's shares for equal microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from plait.config.fields import build
from plait.core.figures import Figure, Report
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.simulate.formulas import gpipe, lorapp_split, simulated_gpipe, simulated_lorapp
from plait.utils.benchmarks import BENCHMARKS

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
