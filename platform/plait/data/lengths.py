"""Lengths of a split's samples in a few figures, for tracking and the planner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.core.samples import Split

PERCENTILES = (50, 90, 95, 99)
BINS = 20


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Lengths in tokens.

    Attributes:
        tokens: of all samples.
        percentiles: percent and length, for each of :data:`PERCENTILES`.
        labelled_share: labelled tokens over all tokens.
        histogram: (first length, behind the last length, samples) of each bin.
    """

    samples: int
    tokens: int
    mean: float
    deviation: float
    shortest: int
    longest: int
    percentiles: tuple[tuple[int, float], ...]
    labelled_share: float
    histogram: tuple[tuple[int, int, int], ...]


def summary(split: Split) -> LengthSummary:
    """The figures of ``split``; zeros where it is empty."""
    lengths = split.lengths
    if not len(lengths):
        return LengthSummary(0, 0, 0.0, 0.0, 0, 0, tuple((p, 0.0) for p in PERCENTILES), 0.0, ())
    shortest, longest = int(lengths.min()), int(lengths.max())
    bins = min(BINS, longest - shortest + 1)
    edges = np.unique(np.linspace(shortest, longest + 1, bins + 1).round().astype(np.int64))
    counts, _ = np.histogram(lengths, bins=edges)
    values = np.percentile(lengths, PERCENTILES)
    return LengthSummary(
        samples=len(split),
        tokens=int(lengths.sum()),
        mean=float(lengths.mean()),
        deviation=float(lengths.std()),
        shortest=shortest,
        longest=longest,
        percentiles=tuple((p, float(value)) for p, value in zip(PERCENTILES, values, strict=True)),
        labelled_share=float(split.labels.mean()),
        histogram=tuple(
            (int(low), int(high), int(count))
            for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
        ),
    )
