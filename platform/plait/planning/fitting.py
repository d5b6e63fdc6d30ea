"""Which of a cluster's replicas fit into its memory, and how many tokens of a microbatch they then take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.core.errors import CapacityError, choices
from plait.cost.profiles import ClusterProfile
from plait.cost.replica import Configuration
from plait.planning.model_memory import ModelMemory
from plait.planning.workload import Workload


def fitting(
    profile: ClusterProfile, memory: ModelMemory | None, workload: Workload, *, share: float, together: int
) -> ClusterProfile:
    """The cluster with the configurations of its table that it has devices and memory for.

    A capacity whose heaviest microbatch takes too much memory is halved, down to the longest sample.

    Args:
        memory: of the model; None takes the table's capacities for what fits.
        workload: of the search.
        share: of a device's memory that may be used (planner.memory_share).
        together: most jobs that train at once.

    Raises:
        CapacityError: too few devices for any, or the longest sample fits into none.
    """
    where = (
        f"{profile.devices.count} × {profile.devices.kind} of {profile.devices.memory_bytes / 2**30:g} GiB"
    )
    if not profile.allowed:
        least = min(profile.configurations, key=lambda each: each.devices)
        raise CapacityError(
            f"{where} for {profile.model}",
            f"The table {profile.table!r} has no replica for so few devices: {least} takes {least.devices}.",
            "Describe more devices (cluster.options.device.count), or choose another table "
            f"(cluster.options.max_tokens: {choices(profile.tables)}) or cluster.",
        )
    workload.check_fits(max(each.max_tokens for each in profile.allowed), where)
    if memory is None:
        return replace(profile, configurations=profile.allowed)
    available = share * profile.devices.memory_bytes
    held = sum(sorted((memory.adapter_bytes(job.adapter) for job in workload.jobs), reverse=True)[:together])
    name, longest = max(workload.longest.items(), key=lambda each: each[1])
    found = _within(profile, memory, longest, held, available)
    if max((each.max_tokens for each in found), default=0) >= longest:
        return replace(profile, configurations=found)
    needs = {
        configuration: memory.peak(configuration, profile.time.layers, held)
        for configuration in (replace(each, max_tokens=longest) for each in profile.allowed)
    }
    best = min(needs, key=needs.__getitem__)
    raise CapacityError(
        f"job {name} has a sample of {longest} tokens ({workload.longest_is[name]}): with it alone {best} "
        f"takes {needs[best] / 2**30:.1f} GiB on a device",
        f"Of each of {where} {available / 2**30:.1f} GiB may be used (planner.memory_share={share}).",
        "Set engine.checkpointing=true where it is not, drop or cut long samples (data.overlong, "
        "model.max_length), train fewer jobs at once (search.parallel), or describe more or larger devices.",
    )


def _within(
    profile: ClusterProfile, memory: ModelMemory, longest: int, held: int, available: float
) -> tuple[Configuration, ...]:
    found = []
    for configuration in profile.allowed:
        for capacity in _capacities(configuration.max_tokens, longest):
            smaller = replace(configuration, max_tokens=capacity)
            if memory.peak(smaller, profile.time.layers, held) <= available:
                found.append(smaller)
                break
    return tuple(found)


def _capacities(most: int, longest: int) -> Sequence[int]:
    """The most tokens, its halves that take the longest sample, and at last that sample alone.

    A configuration that does not take the longest sample is for shorter ones and is halved freely.
    """
    least = longest if longest <= most else 1
    found = [most]
    while found[-1] // 2 >= least:
        found.append(found[-1] // 2)
    return found if found[-1] == least else [*found, least]
