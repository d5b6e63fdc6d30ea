"""What follows from one seed's measurements: who reaches which loss when, and whether the sides agree."""

import itertools
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.errors import PlaitError
from plait.core.jobs import AdapterSpec, JobSpec
from plait.core.settings import SearchSettings, StoppingSettings
from plait_bench.curves import Curve, Point
from plait_bench.listed_search import Evaluation, JointSearch
from plait_bench.search_vs_sequential import (
    SeedResult,
    any_order,
    check_agreement,
    compare,
    largest_difference,
    seeded,
)

SEARCH = SearchSettings(
    parallel=4, stopping=StoppingSettings(kind="successive_halving", rungs=(1, 2), cohort=4)
)
JOBS = [JobSpec(f"trial-{number:04d}", AdapterSpec(rank=number + 1)) for number in range(4)]


def curve(number, *losses):
    """Losses after 1, 2 and 4 steps of a second each; an evaluation takes a quarter of one."""
    points = (
        Point(step, loss, float(step), 0.25, loss) for step, loss in zip((1, 2, 4), losses, strict=True)
    )
    return Curve({"adapter.rank": number + 1}, tuple(points))


CURVES = (curve(0, 4, 4, 4.0), curve(1, 3, 3, 3.0), curve(2, 2, 2, 1.0), curve(3, 1, 1, 2.0))


def joint(*evaluations, finished, seconds=5.0):
    names = tuple(job.name for job in JOBS)
    return JointSearch(tuple(evaluations), seconds, finished, names)


RESULT = SeedResult(
    0,
    joint(
        Evaluation(1.0, "trial-0003", 1, 1.01),
        Evaluation(3.0, "trial-0003", 4, 2.02),
        finished={"trial-0003": 2.02},
    ),
    CURVES,
)


def test_each_side_is_timed_to_the_loss_that_all_of_them_reach():
    found = compare(RESULT, SEARCH)
    assert found.target == 2.02  # the worst of the sides' best: here Plait's own
    # 1.01 at its first rung is below the target already.
    assert (found.joint.best, found.joint.seconds, found.joint.reached) == (2.02, 5.0, 1.0)
    assert found.full.best == 1.0
    assert found.full.seconds == pytest.approx(4 * 4.25)
    assert found.full.reached == pytest.approx(3 * 4.25)  # trial 2 is the first at 2.02 or below, at its end
    # All four to step 1, two of them on to step 2, the best of these on to its end.
    assert found.rungs.best == 2.0
    assert found.rungs.seconds == pytest.approx(4 * 1.25 + 2 * 1.25 + 1 * 2.25)
    assert found.rungs.reached == pytest.approx(3 * 1.25)
    assert found.pruner.seconds <= found.full.seconds + 8 * 0.25
    # Two of four reach it: one of them comes first, and each of the others before both in a third of orders.
    assert found.any_order == pytest.approx(4.25 * (1 + 2 / 3))


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=6))
def test_the_mean_over_all_orders_is_that_of_all_orders(trials):
    if not any(good for _, good in trials):
        return
    curves = [
        Curve({"adapter.rank": number}, (Point(1, 1.0 if good else 3.0, float(seconds), 0.0, 1.0),))
        for number, (seconds, good) in enumerate(trials)
    ]

    def until_good(order):
        total = 0.0
        for each in order:
            total += each.seconds
            if each.last.loss <= 2.0:
                return total
        raise AssertionError

    assert any_order(curves, 2.0) == pytest.approx(fmean(map(until_good, itertools.permutations(curves))))


def test_sides_that_disagree_are_refused():
    assert largest_difference(RESULT) == (pytest.approx(0.01), "trial-0003, step 1")
    assert check_agreement(RESULT, 0.0101) == pytest.approx(0.01)
    with pytest.raises(PlaitError, match=r"trial-0003, step 1: the validation losses .* differ by 1 %"):
        check_agreement(RESULT, 0.009)
    with pytest.raises(PlaitError, match="nowhere"):
        check_agreement(replace(RESULT, joint=joint(finished={})), 1.0)
    nan = Evaluation(1.0, "trial-0000", 1, float("nan"))
    with pytest.raises(PlaitError, match="trial-0000"):
        check_agreement(replace(RESULT, joint=joint(nan, finished={})), 1.0)


def test_a_side_without_a_finished_trial_is_refused():
    with pytest.raises(PlaitError, match="to its end"):
        compare(replace(RESULT, joint=joint(finished={})), SEARCH)


def test_seeds_have_the_same_jobs_in_other_orders():
    first, again, second = seeded(JOBS * 4, 0), seeded(JOBS * 4, 0), seeded(JOBS * 4, 1)
    assert first == again
    assert {job.train.seed for job in second} == {1}
    assert [job.name for job in first] != [job.name for job in second]
    assert sorted(job.name for job in first) == sorted(job.name for job in second)
