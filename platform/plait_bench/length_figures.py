"""Lengths of the papers' data sets as they are assumed: their distribution, and what sequences need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import kurtosis, skew

from plait.core.errors import ConfigError
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait_bench.benchmarks import benchmark
from plait_bench.figures import Figure, Report
from plait_bench.inputs import Count
from plait_bench.lengths import Family, LengthGenerator, sigma_from_skewness


@dataclass(frozen=True, slots=True)
class LengthSet:
    """A data set: mean of its lengths, and their spread or the skewness that implies it.

    Attributes:
        family: None: each family is shown, the first one is compared.
    """

    name: str
    mean: float
    family: Family | None = None
    sigma: float | None = None
    skewness: float | None = None

    def __post_init__(self) -> None:
        if (self.sigma is None) == (self.skewness is None):
            raise ConfigError(
                f"{self.name}: sigma={self.sigma}, skewness={self.skewness}", "Give one of them."
            )

    def draw(self, family: Family, count: int, clip: int, seed: int) -> np.ndarray:
        """Lengths (count,)."""
        sigma = self.sigma or sigma_from_skewness(family, self.skewness or 0.0)
        return LengthGenerator(family, self.mean, sigma, clip, seed).draw(count, stream=self.name)


@dataclass(frozen=True, slots=True)
class LengthOptions:
    """Options of ``lengths``.

    Attributes:
        sets: the data sets.
        edges: tokens up to which shares are shown, by what takes such a sequence.
        samples: drawn of each.
        clip: longest length.
        seed: of the draws.
    """

    sets: tuple[LengthSet, ...]
    edges: dict[str, int]
    samples: Count = 100_000
    clip: Count = 16384
    seed: int = 0


@benchmark("lengths", LengthOptions)
def lengths(_settings: RunSettings, _jobs: Sequence[JobSpec], asked: LengthOptions) -> Report:
    """Shares of sequences by length, means after clipping, and fourth moments, of drawn lengths."""
    figures = []
    for each in asked.sets:
        families: tuple[Family, ...] = (each.family,) if each.family else ("lognormal", "gamma")
        for number, family in enumerate(families):
            drawn = each.draw(family, asked.samples, asked.clip, asked.seed)
            other = f"; {family}" if number else ""
            note = f"{family}, skewness {skew(drawn):.2f}"
            for text, edge in asked.edges.items():
                share = 100 * float(np.mean(drawn <= edge))
                figures.append(Figure(f"{each.name}: {text}{other}", share, "%", "computed", note=note))
            mean, fourth = float(drawn.mean()), float(kurtosis(drawn))
            figures.append(Figure(f"{each.name}: mean{other}", mean, "tokens", "computed", note=note))
            figures.append(Figure(f"{each.name}: kurtosis{other}", fourth, "", "computed", note=note))
    notes = (f"Assumed lengths: {asked.samples} of each set, clipped at {asked.clip}, seed {asked.seed}.",)
    return Report("Lengths of data sets", tuple(figures), notes)
