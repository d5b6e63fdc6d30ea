"""The orders of a pipeline by name: Plait's, and those of the systems that it is compared with.

An order says which microbatches there are and in which order stages take them. What is trained is the same
in all of them. Only the first two put samples of several jobs into one microbatch.

- plait: packed and merged, global batches far enough apart, 1F1B; lorafusion: the same, only whole
  microbatches are merged;
- mlora: jobs take turns, whatever is ready runs, backward before forward;
- 1f1b, gpipe: jobs take turns, the pipeline is drained after every global batch;
- sequential: as 1f1b, but one job after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from plait.core.plans import GlobalBatch, Microbatch
from plait.planner.grouping import group_jobs, job_load
from plait.planner.packing import pack
from plait.planner.packing_exact import PackingLimits, pack_all
from plait.planner.schedule import build_schedule, turns
from plait.simulate.events import Action, Choose, OneFOneB, Order, Ready, in_order

OrderName = Literal["plait", "lorafusion", "mlora", "1f1b", "gpipe", "sequential"]
ORDERS: tuple[OrderName, ...] = ("plait", "lorafusion", "mlora", "1f1b", "gpipe", "sequential")


@dataclass(frozen=True, slots=True)
class GPipe:
    """All forwards of a global batch, then all its backwards."""

    batches: Sequence[int]

    def chooser(self, stage: int, stages: int) -> Choose:
        """The same list on every stage."""
        del stage, stages
        actions, begin = list[Action](), 0
        for count in self.batches:
            places = range(begin, begin + count)
            actions += [Action("forward", place) for place in places]
            actions += [Action("backward", place) for place in places]
            begin += count
        return in_order(actions)


@dataclass(frozen=True, slots=True)
class BackwardFirst:
    """LoRAPP (mLoRA §3.2): whatever is ready, backward before forward, earlier before later."""

    def chooser(self, stage: int, stages: int) -> Choose:
        """The rule, the same for every stage."""
        del stage, stages

        def choose(ready: Ready) -> Action | None:
            if ready["backward"]:
                return Action("backward", min(ready["backward"]))
            return Action("forward", min(ready["forward"])) if ready["forward"] else None

        return choose


@dataclass(frozen=True, slots=True)
class Arranged:
    """The microbatches of one replica, no-ops included, and the order in which its stages take them."""

    microbatches: tuple[Microbatch, ...]
    order: Order


def arrange(
    name: OrderName,
    batches: Mapping[str, Sequence[GlobalBatch]],
    *,
    stages: int,
    capacity: int,
    limits: PackingLimits | None = None,
) -> Arranged:
    """All global batches, by job, in the order of this name.

    Args:
        limits: of the search for the fewest microbatches, in orders that pack several jobs.

    Raises:
        CapacityError: a sample alone is longer than the capacity.
    """
    if name in ("plait", "lorafusion"):
        return _packed(batches, limits, stages=stages, capacity=capacity, filling=name == "plait")
    jobs = [[job] for job in batches]
    order: list[tuple[GlobalBatch, ...]]
    if name == "sequential":
        order = [(batch,) for own in batches.values() for batch in own]
    else:
        order = list(turns(batches, jobs))
    packed = [pack(turn, capacity=capacity) for turn in order]
    every = [each for own in packed for each in own]
    microbatches = tuple(replace(each, index=index) for index, each in enumerate(every))
    return Arranged(microbatches, rule(name, [len(own) for own in packed]))


def rule(name: str, counts: Sequence[int]) -> Order:
    """The order of this name; ``counts``: microbatches of each part after which some orders are drained."""
    if name in ("plait", "lorafusion"):
        return OneFOneB([sum(counts)])
    if name == "mlora":
        return BackwardFirst()
    return GPipe(counts) if name == "gpipe" else OneFOneB(counts)


def _packed(
    batches: Mapping[str, Sequence[GlobalBatch]],
    limits: PackingLimits | None,
    *,
    stages: int,
    capacity: int,
    filling: bool,
) -> Arranged:
    groups = group_jobs(
        [job_load(job, own) for job, own in batches.items()], stages=stages, capacity=capacity
    )
    order = [{0: own} for own in pack_all(list(turns(batches, groups)), capacity=capacity, limits=limits)]
    items = build_schedule(order, {0: stages}, capacity=capacity, filling=filling)
    microbatches = tuple(item for item in items if isinstance(item, Microbatch))
    return Arranged(microbatches, rule("plait", [len(microbatches)]))
