"""How many devices of each kind to use: more are taken only if they pay.

The objective is the time of a step, its device-seconds or its money. A step on more devices ends earlier, and
nearly always costs more, since devices wait for each other; so part of the objective, the slack, may be
given up for the other side: with time as the objective, the fewest device-seconds of the choices within the
slack of the fastest; else, the fastest of those within the slack of the cheapest.

Devices are tried by powers of two, and all of a kind. What is proved holds for every number of them: between
two that are tried, a step is no faster than on the more of both, and costs the fewest devices at least.

A seam: it chooses between deployments of any costs, and is tested without a plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.core.errors import CapacityError
from plait.cost.replica import ReplicaCost
from plait.planner.deployment import GAP, Deployment, able, deploy, least_cost, relaxation_bound
from plait.planner.deployment_patterns import Devices

SLACK = 0.1
ENUMERATED = 100  # deployments that are tried one by one if the search leaves the bound open
COARSE = 0.03  # gap of the deployments that are compared; the chosen one is searched for again


@dataclass(frozen=True, slots=True)
class Tried:
    """Some devices with the best deployment on them.

    Attributes:
        value: of the objective, for a step.
    """

    devices: Devices
    deployment: Deployment
    value: float

    @property
    def number(self) -> int:
        """All devices."""
        return sum(self.devices.values())


@dataclass(frozen=True, slots=True)
class Rented:
    """The devices chosen.

    Attributes:
        bound: proved: with no number of these devices is the objective lower.
    """

    chosen: Tried
    bound: float

    @property
    def gap(self) -> float:
        """Distance of the value to the bound, relative: the slack that was given up is part of it.

        0 if devices are free.
        """
        value = self.chosen.value
        return value / self.bound - 1.0 if value > self.bound else 0.0


def rent(
    costs: Sequence[ReplicaCost],
    counts: Sequence[int],
    devices: Devices,
    *,
    rates: Mapping[str, float] | None,
    slack: float = SLACK,
    longest: int = 0,
) -> Rented:
    """The devices for a step, of those that there are.

    Args:
        rates: what a device-second of each kind costs; None if time is the objective.
        slack: share of the objective that may be given up.
        longest: tokens of a sequence of some other step, which must fit, too.

    Raises:
        CapacityError: a bucket fits into no configuration of at most ``devices``.
    """
    known = least_cost(costs, counts, rates) if rates is not None else 0.0
    tried, bounds = list[Tried](), list[float]()
    for box in sorted(_boxes(costs, counts, devices, rates, longest), key=lambda each: each.value):
        if tried and box.value > (1.0 + slack) * min(each.value for each in tried):
            bounds.append(box.value)
            continue
        deployment = deploy(costs, counts, box.most, gap=COARSE, most_enumerated=ENUMERATED)
        tried.append(Tried(box.most, deployment, box.rate * deployment.makespan))
        bounds.append(max(known, box.least_rate * deployment.bound))
    least = min(each.value for each in tried)
    near = [each for each in tried if each.value <= (1.0 + slack) * least]

    def other(each: Tried) -> tuple[float, int]:
        seconds = each.deployment.makespan
        return (each.number * seconds if rates is None else seconds), each.number

    chosen = min(near, key=other)
    if chosen.deployment.gap > GAP:
        chosen = _again(chosen, costs, counts)
    return Rented(chosen, min(chosen.value, *bounds))


def _again(tried: Tried, costs: Sequence[ReplicaCost], counts: Sequence[int]) -> Tried:
    """The same devices with the best deployment that is found."""
    rate, found = (
        tried.value / tried.deployment.makespan,
        deploy(costs, counts, tried.devices, most_enumerated=ENUMERATED),
    )
    if found.makespan > tried.deployment.makespan:
        found = replace(tried.deployment, bound=found.bound)
    return replace(tried, deployment=found, value=rate * found.makespan)


@dataclass(frozen=True, slots=True)
class _Box:
    """Numbers of devices that are decided together: those up to ``most``, above those tried before it.

    Attributes:
        rate: what a second on ``most`` costs; 1 for time.
        least_rate: the same on the fewest devices of the box.
        value: no number of devices in the box has a lower objective.
    """

    most: Devices
    rate: float
    least_rate: float
    value: float


def _boxes(
    costs: Sequence[ReplicaCost],
    counts: Sequence[int],
    devices: Devices,
    rates: Mapping[str, float] | None,
    longest: int,
) -> list[_Box]:
    """Every range of numbers of devices on whose most the sequences fit.

    Raises:
        CapacityError: they fit nowhere.
    """
    found: list[_Box] = []
    refused: CapacityError | None = None
    for chosen in itertools.product(*(_steps(number) for number in devices.values())):
        most = {kind: top for kind, (_, top) in zip(devices, chosen, strict=True) if top}
        if not most:
            continue
        fewest = dict(zip(devices, (least for least, _ in chosen), strict=True))
        try:
            allowed = able(costs, counts, most)
        except CapacityError as error:
            refused = error
            continue
        if max(cost.configuration.max_tokens for cost in allowed) < longest:
            continue
        rate = 1.0 if rates is None else sum(rates[kind] * number for kind, number in most.items())
        low = 1.0 if rates is None else sum(rates[kind] * fewest[kind] for kind in most)
        found.append(_Box(most, rate, low, low * relaxation_bound(allowed, counts, most)))
    if not found:
        raise refused or CapacityError(f"a sequence of {longest} tokens", "No configuration takes it.")
    return found


def _steps(number: int) -> list[tuple[int, int]]:
    """Ranges of numbers of devices, fewest and most: none, then up to each power of two, then all."""
    tops = [2**k for k in range(number.bit_length()) if 2**k < number] + [number]
    return [(0, 0), *((before + 1, top) for before, top in zip([0, *tops], tops, strict=False))]
