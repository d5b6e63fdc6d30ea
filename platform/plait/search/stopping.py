"""Which trials end early: pure decisions over what has been measured at rungs.

A rule is asked about one trial at a rung, and answers from the table of all trials alone. Nothing is kept
between two questions, so a search that was killed decides the same when it goes on. Rules over cohorts wait
until every member has come to the rung or has ended: their answers do not depend on who came first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Literal, Protocol

from plait.core.settings import SearchSettings
from plait.search.rungs import Brackets, Judged, Layout, equal_cohorts, judged, rung_steps

Action = Literal["go", "wait", "stop", "fail"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a trial at a rung: it goes on, waits, is stopped, or has failed."""

    action: Action
    reason: str = ""


GO = Verdict("go")
WAIT = Verdict("wait")


@dataclass(frozen=True, slots=True)
class Record:
    """One trial as the study has it.

    Attributes:
        values: measured, by optimiser step.
        ended: whether it is over, whatever came of it.
        passed: the last rung past which an asynchronous rule let it.
    """

    values: Mapping[int, float] = field(default_factory=dict)
    ended: bool = False
    passed: int = 0

    def missing(self, rung: int) -> bool:
        """Whether its value at the rung may still come."""
        return rung not in self.values and not self.ended and not self.beyond(rung)

    def beyond(self, rung: int) -> bool:
        """Whether it has come further than this rung."""
        return any(step > rung for step in self.values)


@dataclass(frozen=True, slots=True)
class Table:
    """All trials that were drawn, by number; ``expected`` is how many there will be. None: no more than
    those, whatever waits between them."""

    records: Mapping[int, Record]
    expected: int | None

    def among(self, numbers: range) -> set[int]:
        """Those of these numbers that there are or will be."""
        if self.expected is None:
            return {number for number in numbers if number in self.records}
        return {number for number in numbers if number < self.expected}

    def coming(self, rung: int) -> int:
        """How many values at the rung may still come, of all trials that there are or will be."""
        numbers = self.records.keys() | set(range(self.expected or 0))
        return sum(self.missing(number, rung) for number in numbers)

    def missing(self, number: int, rung: int) -> bool:
        """Whether a trial's value at the rung may still come; that of one not yet drawn may."""
        record = self.records.get(number)
        return record is None or record.missing(rung)


class Rule(Protocol):
    """Judges trials at rungs."""

    @property
    def asynchronous(self) -> bool:
        """Whether its answers depend on the order of arrival, so that they must be kept."""

    def rungs(self, number: int, /) -> tuple[int, ...]:
        """Of a trial."""

    def verdict(self, number: int, step: int, table: Table) -> Verdict:
        """What becomes of a trial that stands at the rung after ``step`` optimiser steps."""


@dataclass(frozen=True, slots=True)
class CohortRule:
    """Compares whole cohorts.

    Attributes:
        layout: who is compared with whom.
        keep: of (badness, number), best first, of those measured, how many members there are, the rung and
            the table: those that go on.
    """

    layout: Layout
    judged: Judged
    keep: Callable[[list[tuple[float, int]], int, int, Table], set[int]]
    asynchronous: bool = False

    def rungs(self, number: int, /) -> tuple[int, ...]:
        """Of a trial."""
        return self.layout.cohort(number).rungs

    def verdict(self, number: int, step: int, table: Table) -> Verdict:
        """Replays the cohort's rungs up to this one; waits where one cannot be decided yet."""
        cohort = self.layout.cohort(number)
        members = table.among(cohort.numbers) | {number}
        for rung in (each for each in cohort.rungs if each <= step):
            if any(table.missing(member, rung) for member in members):
                return WAIT
            ranked = sorted(
                (self.judged.badness(table.records[member].values[rung]), member)
                for member in members
                if rung in table.records[member].values
            )
            # Who was beyond this rung before there were rungs has no value here, and is not in question.
            kept = {member for member in members if _unmeasured(table.records[member], rung)}
            kept |= self.keep(ranked, len(members), rung, table)
            if number not in kept:
                value = table.records[number].values.get(rung)
                place = 1 + [member for _, member in ranked].index(number) if value is not None else 0
                return Verdict(
                    "stop",
                    f"{self.judged.metric} {value:.6g} at rung {rung}: place {place} of {len(members)}, "
                    f"{len(kept)} go on ({cohort})"
                    if value is not None
                    else f"no {self.judged.metric} at rung {rung}",
                )
            members = kept
        return GO


