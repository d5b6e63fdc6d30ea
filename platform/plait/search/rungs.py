"""Rungs: where they are, the trials that are compared at them, and the table of measured values.

Pure functions and plain data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from plait.core.errors import ConfigError, choices
from plait.core.objectives import MINIMISE, Objective
from plait.core.rungs import PARTS, Share, Unit, step_of
from plait.core.settings import SearchSettings, StoppingSettings
from plait.core.space import as_written
from plait.tracking import names
from plait.utils.counts import counted

SHARE = 8  # the first rung, and the distance of evenly spaced ones, is 1/SHARE of the budget by default

# Metrics that are measured at every rung.
RUNG_METRICS = (
    names.EVAL_LOSS,
    names.EVAL_ACCURACY,
    names.TRAIN_LOSS,
    names.TRAIN_GRAD_NORM,
    names.TRAIN_TOKENS,
    names.THROUGHPUT,
    names.DEVICE_SECONDS,
)
LOSSES = (names.EVAL_LOSS, names.TRAIN_LOSS)


def rung_metric(search: SearchSettings) -> Objective:
    """The metric by which trials are compared at a search's rungs, and its direction.

    Raises:
        ConfigError: the metric is not measured at rungs, or a divergence factor makes no sense for it.
    """
    stopping = search.stopping
    metric = stopping.metric or search.objectives[0].metric
    own = next((each for each in search.objectives if each.metric == metric), Objective.usual(metric))
    if metric not in RUNG_METRICS:
        raise ConfigError(
            f"search.stopping.metric={metric}",
            f"The metrics at rungs are {choices(RUNG_METRICS)}.",
            "Set search.stopping.metric to one of them.",
        )
    direction = stopping.direction or own.direction
    if stopping.divergence is not None and not (metric in LOSSES and direction == MINIMISE):
        raise ConfigError(
            f"search.stopping.divergence={stopping.divergence} with metric {metric}",
            "Divergence can only be detected in a loss that is minimised.",
            f"Leave it out, or set search.stopping.metric={LOSSES[0]}.",
        )
    return Objective(metric, direction)


def describe_metric(search: SearchSettings) -> str:
    """What is said at the start where one of several objectives decides at rungs without being named."""
    stopping = search.stopping
    if len(search.objectives) == 1 or stopping.metric is not None or not stopping.active:
        return ""
    return (
        f"search/stopping={stopping.kind} goes by {search.objectives[0].metric} alone, the first objective: "
        "search.stopping.metric names another, search/stopping=none ends no trial early."
    )


UNITS: Mapping[Unit, str] = {"steps": "optimiser steps", "shares": "shares of each trial's own steps"}


def unit_of(
    stopping: StoppingSettings, budgets: Collection[int], keep: Callable[[Unit], Unit] = lambda unit: unit
) -> Unit:
    """What the rungs count. If the settings leave it open, it is the study's unit; in a new one, shares if
    the budgets differ: after equally many steps a larger batch has seen more samples.

    Args:
        budgets: optimiser steps of the jobs.
        keep: returns the study's unit, or else stores the given one.

    Raises:
        ConfigError: the settings give rungs in the other unit than the study's.
    """
    differ = not stopping.placed and min(budgets) < max(budgets)
    wanted: Unit = "shares" if stopping.by_share or differ else "steps"
    unit = keep(wanted)
    if stopping.placed and unit != wanted:
        given = {key: getattr(stopping, key) for key in ("rungs", "every", "min_steps", "max_steps")}
        key, value = next((key, value) for key, value in given.items() if value is not None)
        raise ConfigError(
            f"search.stopping.{key}={as_written(list(value) if key == 'rungs' else value)}",
            f"The values and rungs of this search count {UNITS[unit]}, from its start to its end.",
            f"Give the rungs as {UNITS[unit]}, choose another search.name, or start again with "
            "search.fresh=true.",
        )
    return unit


def place_rungs(
    stopping: StoppingSettings, budgets: Collection[int], unit: Unit, *, geometric: bool
) -> tuple[int, ...]:
    """The rungs, ascending.

    Args:
        budgets: optimiser steps of the jobs.
        unit: what the rungs count, from :func:`unit_of`.
        geometric: if the settings leave it open, each rung is at eta times the previous one; otherwise they
            are evenly spaced.

    Raises:
        ConfigError: a rung is not within the shortest budget.
    """
    budget = min(budgets)
    last = min(budget - 1, stopping.max_steps or budget)
    key, given, rungs = _rungs_of(stopping, budget, last, unit, geometric=geometric)
    wrong = not rungs or step_of(rungs[-1], budget) >= budget
    for name in (key, "max_steps"):
        value = given if name == key else (stopping.max_steps or 0)
        if wrong or value > budget:
            raise ConfigError(
                f"search.stopping.{name}={value} with a budget of {counted(budget, 'step')}",
                "A rung must come after the first step and before the last step of a job.",
                "Set earlier rungs, or a longer budget (train.steps).",
            )
    if unit == "steps" or stopping.rungs is not None:
        return rungs
    return tuple(Share(PARTS * step // budget) for step in rungs)


def _rungs_of(
    stopping: StoppingSettings, budget: int, last: int, unit: Unit, *, geometric: bool
) -> tuple[str, float, tuple[int, ...]]:
    """The key that places the rungs, its value, and the rungs of a job of this budget."""
    share = max(1, -(-budget // SHARE))
    if stopping.rungs is not None:
        read = Share.of if unit == "shares" else int
        return "rungs", max(stopping.rungs, default=0), tuple(sorted(set(map(read, stopping.rungs))))
    if stopping.every is not None or not geometric:
        first = stopping.every or share
        return "every", first, tuple(range(first, last + 1, first))
    first = stopping.min_steps or share
    return "min_steps", first, tuple(_powers(first, stopping.eta, last))


def describe_rungs(
    stopping: StoppingSettings, budgets: Collection[int], unit: Unit, rungs: Sequence[int]
) -> list[str]:
    """What is said at the start: where rungs are if they were left open and are shares, what a pruner's steps
    are then, and whether trials of different budgets are compared after equally many steps."""
    least, most = min(budgets), max(budgets)
    if not stopping.active or (unit == "steps" and least == most):
        return []
    have = f"trials have {least:,} to {counted(most, 'step')}"
    if unit == "steps":
        return [
            f"Rungs count optimiser steps, and {have}: that favours large batches. In a new search, "
            f"search.stopping.rungs=[0.125,0.25,0.5] compares at {UNITS['shares']}."
        ]
    places = f"Rungs are at {', '.join(map(str, rungs))} of each trial's own steps"
    said = [] if stopping.placed else [f"{places}, because {have}." if least < most else f"{places}."]
    if stopping.kind == "optuna":
        said += [
            f"Options of search.stopping.pruner={stopping.pruner} that count steps count ten-thousandths of "
            f"each trial's own ({PARTS // 4:,} is a quarter of a trial)."
        ]
    return said


def _powers(first: int, eta: int, last: int) -> Iterable[int]:
    step = first
    while step <= last:
        yield step
        step *= eta


@dataclass(frozen=True, slots=True)
class Cohort:
    """Consecutive trials that are compared with each other, and the rungs at which this happens."""

    first: int
    size: int
    rungs: tuple[int, ...]

    @property
    def numbers(self) -> range:
        """The numbers of its trials, whether they exist yet or not."""
        return range(self.first, self.first + self.size)

    def __str__(self) -> str:
        return f"trials {self.first} to {self.first + self.size - 1}"


@dataclass(frozen=True, slots=True)
class EqualCohorts:
    """Cohorts of one size, all with the same rungs."""

    size: int
    rungs: tuple[int, ...]

    def cohort(self, number: int) -> Cohort:
        """The cohort of trial ``number``."""
        return Cohort(number // self.size * self.size, self.size, self.rungs)


class Brackets:
    """Hyperband's cohorts (Li et al., JMLR 18 (185), 2018, algorithm 1), one bracket after another, repeated.

    With R rungs, bracket s from R down to 0 has ⌈(R + 1) / (s + 1) · eta^s⌉ trials and the last s rungs: the
    later a bracket first stops trials, the fewer it has.
    """

    def __init__(self, rungs: Sequence[int], eta: int) -> None:
        most = len(rungs)
        self._brackets = [
            (math.ceil((most + 1) / (left + 1) * eta**left), tuple(rungs[most - left :]))
            for left in range(most, -1, -1)
        ]
        self._firsts = [0, *accumulate(size for size, _ in self._brackets)]

    def cohort(self, number: int) -> Cohort:
        """The cohort of trial ``number``."""
        rounds, offset = divmod(number, self._firsts[-1])
        index = max(i for i, first in enumerate(self._firsts[:-1]) if first <= offset)
        size, rungs = self._brackets[index]
        return Cohort(rounds * self._firsts[-1] + self._firsts[index], size, rungs)


Layout = EqualCohorts | Brackets  # assigns every trial to a cohort


def once_a_step(values: Mapping[int, float], steps: int) -> dict[int, float]:
    """Values by rung, ascending, one for each step, though a trial of few ``steps`` may reach several rungs
    with one: then by the last of them.

    Args:
        steps: the trial's, if rungs are shares of them; else PARTS.
    """
    last = {step_of(Share(rung), steps): rung for rung in sorted(values)}
    return {rung: values[rung] for rung in last.values()}


@dataclass(frozen=True, slots=True)
class RungRecord:
    """One trial's row of the rung table.

    Attributes:
        values: measured values, by rung.
        ended: whether the trial has ended, in any way.
        passed: the last rung that an asynchronous rule let it pass.
        violates: the rungs at which it broke a constraint.
        rejected: it was never trained because its settings break a constraint, so no rule counts it.
        steps: its optimiser steps, where rungs are shares of them and it has begun.
    """

    values: Mapping[int, float] = field(default_factory=dict)
    ended: bool = False
    passed: int = 0
    violates: frozenset[int] = frozenset()
    rejected: bool = False
    steps: int = PARTS

    def missing(self, rung: int) -> bool:
        """Whether its value at the rung may still come."""
        return rung not in self.values and not self.ended and not self.beyond(rung)

    def beyond(self, rung: int) -> bool:
        """Whether it has trained further than this rung."""
        return any(each > rung for each in self.values)

    def history(self, rungs: Iterable[int]) -> list[float]:
        """Its values at these rungs, ascending, one for each step."""
        values = {int(each): self.values[each] for each in rungs if each in self.values}
        return list(once_a_step(values, self.steps).values())


@dataclass(frozen=True, slots=True)
class RungTable:
    """The rows of all suggested trials, by number.

    ``expected`` is how many trials there will be; None: no more than these, even if numbers are missing in
    between.
    """

    records: Mapping[int, RungRecord]
    expected: int | None

    def among(self, numbers: range) -> set[int]:
        """The subset of these numbers that exist or will exist, except rejected ones."""
        if self.expected is None:
            found = {number for number in numbers if number in self.records}
        else:
            found = {number for number in numbers if number < self.expected}
        return {each for each in found if each not in self.records or not self.records[each].rejected}

    def describe(self, cohort: Cohort) -> str:
        """A cohort's numbers in words, and how many of them were never trained."""
        rejected = sum(self.records[each].rejected for each in cohort.numbers if each in self.records)
        return f"{cohort}, {rejected} of them infeasible" if rejected else str(cohort)

    def ranked(self, numbers: Iterable[int], rung: int, metric: Objective) -> list[int]:
        """The subset of these trials that was measured at the rung: those that satisfy every constraint
        first, then by value, ties by number."""
        found = {number: self.records[number] for number in numbers if number in self.records}
        measured = [number for number, record in found.items() if rung in record.values]
        return sorted(
            measured,
            key=lambda number: (
                rung in found[number].violates,
                metric.badness(found[number].values[rung]),
                number,
            ),
        )

    def coming(self, rung: int) -> int:
        """How many values at the rung may still come, from all trials that exist or will exist."""
        numbers = self.records.keys() | set(range(self.expected or 0))
        return sum(self.missing(number, rung) for number in numbers)

    def missing(self, number: int, rung: int) -> bool:
        """Whether a trial's value at the rung may still come, which is true for one that is not yet
        suggested."""
        record = self.records.get(number)
        return record is None or record.missing(rung)
