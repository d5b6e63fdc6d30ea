"""The leaderboard of a search: one row a job, best first, as table, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from plait.core.lifecycle import JobState
from plait.tracking.board import JobRecord, varying
from plait.tracking.names import objective_name

Cell = str | int | float | None
FORMATS = ("table", "csv", "json")
WIDTH = 80  # of a table, in characters, where nothing else is known
LEAST_REASON = 40  # characters: in a column of fewer it would break into many lines
LEAST_NEEDED = ("reason", "tokens", "train_loss", "best_eval_step", "best_eval_loss", "device_seconds")


def columns(
    records: Sequence[JobRecord], keys: Sequence[str] | None = None
) -> tuple[list[str], list[list[Cell]]]:
    """Names and rows; records in the order given. The parameters ``keys`` stand in the middle, by default
    those that vary; who is on a front
    and who breaks a constraint stands where there are such."""
    keys = varying(records) if keys is None else keys
    several = max((len(record.others) for record in records), default=0)
    more = [objective_name(at) for at in range(1, several + 1)] + (["pareto"] if several else [])
    more += [] if all(record.feasible for record in records) else ["feasible"]
    names = ["trial", "state", "objective", *more, *keys, "eval_loss", "best_eval_loss", "best_eval_step"]
    names += ["train_loss", "steps", "tokens", "device_seconds", "run_id", "adapter", "reason"]
    rows: list[list[Cell]] = []
    for record in records:
        values = [_cell(record.parameters.get(key)) for key in keys]
        head: list[Cell] = [record.trial, record.state, record.objective]
        head += [_cell(value) for value in (*record.others, *[None] * several)[:several]]
        head += ["yes" if record.on_front else ""] if several else []
        head += ["yes" if record.feasible else "no"] if "feasible" in more else []
        measured: list[Cell] = [_cell(record.eval_loss), _cell(record.best_eval_loss), record.best_eval_step]
        measured += [_cell(record.loss), record.step, record.tokens]
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


def to_split_json(records: Sequence[JobRecord], keys: Sequence[str] | None = None) -> str:
    """The form in which MLflow's UI shows a JSON artifact as a table. It takes a dot in a column's name for
    a path and then finds nothing, and shows every digit of a number."""
    names, rows = columns(records, keys)
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


def to_table(records: Sequence[JobRecord], title: str, width: int = WIDTH) -> Table:
    """A table for the terminal: without columns that are empty or repeat the objective, without ids and
    paths, and with parameters by their last word. What is too wide for ``width`` characters is left
    out, the least needed first, which the caption says."""
    names, rows = columns(records)
    cells = {name: [row[at] for row in rows] for at, name in enumerate(names)}
    shown = {name: _shown(name, cells, records) for name in names if not _repeats(name, cells)}
    shown = {name: column for name, column in shown.items() if any(cell not in (None, "") for cell in column)}
    hidden = _too_wide(shown, width)
    table = Table(
        title=title,
        title_justify="left",
        caption=f"hidden columns: {', '.join(map(heading, hidden))} (--format csv)" if hidden else None,
        caption_justify="left",
        header_style="bold",
        box=None,
        pad_edge=False,
        collapse_padding=True,
    )
    kept = [name for name in shown if name not in hidden]
    for name in kept:
        numeric = name == "steps" or all(isinstance(cell, (int, float, type(None))) for cell in shown[name])
        table.add_column(heading(name), justify="right" if numeric else "left", no_wrap=name != "reason")
    for cells_of_row in zip(*(shown[name] for name in kept), strict=True):
        table.add_row(*(_text(cell) for cell in cells_of_row))
    return table


def heading(name: str) -> str:
    """A column's name as the table has it."""
    return name.rsplit(".", 1)[-1].replace("_", " ").replace("seconds", "s")


def _repeats(name: str, cells: Mapping[str, Sequence[Cell]]) -> bool:
    """Whether a column says what another one says."""
    if name in ("run_id", "adapter"):  # for programs
        return True
    if name == "eval_loss":
        return cells[name] == cells["objective"]
    others = [column for other, column in cells.items() if not other.startswith("objective")]
    return name.startswith("objective_") and cells[name] in others


def _shown(name: str, cells: Mapping[str, Sequence[Cell]], records: Sequence[JobRecord]) -> Sequence[Cell]:
    """A column's cells without what says nothing new."""
    if name == "reason":
        return [None if record.state == JobState.FINISHED else record.reason for record in records]
    if name == "steps":  # of those that go on, how many there are to be
        return [_progress(record) for record in records]
    if name in ("best_eval_loss", "best_eval_step"):
        return [
            cell if record.was_better else None for cell, record in zip(cells[name], records, strict=True)
        ]
    return cells[name]


def _too_wide(shown: Mapping[str, Sequence[Cell]], width: int) -> list[str]:
    """The columns to leave out so that the others fit; reasons may break into a few lines."""
    wanted = {
        name: max(len(heading(name)), *(len(_text(cell)) for cell in column))
        for name, column in shown.items()
    }
    if "reason" in wanted:
        wanted["reason"] = min(wanted["reason"], LEAST_REASON)
    hidden: list[str] = []
    for name in LEAST_NEEDED:
        if sum(wanted.values()) + len(wanted) - 1 <= width:
            break
        if wanted.pop(name, None) is not None:
            hidden.append(name)
    return [name for name in shown if name in hidden]


def _progress(record: JobRecord) -> Cell:
    return record.step if record.ended or not record.steps else f"{record.step}/{record.steps}"


def _text(value: Cell) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
