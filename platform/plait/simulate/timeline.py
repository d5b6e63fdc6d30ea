"""Shows a run as a Chrome trace for Perfetto and chrome://tracing, or as a figure for a browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from plait.simulate.events import Pipeline, Run, Span, Work
from plait.utils.durations import precise
from plait.utils.trace_events import TraceEvents

if TYPE_CHECKING:
    import plotly.graph_objects as go


# One hue for each job (Okabe and Ito's, safe for colour-blind readers); forwards are lighter.
HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
LIGHT = 0.6  # share of white in the colour of a forward
MOST_SPANS = 4000  # browsers scroll badly with more, so only the beginning of the run is shown
WIDE = 60  # forwards and backwards of a row that are visible at first
STEPS = "optimiser steps"
ROW, LEGEND_LINE, AROUND = 30, 19, 190  # pixels


def chrome_trace(run: Run, pipelines: Mapping[int, Pipeline]) -> str:
    """The run as trace-event JSON: a process for each replica, a thread for each stage.

    Forwards and backwards are complete events; each optimiser step is an instant on its replicas' first
    stage.
    """
    events = TraceEvents()
    for replica, pipeline in pipelines.items():
        events.name_process(replica + 1, f"replica {replica}")
        for stage in range(pipeline.stages):
            events.name_thread(replica + 1, stage + 1, f"stage {stage}")
    for span in run.spans:
        work = pipelines[span.replica].works[span.work]
        parts = ", ".join(f"{job}#{step}" for job, step in work.parts) or "no-op"
        events.span(
            f"{span.kind} {span.work}: {parts}",
            span.kind,
            (span.replica + 1, span.stage + 1),
            span.start,
            span.end,
            {"microbatch": span.work, "tokens": work.tokens, "segments": parts},
        )
    for (job, step), seconds in run.steps.items():
        for replica in pipelines:
            events.instant(f"step {job}#{step}", "step", (replica + 1, 1), seconds)
    return events.text()


def timeline_figure(run: Run, pipelines: Mapping[int, Pipeline], *, title: str) -> go.Figure:
    """The run's spans over time, coloured by the first job of each microbatch, with steps in the top row."""
    import plotly.graph_objects as go

    spans = sorted(run.spans, key=lambda span: (span.start, span.replica, span.stage))[:MOST_SPANS]
    shown = max((span.end for span in spans), default=0.0)
    works = {
        (r, place): work for r, pipeline in pipelines.items() for place, work in enumerate(pipeline.works)
    }
    hues = _hues(sorted({job for work in works.values() for job, _ in work.parts}))
    figure = go.Figure()
    for job, hue in hues.items():
        own = [(span, works[span.replica, span.work]) for span in spans]
        own = [(span, work) for span, work in own if work.parts and work.parts[0][0] == job]
        steps = [(step, at) for (name, step), at in sorted(run.steps.items()) if name == job and at <= shown]
        _add_bars(figure, [each for each in own if each[0].kind == "forward"], job, _light(hue))
        _add_bars(figure, [each for each in own if each[0].kind == "backward"], job, hue, legend=True)
        _add_steps(figure, steps, job, hue)
    rows = [
        _row(replica, stage) for replica, pipeline in pipelines.items() for stage in range(pipeline.stages)
    ]
    part = "" if len(spans) == len(run.spans) else f", the first {precise(shown)} of {precise(run.makespan)}"
    figure.update_layout(
        title=f"{title} (simulated{part})",
        barmode="overlay",
        bargap=0.15,
        dragmode="pan",
        xaxis={"title": "seconds (drag to move, turn the wheel to zoom)", "range": [0, _wide(spans, shown)]},
        yaxis={"categoryorder": "array", "categoryarray": [*rows[::-1], STEPS], "fixedrange": True},
        legend={"title": "first job of a microbatch:<br>forward light, backward dark"},
        template="plotly_white",
        height=AROUND + max(ROW * (len(rows) + 1), LEGEND_LINE * (len(hues) + 2)),
    )
    return figure


def _hues(jobs: Sequence[str]) -> dict[str, str]:
    """A hue for each job, all different as long as there are enough."""
    from plotly.colors import qualitative

    palette = HUES if len(jobs) <= len(HUES) else tuple(qualitative.Dark24)
    return {job: palette[place % len(palette)] for place, job in enumerate(jobs)}


def _light(hue: str) -> str:
    """The hue mixed with white."""
    parts = (int(hue[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(LIGHT * 255 + (1 - LIGHT) * part):02X}" for part in parts)


def _wide(spans: Sequence[Span], shown: float) -> float:
    """Seconds that are visible at first: the busiest row's first ``WIDE`` forwards and backwards."""
    rows: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        rows.setdefault((span.replica, span.stage), []).append(span)
    return min((own[WIDE - 1].end for own in rows.values() if len(own) > WIDE), default=1.01 * shown)


def _add_bars(
    figure: go.Figure, own: Sequence[tuple[Span, Work]], job: str, colour: str, *, legend: bool = False
) -> None:
    figure.add_bar(
        orientation="h",
        y=[_row(span.replica, span.stage) for span, _ in own] or [STEPS],
        base=[span.start for span, _ in own] or [0],
        x=[span.end - span.start for span, _ in own] or [0],
        marker={"color": colour, "line": {"width": 0.5, "color": "white"}},
        name=job,
        legendgroup=job,
        showlegend=legend,
        customdata=[
            [span.kind, span.work, work.tokens, ", ".join(f"{name}#{step}" for name, step in work.parts)]
            for span, work in own
        ],
        hovertemplate="%{customdata[0]} of microbatch %{customdata[1]}: %{customdata[2]} tokens, "
        "%{customdata[3]}<br>from %{base:.4g} s, takes %{x:.4g} s<extra></extra>",
    )


def _add_steps(figure: go.Figure, steps: Sequence[tuple[int, float]], job: str, hue: str) -> None:
    figure.add_scatter(
        x=[at for _, at in steps],
        y=[STEPS] * len(steps),
        mode="markers",
        marker={"symbol": "line-ns", "size": 14, "color": hue, "line": {"width": 2, "color": hue}},
        name=job,
        legendgroup=job,
        showlegend=False,
        text=[f"{job}#{step}" for step, _ in steps],
        hovertemplate="step %{text} at %{x:.4g} s<extra></extra>",
    )


def _row(replica: int, stage: int) -> str:
    return f"replica {replica}, stage {stage}"
