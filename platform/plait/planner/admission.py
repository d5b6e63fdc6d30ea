"""Decides which jobs train now (mLoRA §3.4): by priority, then arrival, as far as predicted memory allows.

A pure function, called at the end of an iteration. A job that must make room is preempted: it is saved, and
resumes later from the same point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Job = TypeVar("Job")


def admit(
    ordered: Iterable[Job], fits: Callable[[Sequence[Job]], bool], max_jobs: int | None = None
) -> list[Job]:
    """The jobs of the next iteration.

    One that does not fit in addition to those before it is passed over, and later ones may use the room. It
    is considered first again next time, and those that took its room are preempted as soon as it fits, so no
    job waits forever behind later ones.

    Args:
        ordered: those that train or could, by priority, then arrival.
        fits: whether a group fits into memory; a smaller group must fit if a larger one does.
        max_jobs: most jobs at once; None leaves it to memory.
    """
    chosen: list[Job] = []
    for job in ordered:
        if (max_jobs is None or len(chosen) < max_jobs) and fits([*chosen, job]):
            chosen.append(job)
    return chosen
