"""``plait bench replay/stopping``: rules that end trials early, on the recorded curves of a full grid."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import quantiles

from plait.config.fields import build
from plait.core.errors import ConfigError
from plait.core.figures import Figure, Report
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings, SearchSettings, StoppingSettings
from plait.utils.benchmarks import BENCHMARKS
from plait.utils.progress import part
from plait_bench.recorded_curves import RecordedCurves, read_curves
from plait_bench.replay import Replay, replay

TRACES = Path(__file__).parent / "traces"


@dataclass(frozen=True, slots=True)
class Options:
    """Of the benchmark.

    Attributes:
        curves: name of a record that comes with Plait, or a file.
        rules: settings of ``search.stopping`` by label.
        orders: how many random orders of the trials each rule is tried on.
        within: what a search may choose above the full grid's best loss, in percent.
        share: of the full grid's device time that it may take, in percent.
    """

    curves: str = "smollm2_gsm_symbolic.json"
    rules: dict[str, StoppingSettings] = field(default_factory=dict)
    orders: int = 100
    within: float = 1.0
    share: float = 25.0

    def __post_init__(self) -> None:
        if self.orders < 1:
            raise ConfigError(f"bench.options.orders={self.orders}", "It must be at least 1.")
        if not self.rules:
            raise ConfigError("bench.options.rules={}", "There must be at least one rule.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One search over the curves.

    Attributes:
        gap: of the best loss found above the full grid's best, in percent.
        share: of the full grid's device time, in percent.
        replay: all of it.
    """

    gap: float
    share: float
    replay: Replay


@BENCHMARKS.register("replay/stopping")
def run(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Search the recorded curves by every rule in many orders; ``jobs`` are not used.

    Raises:
        ConfigError: an unknown option, or a rung at which nothing was recorded.
        DataError: there is no such record.
    """
    del jobs
    asked = build(Options, options, "bench.options")
    recorded = read_curves(find_curves(asked.curves))
    figures = [
        Figure("full grid: best loss", recorded.best, "nats", "measured"),
        Figure("full grid: device time", recorded.seconds, "s", "measured", note="each evaluated at its end"),
    ]
    piece = part("replays", len(asked.rules))
    for label, rule in asked.rules.items():
        piece(label)
        search = replace(settings.search, stopping=rule)
        outcomes = [search_in_order(recorded, search, seed) for seed in range(asked.orders)]
        figures += _figures(label, outcomes, asked)
    return Report("replay/stopping", tuple(figures), _assumptions(settings.search, recorded, asked))


def find_curves(curves: str) -> Path:
    """A record that comes with Plait, by name, else a file."""
    shipped = TRACES / curves
    return shipped if shipped.is_file() else Path(curves).expanduser()


def search_in_order(recorded: RecordedCurves, search: SearchSettings, seed: int) -> Outcome:
    """Search the curves in a random order."""
    order = list(recorded.curves)
    random.Random(seed).shuffle(order)
    found = replay(order, search)
    gap, share = found.best / recorded.best - 1, found.seconds / recorded.seconds
    return Outcome(100 * gap, 100 * share, found)


def _figures(label: str, outcomes: Sequence[Outcome], options: Options) -> list[Figure]:
    good = sum(each.gap <= options.within and each.share <= options.share for each in outcomes)
    near = sum(each.gap <= options.within for each in outcomes)
    count = len(outcomes)
    return [
        _spread(f"{label}: device time", [each.share for each in outcomes], "% of the full grid's"),
        _spread(f"{label}: found above the best", [each.gap for each in outcomes], "%"),
        Figure(
            f"{label}: within {options.within:g} % at {options.share:g} % or less",
            100 * good / count,
            "% of orders",
            "simulated",
            note=f"within {options.within:g} % at any cost: {100 * near / count:.0f} %",
        ),
    ]


def _spread(name: str, values: Sequence[float], unit: str) -> Figure:
    """The median, with quartiles and extremes in the note."""
    first, middle, third = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    note = f"quartiles {first:.3g} and {third:.3g}; {min(values):.3g} to {max(values):.3g}"
    return Figure(name, middle, unit, "simulated", note=note)


def _assumptions(search: SearchSettings, recorded: RecordedCurves, options: Options) -> tuple[str, ...]:
    facts = recorded.facts
    machine = facts.get("machine", {})
    return (
        f"Medians over {options.orders} random orders of {len(recorded.curves)} trials, {search.parallel} at "
        "a time. Replays of measured curves through the real loop, study and rules; evaluations at rungs "
        "count, each as long as it took; parking and going on again are taken to cost nothing.",
        f"Curves recorded {facts.get('date', '')} on {machine.get('cpus', '?')} × "
        f"{machine.get('processor', '?')}, {facts.get('together', '?')} trials together, "
        f"{recorded.steps[-1]} steps each.",
    )
