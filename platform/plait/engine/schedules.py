"""What a schedule means to a replica: its rounds, and when its share of a job's gradients is complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plait.core.messages import StepJob
from plait.core.plans import Microbatch


@dataclass(frozen=True, slots=True)
class Round:
    """Microbatches, and the steps that take their gradients."""

    microbatches: tuple[Microbatch, ...]
    steps: tuple[StepJob, ...]

    def complete(self) -> list[tuple[str, ...]]:
        """Jobs whose gradients may be added up after so many microbatches, from none to all of them.

        They come in the order of the steps, as replicas with other microbatches must have it.
        """
        last = {
            segment.job: number
            for number, microbatch in enumerate(self.microbatches, start=1)
            for segment in microbatch.segments
        }
        ready: list[list[str]] = [[] for _ in range(len(self.microbatches) + 1)]
        after = 0
        for step in self.steps:
            after = max(after, last.get(step.job, 0))
            ready[after].append(step.job)
        return [tuple(jobs) for jobs in ready]


def rounds(items: Iterable[Microbatch | StepJob]) -> list[Round]:
    """A schedule cut after each run of steps; what is left behind the last has none.

    There is at least one: of a round, a replica may have nothing.
    """
    found: list[Round] = []
    microbatches: list[Microbatch] = []
    steps: list[StepJob] = []
    for item in items:
        if isinstance(item, StepJob):
            steps.append(item)
            continue
        if steps:
            found.append(Round(tuple(microbatches), tuple(steps)))
            microbatches, steps = [], []
        microbatches.append(item)
    if microbatches or steps or not found:
        found.append(Round(tuple(microbatches), tuple(steps)))
    return found


def by_completion(jobs: Iterable[str], microbatches: Sequence[Microbatch]) -> list[str]:
    """Jobs in the order in which the replicas are through with their microbatches, counted in tokens.

    Gradients that are added up in this order are the soonest done.
    """
    whole: dict[int, int] = {}
    for each in microbatches:
        whole[each.replica] = whole.get(each.replica, 0) + each.tokens
    done = dict.fromkeys(whole, 0)
    through: dict[str, float] = {}
    for each in microbatches:
        done[each.replica] += each.tokens
        share = done[each.replica] / whole[each.replica]
        through |= {part.job: max(share, through.get(part.job, 0.0)) for part in each.segments}
    return sorted(jobs, key=lambda job: through.get(job, 0.0))
