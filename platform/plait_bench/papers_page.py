"""The table of all papers' figures, as Markdown and as one HTML page. A seam: only the presentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import inf
from typing import Any

from plait_bench.figures import WEAK
from plait_bench.table import number, results, span

Record = Mapping[str, Any]
HEADINGS = ("paper", "figure", "file", "how", "result", "largest difference", "remarks")
STYLE = (
    "body{font:14px/1.4 sans-serif;margin:2em;max-width:110em}table{border-collapse:collapse}"
    "td,th{border-bottom:1px solid #ccc;padding:.3em .6em;text-align:left;vertical-align:top}"
)


def published(record: Record) -> list[Mapping[str, Any]]:
    """A report's figures with a published value that are shown first, or that the model was fitted to."""
    return [each for each in _every_published(record) if each["headline"] or each["result"] == "fitted"]


def _every_published(record: Record) -> list[Mapping[str, Any]]:
    """A report's figures with a published value, the detail too."""
    found = [each for each in _figures(record) if each["target"]]
    return [each for each in found if each["target"]["kind"] == "published"]


def _figures(record: Record) -> Sequence[Mapping[str, Any]]:
    return record["report"]["figures"] if record["report"] else ()


def evidence(record: Record) -> list[Mapping[str, Any]]:
    """The published figures that say something about Plait: not fitted, assumed or so by definition."""
    return [each for each in published(record) if each["result"] not in WEAK]


def result_of(record: Record) -> str:
    """A file's result: the worst of its published figures that are evidence, or why there is none."""
    if record["state"] == "needs":
        return f"needs {record['needs']}"
    if record["state"] == "failed":
        return "failed"
    found = {each["result"] for each in published(record)}
    for worst in ("outside, unexplained", "outside, explained", "within"):
        if worst in found:
            return worst
    return f"no evidence: {', '.join(sorted(found))}" if found else "no published number"


def summary(records: Sequence[Record]) -> str:
    """One sentence about all figures."""
    states = Counter(each["state"] for each in records for _ in each["paper"]["figures"])
    failed = f", {states['failed']} failed" if states["failed"] else ""
    values = sorted(each["result"] for record in records for each in published(record))
    counted = sum(len(evidence(record)) for record in records)
    return (
        f"of {states.total()} figures that have a file {states['ran']} are given and {states['needs']} need "
        f"what this machine lacks{failed}; "
        f"of {len(values)} published numbers {counted} are evidence: {results(values) or 'none'}"
    )


def rows(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """One row for each file."""
    for record in records:
        paper, shown = record["paper"], evidence(record)
        how = ", ".join(sorted({each["how"] for each in _figures(record)}))
        yield (
            paper["name"],
            ", ".join(paper["figures"]),
            record["name"],
            how,
            result_of(record),
            _largest(shown),
            _remarks(record),
        )


def _largest(shown: Sequence[Mapping[str, Any]]) -> str:
    """The published figure that ours is furthest from, relative to the published value."""
    if not shown:
        return ""

    def off(each: Mapping[str, Any]) -> float:
        value = float(each["target"]["value"])
        return inf if each["ours"] is None else abs(float(each["ours"]) - value) / (abs(value) or 1.0)

    most = max(shown, key=off)
    value = number(most["target"]["value"])
    return f"{most['name']}: {number(most['ours'])} against {value} {most['unit']} ({100 * off(most):.1f} %)"


def _remarks(record: Record) -> str:
    if record["state"] == "failed":
        return str(record["error"]).strip().splitlines()[-1]
    shown = published(record)
    why = dict.fromkeys(each["target"]["why"] for each in shown if each["result"] != "within")
    moved = [f"{each['name']}: {said}." for each in shown if (said := _span(each))]
    opened = [f"Open: {each}." for each in record["paper"]["leaves_open"]]
    return " ".join([*filter(None, why), *moved, *opened])


def _span(figure: Mapping[str, Any]) -> str:
    found = [each for each in (figure["ours"], *figure["target"]["others"]) if each is not None]
    return span(found[0], found[1:]) if found else ""


def as_markdown(records: Sequence[Record]) -> str:
    """A heading, the summary and a table."""
    lines = ["# The papers' figures", "", summary(records) + ".", ""]
    lines += [f"| {' | '.join(HEADINGS)} |", "|" + "--|" * len(HEADINGS)]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows(records)]
    return "\n".join(lines) + "\n"


def as_html(records: Sequence[Record]) -> str:
    """One page: the summary, the table of files, and every published figure next to ours."""
    files = "".join(_row(row) for row in rows(records))
    every = "".join(
        _row((
            record["name"], each["name"], f"{number(each['target']['value'])} {each['unit']}",
            f"{number(each['ours'])} {each['unit']}", each["how"], each["result"], each["target"]["source"],
            "" if each["plait"] is None else number(each["plait"]), _span(each),
        ))
        for record in records
        for each in _every_published(record)
    )  # fmt: skip
    second = ("file", "figure", "published", "ours", "how", "result", "source", "Plait's plan", "ours moves")
    return (
        f"<!doctype html><meta charset=utf-8><title>The papers' figures</title><style>{STYLE}</style>"
        f"<h1>The papers' figures</h1><p>{escape(summary(records))}.</p>"
        f"<table>{_row(HEADINGS, 'th')}{files}</table><h2>Published numbers</h2>"
        f"<table>{_row(second, 'th')}{every}</table>\n"
    )


def _row(cells: Sequence[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
