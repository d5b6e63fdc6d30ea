"""Everything Plait keeps in MLflow: losses, throughput, adapters, leaderboard."""

import os

# Set before MLflow is imported, where the user has not: the writer retries by itself and may not hang for
# minutes in one call, and nobody but the chosen store hears of a run.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from plait.tracking.board import Board, JobRecord
from plait.tracking.check import check_tracking
from plait.tracking.location import Location, locate
from plait.tracking.tracker import SearchFacts, Tracker

__all__ = ["Board", "JobRecord", "Location", "SearchFacts", "Tracker", "check_tracking", "locate"]
