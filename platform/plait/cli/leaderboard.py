"""`plait leaderboard`: a search's adapters as a table for the terminal, as CSV or as JSON.

A seam: it imports MLflow, for which help does not wait.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from plait.core.errors import StorageError
from plait.core.lifecycle import JobState, PauseReason
from plait.core.settings import TrackingSettings
from plait.search.locks import trains_here
from plait.terminal.console import literal_console
from plait.tracking.leaderboard import Cell, JobRecord, columns, to_csv, to_json
from plait.tracking.results import SearchResult
from plait.utils.paths import command_on, search_folder

LEAST_REASON = 40  # characters of the column of reasons; with fewer, they would break into many lines
LEAST_NEEDED = (
    "outside",
    "reason",
    "tokens",
    "train_loss",
    "best_eval_step",
    "best_eval_loss",
    "device_seconds",
)
MOST_NEEDED = ("trial", "state", "objective")  # shown in the narrowest terminal


def show(settings: TrackingSettings, name: str | None, form: str) -> None:
    """Print a search as "table", "csv" or "json", the best first.

    Raises:
        SearchError: there is no such search.
    """
    print_leaderboard(_with_study(settings, read_search(settings, name)), form, literal_console())


def read_search(settings: TrackingSettings, name: str | None) -> SearchResult:
    """Read a search (by default the newest) from the store, or from its study while the store is unavailable.

    Raises:
        SearchError: the search does not exist.
        StorageError: neither can be read.
    """
    from plait.tracking.connection import AwayError
    from plait.tracking.results import load_search

    try:
        return load_search(settings, name)
    except AwayError as error:
        from plait.search.stored import board_of_study

        found = None
        with suppress(StorageError):  # the study's database may be unavailable, too; then report the store
            found = board_of_study(settings, name) if name else None
        if found is None:
            raise
        print(f"{error.value}. Showing what the search's study holds:", file=sys.stderr)
        return found


def _with_study(settings: TrackingSettings, result: SearchResult) -> SearchResult:
    """The search with what only its study knows: trials that have no run yet, and which are orphaned or were
    paused, because a killed process tells the store nothing."""
    from plait.search.stored import board_of_study

    found = None
    if result.state != JobState.FINISHED:
        with suppress(StorageError):  # the study may be elsewhere
            found = board_of_study(settings, result.name)
    held = found.records if found else ()
    states = {each.name: each.state for each in held}
    for record in result.records:
        state = states.get(record.name)
        if state in (JobState.ORPHANED, JobState.PAUSED) and not record.state.ended:
            record.state = state
    known = {record.name for record in result.records}
    more = (each for each in held if not each.state.ended and each.name not in known)
    result = replace(result, records=(*result.records, *more))
    if any(record.state == JobState.RUNNING for record in result.records):
        return result
    if JobState.ORPHANED not in states.values():
        stale = result.state == JobState.RUNNING and _is_paused(settings, result)
        return replace(result, state=JobState.PAUSED) if stale else result
    resume = command_on(settings.root, "resume", result.name)
    print(f"Orphaned: the process that trained them is dead. `{resume}` resumes the search.", file=sys.stderr)
    return replace(result, state=JobState.ORPHANED)


def _is_paused(settings: TrackingSettings, result: SearchResult) -> bool:
    """Whether the user paused a search of which no trial trains, or its process was killed; otherwise its
    process has just begun or ended a trial."""
    paused = [record for record in result.records if record.state == JobState.PAUSED]
    if any(record.reason == PauseReason.BY_USER for record in paused):
        return True
    try:
        return bool(paused) and not trains_here(search_folder(settings.root, result.name))
    except StorageError:  # only the search's user may ask
        return False


def print_leaderboard(result: SearchResult, form: str, console: Console) -> None:
    """Print a search's jobs as "table", "csv" or "json", best first."""
    if form == "table":
        named = " and ".join(map(str, result.objectives))
        order = f"Pareto front of {named} first" if result.objectives[1:] else f"{named} first"
        title = f"{result.name} ({result.state}), {order}"
        console.print(to_table(result.records, title, console.width))
        return
    text = to_csv(result.records) if form == "csv" else to_json(result.records)
    console.file.write(text if text.endswith("\n") else f"{text}\n")


def to_table(records: Sequence[JobRecord], title: str, width: int) -> Table:
    """A table for the terminal, without columns that are empty or repeat the objective, without ids and
    paths, and with the last words of parameters' names. Columns that do not fit into ``width`` characters are
    left out, least important first, and the caption names them."""
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
    """A column's heading in the table."""
    return name.rsplit(".", 1)[-1].replace("_", " ").replace("seconds", "s")


def _repeats(name: str, cells: Mapping[str, Sequence[Cell]]) -> bool:
    """Whether a column repeats another one."""
    if name in ("run_id", "adapter"):  # for programs
        return True
    if name in ("eval_loss", "accuracy"):
        return cells[name] == cells["objective"]
    others = [column for other, column in cells.items() if not other.startswith("objective")]
    return name.startswith("objective_") and cells[name] in others


def _shown(name: str, cells: Mapping[str, Sequence[Cell]], records: Sequence[JobRecord]) -> Sequence[Cell]:
    """A column's cells, without redundant values."""
    if name == "reason":
        usual = [record.state == JobState.FINISHED and record.feasible for record in records]
        return [None if each else record.reason for each, record in zip(usual, records, strict=True)]
    if name == "steps":  # the total, for trials that continue
        return [_progress(record) for record in records]
    if name in ("best_eval_loss", "best_eval_step"):
        return [
            cell if record.was_better else None for cell, record in zip(cells[name], records, strict=True)
        ]
    return cells[name]


def _too_wide(shown: Mapping[str, Sequence[Cell]], width: int) -> list[str]:
    """The columns to leave out so that the others fit: the least needed, then the widest settings, then the
    last ones but those most needed. Reasons may wrap into a few lines."""
    wanted = {
        name: max(len(heading(name)), *(len(_text(cell)) for cell in column))
        for name, column in shown.items()
    }
    if "reason" in wanted:
        wanted["reason"] = min(wanted["reason"], LEAST_REASON)
    hidden: list[str] = []
    settings = sorted((name for name in wanted if "." in name), key=lambda name: -wanted[name])
    others = [name for name in reversed(wanted) if name not in (*MOST_NEEDED, *LEAST_NEEDED, *settings)]
    for name in (*LEAST_NEEDED, *settings, *others):
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
