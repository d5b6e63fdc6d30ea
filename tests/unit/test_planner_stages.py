"""Layers of each stage: the slowest stage is as fast as whole layers allow."""

from itertools import product

import pytest

from plait.core.errors import ConfigError
from plait.cost.replica import balanced_split
from plait.cost.time import HeadTime, LayerTime, MicrobatchShape, TimeModel

SHAPE = MicrobatchShape.of([64] * 4)


def model(layers: int, head: float, fixed: float = 1e-3) -> TimeModel:
    return TimeModel(layers, {1: LayerTime(fixed, 1e-5)}, {1: HeadTime(0.0, head)})


def slowest(time: TimeModel, split: tuple[int, ...]) -> float:
    last = len(split) - 1
    return max(time.stage(SHAPE, layers=count, last=stage == last).total for stage, count in enumerate(split))


@pytest.mark.parametrize("head", [0.0, 5e-6, 2e-5, 9e-5])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_no_split_has_a_faster_slowest_stage(stages: int, head: float) -> None:
    time = model(9, head)
    split = balanced_split(time, stages, SHAPE)
    every = [s for s in product(range(1, 10), repeat=stages) if sum(s) == 9]
    best = min(slowest(time, s) for s in every)
    assert sum(split) == 9
    assert slowest(time, split) == best
    # of the equally fast ones, none has a narrower widest stage
    assert max(split) == min(max(s) for s in every if slowest(time, s) == best)


def test_the_last_stage_gets_fewer_layers_and_early_ones_no_more_than_late_ones() -> None:
    assert balanced_split(model(80, 1.5e-5), 4, SHAPE) == (20, 20, 21, 19)
    assert balanced_split(model(8, 0.0), 4, SHAPE) == (2, 2, 2, 2)


def test_memory_limits_the_layers_of_a_stage() -> None:
    time = model(9, 0.0)
    assert balanced_split(time, 3, SHAPE, most_layers=(2, 9, 9)) == (2, 3, 4)
    with pytest.raises(ConfigError, match="pp=3"):
        balanced_split(time, 3, SHAPE, most_layers=(2, 2, 2))


def test_more_stages_than_layers() -> None:
    with pytest.raises(ConfigError, match="pp=5"):
        balanced_split(model(4, 0.0), 5, SHAPE)
