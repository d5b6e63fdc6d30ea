"""Converts events to metrics and parameters to text, as MLflow stores them, and chooses the steps of a curve
that are written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.core.messages import GroupStep, JobEvaluated, JobProgress
from plait.core.spans import ReplicaTime
from plait.tracking import names

_WORDS: Mapping[str, object] = {"None": None, "True": True, "False": False}

# ---- metrics -----------------------------------------------------------------------------------------


def step_values(event: JobProgress) -> dict[str, float]:
    """Metrics of one optimiser step of a job."""
    return {
        names.TRAIN_LOSS: event.loss,
        names.TRAIN_LR: event.lr,
        names.TRAIN_GRAD_NORM: event.grad_norm,
        names.TRAIN_TOKENS: event.tokens,
        names.THROUGHPUT: event.tokens_per_s,
        names.DEVICE_SECONDS: event.device_seconds,
    }


def evaluation_values(
    event: JobEvaluated, best_loss: float | None, best_step: int | None
) -> dict[str, float]:
    """Metrics of one evaluation of a job, and of its best one so far."""
    values = {names.EVAL_LOSS: event.loss, names.EVAL_TOKENS: float(event.tokens)}
    if best_loss is not None and best_step is not None:
        values |= {names.EVAL_BEST_LOSS: best_loss, names.EVAL_BEST_STEP: float(best_step)}
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
    if len(event.replicas) > 1:
        for each in event.replicas:
            values |= _replica_values(each)
    return values


def _replica_values(time: ReplicaTime) -> dict[str, float]:
    """Metrics of one replica in an iteration, as far as they are known."""
    said = {f"replica/{time.replica}/{what}": getattr(time, what) for what in names.OF_REPLICA}
    return {name: value for name, value in said.items() if value is not None}


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """The values that MLflow can store; it would turn infinity into a large number."""
    return {key: float(value) for key, value in values.items() if math.isfinite(value)}


def not_finite(values: Mapping[str, float]) -> str:
    """The values that are not finite, in words; empty if there are none."""
    return ", ".join(f"{key}={value}" for key, value in values.items() if not math.isfinite(value))


# ---- which steps are written: MLflow's pages draw a few hundred points of a line, whatever there is --


def is_kept(step: int, stride: int) -> bool:
    """Whether a step is written because of its number, so that a job that is trained again has the same
    points."""
    return step <= 1 or step % stride == 0


def grown_stride(step: int, points: int) -> int:
    """Stride at a step of a curve of unknown length: a power of two that doubles whenever the steps do, from
    a quarter of ``points`` on. For T steps, it keeps about points / 4 · (1 + log2(4 T / points))."""
    return 1 << max(0, (step // max(1, points // 4)).bit_length() - 1)


@dataclass(slots=True)
class Curve:
    """The curve of one job: the first and the last step, every ``stride``-th in between, and each step at
    which the job is evaluated, pauses or ends are written.

    Attributes:
        steps: total optimiser steps.
        points: approximate number of points of the curve.
        left_out: the newest step, if it was not written.
    """

    steps: int
    points: int
    left_out: JobProgress | None = None

    def takes(self, event: JobProgress) -> bool:
        """Whether a step is written immediately, because of its number or because it diverged."""
        stride = max(1, -(-self.steps // self.points))
        taken = is_kept(event.step, stride) or event.step == self.steps
        taken = taken or not math.isfinite(event.loss + event.grad_norm)
        self.left_out = None if taken else event
        return taken


# ---- names of runs -----------------------------------------------------------------------------------

SHORT = {  # abbreviations before values in the names of runs, for keys whose last word is long
    "adapter.rank": "r",
    "adapter.alpha": "a",
    "adapter.dropout": "do",
    "train.batch_size": "bs",
    "train.accumulation": "acc",
    "train.warmup_steps": "warmup",
    "train.weight_decay": "wd",
    "train.lora_plus_ratio": "plus",
    "data.source": "data",
}
MOST_IN_NAME = 4  # values
LONGEST_VALUE = 16  # characters


def run_name(search: str, trial: int, parameters: Mapping[str, Any], searched: Sequence[str]) -> str:
    """The name of a job's run, by its search, trial and searched values: ``steer/0003 r16 lr3e-3``."""
    groups = {key: f"{key}.source" for key in searched if "." not in key}  # data=a,b searches whole groups
    keys = [key for each in searched if (key := groups.get(each, each)) in parameters][:MOST_IN_NAME]
    words = [f"{SHORT.get(key, key.rpartition('.')[2])}{short_value(parameters[key])}" for key in keys]
    return " ".join([f"{search}/{trial:04d}", *words])


def short_value(value: Any) -> str:
    """A value in few characters, such as 3e-3 or 16; text is preceded by an equals sign."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        text = parameter_text(value).replace('"', "").replace(" ", "")
        return f"={text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + '…'}"
    if value == 0 or 0.01 <= abs(value) < 1e5:
        return f"{value:.4g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


# ---- parameters --------------------------------------------------------------------------------------


def parameter_text(value: object) -> str:
    """A parameter's value as MLflow stores it: words and numbers unchanged, other values as JSON."""
    return json.dumps(value) if isinstance(value, (list, tuple, dict)) else str(value)


def parameter_value(text: str) -> Any:
    """The value that :func:`parameter_text` wrote, except that tuples become lists."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except ValueError:
        return text
