"""Plans one window of a pipeline after another, each so that it may follow what is still in flight.

A seam: pure, so that distances are checked without an engine. A window has the next global batch of some
jobs. Which jobs these are may change from window to window, as jobs join and leave. The bubble lemma
(:mod:`plait.planner.schedule`) holds across windows: distances that one window does not keep to its end, the
next one keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.core.plans import GlobalBatch, Microbatch
from plait.planner.grouping import group_jobs, job_load
from plait.planner.packing import PackedBatches
from plait.planner.schedule import Builder

Pack = Callable[[Sequence[GlobalBatch]], PackedBatches]


class Windows:
    """The windows of one pipeline.

    Args:
        pack: packs the global batches of a group.
        filling: whether parts of a microbatch move into the one before if the whole does not fit.
    """

    def __init__(self, stages: int, capacity: int, pack: Pack, *, filling: bool = True) -> None:
        self._stages, self._capacity, self._pack, self._filling = stages, capacity, pack, filling
        self.drained()

    def drained(self) -> None:
        """Nothing is in flight any more."""
        self._builder = Builder(
            {0: self._stages}, capacity=self._capacity, tile=1, merging=True, filling=self._filling
        )

    def plan(self, batches: Sequence[GlobalBatch]) -> tuple[Microbatch, ...]:
        """Microbatches with these global batches, one of each job, no-ops included.

        Raises:
            CapacityError: a sample alone is longer than the capacity.
        """
        if not batches:
            return ()
        own = {batch.job: batch for batch in batches}
        loads = [job_load(job, [batch]) for job, batch in own.items()]
        groups = group_jobs(loads, stages=self._stages, capacity=self._capacity)
        ordered = sorted(groups, key=self._builder.ready)  # stable
        turns = [{0: self._pack([own[job] for job in group])} for group in ordered]
        for number in range(len(turns)):
            self._builder.add(turns, number)
        return self._builder.take(0)
