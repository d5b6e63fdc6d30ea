"""Buckets, a step's plan sample by sample, planning ahead, and the published deployment."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.errors import CapacityError, ConfigError, DataError
from plait.cost.profiles import cluster_profile
from plait.cost.replica import Configuration
from plait.cost.time import LayerTime, TimeModel
from plait.planner.buckets import dynamic_buckets, fixed_buckets
from plait.planner.deployment import best_equal_replicas, deploy
from plait.planner.dispatch import device_seconds
from plait.planner.dispatch_step import Replicas, plan_step
from plait_bench.bucketed import BucketedCost
from plait_bench.lobra import Assumption, Task, compare, costs_of, expected_counts

ROOT = Path(__file__).resolve().parents[2]
TIME = TimeModel(32, {tp: LayerTime(2.5e-3, 5e-6 / tp**0.8, 1e-10) for tp in (1, 2, 8)})
REPLICAS = Replicas(
    (
        (Configuration(1, 1, 2048), TIME, 6),
        (Configuration(2, 1, 4096), TIME, 1),
        (Configuration(8, 1, 16384), TIME, 1),
    )
)


def _yaml(path: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
    return loaded


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 5))
def test_chosen_buckets_need_the_least_padding(lengths: list[int], buckets: int) -> None:
    found = dynamic_buckets(lengths, buckets=buckets, interval=4)
    edges = sorted({-(-length // 4) * 4 for length in lengths})
    least = min(
        sum(min(edge for edge in chosen if edge >= length) for length in lengths)
        for count in range(1, buckets + 1)
        for chosen in itertools.combinations(edges, count)
        if chosen[-1] == edges[-1]
    )
    padded = sum(length * count for length, count in zip(found.lengths, found.counts, strict=True))
    assert padded == least
    assert len(found.lengths) <= buckets
    assert sum(found.counts) == len(lengths)
    assert found.tokens == sum(lengths)


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=60))
def test_no_bucket_crosses_a_required_boundary(lengths: list[int]) -> None:
    found = dynamic_buckets(lengths, buckets=6, required=(2048, 4096, 9000))
    for limit in (2048, 4096, 9000):
        fitting = sum(length <= limit for length in lengths)
        kept = sum(count for edge, count in zip(found.lengths, found.counts, strict=True) if edge <= limit)
        assert kept == fitting


def test_buckets_refuse_what_they_cannot_hold() -> None:
    with pytest.raises(ConfigError, match="buckets=1"):
        dynamic_buckets([100, 3000], buckets=1, required=(2048,))
    with pytest.raises(DataError, match="0 sequences"):
        dynamic_buckets([])
    with pytest.raises(DataError, match="5000 tokens"):
        fixed_buckets([5000], [1024, 2048])
    assert expected_counts([1, 99, 0], 10) == (1, 10, 0)


@given(st.lists(st.integers(1, 16384), min_size=1, max_size=80))
@settings(max_examples=25)
def test_every_sample_goes_to_a_replica_that_takes_it(lengths: list[int]) -> None:
    plan = plan_step(lengths, REPLICAS)
    limits = [configuration.max_tokens for configuration, _, count in REPLICAS.kinds for _ in range(count)]
    assert len(plan.replica_of) == len(lengths)
    assert all(length <= limits[replica] for length, replica in zip(lengths, plan.replica_of, strict=True))
    per_replica = np.bincount(plan.replica_of, minlength=len(limits))
    assert per_replica.tolist() == [sum(row) for row in plan.expected.assigned]
    assert plan.expected.bound <= plan.expected.makespan * (1 + 1e-9)


def test_sample_over_every_capacity_is_named() -> None:
    with pytest.raises(CapacityError, match="20000 tokens"):
        plan_step([100, 20_000], REPLICAS)


def test_published_deployment_is_found_or_within_ten_percent() -> None:
    """LobRA Table 2: ⟨1,1⟩×6, ⟨2,1⟩×1, ⟨8,1⟩×1 for six tasks on 16 A100-40GB."""
    profile = cluster_profile(
        yaml.safe_load((ROOT / "conf/cluster/a100_40g_llama2_7b.yaml").read_text())["options"]
    )
    options = _yaml("sweeps/lobra/deploy_7b.yaml")["bench"]["options"]
    tasks, published = [Task(**row) for row in options["tasks"]], options["deployment"]
    assert len(options["assumptions"]) >= 5
    everything, without_pipelines, equal = compare(profile, tasks, Assumption(), published, detail=False)
    assert everything.within
    assert without_pipelines.ours == pytest.approx(0.0, abs=1e-9)
    assert "⟨1,1⟩×6, ⟨2,1⟩×1, ⟨8,1⟩×1" in without_pipelines.note
    assert "⟨8,1⟩×2" in equal.note  # Task-Fused in the paper, too
    assert equal.ours > 0.0


def test_proposal_keeps_the_best_for_each_length_and_size() -> None:
    """LobRA Table 3: at 2K one device, at 4K ⟨1,4⟩, at 8K ⟨2,4⟩, at 16K ⟨8,1⟩ do best."""
    profile = cluster_profile(
        yaml.safe_load((ROOT / "conf/cluster/a100_40g_llama2_7b.yaml").read_text())["options"]
    )
    costs = costs_of(profile, (2048, 4096, 8192, 16384))
    proposed = set()
    for size in {cost.configuration.devices for cost in costs}:
        able = [cost for cost in costs if cost.configuration.devices <= size]
        for j in range(4):
            best = min(able, key=lambda c: (round(float(device_seconds(c)[j]), 12), c.ramp))
            proposed |= {str(best.configuration)} if best.batch[j] else set()
    assert {"⟨1,1⟩", "⟨1,4⟩", "⟨2,4⟩", "⟨8,1⟩"} <= proposed
    assert not {"⟨1,2⟩", "⟨2,2⟩", "⟨4,2⟩", "⟨1,8⟩"} & proposed


def test_equal_replicas_are_never_better_than_the_chosen_deployment() -> None:
    shapes = [(1, 1, 2048), (2, 1, 4096), (8, 1, 16384)]
    costs = [BucketedCost.of(Configuration(*shape), [512, 2048, 16384], TIME) for shape in shapes]
    counts = [120, 30, 3]
    equal, chosen = best_equal_replicas(costs, counts, {"": 16}), deploy(costs, counts, {"": 16})
    assert str(equal) == "⟨8,1⟩×2"
    assert chosen.makespan <= equal.makespan
    assert equal.bound >= chosen.bound * (1 - 1e-9)
    with pytest.raises(CapacityError, match="16384 tokens on 4 devices"):
        best_equal_replicas(costs, counts, {"": 4})


def test_search_keeps_a_replica_for_the_longest_sequence() -> None:
    """Without its rare, large replica a deployment leaves the longest sequence nowhere: it must not win."""
    shapes = [(1, 1, 2048), (2, 1, 4096), (8, 1, 16384)]
    costs = [BucketedCost.of(Configuration(*shape), [512, 2048, 16384], TIME) for shape in shapes]
    found = deploy(costs, [300, 40, 1], {"": 24}, most_enumerated=0)
    assert any(kind.cost.configuration.max_tokens == 16384 for kind in found.kinds)
    assert found.bound <= found.makespan
