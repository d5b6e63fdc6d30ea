"""Learning curves of all adapters, the best in colour, the rest faded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from plait.tracking.leaderboard import JobRecord
from plait_dashboards.style import BAND, GREY, OUTCOME_COLOUR, OUTCOME_MARKER, faded, figure, line_style
from plait_dashboards.sweep import (
    FAILED,
    OUTCOMES,
    PRUNED,
    STOPPED,
    USEFUL,
    Curve,
    Floats,
    Integers,
    Sweep,
    outcome,
)

ALL_NAMED = 12  # adapters that can all have a colour and a name
TOP = 6  # that have them if there are more
BAND_FROM = 30  # adapters from which on the middle of them is shown as a band
POINTS = 60_000  # of all curves of one figure
LEAST_POINTS = 20  # of one curve
SVG_POINTS = 15_000  # more are rendered by WebGL


@dataclass(frozen=True, slots=True)
class Band:
    """The middle of many curves, by step: of the adapters that had a value there."""

    steps: Integers
    low: Floats
    middle: Floats
    high: Floats


def learning_curves(sweep: Sweep, metric: str, unit: str) -> go.Figure:
    """One metric of all adapters by optimiser step."""
    curves = {trial: thin(curve, limit(sweep, metric)) for trial, curve in sweep.curves[metric].items()}
    shown = [item for item in sweep.records if item.trial in curves]
    named = shown if len(shown) <= ALL_NAMED else shown[:TOP]
    others = shown[len(named) :]
    kind = "scattergl" if sum(len(curve.steps) for curve in curves.values()) > SVG_POINTS else "scatter"
    made = figure(
        height=480,
        xaxis={"title": {"text": "optimiser step"}},
        yaxis={"title": {"text": f"{metric} ({unit})"}},
    )
    made.update_yaxes(range=_range(curves.values()))
    if len(others) >= BAND_FROM:
        _add_band(made, band([curves[item.trial] for item in shown]))
    for how in (*(how for how in OUTCOMES if how != USEFUL), USEFUL):
        if mine := [item for item in others if outcome(item) == how]:
            _add_faded(made, mine, curves, kind, how)
    for at, item in enumerate(named):
        _add_named(made, item, curves[item.trial], at, kind)
    for how in (PRUNED, STOPPED, FAILED):
        _add_ends(made, [item for item in shown if outcome(item) == how], curves, how)
    return made


def limit(sweep: Sweep, metric: str) -> int:
    """Most points of one curve."""
    return max(POINTS // max(len(sweep.curves[metric]), 1), LEAST_POINTS)


def thin(curve: Curve, most: int) -> Curve:
    """The curve with at most ``most`` points, chosen evenly, including the first and the last."""
    count = len(curve.steps)
    if count <= most:
        return curve
    kept = np.unique(np.linspace(0, count - 1, most).round().astype(int))
    return Curve(curve.steps[kept], curve.values[kept])


def band(curves: Sequence[Curve]) -> Band:
    """The tenth, fiftieth and ninetieth percentile at each step that any curve has."""
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    table = np.full((len(curves), len(steps)), np.nan)
    for row, curve in enumerate(curves):
        inside = (steps >= curve.steps[0]) & (steps <= curve.steps[-1])
        table[row, inside] = np.interp(steps[inside], curve.steps, curve.values)
    low, middle, high = np.nanpercentile(table, (10, 50, 90), axis=0)
    return Band(steps, low, middle, high)


def joined(curves: Sequence[tuple[int, Curve]]) -> tuple[Integers, Floats, Integers]:
    """Many curves as one line with gaps: steps, values (NaN in the gaps) and trial numbers."""
    steps, values, trials = [], [], []
    for trial, curve in curves:
        steps.append(np.append(curve.steps, curve.steps[-1]))
        values.append(np.append(curve.values, np.nan))
        trials.append(np.full(len(curve.steps) + 1, trial))
    return (
        np.concatenate(steps).astype(np.int32),
        np.concatenate(values).astype(np.float32),
        np.concatenate(trials).astype(np.int32),
    )


def _range(curves: Iterable[Curve]) -> list[float]:
    """The range of almost all values, because one diverging curve must not flatten the others."""
    values = np.concatenate([curve.values for curve in curves])
    low, high = float(values.min()), float(np.percentile(values, 99.5))
    pad = max((high - low) * 0.06, 1e-6)
    return [low - pad, high + pad]


def _add_band(made: go.Figure, found: Band) -> None:
    steps = found.steps.astype(np.int32)
    low, high = found.low.astype(np.float32), found.high.astype(np.float32)
    for values, more in ((low, {}), (high, {"fill": "tonexty", "fillcolor": BAND})):
        made.add_scatter(
            x=steps,
            y=values,
            mode="lines",
            line={"width": 0, "color": GREY},
            hoverinfo="skip",
            name="10th to 90th percentile of those still training",
            showlegend=bool(more),
            legendgroup="band",
            **more,
        )
    made.add_scatter(
        x=steps,
        y=found.middle.astype(np.float32),
        mode="lines",
        line={"width": 3, "color": GREY},
        name="median of those still training",
    )


def _add_faded(
    made: go.Figure, others: Sequence[JobRecord], curves: Mapping[int, Curve], kind: str, how: str
) -> None:
    colour = GREY if how == USEFUL else OUTCOME_COLOUR[how]
    steps, values, trials = joined([(item.trial, curves[item.trial]) for item in others])
    made.add_trace(
        {
            "type": kind,
            "x": steps,
            "y": values,
            "customdata": trials,
            "mode": "lines",
            "line": {"width": 1, "color": faded(colour, len(others))},
            "name": f"{len(others)} others, {how}",
            "legendgroup": how,
            "showlegend": False,
            "hovertemplate": "trial %{customdata}<br>step %{x}: %{y:.4g}<extra></extra>",
        }
    )
    made.add_scatter(  # a line as thin as these would be invisible in the legend
        x=[None],
        y=[None],
        mode="lines",
        line={"width": 2, "color": colour},
        opacity=0.6,
        name=f"{len(others)} others, {how}",
        legendgroup=how,
    )


def _add_named(made: go.Figure, item: JobRecord, curve: Curve, at: int, kind: str) -> None:
    ended_early = outcome(item) in (PRUNED, STOPPED, FAILED)
    figure_of = "" if item.objective is None or ended_early else f": {item.objective:.4g}"
    made.add_trace(
        {
            "type": kind,
            "x": curve.steps.astype(np.int32),
            "y": curve.values.astype(np.float32),
            "mode": "lines" if len(curve.steps) > 1 else "markers",
            "line": line_style(at),
            "opacity": 0.4 if ended_early else 1.0,
            "name": f"trial {item.trial}{figure_of}" + (f" ({outcome(item)})" if ended_early else ""),
            "hovertemplate": f"trial {item.trial}<br>step %{{x}}: %{{y:.4g}}<extra></extra>",
        }
    )


def _add_ends(made: go.Figure, items: Sequence[JobRecord], curves: Mapping[int, Curve], how: str) -> None:
    """A marker where the curve of a pruned or failed adapter ends."""
    if not items:
        return
    made.add_scatter(
        x=[int(curves[item.trial].steps[-1]) for item in items],
        y=[float(curves[item.trial].values[-1]) for item in items],
        customdata=[[item.trial, item.reason] for item in items],
        mode="markers",
        marker={"symbol": OUTCOME_MARKER[how], "color": OUTCOME_COLOUR[how], "size": 7, "opacity": 0.8},
        name=f"{how} ({len(items)})",
        hovertemplate="trial %{customdata[0]} " + how + " at step %{x}<br>%{customdata[1]}<extra></extra>",
    )
