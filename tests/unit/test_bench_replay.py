"""Replays of recorded curves: the real loop, study and rules, with what was recorded in place of training."""

import itertools
import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.errors import ConfigError, DataError
from plait.core.jobs import AdapterSpec, JobSpec, TrainSpec
from plait.core.settings import RunSettings, SearchSettings, StoppingSettings
from plait_bench.curves import Curve, Point, RecordedCurves, read_curves, write_curves
from plait_bench.listed_search import Evaluation, parameters_apart, reached, space_of
from plait_bench.replay import replay, replay_stopping

STEPS = (1, 2, 4, 8)
HALVING = SearchSettings(
    parallel=3, stopping=StoppingSettings(kind="successive_halving", rungs=(2, 4), cohort=8)
)


def make_curves(losses, seconds=1.0, evaluation=0.5):
    """By trial its loss at each of STEPS; every step takes ``seconds``."""
    return tuple(
        Curve(
            {"train.lr": 10.0**-number, "adapter.rank": number},
            tuple(
                Point(step, loss, step * seconds, evaluation, 2 * loss)
                for step, loss in zip(STEPS, row, strict=True)
            ),
        )
        for number, row in enumerate(losses)
    )


FALLING = make_curves([[9, 8, 7, final] for final in (3, 1, 5, 2, 8, 4, 7, 6)])


def test_without_rungs_all_trials_come_to_their_ends():
    found = replay(FALLING, SearchSettings(parallel=3))
    assert found.steps == 8 * 8
    assert found.seconds == pytest.approx(8 * (8 * 1.0 + 0.5))
    assert (found.best, found.finished) == (1, 8)
    assert [each.step for each in found.evaluations] == [8] * 8
    assert found.seconds == pytest.approx(RecordedCurves(FALLING).seconds)


def test_halving_takes_the_steps_and_evaluations_of_its_rungs_and_no_others():
    curves = make_curves([[9, rank, rank, rank] for rank in (3, 1, 5, 2, 8, 4, 7, 6)])
    found = replay(curves, HALVING)
    # 8 trials to step 2, the best 4 on to 4, the best 2 on to the end.
    assert found.steps == 8 * 2 + 4 * 2 + 2 * 4
    assert found.seconds == pytest.approx(found.steps * 1.0 + (8 + 4 + 2) * 0.5)
    assert (found.best, found.finished) == (1, 2)
    assert sorted(each.step for each in found.evaluations) == [2] * 8 + [4] * 4 + [8] * 2


def test_a_good_trial_that_starts_badly_is_lost():
    curves = make_curves([[9, 5, 5, 5]] * 4 + [[9, 6, 6, 1]] + [[9, 7, 7, 7]] * 3)
    assert replay(curves, SearchSettings()).best == 1
    assert replay(curves, HALVING).best == 5


@settings(max_examples=40)
@given(
    losses=st.lists(st.lists(st.floats(0.1, 9), min_size=4, max_size=4), min_size=2, max_size=10),
    seed=st.integers(0, 5),
    parallel=st.integers(1, 4),
)
def test_one_cohort_decides_the_same_in_any_order_and_with_any_number_of_slots(losses, seed, parallel):
    values = itertools.count()
    distinct = [[value + 1e-6 * next(values) for value in row] for row in losses]  # ties go by number
    curves = list(make_curves(distinct))
    search = replace(HALVING, stopping=replace(HALVING.stopping, cohort=len(curves)))
    expected = replay(curves, search)
    random.Random(seed).shuffle(curves)
    found = replay(curves, replace(search, parallel=parallel))
    assert (found.best, found.steps, found.finished) == (expected.best, expected.steps, expected.finished)
    assert found.seconds == pytest.approx(expected.seconds)


@pytest.mark.parametrize("kind", ["hyperband", "asha", "median", "optuna"])
def test_every_rule_ends_trials_and_brings_one_to_its_end(kind):
    curves = make_curves([[9, rank, rank, rank] for rank in (1, 8, 2, 7, 3, 6, 4, 5)])
    found = replay(curves, replace(HALVING, stopping=StoppingSettings(kind=kind, rungs=(2, 4), cohort=8)))
    assert found.best == 1
    assert 1 <= found.finished < 8
    assert found.steps < 64


def test_evaluations_of_trials_in_sequence_are_at_the_right_time():
    found = replay(FALLING[:2], SearchSettings(parallel=1))
    assert [each.seconds for each in found.evaluations] == pytest.approx([8.5, 17.0])
    assert reached(found.evaluations, 2.5) == pytest.approx(17.0)
    assert reached(found.evaluations, 0.5) is None


def test_seconds_between_two_points_are_in_proportion():
    points = (Point(2, 1.0, 4.0, 0.0, 1.0), Point(6, 1.0, 12.0, 0.0, 1.0))
    curve = Curve({"a": 1}, points)
    assert [curve.training_seconds(step) for step in (1, 2, 3, 6)] == pytest.approx([2, 4, 6, 12])


def test_a_rung_at_which_nothing_was_recorded_is_refused():
    with pytest.raises(ConfigError, match=r"rung after 3 steps"):
        replay(FALLING, replace(HALVING, stopping=replace(HALVING.stopping, rungs=(3,))))


