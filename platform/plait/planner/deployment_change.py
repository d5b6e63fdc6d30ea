"""Deployments beside the chosen one: the best of equal replicas, and whether a new one pays for a restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.errors import CapacityError
from plait.cost.replica import ReplicaCost
from plait.planner.deployment import Deployment
from plait.planner.deployment_bounds import relaxation_bound
from plait.planner.dispatch import dispatch, spread
from plait.planner.dispatch_search import ReplicaKind


@dataclass(frozen=True, slots=True)
class Change:
    """Whether to leave a deployment for another, when jobs have joined or left.

    Attributes:
        pays: the seconds saved over the steps that are left exceed the restart.
        saved: seconds saved in all, the restart taken off; negative where it costs.
        break_even: steps after which the restart has paid for itself; None where it never does.
    """

    pays: bool
    saved: float
    break_even: int | None


def best_equal_replicas(costs: Sequence[ReplicaCost], counts: Sequence[int], devices: int) -> Deployment:
    """As many replicas of one configuration as fit, of the configuration with the least makespan.

    What a system without heterogeneous replicas can do at best (LobRA's Task-Fused), and the choice of one
    configuration and capacity by throughput (LoRAFusion's parallelism profiler).

    Raises:
        CapacityError: no configuration takes all sequences.
    """
    last = max(j for j, count in enumerate(counts) if count)
    found = []
    for cost in costs:
        number = devices // cost.configuration.devices
        if number and cost.batch[last]:
            kinds = (ReplicaKind(cost, number),)
            found.append((spread(kinds, counts, dispatch(kinds, counts)), kinds))
    if not found:
        raise CapacityError(
            f"a sequence of {costs[0].lengths[last]} tokens on {devices} devices",
            "No configuration takes it.",
            "Shorten the sequences (model.max_length), or add devices.",
        )
    expected, kinds = min(found, key=lambda item: item[0].makespan)
    relaxation = relaxation_bound(costs, counts, devices)
    return Deployment(kinds, expected, min(expected.bound, expected.makespan), relaxation, len(found), None)


def weigh_change(
    *, current_seconds: float, new_seconds: float, steps_left: int, restart_seconds: float
) -> Change:
    """Compare the expected seconds of a step now and after a restart over the steps that are left."""
    gained = current_seconds - new_seconds
    saved = gained * steps_left - restart_seconds
    break_even = int(-(-restart_seconds // gained)) if gained > 0 else None
    return Change(saved > 0, saved, break_even)
