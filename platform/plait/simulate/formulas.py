"""mLoRA's bubble formulas (§3.2.2), and the same shares from the simulator.

Seconds are whole numbers here, so both sides are exact fractions.
"""

from __future__ import annotations

from fractions import Fraction

from plait.cost.time import StageTime
from plait.simulate.events import Pipeline, Run, Work, simulate
from plait.simulate.orders import BackwardFirst, GPipe, Order


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
