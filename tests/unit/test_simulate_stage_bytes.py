"""Bytes of a simulated run: a stage's peak if microbatches are equal, else what is in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.core.plans import Microbatch, Replica
from plait.cost.memory import MemoryCoefficients, MemoryModel, MemoryShape, Phase, StaticBytes
from plait.cost.time import HeadTime, LayerTime, TimeModel
from plait.simulate.forecast import PlanOptions, forecast, make_plan, plan_pipelines
from plait.simulate.report import RunMemory, measure
from plait_bench.pipelines import global_batches

TIME = TimeModel(8, {1: LayerTime(1e-3, 1e-6), 2: LayerTime(1e-3, 6e-7)}, {1: HeadTime(0.0, 4e-6)})
MODEL = MemoryModel(
    {
        "forward": Phase(MemoryCoefficients(token=100.0, square=0.5), margin=0.1),
        "loss": Phase(MemoryCoefficients(fixed=9.0, token=80.0, labelled=30.0, logit_row=2000.0), margin=0.0),
    },
    logit_rows=64,
)


def shape(microbatch: Microbatch) -> MemoryShape:
    return MemoryShape.of([length for each in microbatch.segments for length in each.lengths])


def test_equal_microbatches_take_the_peak_of_every_stage() -> None:
    trace = {f"job{j}": [[100, 100] for _ in range(6)] for j in range(4)}
    static = StaticBytes(8e4, embedding=5e3, head=7e3)
    memory = RunMemory(MODEL, static, shape)
    made = forecast(global_batches(trace), [Replica(0, pp=4)], TIME, PlanOptions({0: 200}, memory=memory))
    split = made.plan.replicas[0].layer_split
    full = MemoryShape.of([100, 100])
    stages = [
        MODEL.stage_peak(full, static=static.stage(split, stage), layer_split=split, stage=stage)
        for stage in range(4)
    ]
    assert made.replica_bytes == {0: int(max(stages))}
    assert {group.predicted.bytes for group in made.plan.groups} == {int(max(stages))}


def test_one_device_takes_what_its_largest_microbatch_takes() -> None:
    memory = RunMemory(MODEL, StaticBytes(5e4), shape)
    trace = {"small": [[10, 20]] * 3, "large": [[300, 400]] * 3}
    made = forecast(global_batches(trace), [Replica()], TIME, PlanOptions({0: 730}, memory=memory))
    assert made.replica_bytes == {0: int(MODEL.safe_peak(MemoryShape.of([10, 20, 300, 400]), static=5e4))}
    (group,) = made.plan.groups
    assert group.predicted.bytes == made.replica_bytes[0]


def test_tensor_parallelism_divides_and_a_light_group_takes_less() -> None:
    memory = RunMemory(MODEL, StaticBytes(5e4), shape)
    trace = {"light": [[10]] * 4, "heavy": [[500]] * 4}
    options = PlanOptions({0: 500}, memory=memory)
    one = forecast(global_batches(trace), [Replica()], TIME, options)
    two = forecast(global_batches(trace), [Replica(tp=2)], TIME, options)
    assert two.replica_bytes[0] == pytest.approx(one.replica_bytes[0] / 2, abs=1)
    alone = forecast(global_batches({"light": trace["light"]}), [Replica()], TIME, options)
    assert alone.replica_bytes[0] < one.replica_bytes[0]


def test_nothing_is_predicted_where_the_memory_is_not_known() -> None:
    made = forecast(global_batches({"a": [[10]]}), [Replica()], TIME, PlanOptions({0: 10}))
    assert made.replica_bytes == {}
    assert [group.predicted.bytes for group in made.plan.groups] == [None]


@pytest.mark.parametrize(("jobs", "size", "bubble"), [(4, 4, 0.2), (3, 2, 0.4)])
def test_a_pipeline_is_not_starved_by_full_microbatches(jobs: int, size: int, bubble: float) -> None:
    """Small jobs fit into one microbatch; one for each keeps the stages busy."""
    trace = {f"job{j}": [[60, 70, 80, 90][:size] for _ in range(8)] for j in range(jobs)}
    batches, replicas = global_batches(trace), [Replica(0, pp=4)]
    options = PlanOptions({0: 2000}, adapting=True)
    slow = TimeModel(8, {1: LayerTime(1e-6, 1e-5)})
    made = forecast(batches, replicas, slow, options)
    one_by_one = replace(options, groups=jobs)
    tried = [
        measure(plan_pipelines(make_plan(batches, replicas, slow, each), slow, each))[0].makespan
        for each in (options, one_by_one)
    ]
    assert made.metrics.makespan <= 1.02 * min(tried)
    assert made.metrics.bubble.total < bubble


def test_slow_links_between_stages_cost_seconds() -> None:
    batches = global_batches({"a": [[60, 70]] * 3, "b": [[80]] * 3})
    free, linked = (
        forecast(
            batches, [Replica(0, pp=2)], TIME, PlanOptions({0: 200}, hidden_size=64, bandwidths=bandwidths)
        )
        for bandwidths in ({}, {0: 1e5})
    )
    assert linked.metrics.makespan > free.metrics.makespan
    assert linked.alone.makespan > free.alone.makespan
    assert free.metrics.communication_bytes == 2 * 3 * (130 + 80) * 64 * 2
