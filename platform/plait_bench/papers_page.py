"""The table of all papers' figures, as Markdown and as one HTML page. A seam: only the presentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from plait_bench.table import number

Record = Mapping[str, Any]
HEADINGS = ("paper", "figure", "file", "how", "result", "largest difference", "remarks")
STYLE = (
    "body{font:14px/1.4 sans-serif;margin:2em;max-width:110em}table{border-collapse:collapse}"
    "td,th{border-bottom:1px solid #ccc;padding:.3em .6em;text-align:left;vertical-align:top}"
)


def published(record: Record) -> list[Mapping[str, Any]]:
    """A report's figures with a published value that are shown first; those fitted to are no evidence."""
    figures = record["report"]["figures"] if record["report"] else ()
    return [
        each for each in figures
        if each["beside"] and each["beside"]["kind"] == "published" and each["result"] != "fitted"
        and each["headline"]
    ]  # fmt: skip


def result_of(record: Record) -> str:
    """A file's result: the worst of its published figures, or why there is none."""
    if record["state"] == "needs":
        return f"needs {record['paper']['needs']}"
    if record["state"] == "failed":
        return "failed"
    results = {each["result"] for each in published(record)}
    for worst in ("outside, unexplained", "outside, explained", "within"):
        if worst in results:
            return worst
    return "no published number"


def summary(records: Sequence[Record]) -> str:
    """One sentence about all figures."""
    figures = sum(len(each["paper"]["figures"]) for each in records)
    given = sum(len(each["paper"]["figures"]) for each in records if each["state"] == "ran")
    needs = sum(len(each["paper"]["figures"]) for each in records if each["state"] == "needs")
    values = Counter(each["result"] for record in records for each in published(record))
    numbers = ", ".join(f"{values[key]} {key}" for key in sorted(values)) or "none"
    return (
        f"of {figures} figures {given} are given and {needs} need what this machine lacks; "
        f"of {values.total()} published numbers, without those fitted to: {numbers}"
    )


def rows(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """One row for each file."""
    for record in records:
        paper, shown = record["paper"], published(record)
        how = ", ".join(sorted({each["how"] for each in (record["report"] or {"figures": ()})["figures"]}))
        yield (
            paper["name"],
            ", ".join(paper["figures"]),
            record["name"],
            how,
            result_of(record),
            _largest(shown),
            _remarks(record, shown),
        )


def _largest(shown: Sequence[Mapping[str, Any]]) -> str:
    """The published figure that ours is furthest from, relative to the published value."""
    if not shown:
        return ""

    def off(each: Mapping[str, Any]) -> float:
        value = float(each["beside"]["value"])
        return abs(float(each["ours"]) - value) / (abs(value) or 1.0)

    most = max(shown, key=off)
    value = number(most["beside"]["value"])
    return f"{most['name']}: {number(most['ours'])} beside {value} {most['unit']} ({100 * off(most):.1f} %)"


def _remarks(record: Record, shown: Sequence[Mapping[str, Any]]) -> str:
    if record["state"] == "failed":
        return str(record["error"]).strip().splitlines()[-1]
    why = dict.fromkeys(each["beside"]["why"] for each in shown if each["result"] != "within")
    opened = [f"Open: {each}." for each in record["paper"]["leaves_open"]]
    return " ".join([*filter(None, why), *opened])


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
            record["name"], each["name"], f"{number(each['beside']['value'])} {each['unit']}",
            f"{number(each['ours'])} {each['unit']}", each["how"], each["result"], each["beside"]["source"],
            "" if each["plait"] is None else number(each["plait"]),
        ))
        for record in records
        for each in (record["report"] or {"figures": ()})["figures"]
        if each["beside"] and each["beside"]["kind"] == "published"
    )  # fmt: skip
    second = ("file", "figure", "published", "ours", "how", "result", "source", "Plait's plan")
    return (
        f"<!doctype html><meta charset=utf-8><title>The papers' figures</title><style>{STYLE}</style>"
        f"<h1>The papers' figures</h1><p>{escape(summary(records))}.</p>"
        f"<table>{_row(HEADINGS, 'th')}{files}</table><h2>Published numbers</h2>"
        f"<table>{_row(second, 'th')}{every}</table>\n"
    )


def _row(cells: Sequence[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
