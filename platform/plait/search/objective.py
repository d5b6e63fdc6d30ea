"""The objective of a trial, read off the engine's events."""

from __future__ import annotations

from collections.abc import Iterable

from plait.data import generation_limit, parse_options
from plait.engine.messages import Event, JobEnded, JobEvaluated, JobGenerated, JobProgress
from plait.errors import ConfigError, choices
from plait.jobs import DataSpec
from plait.search.rungs import judged
from plait.settings import SearchSettings

# Metrics that can be an objective (names of DESIGN §5.11); each is judged by its last value.
METRICS = (
    "eval/loss",
    "eval/accuracy",
    "train/loss",
    "train/grad_norm",
    "train/tokens",
    "throughput/tokens_per_s",
    "cost/device_seconds",
    "job/completion_seconds",
)


def check_metric(metric: str) -> None:
    """The metric can be an objective.

    Raises:
        ConfigError: it cannot.
    """
    if metric not in METRICS:
        raise ConfigError(f"search.metric={metric!r}", f"search.metric must be one of {choices(METRICS)}.")


def check_measured(search: SearchSettings, data: Iterable[DataSpec]) -> None:
    """Every job's data gives the objective, or all jobs would fail at their ends; and what rungs judge.

    Raises:
        ConfigError: a loss over validation rows of which there are none, or the accuracy of answers that
            are not generated; a metric that is not measured at rungs.
    """
    for spec in data:
        _check_measured(search.metric, spec)
        if search.stopping.kind != "none":
            _check_measured(judged(search).metric, spec)


def _check_measured(metric: str, spec: DataSpec) -> None:
    if metric.startswith("eval/") and parse_options(spec).validation == 0:
        raise ConfigError(
            f"search.metric={metric} with data.validation=0",
            "There are no validation rows to measure it on.",
            "Give data.validation=0.1, or search.metric=train/loss.",
        )
    if metric == "eval/accuracy" and generation_limit(spec) is None:
        raise ConfigError(
            f"search.metric=eval/accuracy with data.source={spec.source}",
            "It is measured where answers are generated and a verifier judges them.",
            "Give data=reasoning_gym data.generate=true.",
        )


class Observed:
    """The last value of every metric of every job."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], float] = {}

    def handle(self, event: Event) -> None:
        """Learn from an event."""
        match event:
            case JobProgress():
                self._set(event.job, "train/loss", event.loss)
                self._set(event.job, "train/grad_norm", event.grad_norm)
                self._set(event.job, "train/tokens", event.tokens)
                self._set(event.job, "throughput/tokens_per_s", event.tokens_per_s)
            case JobEvaluated():
                self._set(event.job, "eval/loss", event.loss)
            case JobGenerated():
                self._set(event.job, "eval/accuracy", event.accuracy)
            case JobEnded():
                self._set(event.job, "eval/loss", event.eval_loss)
                self._set(event.job, "train/tokens", event.tokens)
                self._set(event.job, "cost/device_seconds", event.device_seconds)
                self._set(event.job, "job/completion_seconds", event.completion_seconds)

    def value(self, job: str, metric: str) -> float | None:
        """The last value, or None where there is none."""
        return self._values.get((job, metric))

    def _set(self, job: str, metric: str, value: float | None) -> None:
        if value is not None:
            self._values[job, metric] = float(value)
