"""Weighs a change of the deployment: the seconds it saves over the steps to come, against the restart.

A seam: `plait plan` weighs between waves, and the engine while a search runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.errors import CapacityError
from plait.cost.replica import Configuration, ReplicaCost
from plait.planner.deployment import Deployment, deploy, relaxation_bound
from plait.planner.deployment_patterns import Devices
from plait.planner.dispatch import ReplicaKind, dispatch, single, spread
from plait.planner.packed import as_packed
from plait.planner.renting import ENUMERATED

Shape = Sequence[tuple[Configuration, int]]


@dataclass(frozen=True, slots=True)
class MeanStep:
    """The mean step of jobs that train together.

    Attributes:
        steps: number of steps, until the longest job ends.
    """

    costs: tuple[ReplicaCost, ...]
    counts: tuple[int, ...]
    steps: int
    devices: Devices

    def deploy(self) -> Deployment:
        """The deployment with the least expected makespan."""
        return deploy(self.costs, self.counts, self.devices, most_enumerated=ENUMERATED)

    def on(self, shape: Shape) -> Deployment | None:
        """These replicas for this step; None if one of its sequences fits into none of them."""
        by_configuration = {cost.configuration: cost for cost in self.costs}
        kinds = tuple(ReplicaKind(by_configuration[each], count) for each, count in shape)
        try:
            expected = spread(kinds, self.counts, dispatch(kinds, self.counts))
        except CapacityError:
            return None
        least = relaxation_bound(self.costs, self.counts, self.devices)
        return Deployment(kinds, as_packed(single(kinds), expected), least)


@dataclass(frozen=True, slots=True)
class Change:
    """What a change would bring.

    Attributes:
        kept: the deployment so far; None if it cannot take all sequences.
        planned: the best one; None if even the bound of all does not pay for a restart.
        seconds: of a step on it, or by the bound.
        saved: seconds over all steps, less the restart; None if the change is required.
    """

    kept: Deployment | None
    planned: Deployment | None
    seconds: float
    saved: float | None

    @property
    def pays(self) -> bool:
        """Whether the change is made."""
        return self.saved is None or self.saved > 0


def weigh_change(current: Shape, step: MeanStep, restart_seconds: float) -> Change:
    """Weigh a change from the ``current`` replicas to the best ones for a step.

    Raises:
        CapacityError: no replica that there are devices for takes all sequences.
    """
    kept = step.on(current)
    if kept is None:
        planned = step.deploy()
        return Change(None, planned, planned.makespan, None)

    def saved(seconds: float) -> float:
        return (kept.makespan - seconds) * step.steps - restart_seconds

    if saved(kept.bound) <= 0:
        return Change(kept, None, kept.bound, saved(kept.bound))
    planned = step.deploy()
    seconds = kept.makespan if planned.shape == kept.shape else planned.makespan
    return Change(kept, planned, seconds, saved(seconds))
