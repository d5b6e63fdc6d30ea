"""Deployment by patterns: bounds hold, answers cover the batch; both lie around the enumerated optimum."""

from __future__ import annotations

import numpy as np
import pytest

from plait.cost.replica import Configuration, ReplicaCost
from plait.cost.time import HeadTime, LayerTime, TimeModel
from plait.planner.deployment import DeployOptions, deploy
from plait.planner.deployment_bounds import relaxation_bound
from plait.planner.deployment_patterns import Patterns, refine


def _instance(seed: int) -> tuple[list[ReplicaCost], list[int], int]:
    rng = np.random.default_rng(seed)
    head = {1: HeadTime(0.1, 0.002), 2: HeadTime(0.1, 0.001)} if seed % 2 else {}
    layers = {
        1: LayerTime(float(rng.uniform(0, 0.5)), float(rng.uniform(0.01, 0.03)), 1e-5),
        2: LayerTime(float(rng.uniform(0, 0.5)), float(rng.uniform(0.005, 0.02)), 5e-6),
    }
    time = TimeModel(4, layers, head)
    lengths = [40, 100, 200]
    shapes = [(1, 1, 100), (1, 2, 200), (2, 1, 200)]
    costs = [ReplicaCost.of(Configuration(*shape), lengths, time) for shape in shapes]
    return costs, [int(value) for value in rng.integers(1, 7, size=3)], int(rng.integers(3, 5))


def test_bound_and_answer_lie_around_the_optimum() -> None:
    answered = [_lies_around_the_optimum(seed) for seed in range(24)]
    assert sum(answered) >= 12  # three or four devices leave little to round; larger cases nearly always do


def _lies_around_the_optimum(seed: int) -> bool:
    costs, counts, devices = _instance(seed)
    optimum = deploy(costs, counts, devices, DeployOptions(exact=True)).makespan
    low = relaxation_bound(costs, counts, devices)
    refined = refine(costs, counts, devices, bound=low, makespan=3 * optimum, goal=0.001)
    assert low <= refined.bound <= optimum * (1 + 1e-6)
    if not refined.replicas:
        return False
    assert refined.makespan >= optimum * (1 - 1e-6)
    taken = np.sum([each.counts for each in refined.replicas], axis=0)
    assert (taken >= counts).all()
    used = sum(costs[each.cost].configuration.devices for each in refined.replicas)
    assert used <= devices
    for each in refined.replicas:
        assert each.seconds == pytest.approx(costs[each.cost].seconds(each.counts))
    return True


@pytest.mark.parametrize("seed", range(8))
def test_the_deployment_with_patterns_holds_its_bound(seed: int) -> None:
    costs, counts, devices = _instance(seed)
    optimum = deploy(costs, counts, devices, DeployOptions(exact=True)).makespan
    found = deploy(costs, counts, devices, DeployOptions(enumerate_up_to=0, gap=0.0001))
    assert found.bound <= optimum * (1 + 1e-6)
    assert found.makespan >= optimum * (1 - 1e-6)
    assert sum(kind.devices for kind in found.kinds) <= devices
    assert [sum(row[j] for row in found.expected.assigned) for j in range(3)] == counts


def test_what_the_relaxation_proves_holds_at_every_makespan() -> None:
    costs, counts, devices = _instance(3)
    optimum = deploy(costs, counts, devices, DeployOptions(exact=True)).makespan
    patterns = Patterns(costs, counts)
    for factor in (0.5, 0.8, 0.95, 1.0001, 1.3):
        covered = patterns.cover(factor * optimum, devices)
        assert covered.proved <= covered.devices * (1 + 1e-6)
        if factor > 1:
            assert covered.proved <= devices  # it can be done, so nothing else may be proved
    repeated = Patterns(costs, counts)
    assert repeated.cover(optimum, devices) == Patterns(costs, counts).cover(optimum, devices)
