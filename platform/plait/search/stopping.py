"""Stopping rules, which end trials early. Each is a pure decision from the rung table.

A rule decides about one trial at a rung, only from the table of all trials. It keeps no state between two
decisions, so a search that was killed decides the same when it resumes. Rules over cohorts wait until every
member has reached the rung or has ended, so their decisions do not depend on the order of arrival.

To add a rule, write a class with the two methods of :class:`Rule` and register it with ``RULES.add``, in this
module or in one that another package names in the entry-point group ``plait.stopping_rules``.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal, Protocol

from plait.config.fields import build
from plait.core.errors import ConfigError, SearchError, choices
from plait.core.objectives import Objective
from plait.core.rungs import Unit
from plait.core.settings import SearchSettings, StoppingSettings
from plait.core.space import as_written
from plait.search.rungs import (
    Brackets,
    EqualCohorts,
    Layout,
    RungTable,
    place_rungs,
    rung_metric,
    unit_of,
)
from plait.utils.registry import Registry

if TYPE_CHECKING:
    from optuna.pruners import BasePruner

OPTIONS = "search.stopping.options"
OF_EVERY_RULE = (  # keys of search.stopping; each rule defines its own options
    "kind",
    "metric",
    "direction",
    "rungs",
    "every",
    "max_steps",
    "divergence",
    "divergence_from",
    "options",
)

# ---- the definition of a rule ------------------------------------------------------------------------------

Action = Literal["continue", "wait", "stop", "fail"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What a rule decides about a trial at a rung."""

    action: Action
    reason: str = ""


CONTINUE = Decision("continue")
WAIT = Decision("wait")


class Rule(Protocol):
    """Decides about trials at rungs."""

    def rungs(self, number: int, /) -> tuple[int, ...]:
        """The rungs of trial ``number``: optimiser steps, or each a ``Share`` of its own."""

    def decide(self, number: int, rung: int, table: RungTable, /) -> Decision:
        """Decide about trial ``number``, which has reached a rung."""


@dataclass(frozen=True, slots=True)
class RuleRequest:
    """What a rule is made from.

    Attributes:
        rungs: optimiser steps, or each a ``Share`` of a trial's own.
        cohort: trials that are compared with each other; 0 for a rule without cohorts of one size.
        options: an instance of the rule's ``options`` type.
        prunes: returns whether a pruner of Optuna would end a trial now.
    """

    search: SearchSettings
    metric: Objective
    rungs: tuple[int, ...]
    cohort: int
    options: Any
    prunes: Callable[[BasePruner, int], bool]

    @property
    def eta(self) -> int:
        """One in ``eta`` trials is kept."""
        return self.search.stopping.eta


@dataclass(frozen=True, slots=True)
class EqualRungs:
    """What rules have in common by which all trials have the same rungs."""

    same: tuple[int, ...]

    def rungs(self, _number: int, /) -> tuple[int, ...]:
        """The same for all trials."""
        return self.same


def _anything(_: SearchSettings) -> None:
    """Accept all settings."""


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """A stopping rule as it is registered: how it is made, what it needs and what it can do.

    Attributes:
        check: raises a ConfigError if the settings make no sense for it; called before a model is loaded.
        options: type of ``search.stopping.options``: a dataclass, ``dict`` for any, or None for none.
        several_objectives: whether it supports several objectives.
        asynchronous: its decisions depend on the order of arrival, so they must be stored in the study.
        geometric: if the settings leave it open, each rung is at eta times the previous one; otherwise they
            are evenly spaced.
        cohort: returns the default size of a cohort from the settings and the number of rungs; None: the
            rule has no cohorts of one size.
        reads: keys of ``search.stopping`` that it reads in addition to those of every rule, of ``geometric``
            and of ``cohort``.
    """

    make: Callable[[RuleRequest], Rule]
    check: Callable[[SearchSettings], None] = _anything
    options: type[Any] | None = None
    several_objectives: bool = True
    asynchronous: bool = False
    geometric: bool = False
    cohort: Callable[[SearchSettings, int], int] | None = None
    reads: tuple[str, ...] = ()

    @property
    def keys(self) -> list[str]:
        """The keys of ``search.stopping`` that this rule uses."""
        own = [*(("min_steps", "eta") if self.geometric else ()), *(("cohort",) if self.cohort else ())]
        return [*OF_EVERY_RULE, *own, *self.reads]

    def read_options(self, stopping: StoppingSettings) -> Any:
        """Read the given options.

        Raises:
            ConfigError: the rule does not accept them.
        """
        given = stopping.options
        if self.options is dict:
            return dict(given)
        if self.options is not None:
            return build(self.options, given, OPTIONS)
        if given:
            raise ConfigError(
                f"{OPTIONS}={given!r}",
                f"search.stopping.kind={stopping.kind} has no options.",
                "Leave them out.",
            )
        return None


