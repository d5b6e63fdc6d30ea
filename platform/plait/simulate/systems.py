"""The schedules of Plait and of the systems it is compared with, as microbatches and orders.

What a system leaves open in its paper is an argument here and named where a figure is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from plait.core.plans import GlobalBatch, Microbatch
from plait.cost.shapes import MicrobatchShape
from plait.cost.time import StageTime, TimeModel
from plait.planner.grouping import JobLoad, group_jobs, head_tail
from plait.planner.packing_exact import PackingLimits, pack_all
from plait.planner.schedule import ScheduleItem, build_schedule, turns
from plait.planner.verify import verify
from plait.simulate.events import Pipeline, Work
from plait.simulate.orders import BackwardFirst, GPipe, OneFOneB, Order
from plait.simulate.traces import Trace, global_batches


@dataclass(frozen=True, slots=True)
class Machine:
    """One replica to simulate on.

    Attributes:
        time: seconds of microbatches.
        layer_split: layers of each stage.
        tp: tensor-parallel devices of each stage.
        latency: seconds that a message between stages takes besides its bytes.
        bandwidth: bytes per second between stages; None leaves transfers out.
        token_bytes: bytes of one token's activations between stages.
    """

    time: TimeModel
    layer_split: tuple[int, ...]
    tp: int = 1
    latency: float = 0.0
    bandwidth: float | None = None
    token_bytes: int = 0

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return len(self.layer_split)

    def pipeline(self, works: Sequence[Work], order: Order) -> Pipeline:
        """These microbatches on this machine."""
        seconds = [
            [self._seconds(work, layers, stage == self.stages - 1) for work in works]
            for stage, layers in enumerate(self.layer_split)
        ]
        return Pipeline(works, seconds, order, self._transfer(works))

    def in_order(self, works: Sequence[Work]) -> Pipeline:
        """These microbatches in 1F1B order, never drained in between."""
        return self.pipeline(works, OneFOneB([len(works)]))

    def _seconds(self, work: Work, layers: int, last: bool) -> StageTime:
        return self.time.stage(work.shape, tp=self.tp, layers=layers, last=last)

    def _transfer(self, works: Sequence[Work]) -> list[float]:
        if self.bandwidth is None:
            return []
        return [
            self.latency + work.shape.tokens * self.token_bytes / self.bandwidth if work.parts else 0.0
            for work in works
        ]


def in_data_order(batch: Sequence[int], job: str, step: int, size: int, *, padded: bool) -> list[Work]:
    """Microbatches of ``size`` samples in the order of the data.

    Args:
        padded: compute every sample at the length of the microbatch's longest one.
    """
    works = []
    for begin in range(0, len(batch), size):
        lengths = list(batch[begin : begin + size])
        computed = [max(lengths)] * len(lengths) if padded else lengths
        works.append(
            Work(((job, step),), MicrobatchShape.of(computed), tokens=sum(lengths), padded=sum(computed))
        )
    return works


def one_after_another(trace: Trace, machine: Machine, *, size: int, padded: bool, gpipe: bool) -> Pipeline:
    """Jobs one after another, the pipeline drained after every global batch (GPipe or 1F1B)."""
    works: list[Work] = []
    batches: list[int] = []
    for job, own in trace.items():
        for step, batch in enumerate(own):
            new = in_data_order(batch, job, step, size, padded=padded)
            works += new
            batches.append(len(new))
    return machine.pipeline(works, GPipe(batches) if gpipe else OneFOneB(batches))


def lorapp(trace: Trace, machine: Machine, *, size: int, padded: bool) -> Pipeline:
    """mLoRA's pipeline: jobs take turns, backward first, each job stepping for itself."""
    works = [
        work
        for step in range(max(map(len, trace.values())))
        for job, own in trace.items()
        if step < len(own)
        for work in in_data_order(own[step], job, step, size, padded=padded)
    ]
    return machine.pipeline(works, BackwardFirst())


@dataclass(frozen=True, slots=True)
class Planned:
    """A packed schedule with what it was made from."""

    groups: tuple[tuple[str, ...], ...]
    items: tuple[ScheduleItem, ...]
    capacity: int
    tile: int

    @property
    def microbatches(self) -> list[Microbatch]:
        """Without steps, no-ops included."""
        return [item for item in self.items if isinstance(item, Microbatch)]


def plan_schedule(
    trace: Trace,
    *,
    stages: int,
    capacity: int,
    tile: int = 1,
    limits: PackingLimits | None = None,
    merging: bool = True,
    filling: bool = True,
    groups: int | None = None,
    pool: Executor | None = None,
) -> Planned:
    """Group, pack, merge, order and verify the jobs of a trace for one replica.

    Args:
        merging: whether work moves forward into the microbatch before it.
        filling: whether parts of microbatches do, where whole ones do not fit.
        groups: how many; None lets the planner choose.

    Raises:
        CapacityError: a sample alone is longer than the capacity.
        ScheduleError: the verifier found a fault.
    """
    batches = global_batches(trace)
    loads = [job_load(job, own) for job, own in batches.items()]
    grouping = head_tail(loads, groups) if groups else group_jobs(loads, stages=stages, capacity=capacity)
    packed = pack_all(list(turns(batches, grouping)), capacity=capacity, tile=tile, limits=limits, pool=pool)
    items = build_schedule(
        *([{0: own} for own in packed], {0: stages}),
        capacity=capacity,
        tile=tile,
        merging=merging,
        filling=filling,
    )
    every = [batch for own in batches.values() for batch in own]
    verify(items, every, stages={0: stages}, capacity=capacity, tile=tile)
    return Planned(grouping, items, capacity, tile)


def planned_pipeline(planned: Planned, machine: Machine, *, padding: bool = False) -> Pipeline:
    """The schedule in 1F1B order.

    Args:
        padding: compute the rows that round a segment up to the tile, as LoRAFusion does.
    """
    tile = planned.tile if padding else 1
    works = [schedule_work(item, planned.tile, computed_tile=tile) for item in planned.microbatches]
    return machine.in_order(works)


def schedule_work(
    microbatch: Microbatch, tile: int, *, computed_tile: int = 1, labelled_share: float = 1.0
) -> Work:
    """A planned microbatch for the simulator.

    Args:
        tile: padding multiple of the capacity.
        computed_tile: multiple to which segments are computed.
        labelled_share: share of the tokens that reach head and loss.
    """
    lengths = [length for segment in microbatch.segments for length in segment.lengths]
    computed = microbatch.padded(computed_tile)
    shape = MicrobatchShape(computed, sum(length**2 for length in lengths), round(labelled_share * computed))
    parts = tuple((segment.job, segment.step) for segment in microbatch.segments)
    return Work(parts, shape, microbatch.tokens, microbatch.padded(tile))


def job_load(job: str, batches: Iterable[GlobalBatch]) -> JobLoad:
    """What grouping needs to know of a job, from its global batches."""
    own = list(batches)
    lengths = [length for batch in own for length in batch.lengths]
    return JobLoad(job, sum(lengths) / max(1, len(lengths)), round(len(lengths) / max(1, len(own))))
