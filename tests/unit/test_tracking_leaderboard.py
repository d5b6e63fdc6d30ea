"""Leaderboard, leaderboard and values: what is known of the jobs, in order, in every form."""

import csv
import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_results import ended
from rich.console import Console

from plait.cli.leaderboard import to_table
from plait.core.jobs import AdapterSpec, JobSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import GroupStep, JobAdmitted, JobEvaluated, JobProgress
from plait.core.settings import ModelSettings, RunSettings, SearchSettings
from plait.tracking.facts import run_parameters
from plait.tracking.leaderboard import (
    JobRecord,
    Leaderboard,
    columns,
    to_csv,
    to_json,
    to_split_json,
    varying,
)
from plait.tracking.search_run import search_values
from plait.tracking.values import (
    Curve,
    evaluation_values,
    finite,
    group_values,
    grown_stride,
    is_kept,
    not_finite,
    parameter_text,
    parameter_value,
)

objectives = st.one_of(st.none(), st.floats(-10, 10))
states = st.sampled_from([JobState.FINISHED, JobState.PRUNED, JobState.FAILED, JobState.RUNNING])


def board_of(rows: list[tuple[str, float | None]], direction: str) -> Leaderboard:
    board = Leaderboard(direction, len(rows))
    for trial, (state, objective) in enumerate(rows):
        board.add(JobRecord(f"trial-{trial:04d}", trial, state=state, objective=objective))
    return board


@given(st.lists(st.tuples(states, objectives)), st.sampled_from(["minimize", "maximize"]))
def test_the_best_is_the_first_of_the_order_and_none_is_better(
    rows: list[tuple[str, float | None]], direction: str
) -> None:
    board = board_of(rows, direction)
    done = [
        (value, trial)
        for trial, (state, value) in enumerate(rows)
        if state == "finished" and value is not None
    ]
    best = board.best()
    if not done:
        assert best is None
        return
    pick = min if direction == "minimize" else max
    value = pick(value for value, _ in done)
    assert best is board.ordered()[0]
    assert best is not None
    assert best.trial == min(trial for other, trial in done if other == value)


def test_events_tell_the_board_what_a_job_does() -> None:
    board = Leaderboard("minimize", 2)
    spec = JobSpec("a", AdapterSpec(rank=4))
    board.add(JobRecord("a", 0, spec.parameters()))
    assert board.jobs["a"].state == "queued"
    board.handle(JobAdmitted(spec, 0, 10, "g0"))
    board.handle(JobProgress("a", 3, 1.5, 0.1, 1e-4, 300, 2.0, 150.0))
    board.handle(JobEvaluated("a", 3, 1.4, 50))
    board.handle(GroupStep("g0", 1, ("a",), 1, 100, 0.5, None, 200))
    record = board.jobs["a"]
    board.handle(JobAdmitted(spec, 3, 10, "g0"))
    assert record.loss == 1.5
    assert (record.live, record.step, record.steps, record.loss, record.eval_loss) == (True, 3, 10, 1.5, 1.4)
    assert (board.tokens, board.device_seconds) == (300, 2.0)
    board.handle(JobAdmitted(spec, 2, 10, "g0"))
    assert (record.step, record.loss) == (2, None)  # that of a later step comes again
    board.handle(JobResult("a", JobState.STOPPED, 3, "asked to", None, 320, 2.5, 9.0, None))
    assert (record.ended, record.reason, record.eval_loss, record.tokens) == (True, "asked to", 1.4, 320)
    board.handle(ended("failed", math.inf, "loss is inf", job="a"))
    assert (record.objective, board.best(), board.count(JobState.FAILED)) == (None, None, 1)


def records() -> list[JobRecord]:
    first = JobRecord(
        "a", 0, {"adapter.rank": 4, "train.lr": 1e-4, "adapter.target_modules": ["q", "v"]}, JobState.FINISHED
    )
    second = JobRecord(
        "b", 1, {"adapter.rank": 8, "train.lr": 1e-4, "adapter.target_modules": ["q"]}, JobState.FAILED
    )
    first.objective, first.step, first.tokens, first.run_id = 1.25, 10, 500, "id-a"
    second.loss, second.reason = math.nan, "loss is nan, at once"
    return [first, second]


