"""How many layers each pipeline stage holds: the last one also pays for head and loss."""

from __future__ import annotations

from collections.abc import Sequence

from plait.core.errors import ConfigError
from plait.cost.shapes import MicrobatchShape
from plait.cost.time import TimeModel


def balanced_split(
    time: TimeModel, stages: int, shape: MicrobatchShape, *, tp: int = 1, most_layers: Sequence[int] = ()
) -> tuple[int, ...]:
    """Whole layers of each stage such that the slowest stage is as fast as it can be.

    What the stages could hold beyond the model's layers is left out of the widest ones, the earlier first,
    since early stages hold the most microbatches in flight.

    Args:
        shape: a typical microbatch.
        most_layers: most layers that fit into each stage's memory; empty where all do.

    Raises:
        ConfigError: more stages than layers, or memory for too few of them.
    """
    room = tuple(most_layers) or (time.layers,) * stages
    if stages > time.layers or len(room) != stages or sum(room) < time.layers or min(room) < 1:
        raise ConfigError(
            f"pp={stages}", f"Each stage must hold at least one of {time.layers} layers, and all must fit."
        )

    def seconds(layers: int, last: bool) -> float:
        return time.stage(shape, tp=tp, layers=layers, last=last).total

    costs = sorted({seconds(layers, last) for layers in range(1, time.layers + 1) for last in (False, True)})
    for limit in costs:  # the slowest stage's seconds are one of these
        most = [
            max((n for n in range(1, room[s] + 1) if seconds(n, s == stages - 1) <= limit), default=0)
            for s in range(stages)
        ]
        if min(most) >= 1 and sum(most) >= time.layers:
            return _narrowed(most, time.layers)
    raise AssertionError("the whole model on one stage is among the limits")


def _narrowed(most: Sequence[int], layers: int) -> tuple[int, ...]:
    """Take from the widest stage, the earliest of equal ones, until ``layers`` are left."""
    split = list(most)
    for _ in range(sum(split) - layers):
        widest = max(range(len(split)), key=lambda s: (split[s], -s))
        split[widest] -= 1
    return tuple(split)
