"""MLflow runs read back as records of the board."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping

from mlflow.entities import Run

from plait.core.lifecycle import JobState
from plait.core.objectives import Objective
from plait.tracking import names
from plait.tracking.board import Board, JobRecord
from plait.tracking.parameters import parameter_value


def record_of(run: Run) -> JobRecord:
    """What a job's run says of the job. The step of a job that ended is told by a tag; of one that goes on by
    its newest point in the store."""
    tags, metrics = run.data.tags, run.data.metrics
    step = _step(run)
    tokens = metrics.get(names.TRAIN_TOKENS, 0.0)
    state = JobState(tags[names.TAG_STATE])
    kept = (
        state == JobState.FINISHED and run.data.params.get("train.keep") == "best"
    )  # the adapter's own loss
    return JobRecord(
        name=tags.get(names.TAG_JOB, run.info.run_name),
        trial=int(tags[names.TAG_TRIAL]),
        parameters={key: parameter_value(text) for key, text in run.data.params.items()},
        state=state,
        group=tags.get(names.TAG_GROUP, ""),
        step=step,
        steps=int(tags.get(names.TAG_STEPS, step)),
        loss=metrics.get(names.TRAIN_LOSS),
        eval_loss=metrics.get(names.EVAL_BEST_LOSS if kept else names.EVAL_LOSS),
        best_eval_loss=metrics.get(names.EVAL_BEST_LOSS),
        best_eval_step=_whole(metrics.get(names.EVAL_BEST_STEP)),
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
        on_front=tags.get(names.TAG_PARETO) == "true",
    )


def stored_board(run: Run, children: Mapping[int, Run]) -> Board:
    """All jobs of a search, from its run and theirs."""
    tags = run.data.tags
    _, *others = json.loads(tags.get(names.TAG_OBJECTIVES, "[null]"))
    further = tuple(Objective(metric, direction) for metric, direction in others)
    board = Board(tags.get(names.TAG_DIRECTION, "minimize"), len(children), others=further)
    for child in children.values():
        board.add(record_of(child))
    return board


def _step(run: Run) -> int:
    tags = run.data.tags
    ended = int(tags.get(names.TAG_STEP, "0"))
    if JobState(tags[names.TAG_STATE]).ended:
        return ended
    # Only as a message does a run tell the steps of its newest points without reading whole histories.
    points = run.data.to_proto().metrics
    return max((int(point.step) for point in points), default=ended)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _others(metrics: Mapping[str, float]) -> tuple[float, ...]:
    """The objectives beyond the first."""
    named = itertools.takewhile(metrics.__contains__, map(names.objective_name, itertools.count(1)))
    return tuple(metrics[name] for name in named)
