"""What one seed of ``search_vs_sequential`` measured, as a file keeps it, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite, isnan
from typing import Any

from plait.core.errors import PlaitError
from plait.core.settings import SearchSettings, StoppingSettings
from plait_bench.recorded_curves import Curve, Point
from plait_bench.replay import Replay, replay
from plait_bench.replay_study import Evaluation, reached
from plait_bench.search_vs_sequential_joint import JointSearch


@dataclass(frozen=True, slots=True)
class SeedResult:
    """Measured with one seed.

    Attributes:
        seed: of the order of the trials and of their data order, initial weights and dropout.
        joint: Plait's search.
        curves: PEFT's trials in the same order, all to their ends.
        facts: when, on what commit.
    """

    seed: int
    joint: JointSearch
    curves: tuple[Curve, ...]
    facts: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "seed": self.seed,
            "joint": asdict(self.joint),
            "curves": [asdict(curve) for curve in self.curves],
            "facts": dict(self.facts),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SeedResult:
        """From :meth:`to_json`."""
        joint = dict(data["joint"])
        joint["evaluations"] = tuple(Evaluation(**each) for each in joint["evaluations"])
        joint["names"] = tuple(joint["names"])
        curves = tuple(
            Curve(item["parameters"], tuple(Point(**point) for point in item["points"]))
            for item in data["curves"]
        )
        return cls(data["seed"], JointSearch(**joint), curves, data["facts"])


def largest_difference(result: SeedResult) -> tuple[float, str]:
    """|Plait's loss − PEFT's| over PEFT's, at its largest over all evaluations that both did; and where."""
    found = (-1.0, "nowhere")
    for each in result.joint.evaluations:
        theirs = result.curves[result.joint.names.index(each.job)].at(each.step)
        if theirs is not None:
            difference = abs(each.loss - theirs.loss) / theirs.loss
            if not difference <= found[0]:  # what is no number counts as the largest
                found = (difference, f"{each.job}, step {each.step}")
            if isnan(difference):
                break
    return found


def check_agreement(result: SeedResult, tolerance: float) -> float:
    """The largest difference of a loss between the sides.

    Raises:
        PlaitError: it is larger than ``tolerance``.
    """
    largest, where = largest_difference(result)
    if not 0 <= largest <= tolerance:
        raise PlaitError(
            f"{where}: the validation losses of Plait and PEFT differ by {100 * largest:.3g} %",
            f"At most {100 * tolerance:g} % may lie between them (bench.options.loss_tolerance).",
            "Without agreement no speed is reported: look for what changed on either side.",
        )
    return largest


@dataclass(frozen=True, slots=True)
class Side:
    """One way to search.

    Attributes:
        best: lowest loss of a trial that came to its end.
        seconds: of the whole search.
        reached: until an evaluation was at the loss that all sides reach, or below.
    """

    best: float
    seconds: float
    reached: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The sides with one seed.

    Attributes:
        target: the loss to be reached: the worst of the sides' best.
        joint: Plait.
        full: PEFT without a pruner.
        rungs: PEFT with the same rungs and the same decisions.
        pruner: PEFT with Optuna's SuccessiveHalvingPruner.
        any_order: ``full.reached``, on average over all orders of the trials.
    """

    target: float
    joint: Side
    full: Side
    rungs: Side
    pruner: Side
    any_order: float


def compare(result: SeedResult, search: SearchSettings) -> Comparison:
    """How long each way to search takes to the same loss.

    Raises:
        PlaitError: a side ended without a finished trial.
    """
    alone = replace(search, parallel=1)
    sides = {
        "full": _replayed(result, replace(alone, stopping=StoppingSettings())),
        "rungs": _replayed(result, alone),
        "pruner": _replayed(result, replace(alone, stopping=optunas_halving(search.stopping))),
    }
    best = {"joint": min(result.joint.finished.values(), default=inf)} | {
        name: side.best for name, side in sides.items()
    }
    target = max(best.values())
    if not isfinite(target):
        raise PlaitError(f"best losses {best}", "Each side must bring a trial to its end.")
    timelines = {"joint": (result.joint.evaluations, result.joint.seconds)}
    timelines |= {name: (side.evaluations, side.seconds) for name, side in sides.items()}
    found = {
        name: Side(best[name], seconds, _reached(evaluations, target))
        for name, (evaluations, seconds) in timelines.items()
    }
    return Comparison(target=target, any_order=any_order(result.curves, target), **found)


def optunas_halving(stopping: StoppingSettings) -> StoppingSettings:
    """Optuna's own successive halving at the same rungs: asked for each trial when it gets there."""
    assert stopping.rungs  # checked where the options are
    return StoppingSettings(
        kind="optuna",
        rungs=stopping.rungs,
        pruner="SuccessiveHalvingPruner",
        options={"min_resource": stopping.rungs[0], "reduction_factor": stopping.eta},
    )


def _replayed(result: SeedResult, search: SearchSettings) -> Replay:
    return replay(result.curves, search)


def _reached(evaluations: Sequence[Evaluation], target: float) -> float:
    seconds = reached(evaluations, target)
    assert seconds is not None  # the target is some trial's last loss on each side
    return seconds


def any_order(curves: Sequence[Curve], target: float) -> float:
    """Mean time until the first of the trials at ``target`` or below is over, over all orders.

    A trial that does not reach it is trained before the first of the k that do with probability 1 / (k + 1);
    the first one is each of the k alike.
    """
    good = [curve.seconds for curve in curves if curve.last.loss <= target]
    others = sum(curve.seconds for curve in curves if curve.last.loss > target)
    return sum(good) / len(good) + others / (len(good) + 1)
