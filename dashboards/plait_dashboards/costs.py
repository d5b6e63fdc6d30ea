"""What the search cost: device-seconds by outcome and by adapter, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from plait.search.stored import StudyObjective
from plait.tracking import JobRecord
from plait_dashboards.style import GREEN, MARGIN, OUTCOME_COLOUR, OUTCOME_MARKER, figure, say
from plait_dashboards.sweep import OUTCOMES, Sweep, outcome

SECONDS = "device-seconds"


def seconds_by_outcome(records: Sequence[JobRecord]) -> dict[str, float]:
    """Device-seconds of useful, pruned, failed and not yet ended jobs."""
    return {how: sum(item.device_seconds for item in records if outcome(item) == how) for how in OUTCOMES}


def device_seconds(sweep: Sweep) -> go.Figure:
    """By outcome on the left; by adapter, dearest first, on the right."""
    totals = {how: value for how, value in seconds_by_outcome(sweep.records).items() if value > 0}
    if not totals:
        return say(figure(), "No device-seconds have been measured yet.")
    whole = sum(totals.values())
    made = make_subplots(1, 2, column_widths=[0.28, 0.72], horizontal_spacing=0.11)
    made.update_layout(
        template=None, height=420, margin=MARGIN, bargap=0.05, legend={"orientation": "h", "y": 1.12}
    )
    ordered = sorted(sweep.records, key=lambda item: -item.device_seconds)
    for how, total in totals.items():
        colour = {"color": OUTCOME_COLOUR[how], "line": {"width": 0}}
        made.add_bar(
            row=1,
            col=1,
            x=[how],
            y=[total],
            text=[f"{total:,.0f} s<br>{total / whole:.0%}"],
            marker=colour,
            showlegend=False,
            hovertemplate="%{x}: %{y:.1f} device-seconds<extra></extra>",
        )
        mine = [(at, item) for at, item in enumerate(ordered, 1) if outcome(item) == how]
        made.add_bar(
            row=1,
            col=2,
            x=[at for at, _ in mine],
            y=[round(item.device_seconds, 3) for _, item in mine],
            customdata=[[item.trial, item.step] for _, item in mine],
            marker=colour,
            name=f"{how} ({len(mine)})",
            hovertemplate="trial %{customdata[0]}: %{y:.1f} device-seconds, %{customdata[1]} steps"
            "<extra>" + how + "</extra>",
        )
    made.update_xaxes(title={"text": "outcome"}, row=1, col=1)
    made.update_yaxes(title={"text": "device-seconds (s)"}, rangemode="tozero", row=1, col=1)
    made.update_xaxes(title={"text": "adapters, dearest first"}, row=1, col=2)
    made.update_yaxes(title={"text": "device-seconds (s)"}, rangemode="tozero", row=1, col=2)
    if len(ordered) <= 20:
        names = [f"trial {item.trial}" for item in ordered]
        made.update_xaxes(tickvals=list(range(1, len(names) + 1)), ticktext=names, row=1, col=2)
    return made


def pareto_front(points: Sequence[tuple[float, float]], directions: tuple[str, str]) -> list[int]:
    """Places of the points that no other beats in one figure without being worse in the other, by the first
    figure. Of equal points the first stands."""
    signs = [1.0 if direction == "minimize" else -1.0 for direction in directions]
    keyed = sorted((signs[0] * x, signs[1] * y, at) for at, (x, y) in enumerate(points))
    front, best = [], float("inf")
    for _, second, at in keyed:
        if second < best:
            front.append(at)
            best = second
    return front


def pareto_axes(sweep: Sweep) -> tuple[StudyObjective, StudyObjective]:
    """What is set against what: the search's first two objectives, or the only one and its cost."""
    if len(sweep.objectives) >= 2:
        return sweep.objectives[1], sweep.objectives[0]
    scored = [item for item in sweep.records if item.objective is not None]
    cost = StudyObjective(SECONDS, "minimize", {item.trial: item.device_seconds for item in scored})
    values = {item.trial: float(item.objective) for item in scored if item.objective is not None}
    return cost, StudyObjective(sweep.metric or "objective", sweep.direction, values)


def pareto(sweep: Sweep) -> go.Figure:
    """Two figures of every adapter against each other, with the front of those that none beats in both."""
    across, up = pareto_axes(sweep)
    shown = [item for item in sweep.records if item.trial in across.values and item.trial in up.values]
    if not shown:
        return say(figure(), "No adapter has an objective yet.")
    points = [(across.values[item.trial], up.values[item.trial]) for item in shown]
    complete = [at for at, item in enumerate(shown) if outcome(item) == OUTCOMES[0] and item.feasible]
    front = [
        complete[at] for at in pareto_front([points[at] for at in complete], (across.direction, up.direction))
    ]
    made = figure(xaxis={"title": {"text": axis_title(across)}}, yaxis={"title": {"text": axis_title(up)}})
    for how in OUTCOMES:
        mine = [at for at, item in enumerate(shown) if outcome(item) == how]
        if mine:
            made.add_scatter(
                x=[points[at][0] for at in mine],
                y=[points[at][1] for at in mine],
                customdata=[shown[at].trial for at in mine],
                mode="markers",
                marker={
                    "color": OUTCOME_COLOUR[how],
                    "symbol": OUTCOME_MARKER[how],
                    "size": 8,
                    "opacity": 0.7,
                },
                name=f"{how} ({len(mine)})",
                hovertemplate="trial %{customdata}<br>%{x:.4g}, %{y:.4g}<extra>" + how + "</extra>",
            )
    made.add_scatter(
        x=[points[at][0] for at in front],
        y=[points[at][1] for at in front],
        customdata=[shown[at].trial for at in front],
        mode="lines+markers",
        line={"color": GREEN, "width": 2, "shape": "hv" if across.direction == "minimize" else "vh"},
        marker={"size": 11, "symbol": "circle-open", "line": {"width": 2}},
        name=f"Pareto front ({len(front)})",
        hovertemplate="trial %{customdata}<br>%{x:.4g}, %{y:.4g}<extra>Pareto front</extra>",
    )
    return made


def axis_title(objective: StudyObjective) -> str:
    """Name, unit where it has one, and which way is better."""
    unit = " (s)" if objective.name.endswith("seconds") else ""
    return f"{objective.name}{unit}, {'lower' if objective.direction == 'minimize' else 'higher'} is better"
