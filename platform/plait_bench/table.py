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
from plait_bench.figures import USUAL_TOLERANCE, WEAK, Baseline, Figure, Published, Report

DETAILS = ("figure", "ours", "unit", "how", "note")


def show(report: Report, console: Console, *, details: bool) -> None:
    """Print the figures that are compared with something; with ``details``, then all of them."""
    compared = [figure for figure in report.figures if figure.headline]
    for kind in (Published, Baseline):
        if rows := [figure for figure in compared if isinstance(figure.target, kind)]:
            _show_compared(report.name, rows, console)
    if fitted := [figure for figure in report.figures if figure.result == "fitted"]:
        plain(console, _fitted(fitted))
    if compared:
        console.print()
    if details or not compared:
        console.print(details_table(report))
    else:
        more = len(report.figures) - len(compared)
        others = f"{more} more figures, " if more else ""
        plain(console, f"--details shows {others}notes and assumptions; --json is for programs.")


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


def _show_compared(name: str, figures: Sequence[Figure], console: Console) -> None:
    """One table of figures that are compared with the same kind of thing."""
    notes = Notes()
    console.print(compared_table(name, figures, notes))
    for at, text in enumerate(notes.texts, start=1):
        plain(console, f"({at}) {text}")
    if len(figures) > 1 or any(figure.result in WEAK for figure in figures):
        plain(console, results([figure.result for figure in figures if figure.result]))


def results(found: Sequence[str]) -> str:
    """How many figures have each result, those that are no evidence apart."""
    counts = Counter(found)
    said = [f"{counts[each]} {each}" for each in counts if each not in WEAK]
    weak = [f"{counts[each]} {each}" for each in counts if each in WEAK]
    return "; ".join(said + ([f"no evidence: {', '.join(weak)}"] if weak else []))


def compared_table(name: str, figures: Sequence[Figure], notes: Notes) -> Table:
    """For each figure: what it is compared with, our value, the difference, the tolerance, and the result."""
    published = isinstance(figures[0].target, Published)
    headings = ["figure", "published" if published else "baseline", "ours", "how"]
    headings += ["difference" if published else "ratio", "allowed", "result"]
    if with_plait := any(figure.plait is not None for figure in figures):
        headings.append("Plait's plan")
    table = Table(
        title=name, title_justify="left", box=None, pad_edge=False, collapse_padding=True, header_style="bold"
    )
    for heading in headings:
        words = heading in ("figure", "how", "result")
        table.add_column(heading, justify="left" if words else "right", no_wrap=heading != "figure")
    for figure in figures:
        row = _cells(figure, notes)
        plan = [] if not with_plait else [_value(figure.plait, figure.unit)]
        table.add_row(*row, *plan)
    return table


def _cells(figure: Figure, notes: Notes) -> list[str]:
    target = figure.target
    assert target is not None
    what = target.source if isinstance(target, Published) else target.name
    source = notes.mark(what)
    why = "" if figure.result == "within" or not target.why else notes.mark(target.why)
    moved = span(figure.ours, target.others) if isinstance(target, Published) else ""
    return [
        figure.name,
        f"{_value(target.value, figure.unit)} {source}",
        _value(figure.ours, figure.unit),
        figure.how,
        _difference(figure),
        _allowed(figure),
        "; ".join(filter(None, (" ".join(filter(None, (figure.result, why))), moved))),
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
    return f"{100 * difference:+.1f} %" if target.relative else f"{difference:+,.4g} {figure.unit}"


def _allowed(figure: Figure) -> str:
    target = figure.target
    if isinstance(target, Baseline):
        limits = (("≥", target.at_least), ("≤", target.at_most))
        return " ".join(f"{sign} {limit:g}×" for sign, limit in limits if limit is not None)
    assert target is not None
    sign = {"near": "±", "at most": "≤ +", "at least": "≥ −"}[target.sense]
    if target.tolerance is None:
        return f"{sign}{100 * USUAL_TOLERANCE:g} %"
    return f"{sign}{target.tolerance:,.4g} {figure.unit}"


def _value(value: float | None, unit: str) -> str:
    return "" if value is None else f"{number(value)} {unit}".strip()


def number(value: float) -> str:
    """A figure's value, to four digits if it has a fraction."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
