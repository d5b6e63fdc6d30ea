"""Deployment by patterns: bounds hold, answers cover the batch; both lie around the enumerated optimum."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_bounds import Optimum
from scipy.optimize import OptimizeResult

from plait.cost.replica import Configuration, ReplicaCost
from plait.cost.time import HeadTime, LayerTime, TimeModel
from plait.planner.deployment import GAP, completed, deploy, least_cost, relaxation_bound, search
from plait.planner.deployment_patterns import Patterns, Ranges
from plait.planner.dispatch import ReplicaKind
from plait.planner.pricing import PRECISIONS, Pricing
from plait.planner.weighing import MeanStep
from plait_bench.bucketed import BucketedCost, BucketedPricing
from plait_bench.exact import exact_deployment


def _instance(
    seed: int, kind: type[ReplicaCost] = BucketedCost, most: int = 6
) -> tuple[list[ReplicaCost], list[int], dict[str, int]]:
    """Costs of one kind, at most so many sequences of each bucket, and devices."""
    rng = np.random.default_rng(seed)
    head = {1: HeadTime(0.1, 0.002), 2: HeadTime(0.1, 0.001)} if seed % 2 else {}
    layers = {
        1: LayerTime(float(rng.uniform(0, 0.5)), float(rng.uniform(0.01, 0.03)), 1e-5),
        2: LayerTime(float(rng.uniform(0, 0.5)), float(rng.uniform(0.005, 0.02)), 5e-6),
    }
    time = TimeModel(4, layers, head)
    lengths = [40, 100, 200]
    shapes = [(1, 1, 100), (1, 2, 200), (2, 1, 200)]
    costs = [kind.of(Configuration(*shape), lengths, time) for shape in shapes]
    return costs, [int(value) for value in rng.integers(1, most + 1, size=3)], {"": int(rng.integers(3, 5))}


@pytest.mark.parametrize("seed", range(24))
def test_bound_and_answer_enclose_the_optimum(seed: int) -> None:
    costs, counts, devices = _instance(seed)
    optimum = exact_deployment(costs, counts, devices).makespan
    low = relaxation_bound(costs, counts, devices)
    found = search(costs, counts, devices, bound=low, goal=0.001)
    assert low <= found.bound <= optimum * (1 + 1e-6)
    assert optimum * (1 - 1e-6) <= found.expected.makespan <= optimum * 1.1
    assert sum(kind.devices for kind in found.kinds) <= devices[""]
    assert [sum(row[j] for row in found.expected.assigned) for j in range(3)] == counts
    assert search(costs, counts, devices, bound=low, goal=0.001) == found


@pytest.mark.parametrize("seed", range(6))
def test_plan_and_bound_of_packed_sequences_enclose_the_optimum(seed: int) -> None:
    costs, counts, devices = _instance(seed, ReplicaCost, most=2)
    optimum = Optimum(MeanStep(tuple(costs), tuple(counts), 1, devices)).least(devices, None)
    low = relaxation_bound(costs, counts, devices)
    found = search(costs, counts, devices, bound=low, goal=0.001)
    assert low <= found.bound <= optimum * (1 + 1e-6)
    assert optimum * (1 - 1e-6) <= found.expected.makespan <= optimum * 1.1
    patterns = Patterns(costs, counts, devices)
    for factor in (0.5, 0.8, 0.95, 1.0001, 1.3):
        relaxed = patterns.relax(factor * optimum, patterns.everything, exact=True)
        assert relaxed.share <= relaxed.most * (1 + 1e-6)
        if factor > 1:
            assert relaxed.share >= 1 - 1e-6  # a packing does it, so nothing else may be proved


@pytest.mark.parametrize("status", [2, 4])
def test_a_solver_that_fails_proves_nothing(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status of 2 stands for errors of the solver, too."""
    costs, counts, devices = _instance(3)
    low = relaxation_bound(costs, counts, devices)
    failed = OptimizeResult(x=None, status=status)
    monkeypatch.setattr("plait.planner.deployment_patterns.linprog", lambda *_, **__: failed)
    patterns = Patterns(costs, counts, devices)
    relaxed = patterns.relax(1.0, patterns.everything)
    assert (relaxed.share, relaxed.most) == (0.0, float("inf"))
    found = search(costs, counts, devices, bound=low, goal=0.001)
    assert found.bound == low < found.makespan