def test_a_record_is_what_was_written(tmp_path):
    recorded = RecordedCurves(FALLING, {"device": "none", "versions": {"torch": "2"}})
    path = tmp_path / "sub" / "curves.json"
    write_curves(recorded, path)
    found = read_curves(path)
    assert found == replace(recorded, curves=found.curves)
    assert [curve.points for curve in found.curves] == [curve.points for curve in FALLING]
    assert [dict(curve.parameters) for curve in found.curves] == [dict(each.parameters) for each in FALLING]
    assert found.best == 1


def test_trials_of_different_budgets_end_at_their_own(tmp_path):
    long, short = FALLING[0], FALLING[1]
    short = replace(short, points=short.points[:3])
    path = tmp_path / "curves.json"
    write_curves(RecordedCurves((short, long)), path)
    curves = read_curves(path).curves
    assert [curve.points for curve in curves] == [short.points, long.points]
    found = replay(curves, SearchSettings(parallel=2))
    assert found.steps == short.last.step + long.last.step
    assert found.seconds == pytest.approx(short.seconds + long.seconds)


def test_at_shares_a_small_batch_is_not_judged_before_its_steps_count():
    """The best trial has four times the steps of the others, and is behind them after equally many."""
    small = tuple(Point(step, 8 / step**0.5, float(step), 0.5, 1.0) for step in (1, 2, 4, 8, 16, 32))
    large = tuple(Point(step, 7.2 / step**0.5, float(step), 0.5, 1.0) for step in (1, 2, 4, 8))
    curves = [Curve({"train.lr": float(at)}, small if at == 3 else large) for at in range(8)]
    by_steps = replay(curves, HALVING)
    assert by_steps.best == large[-1].loss
    by_share = replace(HALVING.stopping, rungs=(0.25, 0.5))
    found = replay(curves, replace(HALVING, stopping=by_share))
    assert found.best == small[-1].loss
    # All to a quarter of their steps, four on to a half, two to their ends: one of them is the long one.
    assert found.steps == (7 * 2 + 8) + (3 * 2 + 8) + (4 + 16)
    with pytest.raises(ConfigError, match=r"rung after 3 steps"):
        replay(curves, replace(HALVING, stopping=replace(by_share, rungs=(0.375,))))


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"trials": []},
        {"steps": [1, 2, 4]},
        {"steps": [1, 2, 8, 4]},
    ],
)
def test_a_file_that_is_not_a_record_is_refused(tmp_path, change):
    path = tmp_path / "curves.json"
    write_curves(RecordedCurves(FALLING), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError):
        read_curves(path)


def test_a_record_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="record_curves"):
        read_curves(tmp_path / "none.json")


def test_the_report_has_the_spread_over_orders_of_every_rule(tmp_path):
    path = tmp_path / "curves.json"
    write_curves(RecordedCurves(make_curves([[9, r, r, r] for r in range(1, 9)])), path)
    rules = {
        "halving": {"kind": "successive_halving", "rungs": [2, 4], "cohort": 8},
        "asha": {"kind": "asha", "rungs": [2]},
    }
    report = replay_stopping(
        RunSettings(), [], {"curves": str(path), "rules": rules, "orders": 5, "share": 52.0}
    )
    figures = {figure.name: figure for figure in report.figures}
    share = 100 * (32 + 14 * 0.5) / (8 * 8.5)
    assert figures["halving: device time"].ours == pytest.approx(share)
    assert figures["halving: found above the best"].ours == pytest.approx(0)
    assert figures["halving: within 1 % at 52 % or less"].ours == (100 if share <= 52 else 0)
    assert figures["asha: device time"].how == "simulated"
    assert figures["full grid: best loss"].how == "measured"
    with pytest.raises(ConfigError, match="rules"):
        replay_stopping(RunSettings(), [], {"curves": str(path)})


# ---- listed trials --------------------------------------------------------------------------------------


def test_distinguishing_parameters_are_those_that_differ():
    jobs = [
        JobSpec(f"j{rank}{lr}", AdapterSpec(rank=rank), TrainSpec(lr=lr))
        for rank in (2, 4)
        for lr in (1e-3, 1e-4)
    ]
    points = parameters_apart(jobs)
    assert points[1] == {"adapter.rank": 2, "train.lr": 1e-4}
    assert {name: domain.values for name, domain in _domains(space_of(points))} == {
        "adapter.rank": (2, 4),
        "train.lr": (1e-3, 1e-4),
    }
    with pytest.raises(ConfigError, match="same parameters"):
        parameters_apart([jobs[0], replace(jobs[0], name="again"), jobs[1]])


def _domains(space):
    return [(dimension.name, dimension.domain) for dimension in space.dimensions]


def test_reached_is_the_first_evaluation_at_the_loss_or_below():
    evaluations = [Evaluation(1.0, "a", 2, 3.0), Evaluation(2.0, "b", 2, 2.0), Evaluation(3.0, "a", 4, 1.0)]
    assert [reached(evaluations, loss) for loss in (3.0, 2.5, 1.0, 0.5)] == [1.0, 2.0, 3.0, None]
