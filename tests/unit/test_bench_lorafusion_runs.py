"""Idle shares and tokens a second as LoRAFusion's artifact measures them: by runs of 100 microbatches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.cost.time import StageTime
from plait.simulate.events import OneFOneB, Pipeline, Work
from plait.simulate.orders import BackwardFirst
from plait.simulate.report import measure
from plait_bench.lorafusion_runs import idle_in_runs, rate_in_runs, runs_of


def equal(count: int, stages: int = 4) -> Pipeline:
    """Microbatches of 5 tokens, each a forward of 1 and a backward of 2 seconds on every stage."""
    works = [Work(((f"job{place}", 0),), tokens=5) for place in range(count)]
    return Pipeline(works, [[StageTime(1.0, 2.0)] * count] * stages, OneFOneB([count]))


def test_a_schedule_is_cut_into_runs_of_100_microbatches() -> None:
    pipeline = equal(250)
    runs = runs_of(pipeline)
    assert [len(each.works) for each in runs] == [100, 100]
    assert runs[1].works[0] == pipeline.works[100]
    assert all(len(own) == 100 for own in runs[1].seconds)


def test_a_run_fills_and_drains_but_its_tokens_are_counted_in_between() -> None:
    pipeline = equal(1000)
    idle = idle_in_runs(pipeline)
    assert idle.total == pytest.approx(3 / 103)
    assert idle.fill_and_drain == pytest.approx(idle.total)
    assert measure({0: pipeline})[0].bubble.total == pytest.approx(3 / 1003)
    assert rate_in_runs(pipeline) == pytest.approx(5 / 3)


def test_only_the_25th_to_the_97th_microbatch_count() -> None:
    pipeline = equal(100, stages=1)
    slow = [
        StageTime(1.0, 20.0) if place in (3, 98) else each for place, each in enumerate(pipeline.seconds[0])
    ]
    assert rate_in_runs(replace(pipeline, seconds=[slow])) == pytest.approx(5 / 3)
    slow = [StageTime(1.0, 74.0) if place == 50 else each for place, each in enumerate(pipeline.seconds[0])]
    assert rate_in_runs(replace(pipeline, seconds=[slow])) == pytest.approx(5 * 72 / (3 * 72 + 72))


def test_what_is_drained_in_between_or_short_is_one_run() -> None:
    works = equal(250)
    for order in (OneFOneB([100, 150]), BackwardFirst()):
        other = replace(works, order=order)
        assert runs_of(other) == [other]
        assert rate_in_runs(other) == measure({0: other})[0].tokens_per_second
    assert runs_of(equal(99)) == [equal(99)]
    assert rate_in_runs(equal(99)) == measure({0: equal(99)})[0].tokens_per_second