def test_only_parameters_that_vary_have_a_column() -> None:
    assert varying(records()) == ["adapter.rank", "adapter.target_modules"]
    assert varying(records()[:1]) == []
    names, rows = columns(records())
    assert names[:5] == ["trial", "state", "objective", "adapter.rank", "adapter.target_modules"]
    assert rows[0][:5] == [0, "finished", 1.25, 4, '["q","v"]']


def test_seconds_are_those_of_mlflow() -> None:
    (first, *_) = listed = records()
    first.device_seconds = 16.629384499
    names, rows = columns(listed)
    assert rows[0][names.index("device_seconds")] == 16.629384499


def test_records_read_from_mlflow_equal_the_jobs() -> None:
    """A job that another process trains, or that was added, differs in what differs alone."""
    jobs = [JobSpec(f"trial-{at:04d}", AdapterSpec(rank=4 + at)).parameters() for at in range(3)]
    read = {key: parameter_value(parameter_text(value)) for key, value in jobs[1].items()}
    assert read["adapter.target_modules"] != jobs[1]["adapter.target_modules"]
    given = [JobRecord(str(at), at, each) for at, each in enumerate((jobs[0], read, jobs[2]))]
    assert varying(given) == ["adapter.rank"]


points = st.dictionaries(st.sampled_from("abcd"), st.sampled_from([None, 1, 2, "x", (1, 2), [1, 2]]))


@given(st.lists(st.dictionaries(st.sampled_from(["j0", "j1", "j2", "j3"]), points), max_size=5))
def test_keys_that_vary_are_those_while_jobs_come_change_and_go(
    stages: list[dict[str, dict[str, Any]]],
) -> None:
    board = Leaderboard("minimize", 4)
    for jobs in stages:
        read = [{key: parameter_text(value) for key, value in each.items()} for each in jobs.values()]
        named = {key for each in read for key in each}
        differ = {key for key in named if len({each.get(key, "None") for each in read}) > 1}
        board.jobs.clear()
        for at, (name, parameters) in enumerate(jobs.items()):
            board.add(JobRecord(name, at, parameters))
        assert set(board.varying()) == differ
        assert board.varying() == varying(list(board.jobs.values()))
        for record in board.jobs.values():  # one is changed
            record.parameters = {**record.parameters, "a": "new"}
            assert board.varying() == varying(list(board.jobs.values()))
            break


def test_what_is_told_of_a_job_are_the_searched_keys_and_what_differs() -> None:
    """Another worker's result has the searched keys alone; of the first job, no other is known."""
    searched = ("adapter.rank", "adapter.dropout")
    board = Leaderboard("minimize", 4, searched=searched)
    jobs = [JobSpec(f"trial-{at:04d}", AdapterSpec(rank=4 + at)).parameters() for at in range(3)]
    board.add(JobRecord("trial-0000", 0, jobs[0]))
    assert sorted(board.varying()) == sorted(searched)
    found = ended("finished", 1.5, job="trial-0001", trial=1)
    board.take_result(replace(found, parameters={key: jobs[1][key] for key in searched}))
    assert sorted(board.varying()) == sorted(searched)
    board.add(JobRecord("trial-0002", 2, {**jobs[2], "train.seed": 7}))
    assert sorted(board.varying()) == sorted((*searched, "train.seed"))


def test_csv_and_json_say_the_same_and_need_no_special_reader() -> None:
    table = list(csv.DictReader(io.StringIO(to_csv(records()))))
    listed = json.loads(to_json(records()), parse_constant=pytest.fail)
    assert [row["trial"] for row in table] == ["0", "1"]
    assert table[1]["reason"] == listed[1]["reason"] == "loss is nan, at once"
    assert (table[1]["train_loss"], listed[1]["train_loss"]) == ("", None)
    assert listed[0]["parameters"]["train.lr"] == 1e-4
    split = json.loads(to_split_json(records()), parse_constant=pytest.fail)
    assert len(split["columns"]) == len(split["data"][0])
    assert not any("." in name for name in split["columns"])


def table_text(width: int, listed: list[JobRecord]) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(to_table(listed, "demo", width))
    return file.getvalue()


def test_the_table_leaves_out_what_says_nothing() -> None:
    listed = records()
    listed[0].reason = "budget spent"
    text = table_text(160, listed)
    assert "loss is nan" in text
    for absent in ("eval loss", "id-a", "budget spent"):
        assert absent not in text
    listed[0].eval_loss = listed[0].objective
    assert "eval loss" not in table_text(160, listed)
    listed[0].eval_loss = 3.0
    assert "eval loss" in table_text(160, listed)


