"""What MLflow is told of settings, parameters and events: plain values, made without any store."""

from __future__ import annotations

import getpass
import math
from collections.abc import Mapping
from dataclasses import asdict

from plait.core.lifecycle import JobState
from plait.core.messages import GroupStep, JobEvaluated, JobProgress
from plait.core.settings import RunSettings
from plait.tracking import names
from plait.tracking.board import Board, JobRecord
from plait.tracking.parameters import parameter_text
from plait.utils.addresses import redact


def run_parameters(settings: RunSettings) -> tuple[tuple[str, str], ...]:
    """The run's settings, flat, without what is not set; addresses without passwords."""
    flat = {
        f"{group}.{key}": value
        for group, values in asdict(settings).items()
        for key, value in values.items()
        if value is not None and value != {} and value != ()
    }
    return tuple((key, redact(parameter_text(value))) for key, value in flat.items())


def progress_values(event: JobProgress) -> dict[str, float]:
    """Metrics of one optimiser step of a job."""
    return {
        names.TRAIN_LOSS: event.loss,
        names.TRAIN_LR: event.lr,
        names.TRAIN_GRAD_NORM: event.grad_norm,
        names.TRAIN_TOKENS: event.tokens,
        names.THROUGHPUT: event.tokens_per_s,
        names.DEVICE_SECONDS: event.device_seconds,
    }


def evaluation_values(event: JobEvaluated, record: JobRecord) -> dict[str, float]:
    """Metrics of one evaluation of a job, and of its best one so far."""
    values = {names.EVAL_LOSS: event.loss, names.EVAL_TOKENS: float(event.tokens)}
    if record.best_eval_loss is not None and record.best_eval_step is not None:
        best = float(record.best_eval_step)
        values |= {names.EVAL_BEST_LOSS: record.best_eval_loss, names.EVAL_BEST_STEP: best}
    return values


def group_values(event: GroupStep) -> dict[str, float]:
    """Metrics of one iteration of a group, for the search's run."""
    values: dict[str, float] = {
        names.GROUP_JOBS: len(event.jobs),
        names.GROUP_MICROBATCHES: event.microbatches,
    }
    if event.seconds > 0:
        values[names.THROUGHPUT] = event.tokens / event.seconds
    if event.microbatches and event.capacity:
        values[names.GROUP_FILL] = event.tokens / (event.microbatches * event.capacity)
    if event.peak_bytes is not None:
        values[names.PEAK_BYTES] = event.peak_bytes
    return values


def search_values(board: Board, seconds: float) -> dict[str, float]:
    """Totals of a search and its best so far, for the search's run."""
    values: dict[str, float] = {
        names.TRAIN_TOKENS: board.tokens,
        names.DEVICE_SECONDS: board.device_seconds,
        names.SEARCH_SECONDS: seconds,
        names.SEARCH_RUNNING: board.count(JobState.RUNNING),
        names.SEARCH_ENDED: sum(job.ended for job in board.jobs.values()),
        names.SEARCH_FAILED: board.count(JobState.FAILED),
    }
    if seconds > 0:
        values[names.SEARCH_THROUGHPUT] = board.tokens / seconds
    best = board.best()
    if best is not None and best.objective is not None:
        values |= {names.SEARCH_BEST: best.objective, names.SEARCH_BEST_TRIAL: best.trial}
    if board.others:
        values[names.SEARCH_FRONT] = len(board.front())
    return values


def finite(values: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """The values that MLflow can keep: it turns infinity into a large number."""
    return tuple((key, float(value)) for key, value in values.items() if math.isfinite(value))


def not_finite(values: Mapping[str, float]) -> str:
    """The others, in words; empty if there are none."""
    return ", ".join(f"{key}={value}" for key, value in values.items() if not math.isfinite(value))


def user() -> str:
    """Who runs this, as MLflow's UI shows it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
