"""Dispatch and deployment against enumeration, with whole microbatches, ramp and the head's stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from plait.core.errors import CapacityError
from plait.cost.replica import Configuration
from plait.cost.time import HeadTime, LayerTime, TimeModel
from plait.planner.deployment import deploy, relaxation_bound
from plait.planner.dispatch import (
    ReplicaKind,
    descend,
    dispatch,
    greedy,
    makespan,
    single,
    spread,
    spread_shares,
)
from plait_bench.bucketed import BucketedCost
from plait_bench.exact import exact_deployment, exact_dispatch
from plait_bench.lobra import length_based

TIME = TimeModel(
    layers=8,
    layer={tp: LayerTime(2.5e-3, 5e-6 / tp**0.8, 1e-10) for tp in (1, 2, 4)},
    head={tp: HeadTime(1e-3, 3e-6 / tp) for tp in (1, 2, 4)},
)


def _seconds(cost: BucketedCost, counts: Sequence[int]) -> float:
    """T of LobRA's appendix D written out microbatch by microbatch, apart from the code under test."""
    tp, pp, most = cost.configuration.tp, cost.configuration.pp, cost.configuration.max_tokens
    microbatches = []
    for length, count in zip(cost.lengths.tolist(), counts, strict=True):
        while count > 0:
            if length > most:
                return float("inf")
            size = min(count, most // length)
            microbatches.append((size, length))
            count -= size
    work, longest = [], 0.0
    split = [8 // pp] * pp
    for stage, layers in enumerate(split):
        total = 0.0
        for size, length in microbatches:
            layer, head = TIME.layer[tp], TIME.head[tp]
            seconds = layers * (layer.fixed + layer.token * size * length + layer.square * size * length**2)
            if stage == pp - 1:
                seconds += head.fixed + head.labelled * size * length
            total += seconds
            longest = max(longest, seconds)
        work.append(total)
    return max(work) + (pp - 1) * longest


def _best(kinds: Sequence[ReplicaKind], counts: Sequence[int]) -> float:
    """Least max_k T(⌈d_k / p_k⌉) over all shares, by enumeration; the last kind takes what is left."""
    ranges = [[range(-(-count // kind.count) + 1) for count in counts] for kind in kinds]
    rows = [list(itertools.product(*each)) for each in ranges]
    times = [{row: _seconds(kind.cost, row) for row in each} for kind, each in zip(kinds, rows, strict=True)]
    least = float("inf")
    for chosen in itertools.product(*rows[:-1]):
        so_far = max((times[k][row] for k, row in enumerate(chosen)), default=0.0)
        if so_far >= least:
            continue
        given = [sum(kinds[k].count * row[j] for k, row in enumerate(chosen)) for j in range(len(counts))]
        rest = tuple(
            max(0, -(-(count - share) // kinds[-1].count)) for count, share in zip(counts, given, strict=True)
        )
        least = min(least, max(so_far, times[-1][rest]))
    return least


def _instance(seed: int) -> tuple[list[ReplicaKind], list[int]]:
    rng = np.random.default_rng(seed)
    buckets, kinds = int(rng.integers(2, 4)), int(rng.integers(2, 4))
    lengths = np.sort(rng.choice([128, 256, 512, 1024, 2048], buckets, replace=False))
    built = []
    for kind in range(kinds):
        tp, pp = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2, 4]))
        most = 4096 if kind == 0 else int(rng.choice([512, 1024, 2048]))
        cost = BucketedCost.of(Configuration(tp, pp, most), lengths, TIME)
        built.append(ReplicaKind(cost, int(rng.integers(1, 4))))
    counts = [int(count) for count in rng.integers(0, 6, buckets)]
    counts[0] += not any(counts)
    return built, counts


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_dispatch_equals_brute_force(first: int) -> None:
    for seed in range(first, first + 20):
        _check_dispatch(seed)


def _check_dispatch(seed: int) -> None:
    kinds, counts = _instance(seed)
    exact, quick = exact_dispatch(kinds, counts), dispatch(kinds, counts)
    least = _best(kinds, counts)
    assert exact.makespan == pytest.approx(least, rel=1e-6)
    assert exact.bound == pytest.approx(least, rel=1e-5)
    assert exact.gap == pytest.approx(0.0, abs=2e-5)
    assert exact.limit_hit is None
    assert quick.bound <= least * (1 + 1e-9)
    assert quick.makespan >= least * (1 - 1e-9)
    for found in (exact, quick):
        assert [sum(column) for column in zip(*found.assigned, strict=True)] == counts
    each = spread(kinds, counts, exact)
    assert each.makespan <= least * (1 + 1e-9)
    assert [sum(column) for column in zip(*each.assigned, strict=True)] == counts


@pytest.mark.parametrize(
    ("seed", "equal_shares"), [*((seed, True) for seed in range(25)), *((seed, False) for seed in range(15))]
)
def test_deployment_equals_brute_force(seed: int, equal_shares: bool) -> None:
    rng = np.random.default_rng(1000 + seed)
    lengths, devices = [256, 1024], int(rng.integers(2, 6))
    shapes = [(1, 1, 1024), (2, 1, 1024), (1, 2, 1024), (4, 1, 2048)]
    costs = [
        BucketedCost.of(Configuration(*shape), lengths, TIME)
        for shape in shapes
        if shape[0] * shape[1] <= devices
    ]
    counts = [int(rng.integers(1, 5)), int(rng.integers(1, 4))]
    sizes = [cost.configuration.devices for cost in costs]
    least = float("inf")
    for p in itertools.product(*(range(devices // size + 1) for size in sizes)):
        used = sum(count * size for count, size in zip(p, sizes, strict=True))
        if devices - min(sizes) < used <= devices:  # adding an idle replica is never slower
            kinds = [ReplicaKind(cost, count) for cost, count in zip(costs, p, strict=True) if count]
            least = min(least, _best(kinds if equal_shares else _units(kinds), counts))
    found = exact_deployment(costs, counts, {"": devices}, equal_shares=equal_shares)
    assert found.makespan == pytest.approx(least, rel=1e-6)
    assert found.bound == pytest.approx(least, rel=1e-5)
    assert sum(kind.devices for kind in found.kinds) <= devices
    assert relaxation_bound(costs, counts, {"": devices}) <= least
    if equal_shares:
        return
    for enumerated in (0, 4000):
        searched = deploy(costs, counts, {"": devices}, most_enumerated=enumerated)
        assert searched.bound <= least * (1 + 1e-9)
        assert searched.makespan >= least * (1 - 1e-9)
        assert sum(kind.devices for kind in searched.kinds) <= devices


def test_the_relaxation_is_no_more_than_a_replica_whose_slowest_stage_depends_on_the_batch() -> None:
    """Short sequences weigh on the head's stage, long ones on the layers': no stage has the worst of both."""
    time = TimeModel(7, {1: LayerTime(0.0, 1e-3, 1e-5)}, {1: HeadTime(0.0, 2.5e-3)})
    cost = BucketedCost.of(Configuration(1, 2, 400), [40, 400], time)
    counts = [500, 30]
    bound = relaxation_bound([cost], counts, {"": 2})
    busiest = max(float(np.dot(each, counts)) for each in cost.each)
    assert bound == pytest.approx(busiest, rel=1e-6)
    assert bound <= cost.seconds(counts)
    worst_of_both = float(np.dot(cost.each.max(axis=0), counts))
    assert worst_of_both > cost.seconds(counts)  # what no bound may be


def _units(kinds: Sequence[ReplicaKind]) -> list[ReplicaKind]:
    return [ReplicaKind(kind.cost, 1) for kind in kinds for _ in range(kind.count)]


def test_dispatch_is_never_worse_than_greedy() -> None:
    for seed in range(250):
        kinds, counts = _instance(seed)
        by_greed = makespan(kinds, greedy(kinds, counts))
        found = dispatch(kinds, counts)
        assert found.makespan <= by_greed * (1 + 1e-12)
        assert length_based(kinds, counts).makespan >= found.bound * (1 - 1e-9)


def test_seconds_equal_the_written_out_sum() -> None:
    for seed in range(50):
        kinds, counts = _instance(seed)
        for kind in kinds:
            assert kind.cost.seconds(counts) == pytest.approx(_seconds(kind.cost, counts))


def test_sequence_that_fits_nowhere_is_named() -> None:
    cost = BucketedCost.of(Configuration(1, 1, 512), [256, 1024], TIME)
    with pytest.raises(CapacityError, match="1024 tokens") as caught:
        dispatch([ReplicaKind(cost, 2)], [3, 1])
    assert "512 tokens" in str(caught.value)
    with pytest.raises(CapacityError, match="1024 tokens"):
        deploy([cost], [3, 1], {"": 4})


def test_single_replicas_keep_order_and_number() -> None:
    kinds, _ = _instance(5)
    assert [kind.cost for kind in single(kinds)] == [kind.cost for kind in kinds for _ in range(kind.count)]


def test_shares_of_equal_replicas_are_even_and_moves_even_them_out() -> None:
    """What does not divide goes to the least loaded, longest first; one move at a time is enough here."""
    pair = [ReplicaKind(BucketedCost.of(Configuration(1, 1, 1024), [256, 1024], TIME), 2)]
    assert spread_shares(pair, np.array([[3, 5]])).tolist() == [[1, 3], [2, 2]]
    lopsided = np.array([[4, 0], [0, 0]])
    assert descend(single(pair), [4, 0], lopsided, chains=False).tolist() == [[2, 0], [2, 0]]
