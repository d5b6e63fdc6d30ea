"""Chooses how many devices of each kind to use: more only if they pay off.

The objective is the time of a step, its device-seconds or its cost in money. On more devices a step ends
earlier but nearly always costs more, because devices wait for each other. So part of the objective, the
slack, may be given up: with time as the objective, for the fewest device-seconds among choices within the
slack of the fastest; otherwise, for the fastest among those within the slack of the cheapest.

Powers of two, and all devices of a kind, are tried. The bound holds for every number of devices: between two
that are tried, a step is no faster than on the larger number, and costs at least as much per second as the
smaller.

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
ENUMERATED = 100  # at most this many deployments are enumerated if the search leaves the bound open
COARSE = 0.03  # gap of the compared deployments; the chosen one is then searched for again


@dataclass(frozen=True, slots=True)
class Tried:
    """A set of devices with the best deployment on it.

    Attributes:
        value: the objective of one step.
    """

    devices: Devices
    deployment: Deployment
    value: float

    @property
    def number(self) -> int:
        """Number of all its devices."""
        return sum(self.devices.values())


@dataclass(frozen=True, slots=True)
class Rented:
    """The chosen devices.

    Attributes:
        bound: proved lower bound of the objective for any number of these devices.
    """

    chosen: Tried
    bound: float

    @property
    def gap(self) -> float:
        """Relative distance of the value to the bound, including the slack that was given up.

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
    """Choose the devices for a step among the available ones.

    Args:
        rates: price of a device-second of each kind; None if time is the objective.
        slack: share of the objective that may be given up.
        longest: tokens of the longest sequence of any other step, which must also fit.

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
    """The same devices with the best deployment found."""
    rate, found = (
        tried.value / tried.deployment.makespan,
        deploy(costs, counts, tried.devices, most_enumerated=ENUMERATED),
    )
    if found.makespan > tried.deployment.makespan:
        found = replace(tried.deployment, bound=found.bound)
    return replace(tried, deployment=found, value=rate * found.makespan)


@dataclass(frozen=True, slots=True)
class _Box:
    """Numbers of devices that are decided together: those up to ``most`` and above the previous box.

    Attributes:
        rate: cost of a second on ``most`` devices; 1 for time.
        least_rate: the same on the fewest devices of the box.
        value: lower bound of the objective for all numbers of devices in the box.
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
    """All ranges of numbers of devices whose largest number fits the sequences.

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
    """Ranges (fewest, most) of numbers of devices: none, then up to each power of two, then all."""
    tops = [2**k for k in range(number.bit_length()) if 2**k < number] + [number]
    return [(0, 0), *((before + 1, top) for before, top in zip([0, *tops], tops, strict=False))]
