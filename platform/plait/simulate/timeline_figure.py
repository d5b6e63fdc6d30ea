"""A run as a figure: a bar for each forward and backward, a row for each stage of each replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from plait.simulate.events import Pipeline, Run, Span, Work

if TYPE_CHECKING:
    import plotly.graph_objects as go

# One hue for each job (Okabe and Ito's, safe for colour-blind readers); backward is the darker half.
HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
LIGHT = 0.55  # opacity of a forward
MOST_SPANS = 4000  # more make a page that browsers scroll badly: the run's beginning is shown


def timeline_figure(run: Run, pipelines: Mapping[int, Pipeline], *, title: str) -> go.Figure:
    """The run's spans over seconds, coloured by the first job of each microbatch; steps as marks.

    Args:
        title: says what was simulated; the figure adds how much of a long run it shows.
    """
    import plotly.graph_objects as go

    spans = sorted(run.spans, key=lambda span: (span.start, span.replica, span.stage))[:MOST_SPANS]
    shown = max((span.end for span in spans), default=0.0)
    works = {
        (r, place): work for r, pipeline in pipelines.items() for place, work in enumerate(pipeline.works)
    }
    jobs = sorted({job for work in works.values() for job, _ in work.parts})
    hue = {job: HUES[place % len(HUES)] for place, job in enumerate(jobs)}
    figure = go.Figure()
    for job in jobs:
        for kind, opacity in (("forward", LIGHT), ("backward", 1.0)):
            bars = [
                (span, works[span.replica, span.work])
                for span in spans
                if span.kind == kind
                and [part[0] for part in works[span.replica, span.work].parts[:1]] == [job]
            ]
            _add_bars(figure, bars, f"{job}, {kind}", hue[job], opacity)
    steps = [(job, step, at) for (job, step), at in run.steps.items() if at <= shown]
    first = _row(min(pipelines), 0)
    figure.add_scatter(
        x=[at for _, _, at in steps],
        y=[first] * len(steps),
        mode="markers",
        marker={"symbol": "line-ns-open", "size": 14, "color": "black"},
        name="optimiser steps",
        text=[f"{job}#{step}" for job, step, _ in steps],
        hovertemplate="step %{text} at %{x:.4g} s<extra></extra>",
    )
    rows = [
        _row(replica, stage) for replica, pipeline in pipelines.items() for stage in range(pipeline.stages)
    ]
    part = "" if len(spans) == len(run.spans) else f", the first {shown:.3g} of {run.makespan:.3g} s"
    figure.update_layout(
        title=f"{title} (simulated{part})",
        barmode="overlay",
        bargap=0.15,
        xaxis_title="seconds",
        yaxis={"categoryorder": "array", "categoryarray": rows[::-1]},
        template="plotly_white",
        height=220 + 28 * len(rows),
    )
    return figure


def _add_bars(
    figure: go.Figure, own: Sequence[tuple[Span, Work]], name: str, colour: str, opacity: float
) -> None:
    figure.add_bar(
        orientation="h",
        y=[_row(span.replica, span.stage) for span, _ in own],
        base=[span.start for span, _ in own],
        x=[span.end - span.start for span, _ in own],
        marker={"color": colour, "opacity": opacity, "line": {"width": 0}},
        name=name,
        customdata=[
            [span.work, work.tokens, ", ".join(f"{job}#{step}" for job, step in work.parts)]
            for span, work in own
        ],
        hovertemplate="microbatch %{customdata[0]}: %{customdata[1]} tokens, %{customdata[2]}<br>"
        "from %{base:.4g} s<extra></extra>",
    )


def _row(replica: int, stage: int) -> str:
    return f"replica {replica}, stage {stage}"
