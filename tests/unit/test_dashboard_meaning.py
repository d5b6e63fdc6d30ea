"""That a figure shows what it says: places, orders and ends of what is drawn, read off its traces."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plait.core.lifecycle import JobState
from plait.core.messages import GroupStep
from plait.core.objectives import Objective
from plait.tracking.leaderboard import JobRecord
from plait.tracking.location import Location
from plait.tracking.results import SearchResult
from plait.tracking.tables import group_step
from plait_dashboards import curves, packing, parameters, table
from plait_dashboards.costs import device_seconds, pareto
from plait_dashboards.figures import all_figures
from plait_dashboards.importance import Importance
from plait_dashboards.page import facts, report
from plait_dashboards.reading import objectives_of
from plait_dashboards.style import COLOURS, DASHES, faded, line_style
from plait_dashboards.sweep import Curve, Sweep, SweepObjective, outcome


def record(
    trial: int, state: str = "finished", objective: float | None = None, seconds: float = 1.0
) -> JobRecord:
    made = JobRecord(
        f"trial-{trial:04d}", trial, {"adapter.rank": 4 * (trial + 1)}, JobState(state), objective=objective
    )
    made.device_seconds, made.step = seconds, 10
    return made


def sweep(*records: JobRecord, direction: str = "minimize", **more: object) -> Sweep:
    return replace(Sweep("s", "finished", direction, "eval/loss", records), **more)  # type: ignore[arg-type]


def curve(*values: float, first: int = 1) -> Curve:
    return Curve(np.arange(first, first + len(values)), np.array(values, dtype=float))


# ---- outcomes and costs --------------------------------------------------------------------------------


def test_every_state_has_an_outcome() -> None:
    expected = {
        "finished": "useful",
        "pruned": "pruned",
        "stopped": "stopped",
        "failed": "failed",
        "running": "not ended",
        "paused": "not ended",
    }
    assert {state: outcome(record(0, state)) for state in expected} == expected


def test_adapters_are_sorted_by_cost_and_coloured_by_outcome() -> None:
    figure = device_seconds(
        sweep(record(0, "finished", 1.0, 3.0), record(1, "pruned", 2.0, 9.0), record(2, "finished", 3.0, 5.0))
    )
    bars = [trace for trace in figure.data if trace.customdata is not None]
    found = {
        trace.name: {x: (y, at[0]) for x, y, at in zip(trace.x, trace.y, trace.customdata, strict=True)}
        for trace in bars
    }
    assert found == {"useful (2)": {2: (5.0, 2), 3: (3.0, 0)}, "pruned (1)": {1: (9.0, 1)}}
    totals = {trace.x[0]: trace.y[0] for trace in figure.data if trace.customdata is None}
    assert totals == {"useful": 8.0, "pruned": 9.0}


@pytest.mark.parametrize(("across", "up"), list(itertools.product(("minimize", "maximize"), repeat=2)))
def test_the_line_of_a_front_shows_no_value_that_no_adapter_reached(across: str, up: str) -> None:
    ways = {"x": 1.0 if across == "minimize" else -1.0, "y": 1.0 if up == "minimize" else -1.0}
    bad = [(1.0, 9.0), (3.0, 5.0), (7.0, 2.0), (8.0, 8.0)]  # less is better; the last is on no front
    points = [(ways["x"] * x, ways["y"] * y) for x, y in bad]
    found = sweep(
        *(record(trial, "finished", y) for trial, (_, y) in enumerate(points)),
        direction=up,
        objectives=(
            SweepObjective("y", up, {trial: y for trial, (_, y) in enumerate(points)}),
            SweepObjective("x", across, {trial: x for trial, (x, _) in enumerate(points)}),
        ),
    )
    (front,) = [trace for trace in pareto(found).data if trace.legendgroup == "Pareto front"]
    assert list(front.customdata) == [0, 1, 2]
    assert front.line.shape == "hv"  # from one point first across, then up or down to the next
    for (_, y), (x, _) in itertools.pairwise(zip(front.x, front.y, strict=True)):
        corner = ways["x"] * x, ways["y"] * y
        assert any(mine[0] <= corner[0] and mine[1] <= corner[1] for mine in bad)


# ---- curves --------------------------------------------------------------------------------------------


def test_pruned_and_failed_curves_end_in_their_mark_and_say_why() -> None:
    pruned, failed = record(1, "pruned"), record(2, "failed")
    pruned.reason, failed.reason = "place 4 of 8", "diverged"
    losses = {0: curve(3.0, 2.0, 1.0), 1: curve(5.0, 4.0), 2: curve(6.0, 8.0, 9.0, first=4)}
    figure = curves.learning_curves(
        sweep(record(0, "finished", 1.0), pruned, failed, curves={"train/loss": losses}), "train/loss", "nats"
    )
    ends = {trace.name: trace for trace in figure.data if trace.mode == "markers"}
    assert {
        name: (list(end.x), list(end.y), [list(each) for each in end.customdata])
        for name, end in ends.items()
    } == {
        "pruned (1)": ([2], [4.0], [[1, "place 4 of 8"]]),
        "failed (1)": ([6], [9.0], [[2, "diverged"]]),
    }
    assert len({end.marker.symbol for end in ends.values()}) == 2


def test_lines_differ_by_colour_then_by_dash_and_many_are_faint() -> None:
    styles = [line_style(at) for at in range(len(COLOURS) * len(DASHES))]
    assert len({(style["color"], style["dash"]) for style in styles}) == len(styles)
    assert {style["dash"] for style in styles[: len(COLOURS)]} == {"solid"}
    opacities = [float(faded("#0072B2", count).split(", ")[-1][:-1]) for count in (1, 40, 100, 200, 500)]
    assert opacities == [0.3, 0.3, 0.12, 0.06, 0.06]


# ---- packing and predictions -----------------------------------------------------------------------------


def row(iteration: int, **known: float | None) -> GroupStep:
    cells = {"group": "g0", "jobs": ["trial-0000"], "job_tokens": [10], "capacity": 1000, "microbatches": 2}
    return group_step(cells | {"iteration": iteration, "seconds": 1.0, "peak_bytes": None} | known)


def test_a_step_counts_where_it_was_both_predicted_and_measured() -> None:
    rows = [
        row(1, predicted_bytes=2.0**30),
        row(2, peak_bytes=2**30),
        row(3, predicted_bytes=2.0**30, peak_bytes=2**29),
    ]
    assert packing.bytes_pairs(rows).iterations == (3,)
    assert packing.seconds_pairs(rows).iterations == ()


def test_predicted_values_are_horizontal_and_measured_ones_vertical() -> None:
    rows = [row(at, seconds=float(at), predicted_seconds=at + 0.5) for at in range(1, 4)]
    same, dots = packing.predictions(sweep(steps=tuple(rows))).data
    assert list(dots.x) == [1.5, 2.5, 3.5]
    assert list(dots.y) == [1.0, 2.0, 3.0]
    assert list(dots.customdata) == [1, 2, 3]
    assert list(same.x) == list(same.y) == [1.0, 3.5]


def test_the_worst_twentieth_is_the_worst() -> None:
    """Errors of 1 % to 100 %."""
    rows = [row(at, predicted_seconds=1.0 + at / 100) for at in range(1, 101)]
    said = packing.predictions_note(sweep(steps=tuple(rows)))
    assert "off by 50.5% in the median step, by 95.0% at the 95th percentile (100 steps)" in said
    assert "memory" not in said


def test_the_memory_rule_is_not_counted_in_the_error_of_the_fit() -> None:
    """The rule predicts double, the fit 1 % too much."""
    fitted = [row(at, predicted_bytes=1.01 * 2**30, peak_bytes=2**30) for at in range(3, 13)]
    ruled = [row(at, predicted_bytes=2**31, peak_bytes=2**30, bytes_by_rule=True) for at in (1, 2)]
    both = sweep(steps=(*ruled, *fitted))
    said = packing.predictions_note(both)
    assert "memory: off by 1.0% in the median step, by 1.0% at the 95th percentile (10 steps)" in said
    assert f"{packing.BY_RULE}, before anything was fitted: 2.0 times the measured value" in said
    made = packing.predictions(both)
    assert {dots.name: list(dots.customdata) for dots in made.data if dots.mode == "markers"} == {
        "memory (model's shape, upper bound)": [1, 2],
        "memory (fitted model)": list(range(3, 13)),
    }
    assert made.layout.showlegend
    assert [dots.visible for dots in made.data if dots.name == packing.BY_RULE] == ["legendonly"]
    alone = packing.predictions(sweep(steps=tuple(ruled)))
    assert [dots.visible for dots in alone.data] == [None, None]
    assert not packing.predictions(sweep(steps=tuple(fitted))).layout.showlegend
    assert "off by" not in packing.predictions_note(sweep(steps=tuple(ruled)))


def test_a_table_that_was_thinned_says_of_how_many() -> None:
    few = tuple(row(at) for at in range(1, 5))
    assert packing.packing_note(sweep(steps=few)).startswith("4 iterations of the group. Each column is one")
    thinned = tuple(row(at) for at in range(1, 2000, 2))
    said = packing.packing_note(sweep(steps=thinned))
    assert said.startswith(
        "1,000 of 1,999 iterations of the group, chosen evenly. Each column is about 4 iter"
    )


# ---- parameters and facts ----------------------------------------------------------------------------


def test_the_most_important_key_is_at_the_top() -> None:
    """Plotly begins at the bottom."""
    shares = {"train.lr": 0.7, "adapter.rank": 0.2, "adapter.dropout": 0.1}
    (bars,) = parameters.importance(sweep(importance=Importance(shares, 50, ""))).data
    assert list(bars.y) == ["adapter.dropout", "adapter.rank", "train.lr"]
    assert list(bars.x) == [0.1, 0.2, 0.7]


def test_each_further_objective_has_its_own_line_and_column() -> None:
    first, second = record(0, "finished", 1.0), record(1, "finished", 2.0)
    first.others, second.others = (10.0, 100.0), (20.0, 200.0)
    found = sweep(
        first,
        second,
        objectives=tuple(SweepObjective(name, "minimize", {}) for name in ("eval/loss", "m1", "m2")),
    )
    (lines,) = parameters.parallel_coordinates(found).data
    assert {each.label: tuple(each["values"]) for each in lines.dimensions if each.label[0] == "m"} == {
        "m1": (10.0, 20.0),
        "m2": (100.0, 200.0),
    }
    shown = dict(table.columns(found))
    assert (shown["objective: m1"], shown["objective: m2"]) == (["10", "20"], ["100", "200"])


def test_accuracies_are_in_the_table_if_answers_were_scored() -> None:
    scored = record(0, "finished", 0.5)
    assert "eval/accuracy" not in dict(table.columns(sweep(scored)))
    scored.accuracy = 0.25
    shown = dict(table.columns(sweep(scored, record(1, "pruned", 1.5))))
    assert shown["eval/accuracy"] == ["0.25", ""]


def test_trials_outside_of_the_space_are_marked_in_the_table() -> None:
    added = record(0, "finished", 0.5)
    added.outside = "train.lr=1.0"
    shown = dict(table.columns(sweep(added, record(1, "finished", 1.5))))
    assert shown["outside the space"] == ["train.lr=1.0", ""]


def test_the_facts_are_of_what_was_useful_and_keeps_every_constraint() -> None:
    broken = record(0, "finished", 0.5, 2.0)
    broken.feasible = False
    found = facts(sweep(broken, record(1, "finished", 1.5, 4.0), record(2, "pruned", 0.1, 2.0)))
    assert found["best eval/loss (measured)"] == "1.5, trial 1"
    assert found["useful"] == "75%"
    assert found["adapters finished"] == "2"
    assert dict(table.columns(sweep(broken, record(1, "finished", 1.5))))["constraints"] == ["broken", ""]


def test_a_long_front_names_the_first_and_counts_the_rest() -> None:
    def front(size: int) -> str:
        records = [record(trial, "finished", 1.0) for trial in range(size)]
        for each in records:
            each.on_front = True
        objectives = tuple(SweepObjective(name, "minimize", {}) for name in ("eval/loss", "m1"))
        return facts(sweep(*records, record(99, "finished", 2.0), objectives=objectives))[
            "Pareto front (measured)"
        ]

    assert front(0) == "empty"
    assert front(1) == "trial 0"
    assert front(8) == "trials 0, 1, 2, 3, 4, 5, 6, 7"
    assert front(10) == "trials 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_no_fact_can_end_an_element() -> None:
    hostile = {"command": "plait sweep x=<script>alert(1)</script>"}
    page = report(replace(sweep(), state="<script>alert(1)</script>", about=hostile), [])
    assert "plait sweep x=&lt;script&gt;" in page
    assert "alert(1)" in page
    assert "<script>alert(1)" not in page


def test_a_narrow_page_cuts_no_number_of_the_leaderboard() -> None:
    """What does not fit is scrolled to: a cell without its last digits shows another number."""
    found = sweep(
        records=(JobRecord("trial-0000", 0, state=JobState.FINISHED, objective=1.25, tokens=47_426),)
    )
    shown = {item.key: item for item in all_figures(found)}
    wants = sum(shown["leaderboard"].figure.data[0].columnwidth)
    assert f'style="min-width: {wants:.0f}px"' in report(found, [shown["leaderboard"]])
    assert 'style="min-width' not in report(found, [shown["pareto"]])


def test_the_objectives_of_a_search_are_those_of_its_finished_jobs(tmp_path: Path) -> None:
    records = (
        JobRecord("trial-0000", 0, state=JobState.FINISHED, objective=0.5, others=(8.0,)),
        JobRecord("trial-0001", 1, state=JobState.FINISHED, objective=0.25, others=(16.0,)),
        JobRecord("trial-0002", 2, state=JobState.PRUNED, objective=0.75),
    )
    found = SearchResult(
        name="s",
        state=JobState.FINISHED,
        objectives=(Objective("eval/loss"), Objective("eval/accuracy", "maximize")),
        run_id="",
        experiment_id="",
        location=Location("sqlite:///x", tmp_path, None),
        records=records,
    )
    assert objectives_of(found) == (
        SweepObjective("eval/loss", "minimize", {0: 0.5, 1: 0.25}),
        SweepObjective("eval/accuracy", "maximize", {0: 8.0, 1: 16.0}),
    )
