"""The joint step with each of the kernels that run here, over the same microbatches and in turns."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter

from plait.core.figures import Figure
from plait.core.jobs import JobSpec
from plait.utils.progress import part
from plait_bench.joint_side import JointSide

COMPARED = ("reference", "grouped")  # the slower one first: ratios are over it


def time_backends(side: JointSide, jobs: Sequence[JobSpec], rounds: int) -> dict[str, list[float]]:
    """Seconds of one joint step of ``jobs`` (forward, backward, optimiser) by backend, ``rounds`` of each.

    The one that goes second finds warm caches, so that they take turns at that too; the first round warms up
    and is left out.
    """
    microbatches = side.pack(jobs, 1, side.settings.engine.capacity_or_usual)
    for job in jobs:
        side.attach(job)
    seconds: dict[str, list[float]] = {backend: [] for backend in COMPARED}
    piece = part("the joint step by kernels", rounds + 1)
    for round_ in range(rounds + 1):
        piece(f"round {round_}" if round_ else "a warm-up")
        for backend in COMPARED if round_ % 2 else reversed(COMPARED):
            with side.kernels(backend):
                started = perf_counter()
                side.pass_through(microbatches)
                side.step(jobs, round_ + 1)
                seconds[backend].append(perf_counter() - started)
    for job in jobs:
        side.detach(job)
    return {backend: times[1:] for backend, times in seconds.items()}


def backend_figures(seconds: dict[str, list[float]]) -> list[Figure]:
    """The median step of each, and the median of the rounds' ratios."""
    slow, fast = (seconds[backend] for backend in COMPARED)
    ratio = median(a / b for a, b in zip(slow, fast, strict=True))
    figures = [
        Figure(f"joint step, kernels={backend}", median(seconds[backend]), "s", "measured")
        for backend in COMPARED
    ]
    note = f"median over {len(slow)} pairs of steps"
    return [*figures, Figure("speed, grouped over reference", ratio, "×", "measured", note=note)]
