"""What the figures show, from records: pure functions, without any store."""

import json
import math

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.lifecycle import JobState
from plait.core.messages import GroupStep
from plait.core.objectives import Objective
from plait.tracking.leaderboard import JobRecord, Leaderboard
from plait.tracking.tables import group_step
from plait_dashboards import curves, packing, parameters, table
from plait_dashboards.costs import device_seconds, pareto, pareto_axes, seconds_by_outcome
from plait_dashboards.figures import all_figures
from plait_dashboards.importance import Importance
from plait_dashboards.page import facts, figure_json, plotly_packed, report
from plait_dashboards.sweep import Curve, Sweep, SweepObjective, outcome, short_names

STATES = ("finished", "finished", "pruned", "failed", "running")


def record(trial: int, state: str = "finished", objective: float | None = None, **more: object) -> JobRecord:
    values = {"adapter.rank": 4 * 2 ** (trial % 4), "train.lr": 10 ** (-5 + trial % 50 / 20), "train.seed": 0}
    made = JobRecord(f"trial-{trial:04d}", trial, values, JobState(state), objective=objective)
    made.device_seconds, made.tokens, made.step = 1.0 + trial % 7, 100 * trial, 10
    for key, value in more.items():
        setattr(made, key, value)
    return made


def curve(*values: float, first: int = 1) -> Curve:
    return Curve(np.arange(first, first + len(values)), np.array(values, dtype=float))


def row(iteration: int, tokens: dict[str, int], seconds: float = 1.0, **more: float) -> GroupStep:
    cells = {"group": "g0", "jobs": list(tokens), "job_tokens": list(tokens.values()), "capacity": 1000}
    known = {"iteration": iteration, "microbatches": 2, "seconds": seconds, "peak_bytes": None}
    return group_step(cells | known | more)


def sweep_of(count: int, length: int = 20) -> Sweep:
    """A search with jobs in every state."""
    records = [
        record(
            trial,
            state := STATES[trial % len(STATES)],
            1.0 + trial / 100 if state in ("finished", "pruned") else None,
        )
        for trial in range(count)
    ]
    records.sort(key=lambda item: (item.state != "finished", item.objective is None, item.objective or 0.0))
    losses = {
        item.trial: curve(*(2.0 / step + item.trial / 1000 for step in range(1, length + 1)))
        for item in records
    }
    steps = [
        row(at, {item.name: 100 + item.trial for item in records[at : at + 16]}, predicted_seconds=1.1)
        for at in range(1, max(count, 2))
        if records[at : at + 16]
    ]
    found = Importance({"train.lr": 0.7, "adapter.rank": 0.3}, count, "")
    return Sweep(
        "s",
        "finished",
        "minimize",
        "eval/loss",
        tuple(records),
        {"train/loss": losses, "eval/loss": losses},
        tuple(steps),
        found,
    )


def drawn(figure: go.Figure) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(figure_json(figure))["data"]
    return found


# ---- curves ------------------------------------------------------------------------------------------


@given(length=st.integers(1, 400), most=st.integers(2, 50))
def test_a_thinned_curve_keeps_its_ends_and_only_points_of_its_own(length: int, most: int) -> None:
    whole = curve(*(step**0.5 for step in range(length)))
    kept = curves.thin(whole, most)
    assert len(kept.steps) <= max(most, 1)
    assert kept.steps[0] == whole.steps[0]
    assert kept.steps[-1] == whole.steps[-1]
    assert set(zip(kept.steps, kept.values, strict=True)) <= set(zip(whole.steps, whole.values, strict=True))


def test_the_band_is_of_the_curves_that_reach_a_step() -> None:
    found = curves.band([curve(1.0, 1.0), curve(3.0, 3.0, 3.0, 3.0), curve(2.0, 2.0)])
    assert list(found.steps) == [1, 2, 3, 4]
    assert list(found.middle) == [2.0, 2.0, 3.0, 3.0]
    assert found.low[0] == pytest.approx(1.2)
    assert found.high[0] == pytest.approx(2.8)


def test_joined_curves_have_gaps_between_them() -> None:
    steps, values, trials = curves.joined([(7, curve(1.0, 2.0)), (9, curve(3.0))])
    assert list(steps) == [1, 2, 2, 1, 1]
    assert [None if math.isnan(value) else value for value in values] == [1.0, 2.0, None, 3.0, None]
    assert list(trials) == [7, 7, 7, 9, 9]


def test_few_adapters_all_have_a_name_and_pruned_ones_are_faded() -> None:
    lines = [
        trace
        for trace in curves.learning_curves(sweep_of(10), "train/loss", "nats").data
        if trace.mode == "lines"
    ]
    assert len(lines) == 10
    assert len({(line.line.color, line.line.dash) for line in lines}) == 10
    faded = {line.name for line in lines if line.opacity < 1}
    assert faded == {
        f"trial {trial} ({how})"
        for trial, how in ((2, "pruned"), (3, "failed"), (7, "pruned"), (8, "failed"))
    }


