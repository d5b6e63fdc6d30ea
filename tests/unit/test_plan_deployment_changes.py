"""Later waves of a plan: kept on the deployment so far, changed if that pays, or if they must be."""

import math

from plait.cost.replica import Configuration, ReplicaCost
from plait.cost.time import LayerTime, TimeModel
from plait.planner.weighing import MeanStep
from plait.planning.expected import deploy_before

TIME = TimeModel(32, {tp: LayerTime(2.5e-3, 5e-6 / tp**0.8, 1e-10) for tp in (1, 2, 8)})
SHAPES = ((1, 1, 2048), (2, 1, 4096), (8, 1, 16384))


def _wave(counts: tuple[int, int, int], steps: int) -> MeanStep:
    costs = tuple(ReplicaCost.of(Configuration(*shape), [512, 2048, 16384], TIME) for shape in SHAPES)
    return MeanStep(costs, counts, steps, {"": 16})


def test_a_change_is_made_where_it_pays_and_where_it_must_be() -> None:
    long, short = _wave((10, 10, 6), 100), _wave((400, 10, 0), 10_000)
    first = long.deploy()
    changed, outlook = deploy_before(2, first, short, 180.0)
    assert outlook.changed
    assert outlook.step_seconds is not None
    assert outlook.saved is not None
    assert changed.makespan < outlook.step_seconds
    assert abs(outlook.saved - (10_000 * (outlook.step_seconds - changed.makespan) - 180.0)) < 1e-6
    assert outlook.break_even == math.ceil(180.0 / (outlook.step_seconds - changed.makespan))
    kept, outlook = deploy_before(2, first, _wave((400, 10, 0), 1), 180.0)
    assert not outlook.changed
    assert outlook.replicas is None  # no deployment could pay for the restart in one step
    assert kept.shape == first.shape
    forced, outlook = deploy_before(3, changed, long, 1e9)
    assert outlook.changed
    assert outlook.step_seconds is None
    assert outlook.break_even is None
    assert max(each.max_tokens for each, _ in forced.shape) == 16384
