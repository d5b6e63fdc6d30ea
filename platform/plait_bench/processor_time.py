"""Processor seconds of a worker's microbatches and steps, and the time model that a few of them give.

A seam: what is measured on this machine, and what a simulation of the same work is made from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

from plait.core.messages import RunSchedule, StepJob
from plait.core.plans import Microbatch
from plait.cost.fitting import fit_undisturbed
from plait.cost.time import HeadTime, LayerTime, MicrobatchShape, TimeModel
from plait.engine.worker import Worker

PROBES = 3  # measurements of each shape
SHAPES = 12  # most that are measured
FEATURES = ("fixed", "token", "square", "labelled")


def timed(worker: Worker, items: Sequence[Microbatch | StepJob]) -> float:
    """Processor seconds of microbatches or steps."""
    began = time.process_time()
    worker.execute(RunSchedule(tuple(items)))
    return time.process_time() - began


def fitted_time(
    worker: Worker, probes: Sequence[Microbatch], shape: Callable[[Microbatch], MicrobatchShape]
) -> TimeModel:
    """The time model, as of one layer, of some of these microbatches, from the smallest to the largest."""
    chosen = sorted(probes, key=lambda each: each.tokens)[:: max(1, len(probes) // SHAPES)]
    timed(worker, chosen[-1:])  # one-time costs
    rows = [(shape(each), median(timed(worker, [each]) for _ in range(PROBES))) for each in chosen]
    features = [(1.0, each.tokens, each.squares, each.labelled) for each, _ in rows]
    fit = fit_undisturbed(features, [took for _, took in rows], FEATURES)
    fixed, token, square, labelled = fit.coefficients
    return TimeModel(1, {1: LayerTime(fixed, token, square)}, {1: HeadTime(0.0, labelled)})