RULES: Registry[StoppingRule] = Registry(
    "stopping rule", key="search.stopping.kind", group="plait.stopping_rules"
)


def check_stopping(search: SearchSettings) -> None:
    """Check that the stopping rule exists and can be used in this search with its settings, without loading
    anything.

    Raises:
        ConfigError, SearchError: it does not, or cannot.
    """
    kind, usual = search.stopping.kind, StoppingSettings()
    known = RULES.get(kind).keys if search.stopping.active else ["kind"]
    for key in (each.name for each in fields(StoppingSettings)):
        value = getattr(search.stopping, key)
        if key not in known and value != getattr(usual, key):
            able = [name for name in RULES if name != "none" and key in RULES.get(name).keys]
            usually = f"search.stopping.{key}={as_written(getattr(usual, key))}"
            in_file = "" if key == "options" else f" If a file sets it: {usually}."
            raise ConfigError(
                f"search.stopping.{key}={as_written(value)} with search.stopping.kind={kind}",
                "No trial ends early without a rule." if kind == "none" else "This rule does not use it.",
                f"Choose a rule that does, search/stopping={choices(able)}, or leave it out.{in_file}",
            )
    check_rule(search)


def check_rule(search: SearchSettings) -> None:
    """Check the same, ignoring all other settings."""
    stopping = search.stopping
    registered = RULES.get(stopping.kind)
    if not stopping.active:
        return
    if len(search.objectives) > 1 and not registered.several_objectives:
        able = [name for name in RULES if RULES.get(name).several_objectives]
        raise ConfigError(
            f"search.stopping.kind={stopping.kind} with {len(search.objectives)} objectives",
            "This rule supports only one objective.",
            f"Choose one of {choices(able)}, which use search.stopping.metric (by default the first "
            "objective).",
        )
    rung_metric(search)
    registered.read_options(stopping)
    registered.check(search)


def rungs_within(
    stopping: StoppingSettings, budgets: Collection[int], unit: Unit | None = None
) -> tuple[int, ...]:
    """The rungs at which trials may be stopped, ascending; empty for the kind "none".

    Args:
        budgets: optimiser steps of the jobs.
        unit: the study's; None: as in a new study.

    Raises:
        ConfigError: the rule does not exist, or a rung is not within the shortest budget.
    """
    geometric = RULES.get(stopping.kind).geometric
    if not stopping.active:
        return ()
    return place_rungs(stopping, budgets, unit or unit_of(stopping, budgets), geometric=geometric)


def make_rule(
    search: SearchSettings,
    budgets: Collection[int],
    *,
    unit: Unit | None = None,
    keep_cohort: Callable[[str, int], int] = lambda _, size: size,
    prunes: Callable[[BasePruner, int], bool] = lambda _, __: False,
) -> Rule | None:
    """The rule chosen by the settings; None if no trial is stopped early.

    Args:
        budgets: optimiser steps of the jobs.
        unit: the study's; None: as in a new study.
        keep_cohort: returns the size of a cohort that was first stored under a name, or else stores the given
            one: the default depends on settings that may change between starts and between workers.
        prunes: returns whether a pruner of Optuna would end a trial now.

    Raises:
        ConfigError, SearchError: the settings make no sense, or a rung is not within the shortest budget.
    """
    check_rule(search)
    stopping = search.stopping
    if not stopping.active:
        return None
    registered = RULES.get(stopping.kind)
    metric, rungs = rung_metric(search), rungs_within(stopping, budgets, unit)
    cohort = stopping.cohort or 0
    if registered.cohort is not None and not cohort:
        usual = max(2, min(registered.cohort(search, len(rungs)), search.trials))
        cohort = keep_cohort(f"{stopping.kind}, eta {stopping.eta}, {len(rungs)} rungs", usual)
    options = registered.read_options(stopping)
    rule = registered.make(RuleRequest(search, metric, rungs, cohort, options, prunes))
    if stopping.divergence is None:
        return rule
    return Divergence(rule, metric.metric, stopping.divergence, stopping.divergence_from == "start")