def test_many_adapters_are_all_drawn_and_only_the_best_named() -> None:
    sweep = sweep_of(500, 100)
    figure = curves.learning_curves(sweep, "train/loss", "nats")
    named = [trace.name for trace in figure.data if trace.name.startswith("trial")]
    assert named == [f"trial {item.trial}: {item.objective:.4g}" for item in sweep.records[: curves.TOP]]
    shown = {
        int(trial)
        for trace in figure.data
        if trace.customdata is not None and "others" in trace.name
        for trial in np.unique(trace.customdata)
    }
    assert shown | {item.trial for item in sweep.records[: curves.TOP]} == set(range(500))
    thin = [trace for trace in figure.data if "others" in trace.name and trace.customdata is not None]
    assert {trace.type for trace in thin} == {"scattergl"}
    legend = [trace.name for trace in figure.data if "others" in trace.name and trace.showlegend is not False]
    assert sorted(legend) == sorted(trace.name for trace in thin)
    assert any("median" in trace.name for trace in figure.data)
    assert len(figure.data) < 20


def test_one_diverging_curve_does_not_flatten_the_others() -> None:
    sweep = sweep_of(20)
    losses = dict(sweep.curves["train/loss"])
    losses[3] = curve(1.0, 1e9)
    figure = curves.learning_curves(
        Sweep("s", "finished", "minimize", "eval/loss", sweep.records, {"train/loss": losses}),
        "train/loss",
        "nats",
    )
    assert figure.layout.yaxis.range[1] < 10


# ---- parallel coordinates and importance -------------------------------------------------------------


def test_numbers_with_a_large_range_are_shown_by_logarithm() -> None:
    axis = parameters.axis_of("lr", [1e-5, 1e-3, 1e-4])
    assert axis.places == pytest.approx((-5.0, -3.0, -4.0))
    assert axis.tick_texts == ("1e-05", "0.0001", "0.001")


def test_words_and_none_are_shown_by_name() -> None:
    axis = parameters.axis_of("alpha", [None, 16, "auto", True, 16])
    assert axis.tick_texts == ("16", "None", "True", "auto")
    assert axis.places == (1.0, 0.0, 3.0, 2.0, 0.0)


def test_few_numbers_are_marks_and_many_are_left_to_plotly() -> None:
    assert parameters.axis_of("rank", [4, 16, 8]).tick_places == (4.0, 8.0, 16.0)
    assert parameters.axis_of("p", [at / 100 for at in range(10, 40)]).tick_places == ()


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=40))
def test_every_adapter_has_a_place_within_the_marks(values: list[float]) -> None:
    axis = parameters.axis_of("x", values)
    assert len(axis.places) == len(values)
    assert len(axis.tick_places) == len(axis.tick_texts)
    if axis.tick_places:
        assert min(axis.tick_places) <= min(axis.places)
        assert max(axis.places) <= max(axis.tick_places)


def test_parallel_coordinates_leave_out_who_has_no_objective() -> None:
    trace = parameters.parallel_coordinates(sweep_of(10)).data[0]
    assert [item.label for item in trace.dimensions] == ["rank", "lr", "outcome", "eval/loss"]
    assert {len(item["values"]) for item in trace.dimensions} == {6}


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_the_best_is_drawn_on_top_and_one_bad_adapter_does_not_take_all_colours(direction: str) -> None:
    values = [1.0 + trial / 10 for trial in range(20)]
    values[7] = 1000.0 if direction == "minimize" else -1000.0
    records = tuple(record(trial, "finished", value) for trial, value in enumerate(values))
    line = parameters.parallel_coordinates(Sweep("s", "finished", direction, "m", records)).data[0].line
    best = (min if direction == "minimize" else max)(values)
    assert values[int(np.argmax(line.color))] == best
    assert line.cmax - line.cmin < 3
    shown = [float(text) for text in line.colorbar.ticktext]
    assert shown[-1] == pytest.approx(best, rel=0.01)
    assert sorted(shown, reverse=direction == "minimize") == shown


def test_few_trials_are_called_a_hint() -> None:
    few, many = sweep_of(8), sweep_of(100)
    assert "8 finished trials. With so few trials this is only a hint" in parameters.importance_note(few)
    assert "hint" not in parameters.importance_note(many)
    assert parameters.importance(few).data[0].marker.color != parameters.importance(many).data[0].marker.color


def test_words_are_short_where_that_is_clear() -> None:
    assert short_names(["adapter.rank", "train.lr"]) == {"adapter.rank": "rank", "train.lr": "lr"}
    assert short_names(["adapter.seed", "train.seed"]) == {
        "adapter.seed": "adapter.seed",
        "train.seed": "train.seed",
    }


