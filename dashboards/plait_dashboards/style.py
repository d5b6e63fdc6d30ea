"""Colours and axes that all figures share, and the two themes that the page chooses from.

The colours are those of Okabe and Ito (2008), which people with any common colour vision can distinguish; all
of them are visible on a white and on a dark background. The meaning of a colour is also shown by a marker, a
dash or a word.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from plait_dashboards.sweep import FAILED, INFEASIBLE, OPEN, PRUNED, STOPPED, USEFUL

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY = "#CC79A7", "#56B4E9", "#8A8A8A"
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
DASHES = ("solid", "dash", "dot")
OUTCOME_COLOUR = {
    USEFUL: BLUE,
    PRUNED: ORANGE,
    STOPPED: PURPLE,
    INFEASIBLE: SKY,
    FAILED: RED,
    OPEN: GREY,
}
OUTCOME_MARKER = {
    USEFUL: "circle",
    PRUNED: "x",
    STOPPED: "cross",
    INFEASIBLE: "cross-open",
    FAILED: "diamond-open",
    OPEN: "square-open",
}
FAINT = "rgba(138, 138, 138, 0.25)"
BAND = "rgba(138, 138, 138, 0.22)"
SCALE: list[tuple[float, str]] = [(0.0, SKY), (0.5, "#9E8FB2"), (1.0, ORANGE)]  # low to high
MARGIN = {"l": 70, "r": 20, "t": 20, "b": 60}
HEIGHT = 440


def faded(colour: str, count: int) -> str:
    """A colour so transparent that ``count`` lines of it over each other do not hide what is below."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {min(0.3, max(0.06, 12 / count)):.2f})"


def figure(height: int = HEIGHT, **layout: Any) -> go.Figure:
    """An empty figure without a theme."""
    made = go.Figure()
    made.update_layout(
        template=None,
        height=height,
        margin=MARGIN,
        hovermode="closest",
        legend={"groupclick": "toggleitem", "itemsizing": "constant"},
    )
    made.update_layout(**layout)
    return made


def say(made: go.Figure, text: str) -> go.Figure:
    """The figure with a text in place of missing content."""
    made.update_layout(height=120, xaxis={"visible": False}, yaxis={"visible": False})
    made.add_annotation(text=text, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")
    return made


def line_style(at: int) -> dict[str, Any]:
    """Colour and dash of the line with an index; eighteen differ."""
    return {
        "color": COLOURS[at % len(COLOURS)],
        "dash": DASHES[at // len(COLOURS) % len(DASHES)],
        "width": 2,
    }


def themes() -> dict[str, Any]:
    """Plotly templates by the two values of CSS's prefers-color-scheme."""
    return {
        "light": _theme("#222222", "#FFFFFF", "#E3E3E3", "#F3F3F3"),
        "dark": _theme("#E6E6E6", "#161616", "#3A3A3A", "#262626"),
    }


def _theme(ink: str, ground: str, grid: str, head: str) -> dict[str, Any]:
    axis = {"gridcolor": grid, "linecolor": grid, "zerolinecolor": grid, "automargin": True}
    cells = {"font": {"color": ink}, "line": {"color": grid}, "align": "left"}
    return {
        "layout": {
            "paper_bgcolor": ground,
            "plot_bgcolor": ground,
            "font": {"color": ink, "family": "system-ui, sans-serif", "size": 13},
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {"bgcolor": head, "bordercolor": grid, "font": {"color": ink}},
        },
        "data": {
            "table": [
                {"header": cells | {"fill": {"color": head}}, "cells": cells | {"fill": {"color": ground}}}
            ],
            "parcoords": [
                {"labelfont": {"color": ink}, "tickfont": {"color": ink}, "rangefont": {"color": ink}}
            ],
        },
    }
