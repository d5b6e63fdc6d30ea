"""Carries out one stage's lists where the gradients of several replicas are added up.

A seam: as :mod:`plait.distributed.stage_run`, it knows no model. A sum begins when a stage has its last
gradient of a batch, and is made while the stage computes; the job steps before its next microbatch, or at
the end of the lists. So a sum takes no time where the plan leaves a microbatch between.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from plait.core.plans import Microbatch
from plait.distributed.stage_run import Neighbours, Stage, StageRun
from plait.planner.instructions import NONE, Instruction, Key, Lists
from plait.planner.verify import ScheduleError


class SummingStage(Stage, Protocol):
    """A stage of one of several replicas."""

    def begin(self, key: Key) -> Future[float]:
        """Begin to add up a job's gradients over the replicas; the norm of the sum."""

    def finish(self, begun: Sequence[Future[float]], keys: Sequence[Key]) -> list[float]:
        """Wait for the norms of sums."""


class ReplicaRun(StageRun):
    """One stage of one of several replicas while lists are carried out, without their steps.

    Attributes:
        keys: of the next lists' steps, in the order in which all processes add up.
    """

    def __init__(self, stage: SummingStage, links: Neighbours, number: int) -> None:
        super().__init__(stage, links, number)
        self._summing = stage
        self.keys: Sequence[Key] = ()
        self._left = Counter[Key]()  # segments of each global batch before their backward
        self._to_begin = deque[Key]()
        self._begun: dict[Key, Future[float]] = {}

    def run(self, lists: Lists, microbatches: Mapping[int, Microbatch]) -> None:
        """Carry out this stage's list of a window, and all its steps."""
        parts = (part for each in microbatches.values() for part in each.segments)
        self._left = Counter((part.job, part.step) for part in parts)
        self._to_begin = deque(self.keys)
        self._begin_sums()
        super().run(without_steps(lists), microbatches)
        self._step_those(list(self._begun))

    def _forward(self, each: Instruction) -> None:
        first = {part.job: part.step for part in self._microbatches[each.microbatch].segments}
        if late := [key for key in self._to_begin if key[1] < first.get(key[0], 0)]:
            raise ScheduleError(
                f"{late[0][0]}: step {late[0][1]} is due before its gradients can be added up",
                "Replicas take global batches in the order of their steps.",
            )
        self._step_those([key for key in self._begun if key[1] < first.get(key[0], 0)])
        super()._forward(each)

    def _backward(self, each: Instruction) -> None:
        parts = self._microbatches[each.microbatch].segments
        super()._backward(each)
        self._left.subtract((part.job, part.step) for part in parts)
        self._begin_sums()

    def _begin_sums(self) -> None:
        while self._to_begin and not self._left[self._to_begin[0]]:
            key = self._to_begin.popleft()
            self._begun[key] = self._summing.begin(key)

    def _step_those(self, keys: Sequence[Key]) -> None:
        if keys:
            norms = self._summing.finish([self._begun.pop(key) for key in keys], keys)
            self._summing.step(keys, norms)


def without_steps(lists: Lists) -> list[list[Instruction]]:
    """The lists of all stages without steps and what travels for them."""
    return [
        [each._replace(keys=()) for each in own if each.kind != "step" and each.microbatch != NONE]
        for own in lists
    ]
