"""Learning curves of completely trained trials, with the cost of each part, and their file.

They are recorded once from real training (`plait bench record_curves`) and kept small, so that stopping rules
can be replayed on them quickly (``plait_bench.replay``).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from plait.config.fields import build
from plait.core.errors import DataError
from plait.core.space import Value

SCHEMA = 1
DIGITS = 6  # significant ones in the file


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation of one trial.

    Attributes:
        step: optimiser steps done.
        loss: validation loss.
        training_seconds: device time of the trial's training so far, without evaluations.
        evaluation_seconds: device time of this evaluation.
        train_loss: training loss of the last step.
        accuracy: of answers that were generated at this evaluation; None if none were.
    """

    step: int
    loss: float
    training_seconds: float
    evaluation_seconds: float
    train_loss: float
    accuracy: float | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """A trial from its first evaluation to its last, which is at the end of its budget."""

    parameters: Mapping[str, Value]
    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        steps = [point.step for point in self.points]
        seconds = [point.training_seconds for point in self.points]
        if not steps or steps[0] < 1 or steps != sorted(set(steps)) or seconds != sorted(seconds):
            raise DataError(
                f"a curve over the steps {steps}", "A curve needs points with increasing steps and seconds."
            )

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of its points."""
        return tuple(point.step for point in self.points)

    @property
    def last(self) -> Point:
        """The point at the end of the budget."""
        return self.points[-1]

    def at(self, step: int) -> Point | None:
        """The evaluation after ``step`` optimiser steps."""
        return next((point for point in self.points if point.step == step), None)

    def training_seconds(self, step: int) -> float:
        """Device time of the training of the first ``step`` steps; between two points in proportion."""
        index = bisect_left([point.step for point in self.points], step)
        after = self.points[index]
        before = self.points[index - 1] if index else None
        first, spent = (before.step, before.training_seconds) if before else (0, 0.0)
        share = (step - first) / (after.step - first)
        return spent + share * (after.training_seconds - spent)

    @property
    def seconds(self) -> float:
        """Device time of the whole trial, with one evaluation at its end."""
        return self.last.training_seconds + self.last.evaluation_seconds


@dataclass(frozen=True, slots=True)
class RecordedCurves:
    """The curves of all trials, and how they were recorded.

    Attributes:
        curves: of trials, which may have different budgets.
        facts: model, data, device, versions, commit.
    """

    curves: tuple[Curve, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.curves:
            raise DataError("recorded curves", "There must be at least one.")

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps after which the trial of the largest budget was evaluated, which is the last one."""
        return max((curve.steps for curve in self.curves), key=lambda steps: steps[-1])

    @property
    def best(self) -> float:
        """The lowest loss at the end of any trial."""
        return min(curve.last.loss for curve in self.curves)

    @property
    def seconds(self) -> float:
        """Device time of all trials, each evaluated only at its end."""
        return sum(curve.seconds for curve in self.curves)


def write_curves(recorded: RecordedCurves, path: Path) -> None:
    """Write as JSON, one line for each trial; it has steps of its own if its budget is another."""
    lines = []
    names = ["loss", "training_seconds", "evaluation_seconds", "train_loss"]
    if recorded.curves[0].last.accuracy is not None:
        names.append("accuracy")
    for curve in recorded.curves:
        columns = {name: [_rounded(asdict(point)[name]) for point in curve.points] for name in names}
        own = {} if curve.steps == recorded.steps else {"steps": curve.steps}
        lines.append(json.dumps({"parameters": dict(curve.parameters)} | own | columns))
    facts = ",\n".join(f"  {json.dumps(key)}: {json.dumps(fact)}" for key, fact in recorded.facts.items())
    trials = ",\n".join(f"  {line}" for line in lines)
    text = (
        f'{{\n "schema": {SCHEMA},\n "facts": {{\n{facts}\n }},\n'
        f' "steps": {json.dumps(recorded.steps)},\n "trials": [\n{trials}\n ]\n}}\n'
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def read_curves(path: Path) -> RecordedCurves:
    """Curves that :func:`write_curves` wrote.

    Raises:
        DataError: the file cannot be read, or is not such a record.
    """
    rule = (
        f"The file must contain recorded curves, schema {SCHEMA}, as `plait bench record_curves` writes them."
    )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise DataError(f"{path}: schema {content['schema']}", rule)
        curves = [_curve(item, item.get("steps", content["steps"])) for item in content["trials"]]
        return RecordedCurves(tuple(curves), content["facts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: {error}", rule) from error


def _curve(item: Mapping[str, Any], steps: Sequence[int]) -> Curve:
    columns = {name: values for name, values in item.items() if name not in ("parameters", "steps")}
    rows = zip(steps, *columns.values(), strict=True)
    points = [
        build(Point, dict(zip(("step", *columns), row, strict=True)), "trials[].points") for row in rows
    ]
    return Curve(item["parameters"], tuple(points))
