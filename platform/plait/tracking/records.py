"""MLflow runs read back as records of the board."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from mlflow.entities import Run

from plait.tracking import names
from plait.tracking.board import JobRecord
from plait.tracking.values import parameter_value


def record_of(run: Run) -> JobRecord:
    """What a job's run says of the job. Its last step is told only by the metrics' history, so the step
    comes from a tag that is set when the job ends; 0 before."""
    tags, metrics = run.data.tags, run.data.metrics
    tokens = metrics.get(names.TRAIN_TOKENS, 0.0)
    return JobRecord(
        name=tags.get(names.TAG_JOB, run.info.run_name),
        trial=int(tags[names.TAG_TRIAL]),
        parameters={key: parameter_value(text) for key, text in run.data.params.items()},
        state=tags.get(names.TAG_STATE, ""),
        group=tags.get(names.TAG_GROUP, ""),
        step=int(tags.get(names.TAG_STEP, "0")),
        steps=int(tags.get(names.TAG_STEP, "0")),
        loss=metrics.get(names.TRAIN_LOSS),
        eval_loss=metrics.get(names.EVAL_LOSS),
        accuracy=metrics.get(names.EVAL_ACCURACY),
        objective=metrics.get(names.OBJECTIVE),
        tokens=int(tokens),
        device_seconds=metrics.get(names.DEVICE_SECONDS, 0.0),
        completion_seconds=metrics.get(names.COMPLETION_SECONDS),
        adapter=tags.get(names.TAG_ADAPTER, ""),
        reason=tags.get(names.TAG_REASON, ""),
        run_id=run.info.run_id,
        others=_others(metrics),
        feasible=tags.get(names.TAG_FEASIBLE) != "false",
    )


def _others(metrics: Mapping[str, float]) -> tuple[float, ...]:
    """The objectives beyond the first."""
    named = itertools.takewhile(metrics.__contains__, map(names.objective_name, itertools.count(1)))
    return tuple(metrics[name] for name in named)