def test_accuracies_are_a_column_everywhere_if_answers_were_scored() -> None:
    listed = records()
    assert "accuracy" not in columns(listed)[0]
    listed[0].accuracy, listed[0].eval_loss = 0.75, listed[0].objective
    names, rows = columns(listed)
    assert [row[names.index("accuracy")] for row in rows] == [0.75, None]
    assert [row["accuracy"] for row in csv.DictReader(io.StringIO(to_csv(listed)))] == ["0.75", ""]
    assert [row["accuracy"] for row in json.loads(to_json(listed))] == [0.75, None]
    assert "accuracy" in table_text(160, listed)
    for each in listed:  # as the objective, it is shown once
        each.objective = each.accuracy
    assert "accuracy" not in table_text(160, listed)


def test_a_finished_trial_says_which_constraint_it_breaks() -> None:
    listed = records()
    listed[0].feasible, listed[0].reason = False, "violates eval/accuracy >= 0.5"
    assert "violates eval/accuracy >= 0.5" in table_text(160, listed)


def test_columns_that_do_not_fit_are_hidden_and_named() -> None:
    listed = [
        JobRecord(f"t{at}", at, state=JobState.PRUNED, objective=2.0, reason="place 7 of 8, " * 6)
        for at in (0, 1)
    ]
    narrow = table_text(80, listed).splitlines()
    assert len(narrow) == 5
    assert narrow[-1].strip() == "hidden columns: reason (--format csv)"
    assert all("place" not in line and len(line) <= 80 for line in narrow)
    wide = table_text(120, listed)
    assert "place 7 of 8" in wide
    assert "left out" not in wide


def test_a_narrow_terminal_shows_the_trials_of_three_objectives_uncut() -> None:
    listed = records()
    listed[0].others, listed[0].on_front, listed[0].accuracy = (0.25, 16.0), True, 0.25
    shown = table_text(40, listed)
    assert shown.splitlines()[1].split()[:3] == ["trial", "state", "objective"]
    assert "…" not in shown
    assert "pareto" in shown.partition("hidden columns: ")[2]


def test_settings_of_added_trials_cut_no_column() -> None:
    """Each column that is shown is whole: what is outside goes first, then the widest setting."""
    listed = records()
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    for at, record in enumerate(listed):
        record.parameters = {
            "adapter.rank": 4 << at,
            "train.lr": 1e-4,
            "adapter.target_modules": modules[at:],
        }
        record.outside = " ".join(f"adapter.rank={at}, train.lr=0.00012345" for _ in range(3))
    for width in (60, 80):
        text = table_text(width, listed)
        assert "…" not in text
        assert ("target modules" in text.partition("hidden columns: ")[2]) == (width == 60)
        assert "outside" in text.partition("hidden columns: ")[2]


def test_the_best_evaluation_is_kept_and_shown_where_the_last_one_is_worse() -> None:
    board = Leaderboard("minimize", 2)
    board.add(JobRecord("a", 0, {"train.lr": 1.0}))
    board.add(JobRecord("b", 1, {"train.lr": 2.0}))
    for step, loss in ((10, 1.5), (20, 1.25), (30, math.nan), (40, 1.75)):
        event = JobEvaluated("a", step, loss, 80)
        board.handle(event)
        record = board.jobs["a"]
        values = evaluation_values(event, record.best_eval_loss, record.best_eval_step)
        assert values["eval/best_step"] == (10 if step == 10 else 20)
    assert values == {"eval/loss": 1.75, "eval/tokens": 80, "eval/best_loss": 1.25, "eval/best_step": 20}
    board.handle(JobEvaluated("b", 40, 2.0, 80))
    rows = {row["trial"]: row for row in json.loads(to_json(board.ordered()))}
    assert (rows[0]["eval_loss"], rows[0]["best_eval_loss"], rows[0]["best_eval_step"]) == (1.75, 1.25, 20)
    assert (rows[1]["eval_loss"], rows[1]["best_eval_loss"], rows[1]["best_eval_step"]) == (2.0, 2.0, 40)
    assert "best eval loss" in table_text(120, board.ordered())
    assert "best eval" not in table_text(120, [board.jobs["b"]])
    again = JobRecord("a", 0)
    again.evaluated(30, 1.4)
    again.recall(board.jobs["a"])
    assert (again.best_eval_loss, again.best_eval_step, again.eval_loss) == (1.25, 20, 1.4)