# ---- comparing whole cohorts -------------------------------------------------------------------------------

# The members that continue, given the numbers of the measured members (best first), how many members there
# are, the rung, and the table.
Keep = Callable[[list[int], int, int, RungTable], set[int]]


@dataclass(frozen=True, slots=True)
class CohortRule:
    """Compares the members of a cohort when all of them have reached a rung."""

    layout: Layout
    metric: Objective
    keep: Keep

    def rungs(self, number: int, /) -> tuple[int, ...]:
        """The rungs of the trial's cohort."""
        return self.layout.cohort(number).rungs

    def decide(self, number: int, reached: int, table: RungTable) -> Decision:
        """Replay the cohort's rungs up to this one; wait if one cannot be decided yet."""
        cohort = self.layout.cohort(number)
        members = table.among(cohort.numbers) | {number}
        for rung in (each for each in cohort.rungs if each <= reached):
            if any(table.missing(member, rung) for member in members):
                return WAIT
            ranked = table.ranked(members, rung, self.metric)
            # A trial that passed this rung before rungs were introduced has no value here, and continues.
            kept = {member for member in members if _unmeasured(table, member, rung)}
            kept |= self.keep(ranked, len(members), rung, table)
            if number not in kept:
                value = table.records[number].values[rung]
                go_on = "continues" if len(kept) == 1 else "continue"
                broken = " and a broken constraint" if rung in table.records[number].violates else ""
                return Decision(
                    "stop",
                    f"{self.metric.metric} {value:.6g}{broken} at rung {rung}: ranked "
                    f"{1 + ranked.index(number)} of {len(members)}, {len(kept)} {go_on} "
                    f"({table.describe(cohort)})",
                )
            members = kept
        return CONTINUE


def _unmeasured(table: RungTable, number: int, rung: int) -> bool:
    record = table.records[number]
    return rung not in record.values and record.beyond(rung)


