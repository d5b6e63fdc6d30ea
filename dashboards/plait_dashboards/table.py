"""The leaderboard as a table."""

from __future__ import annotations

import math

import plotly.graph_objects as go

from plait.core.lifecycle import JobState
from plait.tracking.leaderboard import JobRecord
from plait_dashboards.style import figure, say
from plait_dashboards.sweep import Sweep, outcome, short_names

ROW = 26  # pixels
LINE = 19  # pixels of each further line of a cell
LETTER = 7.9  # pixels of the usual width of a letter, which digits have
BOLD = 1.12  # width of letters in a heading, relative to usual ones
EDGES = 18  # pixels around a cell's text
PAGE = 1150  # approximate width of the whole table
PROSE = 180  # least width of the reasons, which wrap
MOST_ROWS = 20  # rows visible at once; the table scrolls

Column = tuple[str, list[str]]


def leaderboard(sweep: Sweep) -> go.Figure:
    """All jobs, best first."""
    if not sweep.records:
        return say(figure(), "No adapter has started.")
    shown = columns(sweep)
    widths = [_width(name, cells) for name, cells in shown]
    last, reasons = shown[-1]
    if last == "reason":  # prose, which wraps
        widths[-1] = max(PAGE - sum(widths[:-1]), PROSE)
    else:
        reasons = []
    made = figure(
        height=60 + ROW + LINE + _height(len(sweep.records), reasons, widths[-1]),
        margin={"l": 0, "r": 0, "t": 10},
    )
    made.add_table(
        header={"values": [f"<b>{name}</b>" for name, _ in shown], "height": ROW},
        cells={"values": [cells for _, cells in shown], "height": ROW},
        columnwidth=widths,
    )
    made.update_layout(margin={"b": 10})
    return made


def _width(name: str, cells: list[str]) -> float:
    """Pixels that a column needs; a heading may break at a blank."""
    heading = BOLD * max(map(len, name.split(" ")))
    return LETTER * max(heading, *map(len, cells)) + EDGES


def _height(rows: int, reasons: list[str], width: float) -> int:
    """Pixels of the rows visible at once; rows whose reason wraps are higher."""
    shown = min(rows, MOST_ROWS)
    lines = (math.ceil(LETTER * len(text) / (width - EDGES)) for text in reasons[:shown])
    return ROW * shown + LINE * sum(max(count, 1) - 1 for count in lines)


def columns(sweep: Sweep) -> list[Column]:
    """Headings with their units, and cells; empty columns are left out."""
    records = sweep.records
    shown: list[Column] = [
        ("place", [str(at) for at in range(1, len(records) + 1)]),
        ("trial", [str(item.trial) for item in records]),
        ("outcome", [_outcome(item) for item in records]),
        (f"objective: {sweep.metric}", [number(item.objective) for item in records]),
    ]
    for at, each in enumerate(sweep.objectives[1:]):
        if each.name not in sweep.searched:
            shown.append((f"objective: {each.name}", [_further(item, at) for item in records]))
    if len(sweep.objectives) > 1:
        shown.append(("Pareto front", ["yes" if item.on_front else "" for item in records]))
    shown.append(("constraints", ["" if item.feasible else "broken" for item in records]))
    for key, word in short_names(sweep.searched).items():
        shown.append((word, [number(item.parameters.get(key)) for item in records]))
    shown += [
        ("outside the space", [item.outside for item in records]),
        ("eval/loss", [number(item.eval_loss) for item in records]),
        ("eval/accuracy", [number(item.accuracy) for item in records]),
        ("train/loss", [number(item.loss) for item in records]),
        ("steps", [str(item.step or "") for item in records]),
        ("tokens", [f"{item.tokens:,}" for item in records]),
        ("device-seconds", [f"{item.device_seconds:.1f}" for item in records]),
        ("reason", [item.reason for item in records]),
    ]
    return [column for column in shown if any(column[1])]


def _outcome(item: JobRecord) -> str:
    how = outcome(item)
    return item.state if item.state in (JobState.FINISHED, how) else f"{how}: {item.state}"


def _further(item: JobRecord, at: int) -> str:
    return number(item.others[at]) if at < len(item.others) else ""


def number(value: object) -> str:
    """A cell: floats with four digits, nothing for None."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
