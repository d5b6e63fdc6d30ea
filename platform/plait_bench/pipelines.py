"""Length traces, and the pipelines of the systems that Plait's schedule is compared with.

What a paper leaves open is an argument here and named if a figure is shown.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plait.core.errors import DataError
from plait.core.plans import GlobalBatch, Microbatch
from plait.cost.time import MicrobatchShape, TimeModel
from plait.planner.grouping import group_jobs, head_tail, job_load
from plait.planner.packing_exact import PackingLimits, pack_all
from plait.planner.schedule import ScheduleItem, build_schedule, turns
from plait.planner.verify import verify
from plait.simulate.events import OneFOneB, Pipeline, Work
from plait.simulate.forecast import Machine, schedule_work
from plait.simulate.orders import BackwardFirst, GPipe
from plait_bench.lengths import LengthGenerator

Trace = Mapping[str, Sequence[Sequence[int]]]  # by job: the lengths of each global batch


def mixed_lengths(generators: Mapping[str, LengthGenerator], count: int, *, seed: int, job: str) -> list[int]:
    """``count`` lengths of a job whose samples come from several data sets in equal shares."""
    names = sorted(generators)
    rng = np.random.default_rng([seed, zlib.crc32(job.encode())])
    which = rng.integers(0, len(names), count)
    drawn = {name: iter(generators[name].draw(count, stream=f"{job}/{name}").tolist()) for name in names}
    return [int(next(drawn[names[place]])) for place in which]


def in_batches(lengths: Sequence[int], global_batch: int) -> list[list[int]]:
    """Lengths in global batches; an incomplete last one is left out."""
    whole = len(lengths) // global_batch * global_batch
    return [list(lengths[begin : begin + global_batch]) for begin in range(0, whole, global_batch)]


def read_trace(path: Path) -> dict[str, list[list[int]]]:
    """A trace from JSON: {"jobs": {name: [[length, ...], ...]}}.

    Raises:
        DataError: not such a file, or a length below 1.
    """
    try:
        jobs = json.loads(path.read_text(encoding="utf-8"))["jobs"]
        trace = {str(job): [[int(length) for length in batch] for batch in own] for job, own in jobs.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: {error}", 'A trace is JSON: {"jobs": {"name": [[length, ...], ...]}}.'
        ) from error
    for job, own in trace.items():
        for step, batch in enumerate(own):
            if not batch or min(batch) < 1:
                raise DataError(
                    f"{path}: {job} step {step}: {batch}", "Every global batch needs lengths of at least 1."
                )
    return trace


def global_batches(trace: Trace) -> dict[str, list[GlobalBatch]]:
    """The trace as global batches, every token labelled."""
    result: dict[str, list[GlobalBatch]] = {}
    for job, own in trace.items():
        begin, result[job] = 0, []
        for step, lengths in enumerate(own):
            samples = tuple(range(begin, begin + len(lengths)))
            weight = 1.0 / sum(lengths)
            result[job].append(GlobalBatch(job, step, samples, (0,) * len(samples), tuple(lengths), weight))
            begin += len(lengths)
    return result


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


def sharded_rate(trace: Trace, time: TimeModel, *, devices: int, size: int, gather: float = 0.0) -> float:
    """Tokens a second of jobs one after another, with the base model sharded over the devices (FSDP).

    Each device takes ``size`` samples through all layers, and all wait for the slowest.

    Args:
        gather: seconds of collecting a layer's weights, for its forward and again for its backward, if
            nothing hides them.
    """
    seconds, tokens = 0.0, 0
    for job, own in trace.items():
        for step, batch in enumerate(own):
            works = in_data_order(batch, job, step, size, padded=False)
            for begin in range(0, len(works), devices):
                slowest = max(time.microbatch(work.shape) for work in works[begin : begin + devices])
                seconds += slowest + 2 * time.layers * gather
            tokens += sum(batch)
    return tokens / seconds


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
        filling: whether parts of microbatches do, if whole ones do not fit.
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
