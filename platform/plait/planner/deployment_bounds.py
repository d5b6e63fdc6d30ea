"""The linear relaxation's bound of a step's seconds, over every deployment of a number of devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plait.cost.replica import ReplicaCost
from plait.planner.dispatch import device_seconds


def relaxation_bound(costs: Sequence[ReplicaCost], counts: Sequence[int], devices: int) -> float:
    """Σ_j B_j · (fewest device-seconds of a sequence of bucket j) / devices.

    Every sequence on the configuration that spends the fewest device-seconds on it, devices perfectly busy.
    """
    cheapest = np.min([device_seconds(cost) for cost in costs], axis=0)
    used = np.asarray(counts) > 0
    return float((np.asarray(counts)[used] * cheapest[used]).sum() / devices)