@pytest.mark.parametrize("kind", [BucketedCost, ReplicaCost])
def test_bounds_hold_if_no_linear_program_is_solved(
    kind: type[ReplicaCost], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs, counts, devices = _instance(4, kind, most=3)
    solved = deploy(costs, counts, devices)
    for module in ("plait.planner.deployment", "plait.planner.deployment_patterns", "plait.planner.pricing"):
        monkeypatch.setattr(f"{module}.linprog", lambda *_, **__: OptimizeResult(x=None, fun=None, status=4))
    monkeypatch.setattr("scipy.optimize.linprog", lambda *_, **__: OptimizeResult(x=None, fun=None, status=4))
    assert 0 < relaxation_bound(costs, counts, devices) <= solved.makespan
    assert 0 < least_cost(costs, counts, {"": 1.0}) <= solved.makespan * devices[""]
    for most_enumerated in (4000, 0):
        found = deploy(costs, counts, devices, most_enumerated=most_enumerated)
        assert found.bound <= solved.makespan * (1 + 1e-6) <= found.makespan * (1 + GAP + 1e-6)
    for cost in costs:
        priced_by = Pricing if kind is ReplicaCost else BucketedPricing
        assert priced_by(cost, np.array(counts), 5.0).priced(np.ones(3), 0.1, PRECISIONS[1]).limit >= 0.1


@pytest.mark.parametrize("seed", [5016, 5043, 5048, 5062, 5090])
def test_small_deployments_are_near_the_optimum(seed: int) -> None:
    """With pipelines whose slowest stage depends on the batch, if little is left to round."""
    rng = np.random.default_rng(seed)
    layers = {
        tp: LayerTime(
            float(rng.uniform(0, 0.5)), float(rng.uniform(0.002, 0.03)), float(rng.choice([0, 1e-5, 1e-4]))
        )
        for tp in (1, 2)
    }
    head = {tp: HeadTime(float(rng.uniform(0, 0.3)), float(rng.uniform(0, 0.05))) for tp in (1, 2)}
    time = TimeModel(int(rng.integers(4, 7)), layers, head if seed % 2 else {})
    shapes = [(1, 1, int(rng.choice([100, 200, 400]))), (1, 2, 200), (2, 1, 200), (1, 4, 400)]
    costs = [BucketedCost.of(Configuration(*shape), [40, 100, 200], time) for shape in shapes]
    counts = [int(value) for value in rng.integers(1, 6, size=3)]
    optimum = exact_deployment(costs, counts, {"": 5}).makespan
    found = deploy(costs, counts, {"": 5})
    assert found.bound <= optimum * (1 + 1e-6)
    assert optimum * (1 - 1e-6) <= found.makespan <= optimum * 1.03


def test_the_bound_of_the_relaxation_is_valid_at_every_makespan() -> None:
    for seed in range(8):
        costs, counts, devices = _instance(seed)
        optimum = exact_deployment(costs, counts, devices).makespan
        patterns = Patterns(costs, counts, devices)
        for factor in (0.5, 0.8, 0.95, 1.0001, 1.3):
            relaxed = patterns.relax(factor * optimum, patterns.everything, exact=True)
            assert relaxed.share <= relaxed.most * (1 + 1e-6)
            if factor > 1:
                assert relaxed.share >= 1 - 1e-6  # it can be done, so nothing else may be proved
        nothing = patterns.relax(optimum, Ranges((devices[""] + 1, 0, 0), (devices[""] + 1, 0, 0)))
        assert nothing.most == 0.0


@pytest.mark.parametrize(("kind", "priced_by"), [(BucketedCost, BucketedPricing), (ReplicaCost, Pricing)])
@given(
    st.integers(0, 1000),
    st.lists(st.floats(0.0, 1.0).map(lambda price: round(price, 9)), min_size=3, max_size=3),
    st.sampled_from([1.0, 1e-300, 1e9]),
    st.floats(1.0, 30.0),
    st.sampled_from(PRECISIONS),
)
@settings(max_examples=60)
def test_pricing_finds_what_is_worth_most(
    kind: type[ReplicaCost],
    priced_by: type[Pricing],
    seed: int,
    prices: list[float],
    unit: float,
    tau: float,
    precision: object,
) -> None:
    """In any unit of price."""
    costs, counts, _ = _instance(seed, kind)
    for cost in costs:
        every = np.array(list(itertools.product(*(range(count + 1) for count in counts))))
        holds = cost.seconds_many(every) <= tau
        most = float((every @ np.array(prices))[holds].max(initial=0.0))
        pricing = priced_by(cost, np.array(counts), tau)
        need = 0.5 * most + 1e-9
        priced = pricing.priced(np.array(prices) * unit, need * unit, precision)  # type: ignore[arg-type]
        assert priced.limit >= (most - 1e-9) * unit
        for pattern in priced.patterns:
            assert cost.seconds(pattern) <= tau * (1 + 1e-8)
            assert (pattern <= counts).all()
        if most > 1e-6:
            found = max(float(np.array(prices) @ pattern) for pattern in priced.patterns)
            assert found > 0.5 * most


def test_rounded_patterns_are_completed_to_the_batch() -> None:
    costs, counts, _ = _instance(1)
    replicas = [ReplicaKind(cost, 1) for cost in costs]
    for rows in ([[0, 0, 0]] * 3, [[9, 0, 0], [3, 2, 9], [1, 9, 1]]):
        shares = completed(replicas, counts, np.array(rows))
        assert shares.sum(axis=0).tolist() == counts
        assert shares.min() >= 0
        assert all(np.isfinite(kind.cost.seconds(row)) for kind, row in zip(replicas, shares, strict=True))
