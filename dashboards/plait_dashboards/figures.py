"""All figures of a search, in the order of the page, each with its meaning and origin."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from plait.tracking import names
from plait_dashboards import costs, curves, packing, parameters, table
from plait_dashboards.sweep import OUTCOMES, USEFUL, Sweep, outcome

UNITS = {
    names.TRAIN_LOSS: "nats per labelled token",
    names.EVAL_LOSS: "nats per labelled token",
    names.EVAL_ACCURACY: "share of answers",
    names.TRAIN_GRAD_NORM: "before clipping",
    names.THROUGHPUT: "tokens per second",
}


@dataclass(frozen=True, slots=True)
class Shown:
    """One figure of the page.

    Attributes:
        key: file name and anchor.
        origin: "Measured", "Predicted and measured" or "Estimated": where the numbers come from.
        note: what to know when reading it.
    """

    key: str
    title: str
    origin: str
    note: str
    figure: go.Figure


def all_figures(sweep: Sweep) -> list[Shown]:
    """Every figure of a search; figures without data say so."""
    return [
        *(_curves(sweep, metric) for metric in drawn_metrics(sweep)),
        Shown("leaderboard", "Leaderboard", "Measured", _leaderboard_note(sweep), table.leaderboard(sweep)),
        Shown(
            "parallel-coordinates",
            "Parallel coordinates",
            "Measured",
            "One line per adapter, coloured by its objective. Drag along an axis to show only the lines that "
            f"cross it there.{_left_out(sweep)}",
            parameters.parallel_coordinates(sweep),
        ),
        Shown(
            "importance",
            "Importance of each hyperparameter",
            "Estimated",
            parameters.importance_note(sweep),
            parameters.importance(sweep),
        ),
        Shown("pareto", "Pareto front", "Measured", costs.pareto_note(sweep), costs.pareto(sweep)),
        *_costs(sweep),
    ]


def _costs(sweep: Sweep) -> list[Shown]:
    return [
        Shown(
            "device-seconds",
            "Device-seconds by outcome and by adapter",
            "Measured",
            "The time of a microbatch is divided among its adapters by tokens. Time that was spent on "
            "finished adapters is useful.",
            costs.device_seconds(sweep),
        ),
        Shown(
            "packing",
            "Timeline of the packing",
            "Measured",
            packing.packing_note(sweep),
            packing.packing(sweep),
        ),
        Shown(
            "predictions",
            "Predicted against measured time and memory",
            "Predicted and measured",
            packing.predictions_note(sweep),
            packing.predictions(sweep),
        ),
    ]


def _curves(sweep: Sweep, metric: str) -> Shown:
    drawn = len(sweep.curves[metric])
    longest = max(len(curve.steps) for curve in sweep.curves[metric].values())
    said = "Curves of pruned adapters are faded and end in a cross. "
    if drawn > curves.ALL_NAMED:
        said += f"The best {curves.TOP} are coloured, the other {drawn - curves.TOP} are faded. "
    if longest > curves.limit(sweep, metric):
        said += f"At most {curves.limit(sweep, metric)} points of each curve are drawn. "
    key = "curves-" + metric.replace("/", "-").replace("_", "-")
    figure = curves.learning_curves(sweep, metric, UNITS.get(metric, "as logged"))
    return Shown(key, f"Learning curves: {metric}", "Measured", said.strip(), figure)


def _leaderboard_note(sweep: Sweep) -> str:
    order = "lowest" if sweep.direction == "minimize" else "highest"
    counts = {how: sum(outcome(item) == how for item in sweep.records) for how in OUTCOMES}
    parts = [f"{count} {'finished' if how == USEFUL else how}" for how, count in counts.items() if count]
    rule = f"{order.capitalize()} {sweep.metric} first; finished adapters come before others"
    if len(sweep.objectives) > 1:
        rule = f"The Pareto front of {' and '.join(each.name for each in sweep.objectives)} first. {rule}"
    return f"{rule}: {', '.join(parts)}."


def _left_out(sweep: Sweep) -> str:
    missing = len(sweep.records) - len(parameters.scored(sweep))
    what = "values for all objectives" if len(sweep.objectives) > 1 else "an objective"
    return f" Adapters without {what} are not shown: {missing}." if missing else ""


def drawn_metrics(sweep: Sweep) -> list[str]:
    """Metrics that have a curve, not only a final value."""
    return [
        metric
        for metric, found in sweep.curves.items()
        if any(len(curve.steps) > 1 for curve in found.values())
    ]
