"""Forecasts: a verified plan with predictions, cheaper than job by job, over one or several replicas."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from plait.core.errors import CapacityError, ConfigError
from plait.core.plans import GlobalBatch, Microbatch, Replica
from plait.cost.replica import Configuration, ReplicaCost
from plait.cost.time import HeadTime, LayerTime, MicrobatchShape, TimeModel
from plait.engine.packer import Packer
from plait.planner.verify import violations
from plait.simulate.events import Work, simulate
from plait.simulate.forecast import Machine, PlanOptions, forecast
from plait.simulate.lowering import Lowering
from plait_bench.pipelines import global_batches

TIME = TimeModel(12, {1: LayerTime(1e-3, 1e-6), 2: LayerTime(1e-3, 6e-7)}, {1: HeadTime(0.0, 4e-6)})


def jobs(count: int, *, steps: int = 8, size: int = 8) -> dict[str, list[GlobalBatch]]:
    rng = random.Random(21)
    trace = {
        f"job{j}": [[rng.randint(40, 900) for _ in range(size)] for _ in range(steps)] for j in range(count)
    }
    return global_batches(trace)


def test_joint_training_saves_time_on_one_device_by_fewer_microbatches() -> None:
    batches = jobs(4)
    made = forecast(batches, [Replica()], TIME, PlanOptions({0: 2048}))
    assert made.plan.replicas[0].layer_split == (12,)
    assert made.metrics.bubble.total == pytest.approx(0)
    assert made.metrics.microbatches < made.alone.microbatches
    assert 0.5 < made.metrics.device_seconds / made.alone.device_seconds < 1
    assert sum(group.predicted.device_seconds or 0 for group in made.plan.groups) == pytest.approx(
        made.metrics.device_seconds
    )
    assert max(group.predicted.seconds or 0 for group in made.plan.groups) == made.metrics.makespan


def test_a_pipeline_and_a_tensor_parallel_replica_share_the_work() -> None:
    batches = jobs(4)
    replicas = [Replica(0, pp=4), Replica(1, tp=2)]
    capacities = {0: 2048, 1: 1024}
    made = forecast(batches, replicas, TIME, PlanOptions(capacities, hidden_size=64, labelled_share=0.5))
    assert sum(made.plan.replicas[0].layer_split) == 12
    every = [batch for own in batches.values() for batch in own]
    stages = {0: 1, 1: 1}  # the pipeline drains, so that a step follows the microbatch before it
    assert violations(made.plan.schedule, every, stages=stages, capacity=capacities) == []
    assert (
        made.metrics.device_seconds < 0.8 * made.alone.device_seconds
    )  # one job alone leaves the pipeline idle
    assert made.metrics.communication_bytes > 0
    assert made.metrics.mean_completion <= made.metrics.makespan
    tokens = sum(sum(batch.lengths) for batch in every)
    assert made.metrics.tokens_per_second * made.metrics.makespan == pytest.approx(tokens)
    assert made.alone.tokens_per_second * made.alone.makespan == pytest.approx(tokens)
    assert made.plan.choices == {"capacity.0": 2048, "capacity.1": 1024, "packing repeats": True}


def labelled(count: int, *, steps: int, size: int) -> dict[str, list[GlobalBatch]]:
    """Jobs all tokens of which are labelled."""
    return {
        job: [replace(each, loss_weight=1.0 / sum(each.lengths)) for each in own]
        for job, own in jobs(count, steps=steps, size=size).items()
    }


def test_samples_are_shared_out_as_the_engine_shares_them() -> None:
    batches = labelled(1, steps=1, size=24)
    replicas = [Replica(5, capacity=1000), Replica(9, capacity=950, speed=3.0)]
    options = PlanOptions({5: 1000, 9: 950}, times={9: TIME.at_speed(3.0)})
    planned = replica_of(forecast(batches, replicas, TIME, options).plan.schedule)
    assert planned == replica_of(Packer(replicas, TIME).pack(batches["job0"]))
    assert Counter(planned.values())[9] > Counter(planned.values())[5] > 0


def test_several_replicas_with_stages_train_as_the_engine_trains_them() -> None:
    batches = labelled(3, steps=3, size=12)
    del batches["job2"][-1]
    replicas = [Replica(0, pp=2, layer_split=(11, 1), capacity=1000), Replica(1, pp=1, capacity=1000)]
    made = forecast(batches, replicas, TIME, PlanOptions({0: 1000, 1: 1000}))
    packer, steps = Packer(made_of(made.plan.replicas), TIME), [0, 1, 2]
    for step in steps:
        turn = [own[step] for own in batches.values() if step < len(own)]
        assert replica_of(made.plan.schedule, step) == replica_of(packer.pack(turn))
    filled = [place for place, work in enumerate(made.pipelines[0].works) if work.parts]
    own = [each for each in made.plan.schedule if isinstance(each, Microbatch) and not each.replica]
    lowering, expected = Lowering(2), ([], [])
    for step in steps:  # each step is a window at whose end the engine's pipeline is drained
        window = [each for each in own if {part.step for part in each.segments} == {step}]
        for stage, instructions in zip(expected, lowering.window(window), strict=True):
            stage += [
                (e.kind, filled[e.microbatch]) for e in instructions if e.kind in ("forward", "backward")
            ]
    for stage in (0, 1):
        spans = [s for s in made.run.spans if (s.replica, s.stage) == (0, stage) and s.work in filled]
        assert [(span.kind, span.work) for span in sorted(spans, key=lambda s: s.start)] == expected[stage]


@pytest.mark.parametrize("number", [4, 5, 16])
@pytest.mark.parametrize(
    "split",
    [(6, 6), (11, 1), (1, 11), (8, 4), (4, 8), (4, 4, 4), (6, 4, 2), (2, 4, 6), (2, 8, 2), (6, 2, 2, 2)],
)
def test_dispatch_counts_the_seconds_that_stages_of_any_layers_take(
    split: tuple[int, ...], number: int
) -> None:
    """A short stage runs while the longest one does something else, and is not counted there again."""
    cost = ReplicaCost.of(Configuration(1, len(split), 900, layer_split=split), [900], TIME)
    shape = MicrobatchShape.of([900])
    pipeline = Machine(TIME, split).in_order([Work((), shape, 900, 900)] * number)
    assert cost.seconds([number]) == pytest.approx(simulate({0: pipeline}).makespan, rel=1e-9)


def test_stages_whose_seconds_do_not_depend_on_tokens_have_a_cost() -> None:
    for layer, seconds in ((LayerTime(1e-3, 0.0), 2.0 * 11e-3), (LayerTime(0.0, 0.0), 0.0)):
        time = TimeModel(12, {1: layer})
        cost = ReplicaCost.of(Configuration(1, 2, 900, layer_split=(11, 1)), [900], time)
        assert cost.seconds([2]) == pytest.approx(seconds)


def made_of(replicas: Iterable[Replica]) -> list[Replica]:
    """As the engine has them, with their capacity."""
    return [replace(each, capacity=1000) for each in replicas]


def replica_of(items: Iterable[object], step: int | None = None) -> dict[tuple[str, int], int]:
    """By job and sample; of one step alone if it is given."""
    return {
        (part.job, n): each.replica
        for each in items
        if isinstance(each, Microbatch)
        for part in each.segments
        for n in part.samples
        if step in (None, part.step)
    }


def test_the_same_jobs_give_the_same_plan() -> None:
    batches = jobs(3, steps=2)
    first, second = (forecast(batches, [Replica(pp=2)], TIME, PlanOptions({0: 1500})) for _ in range(2))
    assert first.plan == second.plan


def test_searches_that_cannot_be_planned_are_refused() -> None:
    with pytest.raises(CapacityError, match=r"sample \d+ of job job0"):
        forecast(jobs(1), [Replica()], TIME, PlanOptions({0: 100}))
    with pytest.raises(ConfigError, match="0 jobs on 1 replicas"):
        forecast({}, [Replica()], TIME, PlanOptions({0: 100}))
    with pytest.raises(ConfigError, match="pp=13"):
        forecast(jobs(1), [Replica(pp=13)], TIME, PlanOptions({0: 1000}))
    with pytest.raises(ConfigError, match="capacities of replicas 0, 1"):
        forecast(jobs(1), [Replica()], TIME, PlanOptions({0: 1000, 1: 1000}))
