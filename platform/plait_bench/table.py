"""A benchmark's report as tables for the terminal, and as JSON for programs.

A seam: only the presentation; ``plait_bench.figures`` defines the report, and no benchmark imports this.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from plait.terminal.console import filled, plain
from plait.utils.counts import counted
from plait_bench.figures import USUAL_TOLERANCE, WEAK, Baseline, Figure, Published, Report

DETAILS = ("figure", "ours", "unit", "how", "note")
SCREEN = 23  # lines that the table shown first may take, beside those of a prompt


def show(report: Report, console: Console, *, details: bool) -> None:
    """Print the figures that are compared with something, as many as fit on a screen; with ``details`` all of
    them, what was tried, and those that are not compared."""
    compared = [figure for figure in report.figures if figure.headline]
    by_target = [
        [figure for figure in compared if isinstance(figure.target, kind)] for kind in (Published, Baseline)
    ]
    kinds = [rows for rows in by_target if rows] or [list(report.figures)]
    fitted = [figure for figure in report.figures if figure.result == "fitted"]
    below = [*([_fitted(fitted)] if fitted else []), *([] if details else [_more(report, compared)])]
    room = SCREEN - len(below)
    for number_, rows in enumerate(kinds):
        last = number_ == len(kinds) - 1
        lines = _compared(report.name, rows, console, None if details else room if last else room // 2)
        room -= len(lines)
        for line in lines:
            console.print(line, end="")
    for text in below:
        _cropped(console, text)
    if details:
        console.print(details_table(report))
        for figure in compared:
            if tried := _tried(figure):
                plain(console, f"{figure.name}: {tried}")


def _more(report: Report, compared: Sequence[Figure]) -> str:
    count = len(report.figures) - len(compared) if compared else 0
    more = f"{counted(count, 'more figure')} and " if count else ""
    return f"--details shows {more}what was tried; --json is for programs."


def _tried(figure: Figure) -> str:
    """What was tried about a figure, and how far it moved."""
    target = figure.target
    moved = span(figure.ours, target.others) if isinstance(target, Published) else ""
    why = "" if target is None or figure.result == "within" else target.why
    return " ".join(filter(None, (f"{moved}." if moved else "", why)))


def _cropped(console: Console, text: str) -> None:
    """Print a line, without what does not fit."""
    console.print(text, markup=False, highlight=False, no_wrap=True, overflow="ellipsis")


def _fitted(figures: Sequence[Figure]) -> str:
    """One line about figures that are no evidence."""
    off = [100 * abs(each.target.difference(each.ours)) for each in figures if each.target is not None]
    mean, largest = sum(off) / len(off), max(off)
    return f"{len(off)} that the model was fitted to: {mean:.1f} % off in the mean, {largest:.1f} % at most"


def to_json(report: Report) -> str:
    """The whole report as JSON, which cannot contain numbers that are not finite."""
    figures = [_finite(figure.mapping()) for figure in report.figures]
    return json.dumps({"name": report.name, "figures": figures, "assumptions": report.assumptions}, indent=2)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def details_table(report: Report) -> Table:
    """All figures with their notes, and what was assumed."""
    rows = [
        (figure.name, number(figure.ours), figure.unit, figure.how, figure.note) for figure in report.figures
    ]
    table = filled(report.name, DETAILS, rows, left=set(DETAILS) - {"ours"})
    table.caption = "\n".join(report.assumptions) or None
    return table


@dataclass(slots=True)
class Notes:
    """Numbered texts below a table, each once."""

    texts: list[str] = field(default_factory=list)

    def mark(self, text: str) -> str:
        """The mark that leads to a text."""
        if text not in self.texts:
            self.texts.append(text)
        return f"({self.texts.index(text) + 1})"


def _compared(name: str, figures: Sequence[Figure], console: Console, room: int | None) -> list[str]:
    """The lines of one table of figures that are compared with the same kind of thing.

    Args:
        room: most lines; figures that are within are left out first. None: all lines.
    """
    ranked = sorted(range(len(figures)), key=lambda place: figures[place].result == "within")
    for count in range(max(1, len(figures)), 0, -1):
        shown = [figures[place] for place in sorted(ranked[:count])]
        lines = _rendered(name, figures, shown, console)
        if room is None or len(lines) <= room:
            break
    return lines


def _rendered(name: str, figures: Sequence[Figure], shown: Sequence[Figure], console: Console) -> list[str]:
    notes = Notes()
    with console.capture() as capture:
        compared = any(figure.headline for figure in shown)  # then all of them are
        console.print(compared_table(name, shown, notes) if compared else own_table(name, shown))
        for at, text in enumerate(notes.texts, start=1):
            _cropped(console, f"({at}) {text}")
        if left := len(figures) - len(shown):
            plain(console, f"{left} more: --details shows them.")
        found = [figure.result for figure in figures if figure.result]
        if len(found) > 1 or any(each in WEAK for each in found):
            plain(console, results(found))
    return capture.get().splitlines(keepends=True)


def results(found: Sequence[str]) -> str:
    """How many figures have each result, those that are no evidence apart."""
    counts = Counter(found)
    said = [f"{counts[each]} {each}" for each in counts if each not in WEAK]
    weak = [f"{counts[each]} {each}" for each in counts if each in WEAK]
    return "; ".join(said + ([f"no evidence: {', '.join(weak)}"] if weak else []))


def compared_table(name: str, figures: Sequence[Figure], notes: Notes) -> Table:
    """For each figure: what it is compared with, our value, the difference, the tolerance, and the result."""
    published = isinstance(figures[0].target, Published)
    allowed = [_allowed(figure) for figure in figures]
    headings = ["figure", "published" if published else "baseline", "ours", "off" if published else "ratio"]
    if with_allowed := set(allowed) != {USUAL}:
        headings.append("allowed")
    headings.append("result")
    if with_plait := any(figure.plait is not None for figure in figures):
        headings.append("Plait's")
    table = _open_table(name, figures, headings)
    for figure, limit in zip(figures, allowed, strict=True):
        plan = "" if figure.plait is None else number(figure.plait)
        table.add_row(
            *_cells(figure, notes),
            *([limit] if with_allowed else []),
            (figure.result or "").removeprefix("outside, "),
            *([plan] if with_plait else []),
        )
    return table


def own_table(name: str, figures: Sequence[Figure]) -> Table:
    """Our value of each figure, where nothing is compared."""
    table = _open_table(name, figures, ("figure", "ours", "unit"))
    for figure in figures:
        table.add_row(figure.name, number(figure.ours), figure.unit)
    return table


def _open_table(name: str, figures: Sequence[Figure], headings: Sequence[str]) -> Table:
    hows = ", ".join(dict.fromkeys(figure.how for figure in figures))
    table = Table(
        title=f"{name} ({hows})", title_justify="left", box=None, pad_edge=False, collapse_padding=True,
        header_style="bold",
    )  # fmt: skip
    for heading in headings:
        words = heading in ("figure", "result", "unit")
        table.add_column(heading, justify="left" if words else "right", no_wrap=heading != "figure")
    return table


def _cells(figure: Figure, notes: Notes) -> list[str]:
    target = figure.target
    assert target is not None
    source = notes.mark(target.source if isinstance(target, Published) else target.name)
    return [
        figure.name,
        f"{number(target.value)} {figure.unit} {source}".replace("  ", " "),
        number(figure.ours),
        _difference(figure),
    ]


def span(ours: float, others: Sequence[float]) -> str:
    """From where to where ours goes under the assumptions that were tried; "" if none were."""
    every = (ours, *others)
    return f"{number(min(every))} to {number(max(every))} by assumption" if others else ""


def _difference(figure: Figure) -> str:
    target = figure.target
    assert target is not None
    difference = target.difference(figure.ours)
    if isinstance(target, Baseline):
        return f"{difference:.3g}×"
    return f"{100 * difference:+.1f} %" if target.relative else f"{difference:+,.4g}"


USUAL = f"±{100 * USUAL_TOLERANCE:g} %"


def _allowed(figure: Figure) -> str:
    target = figure.target
    if isinstance(target, Baseline):
        limits = (("≥", target.at_least), ("≤", target.at_most))
        return " ".join(f"{sign} {limit:g}×" for sign, limit in limits if limit is not None)
    assert target is not None
    sign = {"near": "±", "at most": "≤ +", "at least": "≥ −"}[target.sense]
    if target.tolerance is None:
        return f"{sign}{100 * USUAL_TOLERANCE:g} %"
    return f"{sign}{target.tolerance:,.4g}"


def number(value: float | None) -> str:
    """A figure's value, to four digits if it has a fraction; None, as in JSON, if it is not finite."""
    if value is None:
        return "no number"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
