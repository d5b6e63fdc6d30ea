"""The cost of a search: device-seconds by outcome and by adapter, and the Pareto front."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from plait.core.objectives import Objective, pareto_front
from plait.tracking.leaderboard import JobRecord
from plait_dashboards.parameters import Axis, axis_of
from plait_dashboards.style import FAINT, GREEN, HEIGHT, MARGIN, OUTCOME_COLOUR, OUTCOME_MARKER, figure, say
from plait_dashboards.sweep import OUTCOMES, Sweep, SweepObjective, outcome

SECONDS = "device-seconds"
MOST_PAIRED = 4  # most objectives that are shown in pairs; with five there would be ten panels
MOST_COLUMNS = 3


def seconds_by_outcome(records: Sequence[JobRecord]) -> dict[str, float]:
    """Device-seconds of useful, pruned, failed and not yet ended jobs."""
    return {how: sum(item.device_seconds for item in records if outcome(item) == how) for how in OUTCOMES}


def device_seconds(sweep: Sweep) -> go.Figure:
    """Device-seconds by outcome on the left; by adapter, most expensive first, on the right."""
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
            textposition="outside",
            cliponaxis=False,
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
    room = [0, 1.2 * max(totals.values())]  # space for the text above the bars
    made.update_yaxes(title={"text": "device-seconds (s)"}, range=room, row=1, col=1)
    made.update_xaxes(title={"text": "adapters, most expensive first"}, row=1, col=2)
    made.update_yaxes(title={"text": "device-seconds (s)"}, rangemode="tozero", row=1, col=2)
    if len(ordered) <= 20:
        names = [f"trial {item.trial}" for item in ordered]
        made.update_xaxes(tickvals=list(range(1, len(names) + 1)), ticktext=names, row=1, col=2)
    return made


def pareto_axes(sweep: Sweep) -> tuple[SweepObjective, ...]:
    """The quantities that are plotted against each other: the search's objectives (of two, the first is
    vertical), or a single objective and its cost."""
    if len(sweep.objectives) == 2:
        return sweep.objectives[1], sweep.objectives[0]
    if len(sweep.objectives) > 2:
        return sweep.objectives
    scored = [item for item in sweep.records if item.objective is not None]
    cost = SweepObjective(SECONDS, "minimize", {item.trial: item.device_seconds for item in scored})
    values = {item.trial: float(item.objective) for item in scored if item.objective is not None}
    return cost, SweepObjective(sweep.metric, sweep.direction, values)


@dataclass(frozen=True, slots=True)
class Scored:
    """The adapters that have a value on every axis.

    Attributes:
        points: their values, by axis.
        front: indices of the finished ones that satisfy every constraint and that no other dominates, best on
            the first axis first.
    """

    axes: tuple[SweepObjective, ...]
    records: tuple[JobRecord, ...]
    points: tuple[tuple[float, ...], ...]
    front: tuple[int, ...]


def scored(sweep: Sweep) -> Scored:
    """Adapters by the quantities of :func:`pareto_axes`."""
    axes = pareto_axes(sweep)
    shown = tuple(item for item in sweep.records if all(item.trial in axis.values for axis in axes))
    points = tuple(tuple(axis.values[item.trial] for axis in axes) for item in shown)
    complete = [at for at, item in enumerate(shown) if outcome(item) == OUTCOMES[0] and item.feasible]
    ways = [Objective(axis.name, axis.direction) for axis in axes]
    front = tuple(complete[at] for at in pareto_front([points[at] for at in complete], ways))
    return Scored(axes, shown, points, front)


def pareto(sweep: Sweep) -> go.Figure:
    """The adapters by the quantities of :func:`pareto_axes`, with the Pareto front: a panel for each pair, or
    parallel coordinates if there are too many pairs."""
    found = scored(sweep)
    if not found.records:
        return say(figure(), "No adapter has an objective yet.")
    if len(found.axes) > MOST_PAIRED:
        return _front_as_lines(found)
    pairs = list(itertools.combinations(range(len(found.axes)), 2))
    columns = min(len(pairs), MOST_COLUMNS)
    rows = -(-len(pairs) // columns)
    made = make_subplots(rows, columns, horizontal_spacing=0.09, vertical_spacing=0.2 / rows)
    legend = {"groupclick": "togglegroup", "itemsizing": "constant"}
    made.update_layout(template=None, height=HEIGHT, margin=MARGIN, hovermode="closest", legend=legend)
    if len(pairs) > 1:
        made.update_layout(height=340 * rows + 80, legend={"orientation": "h", "y": 1 + 0.12 / rows})
    for at, (across, up) in enumerate(pairs):
        _add_pair(made, found, (across, up), (at // columns + 1, at % columns + 1))
    return made


def _add_pair(made: go.Figure, found: Scored, pair: tuple[int, int], place: tuple[int, int]) -> None:
    """Add one panel; the first one has the legend. If there is only one pair, a line follows the front."""
    across, up = pair
    row, col = place
    made.update_xaxes(title={"text": axis_title(found.axes[across])}, row=row, col=col)
    made.update_yaxes(title={"text": axis_title(found.axes[up])}, row=row, col=col)
    for how in OUTCOMES:
        mine = [at for at, item in enumerate(found.records) if outcome(item) == how]
        if mine:
            marker = {"color": OUTCOME_COLOUR[how], "symbol": OUTCOME_MARKER[how], "size": 8, "opacity": 0.7}
            made.add_trace(
                _dots(found, pair, mine, f"{how} ({len(mine)})", how) | {"marker": marker, "mode": "markers"},
                row,
                col,
            )
    front = _dots(found, pair, found.front, f"Pareto front ({len(found.front)})", "Pareto front")
    front |= {
        "mode": "lines+markers" if len(found.axes) == 2 else "markers",
        # Horizontal first, from the best: a corner then claims no more than the previous adapter reached.
        "line": {"color": GREEN, "width": 2, "shape": "hv"},
        "marker": {"size": 11, "symbol": "circle-open", "color": GREEN, "line": {"width": 2}},
    }
    made.add_trace(front, row, col)
    if place != (1, 1):
        made.update_traces(showlegend=False, row=row, col=col)


def _dots(
    found: Scored, pair: tuple[int, int], places: Sequence[int], name: str, group: str
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": [found.points[at][pair[0]] for at in places],
        "y": [found.points[at][pair[1]] for at in places],
        "customdata": [found.records[at].trial for at in places],
        "name": name,
        "legendgroup": group,
        "hovertemplate": "trial %{customdata}<br>%{x:.4g}, %{y:.4g}<extra>" + group + "</extra>",
    }


def _front_as_lines(found: Scored) -> go.Figure:
    """One line per adapter across all objectives; those on the front in colour."""
    on_front = [float(at in found.front) for at in range(len(found.records))]
    axes = [axis_of(axis.name, [point[at] for point in found.points]) for at, axis in enumerate(found.axes)]
    axes.append(Axis("Pareto front", tuple(on_front), (0.0, 1.0), ("no", "yes")))
    made = figure(height=460, margin={"l": 80, "r": 80, "t": 60, "b": 40})
    made.add_parcoords(
        dimensions=[axis.dimension() for axis in axes],
        line={"color": on_front, "colorscale": [[0.0, FAINT], [1.0, GREEN]], "cmin": 0, "cmax": 1},
    )
    return made


def pareto_note(sweep: Sweep) -> str:
    """A note on the adapters of the front, and how to read the figure."""
    axes = pareto_axes(sweep)
    if len(axes) == 2:
        said = f"{axes[1].name} against {axes[0].name}"
        return f"{said}: the front has the finished adapters that no other adapter beats in both."
    shown = "each pair of objectives" if len(axes) <= MOST_PAIRED else "one line per adapter"
    return (
        f"{', '.join(axis.name for axis in axes)}; {shown}. The front has the finished adapters that no "
        "other adapter equals or beats in all objectives; in a plot of only two, such an adapter may "
        "look dominated."
    )


def axis_title(objective: SweepObjective) -> str:
    """Name, unit if it has one, and which way is better."""
    unit = " (s)" if objective.name.endswith("seconds") else ""
    return f"{objective.name}{unit}, {'lower' if objective.direction == 'minimize' else 'higher'} is better"
