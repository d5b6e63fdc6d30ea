"""Everything Plait keeps in MLflow: losses, throughput, adapters, leaderboard.

A loss goes from the worker to MLflow through these modules:

    engine/coordinator.py     puts it into a JobProgress when the job's step is complete
    search/run.py             takes the engine's events in order
    tracking/tracker.py       decides which run it belongs to, and whether this step is written
    tracking/event_log.py     keeps it on disk until the store has it
    tracking/writer.py        sends many records together, in the background
    tracking/mlflow_store.py  writes it to the store
"""

import os

# Set before MLflow is imported, unless the user did: the writer does its own retries and must not hang for
# minutes in one call, runs are reported only to the chosen store, and the terminal belongs to Plait.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
