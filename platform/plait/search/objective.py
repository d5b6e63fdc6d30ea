"""The objectives of a trial, computed from its job and the engine's events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from plait.core.errors import ConfigError, choices
from plait.core.jobs import DataSpec, JobSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import Event, JobAdmitted, JobEvaluated, JobGenerated, JobProgress
from plait.core.objectives import Constraint, Objective
from plait.core.settings import SearchSettings
from plait.data.loading import each_evaluation, generation_limit
from plait.data.sources import SOURCES, VerifiedOptions, parse_options
from plait.search.rungs import RUNG_METRICS, rung_metric
from plait.tracking import names
from plait.tracking.values import step_values
from plait.utils.spelling import did_you_mean

METRICS = (*RUNG_METRICS, names.COMPLETION_SECONDS)  # can be objectives; the last value counts
GROWING = (names.TRAIN_TOKENS, names.DEVICE_SECONDS, names.COMPLETION_SECONDS)


def numbers(job: JobSpec) -> dict[str, float]:
    """The job's config keys with numeric values."""
    held = job.parameters()
    return {
        key: float(value)
        for key, value in held.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def check_objectives(search: SearchSettings, probes: Iterable[JobSpec]) -> None:
    """Check that every objective and every constraint is a metric, or a number in every job.

    Args:
        probes: jobs that represent the whole search.

    Raises:
        ConfigError: one is not.
    """
    held = [numbers(job) for job in probes]
    keys = set.intersection(*map(set, held))
    asked = [("An objective", f"search.metric={each.metric!r}", each.metric) for each in search.objectives]
    asked += [("A constraint's metric", f"search.constraints: {each}", each.metric) for each in search.limits]
    for what, setting, metric in asked:
        if metric not in METRICS and metric not in keys:
            raise ConfigError(
                setting,
                f"{what} must be one of {choices(METRICS)}, or a numeric key of the job.",
                f"{did_you_mean(metric, [*METRICS, *keys])}Numeric keys are: {choices(sorted(keys))}.",
            )
    for limit in search.limits:
        values = sorted(found[limit.metric] for found in held if limit.metric in found)
        if limit.metric not in METRICS and all(limit.violation(value) > 0 for value in values):
            raise ConfigError(
                f"search.constraints: {limit}",
                f"No trial can satisfy it: {limit.metric} is {_between(values[0], values[-1])}.",
                "Change the constraint or the search space.",
            )


def unusual_directions(search: SearchSettings) -> list[str]:
    """What is said at the start of objectives whose worst value would be the best one."""
    said = []
    for each in search.objectives:
        usual = Objective.usual(each.metric)
        if each.metric in RUNG_METRICS and each != usual:
            said.append(
                f"The {each} counts as the best, by search.direction={each.direction}: "
                f"{usual.direction} would prefer the {usual}."
            )
    return said


def _between(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"between {low:g} and {high:g}"


def check_kept(search: SearchSettings, jobs: Iterable[JobSpec]) -> None:
    """Check that jobs whose best evaluation is kept have evaluations before their ends, by their own settings
    or at rungs, and answers there if accuracies decide.

    Raises:
        ConfigError: one has none.
    """
    at_rungs = search.stopping.active and rung_metric(search).metric.startswith("eval/")
    for job in jobs:
        asked = f"train.keep={job.train.keep}"
        if job.train.keep == "last":
            continue
        by_loss = job.train.keep == "best"
        rule = f"{asked} compares {'validation losses' if by_loss else 'accuracies of generated answers'}."
        if parse_options(job.data).validation == 0:
            raise ConfigError(
                f"{asked} with data.validation=0", rule, "Set data.validation=0.1, or train.keep=last."
            )
        if not by_loss and not each_evaluation(job.data):
            raise ConfigError(
                f"{asked} without answers at evaluations",
                rule,
                "Set data.generate=true data.generate_at=evaluation, or train.keep=best.",
            )
        if job.train.eval_every == 0 and not at_rungs:
            raise ConfigError(
                f"{asked} with train.eval_every=0",
                f"{rule} There is only one evaluation, after the last step.",
                "Set train.eval_every=10, or train.keep=last.",
            )


def check_measured(search: SearchSettings, data: Iterable[DataSpec]) -> None:
    """Check that every job's data yields the objectives (or all jobs would fail at their ends) and the
    metrics that constraints and rungs compare.

    Raises:
        ConfigError: a metric needs validation rows or generated answers that do not exist, or is not
            measured at rungs.
    """
    for spec in data:
        for objective in search.objectives:
            _check_measured(objective.metric, spec, "search.metric")
        for limit in search.limits:
            _check_measured(limit.metric, spec, "search.constraints", str(limit))
        if search.stopping.active:
            metric = rung_metric(search).metric
            _check_measured(metric, spec, f"search{'.stopping' * bool(search.stopping.metric)}.metric")
            if metric == names.EVAL_ACCURACY and not each_evaluation(spec):
                raise ConfigError(
                    "rungs by eval/accuracy with data.generate_at=end",
                    "Trials are compared at rungs by answers that are generated there.",
                    "Set data.generate_at=evaluation.",
                )


def _metrics(search: SearchSettings) -> list[str]:
    """The metrics of the objectives, then those of the constraints."""
    return [*(each.metric for each in search.objectives), *(each.metric for each in search.limits)]


def _check_measured(metric: str, spec: DataSpec, key: str, limit: str = "") -> None:
    """``key``: the setting that names the metric; ``limit``: what it says of it, if it is a constraint."""
    given = f"{key}: {limit}" if limit else f"{key}={metric}"
    if metric.startswith("eval/") and parse_options(spec).validation == 0:
        raise ConfigError(
            f"{given} with data.validation=0",
            "This metric needs validation rows.",
            "Set data.validation=0.1, " + ("or leave it out." if limit else f"or {key}=train/loss."),
        )
    if metric == names.EVAL_ACCURACY and generation_limit(spec) is None:
        raise ConfigError(
            f"{given} with data.source={spec.source}",
            "Accuracy needs generated answers and a verifier that scores them.",
            _to_generate(spec.source),
        )


def _to_generate(source: str) -> str:
    known = SOURCES.get(source)
    if known.score is not None:
        return "Set data.generate=true."
    if issubclass(known.options, VerifiedOptions):
        return "Set data.generate=true data.scorer=package.module:function."
    return "Set data=reasoning_gym data.generate=true."


def rejection(job: JobSpec, search: SearchSettings) -> JobResult | None:
    """The result of a job that is not trained because its own settings break a constraint; None for
    others."""
    held = numbers(job)  # all that is known before it trains
    known = {
        str(each): each.violation(held[each.metric])
        for each in search.limits
        if each.metric not in METRICS and each.metric in held
    }
    broken = [text for text, amount in known.items() if amount > 0]
    if not broken:
        return None
    return JobResult(job.name, JobState.INFEASIBLE, reason=f"violates {', '.join(broken)}", violations=known)


@dataclass(frozen=True, slots=True)
class Score:
    """The objectives of a trial, or why one is missing.

    Attributes:
        values: values of the objectives, all finite; empty if one is missing.
        violations: how far each constraint is broken, by its text; 0 or less if satisfied.
        missing: what was not measured, or is not finite; "" if nothing is missing.
    """

    values: tuple[float, ...] = ()
    violations: Mapping[str, float] = field(default_factory=dict)
    missing: str = ""


class Observed:
    """The last value of every metric of every job, and the numbers that define the job."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, float]] = {}  # by job and metric

    def handle(self, event: Event) -> None:
        """Learn from an event."""
        match event:
            case JobAdmitted():
                last = {  # it may have no steps left
                    names.TRAIN_LOSS: event.cursor.loss,
                    names.TRAIN_GRAD_NORM: event.cursor.grad_norm,
                    names.THROUGHPUT: event.cursor.tokens_per_s,
                }
                known = {name: value for name, value in last.items() if value is not None}
                self._learn(event.job.name, numbers(event.job) | known)
            case JobProgress():
                self._learn(event.job, step_values(event))
            case JobEvaluated():
                self._learn(event.job, {names.EVAL_LOSS: event.loss})
            case JobGenerated():
                self._learn(event.job, {names.EVAL_ACCURACY: event.accuracy})
            case JobResult():
                if event.eval_loss is not None:
                    self._learn(event.job, {names.EVAL_LOSS: event.eval_loss})
                if event.completion_seconds is not None:  # otherwise it did not train here, and these are 0
                    ended = {names.TRAIN_TOKENS: event.tokens, names.DEVICE_SECONDS: event.device_seconds}
                    self._learn(event.job, ended | {names.COMPLETION_SECONDS: event.completion_seconds})

    def _learn(self, job: str, values: Mapping[str, float]) -> None:
        self._values.setdefault(job, {}).update((key, float(value)) for key, value in values.items())

    def value(self, job: str, metric: str) -> float | None:
        """The last value, or None if there is none."""
        return self._values.get(job, {}).get(metric)

    def score(self, job: str, search: SearchSettings) -> Score:
        """The score of a finished job by the search's objectives and constraints."""
        found = {metric: self.value(job, metric) for metric in _metrics(search)}
        for metric, value in found.items():
            if value is None or not math.isfinite(value):
                missing = "was not measured" if value is None else f"is {value}"
                return Score(missing=f"{metric} {missing}")
        held = {metric: value for metric, value in found.items() if value is not None}
        return Score(
            tuple(held[each.metric] for each in search.objectives),
            {str(each): each.violation(held[each.metric]) for each in search.limits},
        )

    def violates(self, job: str, limits: Iterable[Constraint]) -> bool:
        """Whether a job that still trains breaks a constraint by its last measurements. A value that only
        grows and must reach a lower limit may still do so."""
        return any(
            each.violation(value) > 0
            for each in limits
            if (each.at_most or each.metric not in GROWING)
            and (value := self.value(job, each.metric)) is not None
        )