# ---- costs -------------------------------------------------------------------------------------------


def several(count: int, trials: int = 12) -> Sweep:
    """A search with so many objectives, made up of the trial's number; one of its trials was pruned."""
    ways = ["maximize" if at % 3 == 2 else "minimize" for at in range(count)]
    values = {
        trial: tuple(float((trial * (3 + at)) % (7 + at)) for at in range(count)) for trial in range(trials)
    }
    objectives = tuple(
        SweepObjective(f"m{at}", way, {trial: each[at] for trial, each in values.items()})
        for at, way in enumerate(ways)
    )
    board = Leaderboard(
        ways[0], trials, others=tuple(Objective(f"m{at}", ways[at]) for at in range(1, count))
    )
    for trial, (first, *others) in values.items():
        board.add(record(trial, "finished", first, others=tuple(others)))
    board.add(record(trials, "pruned", 0.0))
    return Sweep("s", "finished", ways[0], "m0", tuple(board.ordered()), objectives=objectives)


@pytest.mark.parametrize(("count", "panels"), [(3, 3), (4, 6)])
def test_more_than_two_objectives_are_shown_in_pairs_with_one_front(count: int, panels: int) -> None:
    sweep = several(count)
    front = {item.trial for item in sweep.records if item.on_front}
    assert 0 < len(front) < 12
    fronts = [trace for trace in pareto(sweep).data if trace.legendgroup == "Pareto front"]
    assert len(fronts) == panels
    assert all(set(trace.customdata) == front for trace in fronts)  # of all objectives, in every pair
    assert len({(trace.xaxis, trace.yaxis) for trace in fronts}) == panels
    shown = [trace.name for trace in pareto(sweep).data if trace.showlegend is not False]
    assert len(shown) == len(set(shown)) == 2
    found = {
        (made.xaxis.title.text, made.yaxis.title.text)
        for made in [pareto(sweep).get_subplot(at // 3 + 1, at % 3 + 1) for at in range(panels)]
    }
    assert len(found) == panels
    assert ("m0, lower is better", "m2, higher is better") in found


def test_five_objectives_are_parallel_coordinates() -> None:
    sweep = several(5)
    (lines,) = pareto(sweep).data
    assert [each.label for each in lines.dimensions] == ["m0", "m1", "m2", "m3", "m4", "Pareto front"]
    front = sum(item.on_front for item in sweep.records)
    assert sum(lines.dimensions[-1]["values"]) == front


def test_several_objectives_are_in_table_lines_and_facts() -> None:
    sweep = several(3)
    shown = dict(table.columns(sweep))
    assert shown["objective: m1"][0] == table.number(sweep.records[0].others[0])
    assert [cell == "yes" for cell in shown["Pareto front"]] == [item.on_front for item in sweep.records]
    (lines,) = parameters.parallel_coordinates(sweep).data
    assert [each.label for each in lines.dimensions][-3:] == ["m1", "m2", "m0"]
    front = [item.trial for item in sweep.records if item.on_front]
    assert facts(sweep)["Pareto front (measured)"].startswith(f"trials {front[0]}, ")
    assert "best m0 (measured)" not in facts(sweep)
    assert len(all_figures(sweep)) == 7


def test_only_finished_adapters_are_on_the_front() -> None:
    records = (record(0, "finished", 2.0, device_seconds=5.0), record(1, "pruned", 1.0, device_seconds=1.0))
    front = pareto(Sweep("s", "finished", "minimize", "eval/loss", records)).data[-1]
    assert list(front.customdata) == [0]


def test_an_adapter_that_breaks_a_constraint_is_not_on_the_front() -> None:
    cheap = record(0, "finished", 1.0, device_seconds=1.0)
    cheap.feasible = False
    records = (cheap, record(1, "finished", 2.0, device_seconds=5.0))
    front = pareto(Sweep("s", "finished", "minimize", "eval/loss", records)).data[-1]
    assert list(front.customdata) == [1]


def test_two_objectives_are_plotted_against_each_other() -> None:
    loss, rank = (
        SweepObjective("eval/loss", "minimize", {0: 1.0}),
        SweepObjective("adapter.rank", "minimize", {0: 8.0}),
    )
    sweep = Sweep(
        "s", "finished", "minimize", "eval/loss", (record(0, "finished", 1.0),), objectives=(loss, rank)
    )
    assert pareto_axes(sweep) == (rank, loss)


def test_seconds_of_all_outcomes_add_up() -> None:
    sweep = sweep_of(50)
    totals = seconds_by_outcome(sweep.records)
    assert sum(totals.values()) == pytest.approx(sum(item.device_seconds for item in sweep.records))
    bars = [trace for trace in device_seconds(sweep).data if trace.customdata is not None]
    assert sum(len(trace.x) for trace in bars) == 50
    assert {trace.name.split(" (")[0] for trace in bars} == {outcome(item) for item in sweep.records}


# ---- packing -----------------------------------------------------------------------------------------


@given(
    steps=st.lists(
        st.dictionaries(st.sampled_from(["a", "b", "c", "stranger"]), st.integers(1, 900), min_size=1),
        min_size=1,
        max_size=40,
    ),
    bins=st.integers(1, 12),
)
def test_shares_of_a_column_add_up(steps: list[dict[str, int]], bins: int) -> None:
    rows = [row(at, tokens) for at, tokens in enumerate(steps, 1)]
    found = packing.timeline(rows, {"a": 0, "b": 1, "c": 2}, bins)
    assert len(found.first) == min(bins, len(steps))
    assert found.first[0] == 1
    assert found.last[-1] == len(steps)
    for column, (first, last) in enumerate(zip(found.first, found.last, strict=True)):
        inside = steps[first - 1 : last]
        whole = sum(sum(tokens.values()) for tokens in inside)
        for trial, job in zip((0, 1, 2), "abc", strict=True):
            own = sum(tokens.get(job, 0) for tokens in inside)
            if trial in found.trials:
                share = found.share[found.trials.index(trial), column]
                assert math.isnan(share) if own == 0 else share == pytest.approx(100 * own / whole)
        assert found.fill[column] == pytest.approx(100 * whole / (2000 * len(inside)))


def test_errors_are_of_steps_that_have_both() -> None:
    rows = [
        row(1, {"a": 10}, 2.0, predicted_seconds=1.0),
        row(2, {"a": 10}, 1.0),
        row(3, {"a": 10}, 4.0, predicted_seconds=5.0, peak_bytes=2**30, predicted_bytes=2**31),
    ]
    assert list(packing.seconds_pairs(rows).errors) == [-0.5, 0.25]
    assert list(packing.bytes_pairs(rows).measured) == [1.0]
    assert list(packing.bytes_pairs(rows).predicted) == [2.0]
    said = packing.predictions_note(Sweep("s", "finished", "minimize", "eval/loss", (), steps=tuple(rows)))
    assert "seconds: off by 37.5% in the median step" in said
    assert "memory: off by 100.0%" in said


@pytest.mark.parametrize("known", [{"predicted_seconds": 1.0}, {"peak_bytes": 5, "predicted_bytes": 6}])
def test_missing_predictions_are_reported_in_their_panel(known: dict[str, float]) -> None:
    sweep = Sweep("s", "finished", "minimize", "eval/loss", (), steps=(row(1, {"a": 10}, **known),))
    (said,) = packing.predictions(sweep).layout.annotations
    no_bytes = "predicted_seconds" in known
    text = said.text.replace("<br>", " ")
    assert text == "Not measured." if no_bytes else text.startswith("Not predicted. Run `plait profile`")
    assert said.xref == ("x2 domain" if "predicted_seconds" in known else "x domain")


# ---- all together ------------------------------------------------------------------------------------


def test_the_table_leaves_out_empty_columns() -> None:
    names = [name for name, _ in table.columns(sweep_of(3))]
    assert names[:4] == ["place", "trial", "outcome", "objective: eval/loss"]
    assert "reason" not in names
    assert "rank" in names
    assert "seed" not in names


@pytest.mark.parametrize("count", [0, 1, 2, 10, 500])
def test_every_figure_can_be_drawn_and_says_where_it_comes_from(count: int) -> None:
    shown = all_figures(sweep_of(count))
    assert len({item.key for item in shown}) == len(shown) >= 7
    for item in shown:
        assert item.origin in ("Measured", "Estimated", "Predicted and measured")
        assert drawn(item.figure) or item.figure.layout.annotations
        for axis in (*item.figure.select_xaxes(), *item.figure.select_yaxes()):
            unlabelled = axis.title.text is None and axis.visible is not False
            assert (
                not unlabelled
                or axis.matches is not None
                or item.key in ("leaderboard", "parallel-coordinates")
            )


def test_a_search_of_500_makes_a_page_of_a_few_megabytes() -> None:
    sweep = sweep_of(500, 1000)
    page = report(sweep, all_figures(sweep))
    assert len(page) - len(plotly_packed()) < 4_000_000


def test_no_text_of_a_search_can_end_an_element() -> None:
    evil = "</script><script>alert(1)</script>"
    records = (record(0, "failed", None, reason=evil), record(1, "finished", 1.0))
    sweep = Sweep(evil, "finished", "minimize", evil, records)
    page = report(sweep, all_figures(sweep))
    assert evil not in page
    assert page.count("</script>") == page.count("<script")
