"""How the group was packed: each adapter's share of each step, and predictions against measurements."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from plait.core.messages import GroupStep
from plait.utils.counts import counted
from plait_dashboards.style import BLUE, GREY, MARGIN, ORANGE, SCALE, figure, say
from plait_dashboards.sweep import Floats, Sweep

BINS = 300  # columns of the timeline at most
NAMED_ROWS = 30  # adapters whose rows can all be labelled
MOST_POINTS = 4_000  # of a scatter
GIB = 2**30
BY_RULE = "memory (model's shape, upper bound)"
TO_PREDICT = "Run `plait profile` with the search's settings: later searches predict from its measurements."


@dataclass(frozen=True, slots=True)
class Timeline:
    """Steps gathered into columns.

    Attributes:
        first, last: iterations of each column.
        trials: trials of the rows.
        share: percent of the column's tokens, (rows, columns); NaN if the adapter was not in it.
        fill: percent of the microbatches' capacity that was used by tokens, by column.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    trials: tuple[int, ...]
    share: Floats
    fill: Floats


def timeline(steps: Sequence[GroupStep], trial_of: Mapping[str, int], bins: int = BINS) -> Timeline:
    """Combine steps into at most ``bins`` columns with equal numbers of steps; jobs without a trial are left
    out."""
    parts = [part for part in np.array_split(np.arange(len(steps)), min(bins, len(steps))) if len(part)]
    trials = sorted({trial_of[job] for step in steps for job in step.jobs if job in trial_of})
    row_of = {trial: row for row, trial in enumerate(trials)}
    tokens = np.zeros((len(trials), len(parts)))
    room, held = np.zeros(len(parts)), np.zeros(len(parts))
    for column, part in enumerate(parts):
        for at in part:
            step = steps[at]
            room[column] += step.microbatches * step.capacity
            held[column] += sum(step.job_tokens)
            for job, count in zip(step.jobs, step.job_tokens, strict=True):
                if job in trial_of:
                    tokens[row_of[trial_of[job]], column] += count
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(tokens > 0, 100 * tokens / held, np.nan)
        fill = np.where(room > 0, 100 * held / room, np.nan)
    first = tuple(steps[part[0]].iteration for part in parts)
    last = tuple(steps[part[-1]].iteration for part in parts)
    return Timeline(first, last, tuple(trials), share, fill)


def packing(sweep: Sweep) -> go.Figure:
    """The timeline above, the capacity in use below."""
    if not sweep.steps:
        return say(figure(), "No group steps were recorded for this search.")
    found = timeline(sweep.steps, {item.name: item.trial for item in sweep.records})
    rows = len(found.trials)
    height = min(max(120 + 22 * rows, 320), 760)
    made = make_subplots(2, 1, shared_xaxes=True, row_heights=[0.8, 0.2], vertical_spacing=0.05)
    made.update_layout(template=None, height=height + 120, margin=MARGIN, showlegend=False)
    spans = [
        str(first) if first == last else f"{first} to {last}"
        for first, last in zip(found.first, found.last, strict=True)
    ]
    made.add_heatmap(
        row=1,
        col=1,
        x=list(found.first),
        y=list(found.trials),
        z=found.share.astype(np.float32),
        colorscale=SCALE,
        zmin=0,
        zmax=colour_end(found.share),
        ygap=1 if rows <= NAMED_ROWS else 0,
        colorbar={"title": {"text": "% of the<br>step's tokens"}, "thickness": 12, "len": 0.8, "y": 0.6},
        hoverongaps=False,
        hovertemplate="trial %{y}, from iteration %{x}<br>%{z:.1f} % of the tokens<extra></extra>",
    )
    made.add_scatter(
        row=2,
        col=1,
        x=list(found.first),
        y=found.fill.astype(np.float32),
        customdata=spans,
        mode="lines",
        line={"color": BLUE, "width": 2},
        hovertemplate="iterations %{customdata}<br>%{y:.1f} % of the capacity<extra></extra>",
    )
    made.update_yaxes(title={"text": "trial"}, autorange="reversed", zeroline=False, row=1, col=1)
    if rows <= NAMED_ROWS:
        made.update_yaxes(tickvals=list(found.trials), row=1, col=1)
    made.update_xaxes(title={"text": "iteration of the group"}, row=2, col=1)
    made.update_yaxes(title={"text": "capacity<br>in use (%)"}, range=[0, 105], row=2, col=1)
    return made


def colour_end(share: Floats) -> float:
    """The share that has the last colour: a few columns with only the last adapters must not use up the
    colour scale."""
    there = share[np.isfinite(share)]
    return float(np.percentile(there, 95)) if len(there) else 100.0


