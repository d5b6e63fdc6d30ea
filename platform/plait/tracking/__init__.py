"""Everything Plait keeps in MLflow: losses, throughput, adapters, leaderboard. ARCHITECTURE.md has the path
of a loss through these modules."""

import os

# Set before MLflow is imported, unless the user did: the writer does its own retries and must not hang for
# minutes in one call, runs are reported only to the chosen store, and the terminal belongs to Plait.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
