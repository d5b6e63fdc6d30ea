"""A plan in the simulator: every replica's part of its schedule, side by side."""

from __future__ import annotations

from collections.abc import Mapping

from plait.core.plans import Microbatch, Plan
from plait.cost.replica import even_split
from plait.cost.time import TimeModel
from plait.simulate.events import Pipeline
from plait.simulate.systems import Machine, schedule_work


def plan_pipelines(
    plan: Plan,
    time: TimeModel,
    *,
    labelled_share: float = 1.0,
    bandwidths: Mapping[int, float] | None = None,
    latency: float = 0.0,
    token_bytes: int = 0,
) -> dict[int, Pipeline]:
    """The replicas of a plan with their microbatches, in 1F1B order; see :func:`.report.measure`.

    Args:
        labelled_share: share of the tokens that reach head and loss.
        bandwidths: bytes a second between the stages of each replica; absent, transfers take no time.
        latency: seconds of a message besides its bytes.
        token_bytes: bytes of one token's activations between stages.

    Raises:
        InputError: the time model has no figures for a replica's tensor-parallel degree.
    """
    tile = max((group.tile for group in plan.groups), default=1)
    pipelines = {}
    for replica in plan.replicas:
        split = replica.layer_split or even_split(time.layers, replica.pp)
        bandwidth = (bandwidths or {}).get(replica.id)
        machine = Machine(time, split, replica.tp, latency, bandwidth, token_bytes)
        works = [
            schedule_work(item, tile, labelled_share=labelled_share)
            for item in plan.schedule
            if isinstance(item, Microbatch) and item.replica == replica.id
        ]
        pipelines[replica.id] = machine.in_order(works)
    return pipelines


def tensor_parallel(plan: Plan) -> Mapping[int, int]:
    """tp of each replica, for :func:`.report.measure`."""
    return {replica.id: replica.tp for replica in plan.replicas}
