"""One self-contained HTML page, which opens without a network."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from plait.core.objectives import Objective, best_of
from plait.utils.counts import listed
from plait_dashboards.costs import seconds_by_outcome
from plait_dashboards.figures import Shown
from plait_dashboards.style import themes
from plait_dashboards.sweep import OUTCOMES, Sweep, outcome

# Nothing is fetched, whatever a name or a reason holds. Plotly's WebGL traces make functions from text.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)

MOST_ON_FRONT = 8


def report(sweep: Sweep, shown: Sequence[Shown]) -> str:
    """The page of a search: its result in a few numbers, then every figure."""
    links = "".join(f'<a href="#{item.key}">{html.escape(item.title)}</a>' for item in shown)
    head = (
        f"<h1>{html.escape(sweep.name)}</h1>{_facts(facts(sweep))}"
        f'<div class="about">{_facts(sweep.about)}</div><nav>{links}</nav>'
    )
    return _page(f"{sweep.name}: report", head, shown)


def single(sweep: Sweep, item: Shown) -> str:
    """A page with one figure."""
    return _page(f"{sweep.name}: {item.title}", "", [item])


def facts(sweep: Sweep) -> dict[str, str]:
    """The facts at the top of a report."""
    found: dict[str, str] = {"state": sweep.state}
    for how in OUTCOMES:
        if count := sum(outcome(item) == how for item in sweep.records):
            word = "finished" if how == OUTCOMES[0] else how
            found[f"adapters {word}"] = str(count)
    best = best_of(sweep.records, Objective(sweep.metric, sweep.direction))
    if len(sweep.objectives) > 1:
        found["Pareto front (measured)"] = _front([item.trial for item in sweep.records if item.on_front])
    elif best is not None and best.objective is not None:
        found[f"best {sweep.metric} (measured)"] = f"{best.objective:.6g}, trial {best.trial}"
    totals = seconds_by_outcome(sweep.records)
    whole = sum(totals.values())
    found["device-seconds (measured)"] = f"{whole:,.1f} s"
    if whole > 0:
        found["useful"] = f"{totals[OUTCOMES[0]] / whole:.0%}"
    found["tokens trained"] = f"{sum(item.tokens for item in sweep.records):,}"
    return found


def _front(trials: Sequence[int]) -> str:
    """The trials on the front; if there are many, the first few and the number of others."""
    if not trials:
        return "empty"
    return f"trial{'s' if len(trials) > 1 else ''} {listed(list(map(str, trials)), MOST_ON_FRONT)}"


def _facts(found: Mapping[str, str]) -> str:
    pairs = (
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in found.items()
    )
    return f"<dl>{''.join(pairs)}</dl>"


def _page(title: str, head: str, shown: Sequence[Shown]) -> str:
    assets = files("plait_dashboards").joinpath("assets")
    style = assets.joinpath("page.css").read_text(encoding="utf-8")
    script = assets.joinpath("page.js").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
{head}
{"".join(_section(item) for item in shown)}
{_data("themes", json.dumps(themes()))}
<script type="text/plain" id="plotly">{plotly_packed()}</script>
<script>{script}</script>
</body>
</html>
"""


def _section(item: Shown) -> str:
    note = f" {html.escape(item.note)}" if item.note else ""
    room = sum(sum(trace.columnwidth) for trace in item.figure.data if trace.type == "table")
    least = f' style="min-width: {room:.0f}px"' if room else ""  # a truncated cell would show another number
    return (
        f'<section id="{item.key}">\n<h2>{html.escape(item.title)}</h2>\n'
        f'<p><span class="origin">{item.origin}.</span>{note}</p>\n'
        f'<div class="wide"><div data-figure="data-{item.key}" role="img" '
        f'aria-label="{html.escape(item.title)}"{least}></div></div>\n'
        f"{_data(f'data-{item.key}', figure_json(item.figure))}</section>\n"
    )


def figure_json(figure: go.Figure) -> str:
    """Traces and layout as JSON, without a theme, which the page chooses. Arrays are packed as in Plotly."""
    found = json.loads(figure.to_json())
    found["layout"].pop("template", None)
    return json.dumps({"data": found["data"], "layout": found["layout"]}, separators=(",", ":"))


def _data(key: str, text: str) -> str:
    """JSON inside HTML, escaped so that no text in it can end the element."""
    safe = text.replace("<", "\\u003c")
    return f'<script type="application/json" id="{key}">{safe}</script>\n'


@lru_cache(maxsize=1)
def plotly_packed() -> str:
    """plotly.js from the installed package, gzipped, as base64: a third of its size."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode("ascii")
