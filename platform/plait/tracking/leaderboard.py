"""The leaderboard of a search: one row a job, best first, as table, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from plait.tracking.board import JobRecord

Cell = str | int | float | None
FORMATS = ("table", "csv", "json")


def varying(records: Sequence[JobRecord]) -> list[str]:
    """Parameters that are not the same in all jobs, in the order in which jobs name them; of a single
    job none."""
    keys = list(dict.fromkeys(key for record in records for key in record.parameters))
    return [key for key in keys if len({str(record.parameters.get(key)) for record in records}) > 1]


def columns(records: Sequence[JobRecord]) -> tuple[list[str], list[list[Cell]]]:
    """Names and rows; records in the order given. Parameters that vary stand in the middle."""
    keys = varying(records)
    names = ["trial", "state", "objective", *keys, "eval_loss", "train_loss", "steps", "tokens"]
    names += ["device_seconds", "run_id", "adapter", "reason"]
    rows: list[list[Cell]] = []
    for record in records:
        values = [_cell(record.parameters.get(key)) for key in keys]
        head: list[Cell] = [record.trial, record.state, record.objective]
        measured: list[Cell] = [_cell(record.eval_loss), _cell(record.loss), record.step, record.tokens]
        tail: list[Cell] = [round(record.device_seconds, 3), record.run_id, record.adapter, record.reason]
        rows.append([*head, *values, *measured, *tail])
    return names, rows


def _cell(value: Any) -> Cell:
    """Numbers and words as they are; what else there is as compact text. A number that is not finite has no
    place in JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float)):
        return value
    return json.dumps(value, separators=(",", ":"))


def to_split_json(records: Sequence[JobRecord]) -> str:
    """The form in which MLflow's UI shows a JSON artifact as a table. It takes a dot in a column's name for
    a path and then finds nothing, and shows every digit of a number."""
    names, rows = columns(records)
    short = [[float(f"{cell:.6g}") if isinstance(cell, float) else cell for cell in row] for row in rows]
    return json.dumps({"columns": [name.replace(".", "_") for name in names], "data": short})


def to_json(records: Sequence[JobRecord]) -> str:
    """A list of objects, one a job, each with all its parameters."""
    names, rows = columns(records)
    listed = []
    for record, row in zip(records, rows, strict=True):
        listed.append(dict(zip(names, row, strict=True)) | {"parameters": dict(record.parameters)})
    return json.dumps(listed, indent=2)


def to_csv(records: Sequence[JobRecord]) -> str:
    """A header and one line a job."""
    names, rows = columns(records)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return text.getvalue()


def to_table(records: Sequence[JobRecord], title: str) -> Table:
    """A table for the terminal, without columns that are empty and without ids and paths, which the other
    forms have: they would leave no room for the rest."""
    names, rows = columns(records)
    filled = [at for at, _ in enumerate(names) if any(row[at] not in (None, "") for row in rows)]
    used = [at for at in filled if names[at] not in ("run_id", "adapter")]
    table = Table(title=title, title_justify="left", header_style="bold")
    for at in used:
        numeric = all(isinstance(row[at], (int, float)) or row[at] is None for row in rows)
        table.add_column(names[at], justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_text(row[at]) for at in used))
    return table


def _text(value: Cell) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)
