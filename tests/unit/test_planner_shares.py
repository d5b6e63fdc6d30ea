"""Samples shared out to replicas: all of them, once, if they fit, and evenly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.errors import CapacityError
from plait.core.plans import GlobalBatch, Group, Plan, Replica
from plait.cost.replica import Configuration, ReplicaCost
from plait.cost.time import HeadTime, LayerTime, TimeModel
from plait.planner.dispatch_step import Dispatcher, by_dispatch
from plait.planner.packing_exact import packed_batches
from plait.planner.schedule import build_schedule, turns
from plait.planner.verify import verify, violations
from plait.simulate.forecast import PlanOptions, plan_pipelines
from plait.simulate.report import measure, most_held


def global_batch(job: str, lengths: list[int], step: int = 0) -> GlobalBatch:
    count = len(lengths)
    return GlobalBatch(
        job,
        step,
        tuple(range(100 * step, 100 * step + count)),
        (1,) * count,
        tuple(lengths),
        1.0 / sum(lengths),
    )


def rows(parts: dict[int, tuple[GlobalBatch, ...]]) -> list[tuple[str, int, int, int]]:
    return sorted(
        (part.job, *row)
        for own in parts.values()
        for part in own
        for row in zip(part.samples, part.draws, part.lengths, strict=True)
    )


LENGTHS = list(range(5, 51, 5))  # so few that each has a bucket of its own
TIME = TimeModel(6, {1: LayerTime(1e-4, 1e-5), 2: LayerTime(1e-4, 6e-6)}, {1: HeadTime(0.0, 1e-5)})


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=12), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_the_dispatcher_assigns_every_sample_once_and_evenly(
    lengths: list[list[int]], speeds: list[int]
) -> None:
    batches = [global_batch(f"j{a}", own) for a, own in enumerate(lengths)]
    whole = Configuration(1, 1, 50)
    replicas = [(3 * at, whole, TIME.at_speed(speed)) for at, speed in enumerate(speeds)]
    parts = Dispatcher(replicas).parts(batches, 1.0)
    assert list(parts) == [number for number, *_ in replicas]
    assert rows(parts) == sorted(row for batch in batches for row in rows({0: (batch,)}))
    assert all(
        part.loss_weight == batches[int(part.job[1:])].loss_weight for own in parts.values() for part in own
    )
    costs = [ReplicaCost.of(whole, LENGTHS, TIME.at_speed(speed)) for speed in speeds]
    given = [Counter(n for part in own for n in part.lengths) for own in parts.values()]
    counts = [[own[length] for length in LENGTHS] for own in given]
    seconds = [cost.seconds(own) for cost, own in zip(costs, counts, strict=True)]
    slowest = seconds.index(max(seconds))
    for at in np.flatnonzero(counts[slowest]):  # no sample would shorten the step elsewhere
        one = np.arange(len(LENGTHS)) == at
        for other in set(range(len(speeds))) - {slowest}:
            moved = list(seconds)
            moved[slowest] = costs[slowest].seconds(counts[slowest] - one)
            moved[other] = costs[other].seconds(counts[other] + one)
            assert max(moved) >= max(seconds) - 1e-8


def test_long_samples_go_only_where_they_fit() -> None:
    small, large = (0, Configuration(1, 1, 10), TIME), (1, Configuration(1, 1, 50), TIME)
    parts = Dispatcher([small, large]).parts([global_batch("a", [40, 40, 5, 5])], 1.0)
    assert [part.lengths for part in parts[1]] == [(40, 40)]
    assert [part.lengths for part in parts[0]] == [(5, 5)]
    for several in ([large], [small, large]):
        with pytest.raises(CapacityError, match=r"sample 1 of job a \(train\) has 60 tokens"):
            Dispatcher(several).parts([global_batch("a", [4, 60])], 1.0)


def test_sharing_by_dispatch_follows_the_given_numbers() -> None:
    batches = [global_batch("a", [10, 9, 8]), global_batch("b", [6, 25])]
    parts = by_dispatch(batches, [1, 0, 1, 1, 1], [7, 3])
    assert rows(parts) == sorted(row for batch in batches for row in rows({0: (batch,)}))
    assert [(part.job, part.lengths) for part in parts[7]] == [("a", (9,))]
    assert [(part.job, part.lengths) for part in parts[3]] == [("a", (10, 8)), ("b", (6, 25))]
    with pytest.raises(ValueError, match="shorter"):
        by_dispatch(batches, [1, 0], [7, 3])


def test_a_plan_over_unequal_replicas_verifies_and_runs() -> None:
    replicas = (Replica(0, pp=3, layer_split=(2, 2, 2)), Replica(1, tp=2, pp=1, layer_split=(6,)))
    stages, room = {replica.id: replica.pp for replica in replicas}, {0: 56, 1: 96}
    batches = {
        job: [
            global_batch(job, [7 * (step + place) % 40 + 1 for place in range(8)], step) for step in range(4)
        ]
        for job in ("a", "b", "c")
    }
    kinds = [(each.id, Configuration(each.tp, each.pp, room[each.id]), TIME) for each in replicas]
    order = []
    for turn in turns(batches, [["a", "b"], ["c"]]):
        parts = Dispatcher(kinds).parts(turn, 1.0)
        order.append({r: packed_batches(own, capacity=room[r], tile=8) for r, own in parts.items() if own})
    items = build_schedule(order, stages, capacity=room, tile=8)
    every = [b for own in batches.values() for b in own]
    verify(items, every, stages=stages, capacity=room, tile=8)
    assert violations(items, every, stages=stages, capacity={0: 56, 1: 40}, tile=8)
    plan = Plan(replicas, (Group(("a", "b"), 64, 8), Group(("c",), 64, 8)), items)
    options = PlanOptions(room, hidden_size=512, bandwidths={0: 1e9, 1: 1e9})
    pipelines = plan_pipelines(plan, TIME, options)
    metrics, run = measure(pipelines, hidden_size=512, tp={0: 1, 1: 2})
    assert len(run.steps) == 12
    assert metrics.device_seconds == pytest.approx(5 * run.makespan)
    assert metrics.tokens_per_second == pytest.approx(
        sum(sum(b.lengths) for own in batches.values() for b in own) / run.makespan
    )
    first = [span for span in run.spans if (span.replica, span.stage) == (0, 0)]
    assert max(most_held(first, [1] * len(pipelines[0].works)).values()) == 3
    slower = plan_pipelines(plan, TIME, replace(options, bandwidths={0: 1e6}))
    assert measure(slower)[0].makespan > metrics.makespan
