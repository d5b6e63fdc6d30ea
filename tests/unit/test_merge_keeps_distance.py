"""Merging takes no microbatch away that keeps the distance between a job's global batches."""

from __future__ import annotations

import random

import pytest

from plait.cost.time import LayerTime, TimeModel
from plait.simulate.forecast import Machine
from plait.simulate.report import Metrics, measure
from plait_bench.pipelines import Trace, plan_schedule, planned_pipeline

TIME = TimeModel(8, {1: LayerTime(fixed=1e-4, token=1e-6)}, {}, forward_share=0.3)
CAPACITY = 4096


def equal_jobs(jobs: int, samples: int, mean: int, *, steps: int = 12) -> Trace:
    draw = random.Random(1)
    return {
        f"job{place}": [[round(draw.gauss(mean, mean / 4)) for _ in range(samples)] for _ in range(steps)]
        for place in range(jobs)
    }


def simulated(trace: Trace, *, stages: int = 4, merging: bool, groups: int | None = None) -> Metrics:
    planned = plan_schedule(trace, stages=stages, capacity=CAPACITY, merging=merging, groups=groups)
    metrics, _ = measure({0: planned_pipeline(planned, Machine(TIME, (8 // stages,) * stages))})
    return metrics


@pytest.mark.parametrize(("jobs", "samples", "mean"), [(8, 4, 60), (4, 4, 200), (16, 4, 60), (8, 8, 100)])
def test_small_global_batches_that_fill_the_pipeline_are_not_merged_into_one(
    jobs: int, samples: int, mean: int
) -> None:
    trace = equal_jobs(jobs, samples, mean)
    merged, apart = simulated(trace, merging=True), simulated(trace, merging=False)
    assert merged.noops == apart.noops == 0
    assert merged.makespan <= apart.makespan


def test_microbatches_that_the_distance_does_not_need_are_merged() -> None:
    """Eight groups in four stages: half of the microbatches may go; the others are evenly full."""
    trace = equal_jobs(8, 4, 60)
    merged, apart = (simulated(trace, merging=merging, groups=8) for merging in (True, False))
    assert merged.noops == 0
    assert merged.microbatches <= 0.6 * apart.microbatches
    assert merged.makespan < apart.makespan


def test_a_large_global_batch_fills_every_microbatch() -> None:
    """Nobody waits, so that the number of microbatches is what the tokens take."""
    trace = equal_jobs(4, 16, 900)
    merged, apart = (simulated(trace, merging=merging) for merging in (True, False))
    tokens = sum(sum(map(sum, own)) for own in trace.values())
    assert merged.microbatches <= 1.05 * tokens / CAPACITY
    assert merged.makespan < 0.95 * apart.makespan


@pytest.mark.parametrize("seed", range(12))
def test_merging_is_not_slower_over_mixed_jobs(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.choice([2, 4, 8])
    trace: dict[str, list[list[int]]] = {}
    for place in range(draw.randint(1, 8)):
        samples, mean = draw.choice([1, 2, 4, 8]), draw.choice([30, 60, 200, 500, 1100])
        lengths = [[round(draw.gauss(mean, mean / 5)) for _ in range(samples)] for _ in range(8)]
        trace[f"job{place}"] = [[max(1, each) for each in batch] for batch in lengths]
    merged, apart = (simulated(trace, stages=stages, merging=merging) for merging in (True, False))
    assert merged.makespan <= 1.01 * apart.makespan