def test_the_table_of_a_usual_search_fits_into_eighty_characters() -> None:
    listed = [
        JobRecord(
            f"trial-{trial:04d}",
            trial,
            {"adapter.rank": 2**trial, "train.lr": 1.23456e-4 * trial},
            JobState.FINISHED,
        )
        for trial in range(8)
    ]
    for record in listed:
        record.objective = record.eval_loss = 4.27761
        record.loss, record.step, record.tokens, record.device_seconds = 4.02151, 1200, 37_380_000, 3894.25
    lines = table_text(80, listed).splitlines()
    assert len(lines) == 2 + len(listed)
    assert "…" not in "".join(lines)
    assert " ".join(lines[1].split()) == "trial state objective rank lr train loss steps tokens device s"


simple = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False))


@given(st.one_of(simple, st.lists(simple)))
def test_parameters_come_back_as_they_went(value: object) -> None:
    assert parameter_value(parameter_text(value)) == value


def test_words_stay_words() -> None:
    assert parameter_value(parameter_text("cosine")) == "cosine"
    assert parameter_value(parameter_text(("q_proj", "v_proj"))) == ["q_proj", "v_proj"]


def test_run_parameters_name_config_keys_and_hide_passwords() -> None:
    settings = RunSettings(
        model=ModelSettings(kind="tiny"), search=SearchSettings(storage="postgresql://me:secret@host/db")
    )
    flat = dict(run_parameters(settings))
    assert flat["model.kind"] == "tiny"
    assert flat["search.storage"] == "postgresql://me:***@host/db"
    assert "model.id" not in flat


@given(st.dictionaries(st.text(), st.floats()))
def test_every_value_is_either_kept_or_reported(values: dict[str, float]) -> None:
    kept = finite(values)
    assert all(math.isfinite(value) for value in kept.values())
    assert (len(kept) == len(values)) == (not_finite(values) == "")


def test_totals_of_group_and_search() -> None:
    event = GroupStep("g0", 1, ("a", "b"), 2, 300, 0.5, 1024, 200)
    assert group_values(event) == {
        "group/jobs": 2,
        "group/microbatches": 2,
        "throughput/tokens_per_s": 600.0,
        "group/fill": 0.75,
        "memory/peak_bytes": 1024,
    }
    board = board_of([(JobState.FINISHED, 2.0), (JobState.RUNNING, None)], "minimize")
    board.jobs["trial-0001"].tokens = 400
    values = search_values(board, 8.0)
    assert (values["search/tokens_per_s"], values["search/best"], values["search/running"]) == (50.0, 2.0, 1)


# ---- which steps are written -------------------------------------------------------------------------


def progress(step: int, loss: float = 1.0) -> JobProgress:
    return JobProgress("a", step, loss, 1.0, 1e-4, step, 0.5, 10.0)


@given(st.integers(1, 5000), st.integers(1, 400))
def test_a_curve_has_first_and_last_and_few_others(length: int, most: int) -> None:
    curve = Curve(length, most)
    kept = [step for step in range(1, length + 1) if curve.takes(progress(step))]
    assert kept[0] == 1
    assert kept[-1] == length
    assert len(kept) <= most + 2
    if length <= most:
        assert kept == list(range(1, length + 1))


def test_a_diverging_step_is_always_written() -> None:
    curve = Curve(100, 10)
    assert [curve.takes(progress(step)) for step in (9, 10)] == [False, True]
    assert curve.left_out is None
    assert not curve.takes(progress(11))
    assert curve.left_out == progress(11)
    assert curve.takes(progress(12, math.nan))
    assert curve.left_out is None


@given(st.integers(4, 400))
def test_a_curve_of_unknown_length_stays_small(most: int) -> None:
    kept = [step for step in range(1, 20_001) if is_kept(step, grown_stride(step, most))]
    assert kept[: most // 4] == list(range(1, most // 4 + 1))
    quarter = most // 4
    assert len(kept) <= quarter * (2 + (20_000 // quarter).bit_length()) + 1
