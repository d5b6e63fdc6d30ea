"""Names that users' saved charts and filters in MLflow depend on, so they do not change."""

from __future__ import annotations

from typing import Final

# ---- metrics of a job's run, always with the job's optimiser step ------------------------------------
TRAIN_LOSS: Final = "train/loss"
TRAIN_LR: Final = "train/lr"
TRAIN_GRAD_NORM: Final = "train/grad_norm"
TRAIN_TOKENS: Final = "train/tokens"
EVAL_LOSS: Final = "eval/loss"
EVAL_TOKENS: Final = "eval/tokens"
EVAL_BEST_LOSS: Final = "eval/best_loss"  # the lowest so far
EVAL_BEST_STEP: Final = "eval/best_step"  # the step after which it was measured
EVAL_ACCURACY: Final = "eval/accuracy"
EVAL_KEPT_LOSS: Final = "eval/kept_loss"  # of the adapter, where the most accurate one is kept
THROUGHPUT: Final = "throughput/tokens_per_s"
DEVICE_SECONDS: Final = "cost/device_seconds"
COMPLETION_SECONDS: Final = "job/completion_seconds"
OBJECTIVE: Final = "objective"  # the first of several; the others are objective_2, objective_3, ...

# ---- metrics of the search's run, with the number of group iterations; the shared names are totals ----
SEARCH_SECONDS: Final = "search/seconds"
SEARCH_THROUGHPUT: Final = "search/tokens_per_s"
SEARCH_BEST: Final = "search/best"
SEARCH_BEST_TRIAL: Final = "search/best_trial"
SEARCH_FRONT: Final = "search/front"  # trials on the Pareto front of several objectives
SEARCH_RUNNING: Final = "search/running"
SEARCH_ENDED: Final = "search/ended"
SEARCH_FAILED: Final = "search/failed"
GROUP_JOBS: Final = "group/jobs"
GROUP_MICROBATCHES: Final = "group/microbatches"
GROUP_FILL: Final = "group/fill"
PEAK_BYTES: Final = "memory/peak_bytes"
# Of each of several replicas in one iteration (``replica/0/busy_seconds``): attributes of its ReplicaTime.
OF_REPLICA: Final = (
    "busy_seconds",
    "waited_seconds",
    "tokens",
    "received_bytes",
    "predicted_busy_seconds",
    "predicted_waited_seconds",
    "waited_share",
    "predicted_waited_share",
    "peak_bytes",
    "predicted_bytes",
)

# ---- tags ---------------------------------------------------------------------------------------------
TAG_STUDY: Final = "plait.study"  # of a search: distinguishes it from an earlier one of its name
TAG_SEARCH: Final = "plait.search"
TAG_TRIAL: Final = "plait.trial"
TAG_JOB: Final = "plait.job"
TAG_STATE: Final = "plait.state"
TAG_GROUP: Final = "plait.group"
TAG_REASON: Final = "plait.reason"
TAG_DIVERGED: Final = "plait.diverged"
TAG_STEP: Final = "plait.step"  # the step at which a job ended
TAG_STEPS: Final = "plait.steps"  # total steps of a job
TAG_ADAPTER: Final = "plait.adapter"
TAG_DIRECTION: Final = "plait.direction"
TAG_METRIC: Final = "plait.metric"
TAG_OBJECTIVES: Final = "plait.objectives"  # of a search with several: JSON, a metric and a direction each
TAG_FEASIBLE: Final = "plait.feasible"  # of a job: "false" if it breaks a constraint
TAG_OUTSIDE: Final = "plait.outside"  # of a job: its settings outside the search space, as overrides
TAG_PARETO: Final = "plait.pareto"  # of a job: "true" if it is on the front of several objectives
TAG_PARENT: Final = "mlflow.parentRunId"
TAG_NOTE: Final = "mlflow.note.content"
TAG_TABLES: Final = "mlflow.loggedArtifacts"

# ---- artifacts ----------------------------------------------------------------------------------------
ADAPTER_FOLDER: Final = "adapter"
CONFIG_FILE: Final = "config.yaml"
LEADERBOARD_FILE: Final = "leaderboard.json"
TEXTS_FILE: Final = "generated.json"  # of `plait generate --table`
PARETO_FILE: Final = "pareto.json"


def objective_name(at: int) -> str:
    """The metric of a job's run with its objective of this index."""
    return OBJECTIVE if at == 0 else f"{OBJECTIVE}_{at + 1}"