def _unmeasured(record: Record, rung: int) -> bool:
    return rung not in record.values and record.beyond(rung)


def best_share(eta: int) -> Callable[[list[tuple[float, int]], int, int, Table], set[int]]:
    """Keeps the best 1/eta of a cohort, one at least; those that ended before the rung count as its worst."""

    def keep(ranked: list[tuple[float, int]], members: int, _rung: int, _table: Table) -> set[int]:
        return {number for _, number in ranked[: max(1, members // eta)]}

    return keep


def above_median(judged_by: Judged) -> Callable[[list[tuple[float, int]], int, int, Table], set[int]]:
    """The median rule (Golovin et al., KDD 2017, §3.2), within a cohort: a trial ends whose best value so far
    is worse than the median of the members' averages so far."""

    def keep(ranked: list[tuple[float, int]], _members: int, rung: int, table: Table) -> set[int]:
        histories = {
            number: [
                judged_by.badness(value)
                for step, value in table.records[number].values.items()
                if step <= rung
            ]
            for _, number in ranked
        }
        if not histories:
            return set()
        middle = median(fmean(values) for values in histories.values())
        return {number for number, values in histories.items() if min(values) <= middle}

    return keep


@dataclass(frozen=True, slots=True)
class AshaRule:
    """Asynchronous successive halving (Li et al., MLSys 2020): whoever is among the best 1/eta of those that
    have come to the rung so far goes on at once; the others wait for their turn.

    It ends whoever could not come among the best any more, were all that may still come worse.
    """

    steps: tuple[int, ...]
    eta: int
    judged: Judged
    asynchronous: bool = True

    def rungs(self, _number: int, /) -> tuple[int, ...]:
        """Of a trial: the same for all."""
        return self.steps

    def verdict(self, number: int, step: int, table: Table) -> Verdict:
        """From those at this rung so far."""
        record = table.records[number]
        if record.passed >= step or step not in record.values:
            return GO
        ranked = sorted(
            (self.judged.badness(each.values[step]), other)
            for other, each in table.records.items()
            if step in each.values
        )
        place = [other for _, other in ranked].index(number) + 1
        coming = table.coming(step)
        if place <= len(ranked) // self.eta or (not coming and place == 1):
            return GO
        if place > max(1, (len(ranked) + coming) // self.eta):
            value = record.values[step]
            return Verdict(
                "stop",
                f"{self.judged.metric} {value:.6g} at rung {step}: place {place} of {len(ranked)} so far",
            )
        return WAIT


@dataclass(frozen=True, slots=True)
class AloneRule:
    """Judges each trial by its own values.

    Attributes:
        steps: the rungs.
        stops: of the values at the rungs so far, oldest first: why it ends, or None.
    """

    steps: tuple[int, ...]
    stops: Callable[[list[float]], str | None]
    asynchronous: bool = False

    def rungs(self, _number: int, /) -> tuple[int, ...]:
        """Of a trial: the same for all."""
        return self.steps

    def verdict(self, number: int, step: int, table: Table) -> Verdict:
        """From the trial's own record."""
        values = table.records[number].values
        reason = self.stops([values[rung] for rung in self.steps if rung <= step and rung in values])
        return GO if reason is None else Verdict("stop", f"{reason} at rung {step}")


def impatient(judged_by: Judged, patience: int, min_delta: float) -> Callable[[list[float]], str | None]:
    """Stops after ``patience`` rungs in a row that were not better than the best before by ``min_delta``."""

    def stops(values: list[float]) -> str | None:
        best, since = float("inf"), 0
        for value in map(judged_by.badness, values):
            since = 0 if value < best - min_delta else since + 1
            best = min(best, value)
        return f"{judged_by.metric} has not improved for {since} rungs" if since >= patience else None

    return stops


def outside(metric: str, lower: float | None, upper: float | None) -> Callable[[list[float]], str | None]:
    """Stops where the last value is below ``lower`` or above ``upper``."""

    def stops(values: list[float]) -> str | None:
        last = values[-1] if values else None
        if last is not None and lower is not None and last < lower:
            return f"{metric} {last:.6g} is below {lower:g}"
        if last is not None and upper is not None and last > upper:
            return f"{metric} {last:.6g} is above {upper:g}"
        return None

    return stops


@dataclass(frozen=True, slots=True)
class AskedRule:
    """Leaves the answer to somebody else, who is asked about one trial after another: a pruner of Optuna."""

    steps: tuple[int, ...]
    prunes: Callable[[int], bool]
    name: str
    asynchronous: bool = True

    def rungs(self, _number: int, /) -> tuple[int, ...]:
        """Of a trial: the same for all."""
        return self.steps

    def verdict(self, number: int, step: int, table: Table) -> Verdict:
        """Asked once at each rung."""
        if table.records[number].passed >= step or not self.prunes(number):
            return GO
        return Verdict("stop", f"{self.name} at rung {step}")


@dataclass(frozen=True, slots=True)
class Divergence:
    """Fails a trial whose loss has risen beyond a factor of its best or first; asks ``rule`` otherwise."""

    rule: Rule
    metric: str
    factor: float
    start: bool

    @property
    def asynchronous(self) -> bool:
        """As the rule beneath."""
        return self.rule.asynchronous

    def rungs(self, number: int, /) -> tuple[int, ...]:
        """Of a trial."""
        return self.rule.rungs(number)

    def verdict(self, number: int, step: int, table: Table) -> Verdict:
        """From the trial's own record first."""
        values = table.records[number].values
        before = [values[rung] for rung in self.rungs(number) if rung < step and rung in values]
        if before and step in values:
            from_ = before[0] if self.start else min(before)
            if values[step] > self.factor * from_:
                whose = "first" if self.start else "best"
                return Verdict(
                    "fail",
                    f"diverged: {self.metric} {values[step]:.6g} at rung {step} is more than "
                    f"{self.factor:g} times its {whose}, {from_:.6g}",
                )
        return self.rule.verdict(number, step, table)


def make_rule(search: SearchSettings, budget: int, prunes: Callable[[int], bool]) -> Rule | None:
    """The rule that the settings ask for; None where nothing is stopped early.

    Args:
        search: its settings.
        budget: optimiser steps of the shortest job.
        prunes: asks Optuna's pruner about a trial.

    Raises:
        ConfigError: the metric is not measured at rungs, or a rung is not within the budget.
    """
    stopping = search.stopping
    if stopping.kind == "none":
        return None
    by, steps = judged(search), rung_steps(stopping, budget)
    rule = _make(search, by, steps, prunes)
    if stopping.divergence is None:
        return rule
    return Divergence(rule, by.metric, stopping.divergence, stopping.divergence_from == "start")


def _make(search: SearchSettings, by: Judged, steps: tuple[int, ...], prunes: Callable[[int], bool]) -> Rule:
    stopping = search.stopping
    match stopping.kind:
        case "successive_halving":
            return CohortRule(equal_cohorts(search, steps), by, best_share(stopping.eta))
        case "hyperband":
            return CohortRule(Brackets(steps, stopping.eta), by, best_share(stopping.eta))
        case "median":
            return CohortRule(equal_cohorts(search, steps), by, above_median(by))
        case "asha":
            return AshaRule(steps, stopping.eta, by)
        case "patience":
            return AloneRule(steps, impatient(by, stopping.patience, stopping.min_delta))
        case "threshold":
            return AloneRule(steps, outside(by.metric, stopping.lower, stopping.upper))
        case "divergence":
            return AloneRule(steps, lambda _: None)
        case "optuna":
            return AskedRule(steps, prunes, stopping.pruner)
    raise AssertionError(stopping.kind)  # StoppingSettings knows no other
