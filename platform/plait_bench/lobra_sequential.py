"""The plan of a task that trains alone, as LobRA-Sequential has one for each task.

The paper prints none of them. That for the mean step is not the best: of the long sequences, few and rare
where a batch is small, it counts one of each bucket in every step, and steps run with other buckets. So plans
are compared by the seconds of steps that were drawn for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import lcm

from plait.cost.profiles import ClusterProfile
from plait_bench.lobra import Rows
from plait_bench.lobra_plans import Shape

GAIN = 1e-4  # relative gain that is worth an exchange


def fastest(
    profile: ClusterProfile, starts: Iterable[Rows], longest: int, seconds: Callable[[Rows], float]
) -> Rows:
    """The fastest of these plans and of all equal replicas, changed as long as an exchange makes it faster.

    Args:
        starts: those that need more devices than the profile has are left out.
        longest: tokens of the longest sequence; a plan that does not hold it is left out.
        seconds: of a plan.
    """
    most = _most_tokens(profile)
    equal: list[Rows] = [((*shape, profile.devices.count // (shape[0] * shape[1])),) for shape in most]
    fitting = [rows for rows in starts if _devices(rows) <= profile.devices.count]
    able = [rows for rows in (*fitting, *equal) if _holds(most, rows) >= longest]
    best, seen = min(able, key=seconds), set(able)
    least = seconds(best)
    tried = iter(exchanges(profile, best))
    while (rows := next(tried, None)) is not None:
        if rows in seen or _holds(most, rows) < longest:
            continue
        seen.add(rows)
        took = seconds(rows)
        if took < least * (1 - GAIN):
            best, least, tried = rows, took, iter(exchanges(profile, rows))
    return best


def exchanges(profile: ClusterProfile, rows: Rows) -> Iterator[Rows]:
    """All plans with the fewest replicas of one configuration exchanged for those of another on as many
    devices."""
    have = {(tp, pp): count for tp, pp, count in rows}
    for fewer in have:
        for other in _most_tokens(profile):
            devices = lcm(fewer[0] * fewer[1], other[0] * other[1])
            left = have[fewer] - devices // (fewer[0] * fewer[1])
            if other != fewer and left >= 0:
                more = have.get(other, 0) + devices // (other[0] * other[1])
                changed = have | {fewer: left, other: more}
                yield tuple((*shape, count) for shape, count in sorted(changed.items()) if count)


def _most_tokens(profile: ClusterProfile) -> dict[Shape, int]:
    """The most tokens of a sequence on each configuration that fits on the devices."""
    fitting = [each for each in profile.configurations if each.devices <= profile.devices.count]
    return {(each.tp, each.pp): each.max_tokens for each in fitting}


def _devices(rows: Rows) -> int:
    return sum(tp * pp * count for tp, pp, count in rows)


def _holds(most: dict[Shape, int], rows: Rows) -> int:
    return max(most[tp, pp] for tp, pp, _ in rows)
