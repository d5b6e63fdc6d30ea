"""Divides a pipeline's jobs into groups that take turns, by head-tail pairing on mean length.

With a pipeline of S stages, a job's next global batch must start at least S microbatches after the end of the
previous one. Groups take turns, so the other groups' microbatches fill that distance; within a group, a
mixture of short and long samples packs best.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plait.core.errors import ConfigError
from plait.core.plans import GlobalBatch


@dataclass(frozen=True, slots=True)
class JobLoad:
    """What grouping needs to know about a job: mean tokens of a sample and samples of a global batch."""

    job: str
    mean_length: float
    global_batch: int

    @property
    def tokens(self) -> float:
        """Mean tokens of one global batch."""
        return self.mean_length * self.global_batch


def job_load(job: str, batches: Iterable[GlobalBatch]) -> JobLoad:
    """What grouping needs to know about a job, from its global batches."""
    own = list(batches)
    lengths = [length for batch in own for length in batch.lengths]
    return JobLoad(job, sum(lengths) / max(1, len(lengths)), round(len(lengths) / max(1, len(own))))


def head_tail(loads: Sequence[JobLoad], groups: int) -> tuple[tuple[str, ...], ...]:
    """``groups`` groups of jobs, which are sorted by mean length and dealt out forwards and backwards in
    turn.

    With twice as many jobs as groups, the shortest is paired with the longest, the second shortest with
    the second longest, and so on.

    Raises:
        ConfigError: there are fewer jobs than groups, or no group.
    """
    if not 1 <= groups <= len(loads):
        raise ConfigError(
            f"groups={groups}", f"{len(loads)} jobs can form between 1 and {len(loads)} groups."
        )
    dealt: list[list[str]] = [[] for _ in range(groups)]
    for place, load in enumerate(sorted(loads, key=lambda load: (load.mean_length, load.job))):
        turn, offset = divmod(place, groups)
        dealt[groups - 1 - offset if turn % 2 else offset].append(load.job)
    return tuple(map(tuple, dealt))


def expected_noops(
    grouping: Sequence[Sequence[str]], loads: Sequence[JobLoad], *, stages: int, capacity: int
) -> float:
    """No-ops that one round of all groups is expected to need, from mean tokens.

    Even with few tokens, a group's global batches take a microbatch, which adds to the others' distance.
    """
    tokens = {load.job: load.tokens for load in loads}
    length = [max(1.0, sum(tokens[job] for job in group) / capacity) for group in grouping]
    return sum(max(0.0, stages - 1 - (sum(length) - own)) for own in length)


def group_jobs(loads: Sequence[JobLoad], *, stages: int, capacity: int) -> tuple[tuple[str, ...], ...]:
    """The fewest groups among those expected to need the fewest no-ops, because large groups pack better.

    With one stage, this is one group.

    Raises:
        ConfigError: no jobs.
    """
    if not loads:
        raise ConfigError("no jobs", "Grouping needs at least one job.")
    candidates = [head_tail(loads, groups) for groups in range(1, len(loads) + 1)]
    return min(
        candidates,
        key=lambda grouping: (
            expected_noops(grouping, loads, stages=stages, capacity=capacity),
            len(grouping),
        ),
    )
