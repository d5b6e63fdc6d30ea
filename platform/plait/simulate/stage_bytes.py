"""Bytes on the devices of a simulated run: what stays on each stage, and what is kept in flight there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from plait.core.plans import Microbatch, Plan, Replica
from plait.cost.memory import MemoryCoefficients, MemoryModel, MemoryShape, StaticBytes
from plait.simulate.events import Run, Span

Held = dict[tuple[int, int], int]  # by replica and place in its schedule


@dataclass(frozen=True, slots=True)
class RunMemory:
    """What the memory of a run follows from.

    Attributes:
        model: of a microbatch that goes through the whole model on one device.
        static: what stays: weights, and the adapters of all jobs.
        shape: what the memory of a planned microbatch depends on.
    """

    model: MemoryModel
    static: StaticBytes
    shape: Callable[[Microbatch], MemoryShape]


def most_bytes(run: Run, plan: Plan, memory: RunMemory) -> Held:
    """Most bytes on any device, the model's margin included, while each microbatch is in flight.

    Activations are taken as spread evenly over the layers, and tensor parallelism as dividing all of it;
    head and loss belong to the last stage; :meth:`MemoryModel.stage_peak` says so of equal microbatches.
    """
    found: Held = {}
    for replica in plan.replicas:
        shapes = [
            memory.shape(item)
            for item in plan.schedule
            if isinstance(item, Microbatch) and item.replica == replica.id
        ]
        for stage in range(replica.pp):
            spans = [span for span in run.spans if (span.replica, span.stage) == (replica.id, stage)]
            for place, size in _stage(spans, shapes, replica, stage, memory).items():
                found[replica.id, place] = max(size, found.get((replica.id, place), 0))
    return found


def _stage(
    spans: Sequence[Span], shapes: Sequence[MemoryShape], replica: Replica, stage: int, memory: RunMemory
) -> dict[int, int]:
    """Most bytes on one device of a stage while each of its microbatches is there."""
    share = replica.layer_split[stage] / sum(replica.layer_split)
    last = stage == replica.pp - 1
    most: dict[int, float] = {}
    for phase in memory.model.phases.values():
        c = phase.coefficients
        kept = [_kept(c, shape, share, last, memory.model.logit_rows) for shape in shapes]
        for place, held in most_held(spans, kept).items():
            passing = (1.0 + phase.margin) * (held + c.fixed) if shapes[place].tokens else 0.0
            most[place] = max(most.get(place, 0.0), passing)
    static = memory.static.stage(replica.layer_split, stage)
    return {place: int((static + size) / replica.tp) for place, size in most.items()}


def _kept(c: MemoryCoefficients, shape: MemoryShape, share: float, last: bool, logit_rows: float) -> float:
    """Bytes that one microbatch takes on a stage, besides what is there once."""
    return share * c.body(shape) + (c.head(shape, logit_rows) if last else 0.0)


def most_held(spans: Sequence[Span], weights: Sequence[float]) -> Mapping[int, float]:
    """For each microbatch of one stage, the largest sum of weights held while it is in flight.

    In flight: from its forward's start to its backward's end, what ends before what starts.
    """
    changes = sorted(
        (span.start, 1, span.work) if span.kind == "forward" else (span.end, 0, span.work) for span in spans
    )
    most: dict[int, float] = {}
    there: set[int] = set()
    for _, starts, work in changes:
        if not starts:
            there.discard(work)
            continue
        there.add(work)
        held = sum(weights[each] for each in there)
        most.update((each, max(held, most.get(each, 0.0))) for each in there)
    return most