def packing_note(sweep: Sweep) -> str:
    """A note on the number of steps in a column."""
    if not sweep.steps:
        return ""
    per_column = -(-len(sweep.steps) // BINS)
    each = "one iteration" if per_column == 1 else f"about {per_column} iterations"
    count = f"{len(sweep.steps):,} iterations of the group"
    if (last := max(step.iteration for step in sweep.steps)) > len(sweep.steps):
        count = f"{len(sweep.steps):,} of {last:,} iterations of the group, chosen evenly"
    return f"{count}. Each column is {each}. Padding is not counted."


@dataclass(frozen=True, slots=True)
class Pairs:
    """Predicted and measured values of the steps that have both."""

    iterations: tuple[int, ...]
    predicted: Floats
    measured: Floats

    @property
    def errors(self) -> Floats:
        """(predicted − measured) / measured, by step."""
        return (self.predicted - self.measured) / self.measured


def seconds_pairs(steps: Sequence[GroupStep]) -> Pairs:
    """Seconds of the steps."""
    return _pairs([(step.iteration, step.predicted_seconds, step.seconds) for step in steps])


def bytes_pairs(steps: Sequence[GroupStep], *, by_rule: bool = False) -> Pairs:
    """Peak memory of the steps, in GiB: of steps predicted by a fitted model or, with ``by_rule``, by the
    upper bound that is used before there is one."""
    chosen = [step for step in steps if step.bytes_by_rule == by_rule]
    found = _pairs([(step.iteration, step.predicted_bytes, step.peak_bytes) for step in chosen])
    return Pairs(found.iterations, found.predicted / GIB, found.measured / GIB)


def _pairs(rows: Sequence[tuple[int, float | None, float | None]]) -> Pairs:
    both = [(at, expected, real) for at, expected, real in rows if expected is not None and real]
    return Pairs(
        tuple(at for at, _, _ in both),
        np.array([expected for _, expected, _ in both], dtype=float),
        np.array([real for _, _, real in both], dtype=float),
    )


def predictions(sweep: Sweep) -> go.Figure:
    """Predicted against measured values: seconds of a step on the left, peak memory on the right. Predictions
    by rule are a separate trace, hidden at first if there is a fit, which they would squeeze into a
    corner."""
    fitted, ruled = bytes_pairs(sweep.steps), bytes_pairs(sweep.steps, by_rule=True)
    sides = (
        ("seconds of a step (s)", [(seconds_pairs(sweep.steps), "seconds", BLUE, "circle")]),
        (
            "peak memory (GiB)",
            [(ruled, BY_RULE, GREY, "circle-open"), (fitted, "memory (fitted model)", ORANGE, "circle")],
        ),
    )
    if not any(pairs.iterations for _, series in sides for pairs, *_ in series):
        return say(figure(), f"There are no predictions for the steps of this search. {TO_PREDICT}")
    made = make_subplots(1, 2, horizontal_spacing=0.12)
    legend = {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.12}
    shown = bool(ruled.iterations)
    made.update_layout(template=None, height=430, margin=MARGIN, showlegend=shown, legend=legend)
    for column, (label, series) in enumerate(sides, 1):
        made.update_xaxes(title={"text": f"predicted {label}"}, row=1, col=column)
        made.update_yaxes(title={"text": f"measured {label}"}, row=1, col=column)
        there = [each for each in series if each[0].iterations]
        if there:
            _add_diagonal(made, there[-1][0], column)
        else:
            measured = any(step.peak_bytes for step in sweep.steps) or column == 1
            _add_nothing(made, column, f"Not predicted. {TO_PREDICT}" if measured else "Not measured.")
        for pairs, name, colour, symbol in there:
            _add_pairs(made, pairs, column, name=name, marker={"color": colour, "symbol": symbol})
    if fitted.iterations:
        made.update_traces(visible="legendonly", selector={"name": BY_RULE})
    return made


def _add_nothing(made: go.Figure, column: int, text: str) -> None:
    made.add_annotation(
        text="<br>".join(textwrap.wrap(text, 40)),
        showarrow=False,
        x=0.5,
        y=0.5,
        xref="x domain",
        yref="y domain",
        row=1,
        col=column,
    )


def _add_diagonal(made: go.Figure, pairs: Pairs, column: int) -> None:
    low = float(min(pairs.predicted.min(), pairs.measured.min()))
    high = float(max(pairs.predicted.max(), pairs.measured.max()))
    made.add_scatter(
        row=1,
        col=column,
        x=[low, high],
        y=[low, high],
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
        line={"color": GREY, "dash": "dash", "width": 2},
    )


def _add_pairs(made: go.Figure, pairs: Pairs, column: int, *, name: str, marker: Mapping[str, str]) -> None:
    kept = np.unique(np.linspace(0, len(pairs.iterations) - 1, MOST_POINTS).round().astype(int))
    made.add_scatter(
        row=1,
        col=column,
        x=pairs.predicted[kept].astype(np.float32),
        y=pairs.measured[kept].astype(np.float32),
        customdata=np.array(pairs.iterations, dtype=np.int32)[kept],
        mode="markers",
        name=name,
        showlegend=column == 2,
        marker={"size": 6, "opacity": 0.75, **marker},
        hovertemplate="iteration %{customdata}<br>predicted %{x:.4g}, measured %{y:.4g}<extra></extra>",
    )


def predictions_note(sweep: Sweep) -> str:
    """The errors in words; those of the upper bound separately, because it is meant to be too high."""
    said, fitted = [], bytes_pairs(sweep.steps)
    for what, pairs in (("seconds", seconds_pairs(sweep.steps)), ("memory", fitted)):
        if pairs.iterations:
            size = np.abs(pairs.errors)
            said.append(
                f"{what}: off by {np.median(size):.1%} in the median step, by {np.percentile(size, 95):.1%} "
                f"at the 95th percentile ({counted(len(size), 'step')})"
            )
    ruled = bytes_pairs(sweep.steps, by_rule=True)
    if ruled.iterations:
        middle = np.median(ruled.predicted / ruled.measured)
        hidden = "; click in the legend to show them" if fitted.iterations else ""
        said.append(
            f"{BY_RULE}, before anything was fitted: {middle:.1f} times the measured value in the median "
            f"step ({counted(len(ruled.iterations), 'step')}{hidden})"
        )
    if not said:
        return ""
    equal = "On the dashed line, prediction and measurement are equal."
    return f"Error of the prediction: {'; '.join(said)}. {equal}"