def best_share(eta: int) -> Keep:
    """Keep the best 1/eta of a cohort, at least one; members that ended before the rung count as the
    worst."""
    return lambda ranked, members, _, __: set(ranked[: max(1, members // eta)])


def above_median(metric: Objective) -> Keep:
    """The median rule (Golovin et al., KDD 2017, §3.2) within a cohort: a trial ends if its best value so far
    is worse than the median of the members' averages so far. A trial that breaks a constraint is worse than
    any that does not."""

    def keep(ranked: list[int], _members: int, rung: int, table: RungTable) -> set[int]:
        feasible = [number for number in ranked if rung not in table.records[number].violates] or ranked
        histories = {
            number: [
                metric.badness(value) for step, value in table.records[number].values.items() if step <= rung
            ]
            for number in feasible
        }
        averages = [fmean(values) for values in histories.values()] or [0.0]
        worse = [math.inf] * (len(ranked) - len(feasible))
        middle = min(median([*averages, *worse]), max(averages))
        return {number for number, values in histories.items() if min(values) <= middle}

    return keep


def _successive_halving(ask: RuleRequest) -> CohortRule:
    return CohortRule(EqualCohorts(ask.cohort, ask.rungs), ask.metric, best_share(ask.eta))


def _hyperband(ask: RuleRequest) -> CohortRule:
    return CohortRule(Brackets(ask.rungs, ask.eta), ask.metric, best_share(ask.eta))


def _median(ask: RuleRequest) -> CohortRule:
    return CohortRule(EqualCohorts(ask.cohort, ask.rungs), ask.metric, above_median(ask.metric))


RULES.add(
    "successive_halving",
    StoppingRule(
        _successive_halving,
        geometric=True,
        cohort=lambda search, rungs: int(search.stopping.eta**rungs),
    ),
)
RULES.add("hyperband", StoppingRule(_hyperband, geometric=True))
RULES.add("median", StoppingRule(_median, cohort=lambda search, _: search.parallel))


# ---- in the order of arrival -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AshaRule(EqualRungs):
    """Asynchronous successive halving (Li et al., MLSys 2020): a trial continues as soon as it is among the
    best 1/eta of those that have reached the rung so far; the others wait.

    A trial ends when it can no longer be among the best, even if all that may still come are worse. The best
    one of all continues, even if there are fewer than eta trials.
    """

    eta: int
    metric: Objective

    def decide(self, number: int, rung: int, table: RungTable) -> Decision:
        """Decide by rank among the trials at this rung so far."""
        record = table.records[number]
        if record.passed >= rung or rung not in record.values:
            return CONTINUE
        ranked = table.ranked(table.records, rung, self.metric)
        rank = ranked.index(number) + 1
        coming = table.coming(rung)
        if rank <= len(ranked) // self.eta or (not coming and rank == 1):
            return CONTINUE
        if rank > max(1, (len(ranked) + coming) // self.eta):
            value = record.values[rung]
            return Decision(
                "stop",
                f"{self.metric.metric} {value:.6g} at rung {rung}: ranked {rank} of {len(ranked)} so far",
            )
        return WAIT


def _asha(ask: RuleRequest) -> AshaRule:
    return AshaRule(ask.rungs, ask.eta, ask.metric)


RULES.add("asha", StoppingRule(_asha, asynchronous=True, geometric=True))


@dataclass(frozen=True, slots=True)
class OptunaPrunerRule(EqualRungs):
    """Applies a pruner of Optuna to one trial after another."""

    prunes: Callable[[int], bool]
    name: str

    def decide(self, number: int, rung: int, table: RungTable) -> Decision:
        """Decide as the pruner does, which is called once at each rung."""
        if table.records[number].passed >= rung or not self.prunes(number):
            return CONTINUE
        return Decision("stop", f"{self.name} at rung {rung}")


PRUNERS = (
    "HyperbandPruner",
    "MedianPruner",
    "NopPruner",
    "PatientPruner",
    "PercentilePruner",
    "SuccessiveHalvingPruner",
    "ThresholdPruner",
)


def make_pruner(stopping: StoppingSettings) -> BasePruner:
    """Make the Optuna pruner that the settings name.

    Raises:
        SearchError: there is none of this name, or it does not accept the options.
    """
    import optuna

    if stopping.pruner not in PRUNERS:
        raise SearchError(
            f"search.stopping.pruner={stopping.pruner!r}", f"It must be one of {choices(PRUNERS)}."
        )
    factory = getattr(optuna.pruners, stopping.pruner)
    options: dict[str, Any] = dict(stopping.options)
    if stopping.pruner == "PatientPruner":  # it wraps another pruner; alone, it uses the trial's own values
        options = {"wrapped_pruner": None} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
        try:
            pruner: BasePruner = factory(**options)
        except (TypeError, ValueError) as error:
            known = [name for name in inspect.signature(factory).parameters if name != "wrapped_pruner"]
            raise SearchError(
                f"{OPTIONS}={dict(stopping.options)!r}",
                f"{stopping.pruner} does not take them: {error}",
                f"It takes {choices(known)}." if known else "It takes none.",
            ) from error
    return pruner


def _check_pruner(search: SearchSettings) -> None:
    objective = search.objectives[0].metric
    if rung_metric(search).metric != objective:
        raise SearchError(
            f"search.stopping.metric={search.stopping.metric} with search.stopping.kind=optuna",
            f"Optuna's pruners always use the objective, {objective}.",
            "Leave out search.stopping.metric, or use another rule.",
        )
    make_pruner(search.stopping)


def _optuna(ask: RuleRequest) -> OptunaPrunerRule:
    pruner = make_pruner(ask.search.stopping)
    return OptunaPrunerRule(ask.rungs, lambda number: ask.prunes(pruner, number), ask.search.stopping.pruner)


RULES.add(
    "optuna",
    StoppingRule(
        _optuna,
        check=_check_pruner,
        options=dict,
        several_objectives=False,
        asynchronous=True,
        reads=("pruner",),
    ),
)


# ---- each trial alone --------------------------------------------------------------------------------------

Stops = Callable[[list[float]], str | None]  # from the values at the rungs so far, oldest first: why it ends


@dataclass(frozen=True, slots=True)
class PerTrialRule(EqualRungs):
    """Decides about each trial from its own values."""

    stops: Stops

    def decide(self, number: int, rung: int, table: RungTable) -> Decision:
        """Decide from the trial's own record."""
        reason = self.stops(table.records[number].history(each for each in self.same if each <= rung))
        return CONTINUE if reason is None else Decision("stop", f"{reason} at rung {rung}")


def _patience(ask: RuleRequest) -> PerTrialRule:
    """Stop after ``patience`` rungs in a row that did not improve on the best value by ``min_delta``."""
    stopping = ask.search.stopping

    def stops(values: list[float]) -> str | None:
        best, since = float("inf"), 0
        for value in map(ask.metric.badness, values):
            since = 0 if value < best - stopping.min_delta else since + 1
            best = min(best, value)
        return (
            f"{ask.metric.metric} has not improved for {since} rungs" if since >= stopping.patience else None
        )

    return PerTrialRule(ask.rungs, stops)


def _threshold(ask: RuleRequest) -> PerTrialRule:
    """Stop if the last value is below ``lower`` or above ``upper``."""
    lower, upper, metric = ask.search.stopping.lower, ask.search.stopping.upper, ask.metric.metric

    def stops(values: list[float]) -> str | None:
        last = values[-1] if values else None
        if last is not None and lower is not None and last < lower:
            return f"{metric} {last:.6g} is below {lower:g}"
        if last is not None and upper is not None and last > upper:
            return f"{metric} {last:.6g} is above {upper:g}"
        return None

    return PerTrialRule(ask.rungs, stops)


def _never(ask: RuleRequest) -> PerTrialRule:
    """Stop no trial; only ``search.stopping.divergence``, which applies to every rule, remains."""
    return PerTrialRule(ask.rungs, lambda _: None)


def _needs(*keys: str) -> Callable[[SearchSettings], None]:
    """A check that refuses settings with none of these keys."""

    def check(search: SearchSettings) -> None:
        if all(getattr(search.stopping, key) is None for key in keys):
            wanted = choices([f"search.stopping.{key}" for key in keys])
            raise ConfigError(
                f"search.stopping.kind={search.stopping.kind}", f"It needs {wanted}.", "Set a number."
            )

    return check


RULES.add("patience", StoppingRule(_patience, reads=("patience", "min_delta")))
RULES.add("threshold", StoppingRule(_threshold, check=_needs("lower", "upper"), reads=("lower", "upper")))
RULES.add("divergence", StoppingRule(_never, check=_needs("divergence")))
RULES.add("none", StoppingRule(_never))  # only so that the name is known: ``make_rule`` returns None for it


@dataclass(frozen=True, slots=True)
class Divergence:
    """Fails a trial whose loss exceeds a multiple of its best or first one; otherwise asks ``rule``."""

    rule: Rule
    metric: str
    factor: float
    from_start: bool

    def rungs(self, number: int, /) -> tuple[int, ...]:
        """The rungs of the rule."""
        return self.rule.rungs(number)

    def decide(self, number: int, rung: int, table: RungTable) -> Decision:
        """Decide from the trial's own record first."""
        values = table.records[number].values
        before = [values[each] for each in self.rungs(number) if each < rung and each in values]
        if before and rung in values:
            reference = before[0] if self.from_start else min(before)
            if values[rung] > self.factor * reference:
                whose = "first" if self.from_start else "best"
                return Decision(
                    "fail",
                    f"diverged: {self.metric} {values[rung]:.6g} at rung {rung} is more than "
                    f"{self.factor:g} times its {whose}, {reference:.6g}",
                )
        return self.rule.decide(number, rung, table)
