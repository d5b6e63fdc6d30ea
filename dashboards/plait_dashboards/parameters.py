"""What the search found about its keys: parallel coordinates and importance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from plait.core.rungs import Share
from plait.tracking.leaderboard import JobRecord
from plait_dashboards.importance import METHOD
from plait_dashboards.style import BLUE, GREY, SCALE, figure, say
from plait_dashboards.sweep import OUTCOMES, Sweep, outcome, short_names

LOG_RATIO = 10.0  # largest over smallest value from which on a key is shown by its logarithm
MOST_TICKS = 8
COLOUR_MARKS = 6


@dataclass(frozen=True, slots=True)
class Axis:
    """One vertical axis: where each adapter crosses it, and its ticks; without ticks, Plotly chooses them."""

    label: str
    places: tuple[float, ...]
    tick_places: tuple[float, ...] = ()
    tick_texts: tuple[str, ...] = ()

    def dimension(self) -> dict[str, Any]:
        """The axis in Plotly's form."""
        made: dict[str, Any] = {"label": self.label, "values": list(self.places)}
        if self.tick_places:
            made |= {"tickvals": list(self.tick_places), "ticktext": list(self.tick_texts)}
        return made


def axis_of(label: str, values: Sequence[Any]) -> Axis:
    """An axis for the values of one key: numbers by size, or by logarithm if their range is large; other
    values, and None among numbers, by name."""
    numbers = [
        value
        for value in values
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    ]
    if len(numbers) < len(values):
        texts = sorted({str(value) for value in values})
        place = {text: float(at) for at, text in enumerate(texts)}
        return Axis(label, tuple(place[str(value)] for value in values), tuple(place.values()), tuple(texts))
    different = sorted(set(numbers))
    spread = different[0] > 0 and different[-1] / different[0] >= LOG_RATIO
    if not spread and len(different) > MOST_TICKS:
        return Axis(label, tuple(float(value) for value in numbers))
    marks = different if len(different) <= MOST_TICKS else decades(different[0], different[-1])
    at = math.log10 if spread else float
    texts = [f"{mark:.3g}" for mark in marks]
    return Axis(label, tuple(at(value) for value in numbers), tuple(at(mark) for mark in marks), tuple(texts))


def decades(low: float, high: float) -> list[float]:
    """Powers of ten within the bounds, and the bounds themselves."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    between = [10.0**power for power in range(first, last + 1)]
    return sorted({low, high, *(mark for mark in between if low * 1.5 < mark < high / 1.5)})


def scored(sweep: Sweep) -> list[JobRecord]:
    """The adapters that have every objective."""
    further = max(len(sweep.objectives) - 1, 0)
    return [item for item in sweep.records if item.objective is not None and len(item.others) >= further]


def parallel_coordinates(sweep: Sweep) -> go.Figure:
    """One line per adapter across the searched keys to its objectives, coloured by the first."""
    shown = scored(sweep)
    keys = short_names(sweep.searched)
    if len(shown) < 2 or not keys:
        return say(
            figure(), "This figure needs two adapters with an objective and a key in which they differ."
        )
    axes = [axis_of(word, [item.parameters.get(key) for item in shown]) for key, word in keys.items()]
    if len({outcome(item) for item in shown}) > 1:
        present = [how for how in OUTCOMES if any(outcome(item) == how for item in shown)]
        places = tuple(float(present.index(outcome(item))) for item in shown)
        axes.append(Axis("outcome", places, tuple(map(float, range(len(present)))), tuple(present)))
    for at, each in enumerate(sweep.objectives[1:]):
        if each.name not in keys:
            axes.append(axis_of(each.name, [item.others[at] for item in shown]))
    objective = [float(item.objective) for item in shown if item.objective is not None]
    axes.append(Axis(sweep.metric, tuple(objective)))
    made = figure(height=460, margin={"l": 80, "r": 80, "t": 60, "b": 40})
    made.add_parcoords(
        dimensions=[axis.dimension() for axis in axes], line=_coloured(objective, sweep.direction)
    )
    return made


def _coloured(objective: Sequence[float], direction: str) -> dict[str, Any]:
    """Colours by objective. Plotly draws lines with larger values on top, so the values say how good each one
    is."""
    sign = -1.0 if direction == "minimize" else 1.0
    best, worst = colour_range([-sign * value for value in objective])
    marks = [-worst + (worst - best) * at / (COLOUR_MARKS - 1) for at in range(COLOUR_MARKS)]
    return {
        "color": [sign * value for value in objective],
        "colorscale": [[1.0 - place, colour] for place, colour in reversed(SCALE)],
        "cmin": -worst,
        "cmax": -best,
        "showscale": True,
        "colorbar": {
            "thickness": 12,
            "x": 1.04,
            "tickvals": marks,
            "ticktext": [f"{sign * mark:.3g}" for mark in marks],
        },
    }


def colour_range(badness: Sequence[float]) -> tuple[float, float]:
    """From the best to the worst, without the worst tenth, because one bad adapter must not use up all
    colours."""
    ordered = sorted(badness)
    return ordered[0], ordered[min(math.ceil(0.9 * (len(ordered) - 1)), len(ordered) - 1)]


def importance(sweep: Sweep) -> go.Figure:
    """The importance of each searched key for the objective."""
    found = sweep.importance
    if not found.shares:
        return say(figure(), found.trouble)
    keys = list(found.shares)[::-1]
    made = figure(
        height=120 + 34 * len(keys),
        xaxis={
            "title": {"text": f"share of importance ({METHOD}; all keys add up to 1)"},
            "rangemode": "tozero",
        },
        yaxis={"title": {"text": "config key"}},
        showlegend=False,
    )
    made.add_bar(
        x=[found.shares[key] for key in keys],
        y=keys,
        orientation="h",
        text=[f"{found.shares[key]:.2f}" for key in keys],
        textposition="outside",
        cliponaxis=False,
        marker={"color": GREY if found.few else BLUE},
        hovertemplate="%{y}: %{x:.3f}<extra></extra>",
    )
    return made


def importance_note(sweep: Sweep) -> str:
    """How reliable the shares are."""
    found = sweep.importance
    if not found.shares:
        return ""
    said = f"Estimated from the measured objectives of {found.trials} finished trials."
    if found.step:
        shares = isinstance(found.step, Share)
        when = f"after {found.step} of their steps" if shares else f"at step {found.step}"
        said = (
            f"Estimated from the objective of {found.trials} trials {when}, including those that were "
            "stopped early."
        )
    if found.few:
        said += " With so few trials this is only a hint; further trials may reverse the order."
    return said
