"""The table of group steps: on disk line by line, as MLflow's table, and over restarts."""

from __future__ import annotations

import itertools
import json
from itertools import pairwise
from pathlib import Path

import pytest

from plait.core.messages import GroupStep, ModelFitted
from plait.tracking import tables
from plait.tracking.tables import (
    FIT_COLUMNS,
    FITS_ARTIFACT,
    FITS_FILE,
    GROUP_STEP_COLUMNS,
    GROUP_STEPS_ARTIFACT,
    GROUP_STEPS_FILE,
    MOST_FITS,
    MOST_GROUP_STEPS,
    LineTable,
    SearchTables,
    group_step,
)


def group_steps_table(folder: Path) -> LineTable:
    return LineTable(folder / GROUP_STEPS_FILE, GROUP_STEP_COLUMNS, MOST_GROUP_STEPS)


def rows_of(table: LineTable) -> list[GroupStep]:
    """The rows that MLflow shows."""
    shown = json.loads(table.artifact())
    return [group_step(dict(zip(shown["columns"], row, strict=True))) for row in shown["data"]]


def step(iteration: int, *, seconds: float = 0.5, predicted: float | None = None) -> GroupStep:
    return GroupStep(
        "g0",
        iteration,
        ("a", "b"),
        2,
        300,
        seconds,
        None,
        256,
        (100, 200),
        predicted,
        4096 if predicted else None,
    )


def test_rows_come_back_as_they_were_added(tmp_path: Path) -> None:
    table = group_steps_table(tmp_path / "search")
    table.add(step(1))
    table.add(step(2, seconds=0.25, predicted=0.3))
    first, second = rows_of(table)
    assert (first.iteration, first.jobs, first.job_tokens) == (1, ("a", "b"), (100, 200))
    assert (first.predicted_seconds, first.peak_bytes, first.predicted_bytes) == (None, None, None)
    assert (second.seconds, second.predicted_seconds, second.predicted_bytes) == (0.25, 0.3, 4096)


def test_a_restart_continues_the_numbering(tmp_path: Path) -> None:
    table = group_steps_table(tmp_path)
    table.add(step(1))
    again = group_steps_table(tmp_path)
    again.add(step(1))
    assert [row.iteration for row in rows_of(table)] == [1, 2]


def test_the_artifact_is_a_table_of_bounded_size_written_ever_more_seldom(tmp_path: Path) -> None:
    table, written = group_steps_table(tmp_path), 0
    for iteration in range(1, 200):
        table.add(step(iteration))
        if table.grown:
            written += 1
            table.artifact()
    assert written < 30
    lines = table.path.read_text()
    table.path.write_text(lines * (3 * MOST_GROUP_STEPS // 199))
    shown = json.loads(table.artifact())
    assert tuple(shown["columns"]) == GROUP_STEP_COLUMNS
    assert MOST_GROUP_STEPS / 2 < len(shown["data"]) <= MOST_GROUP_STEPS
    assert all(len(row) == len(GROUP_STEP_COLUMNS) for row in shown["data"])


def test_a_long_table_is_shown_and_begun_without_parsing_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, rows = group_steps_table(tmp_path), 5 * MOST_GROUP_STEPS + 1
    table.add(step(1))
    table.path.write_bytes(table.path.read_bytes() * rows)
    parsed = 0
    loads = json.loads

    def counting(line: bytes) -> object:
        nonlocal parsed
        parsed += 1
        return loads(line)

    monkeypatch.setattr(tables.json, "loads", counting)
    again = group_steps_table(tmp_path)
    assert parsed == 0
    text = again.artifact()
    assert parsed <= MOST_GROUP_STEPS + 1
    shown = [row[0] for row in loads(text)["data"]]
    assert (len(shown), shown[-1]) == (rows // 6 + 1, rows)
    assert {after - before for before, after in pairwise(shown)} == {6}
    again.add(step(1))
    assert rows_of(again)[-1].iteration == rows + 1


def test_a_torn_line_of_a_killed_process_spoils_no_row_of_another(tmp_path: Path) -> None:
    steps, fits = group_steps_table(tmp_path), LineTable(tmp_path / FITS_FILE, FIT_COLUMNS, MOST_FITS)
    fitted = ModelFitted("seconds", 9, 8, (("token", 0.5),), 0.01, 0.02, None, 0.1)
    for before, (table, key) in itertools.product((0, 1), ((steps, "iteration"), (fits, "target"))):
        with table.path.open("a") as file:
            file.write(f'{{"{key}": ')
        table.add(step(1) if table is steps else fitted)
        assert len(json.loads(table.artifact())["data"]) == before + 1


def test_a_full_disk_ends_no_search(tmp_path: Path) -> None:
    table = group_steps_table(tmp_path)
    table.path.mkdir()
    table.add(step(1))
    assert json.loads(table.artifact())["data"] == []


def test_two_processes_add_to_one_table(tmp_path: Path) -> None:
    both = group_steps_table(tmp_path), group_steps_table(tmp_path)
    for at in range(1, 6):
        for table in both:
            table.add(step(at))
    rows = rows_of(both[0])
    assert [row.iteration for row in rows] == list(range(1, 11))
    assert len(json.loads(both[1].artifact())["data"]) == 10


def test_a_search_shows_its_tables_as_they_grow_and_at_its_end(tmp_path: Path) -> None:
    shown: list[tuple[str, int]] = []
    tables = SearchTables(tmp_path, lambda path, text: shown.append((path, len(json.loads(text)["data"]))))
    tables.handle(ModelFitted("seconds", 9, 8, (("token", 0.5),), 0.01, 0.02, None, 0.1))
    for at in range(1, 8):
        tables.handle(step(at))
    tables.finish()
    tables.finish()
    steps = [rows for path, rows in shown if path == GROUP_STEPS_ARTIFACT]
    assert steps == [1, 2, 3, 4, 5, 7]  # by a quarter each time, and what is left at the end
    assert [rows for path, rows in shown if path == FITS_ARTIFACT] == [1]
