"""A SQLite file with MLflow's tables, whole or absent."""

from __future__ import annotations

import fcntl
from pathlib import Path

from mlflow import MlflowClient


def make_database(file: Path) -> None:
    """Make a SQLite file with MLflow's tables where there is none yet.

    MLflow takes seconds for it, in dozens of steps that SQLite does not undo: a process that is killed in
    between leaves tables that MLflow can neither use nor complete. So they are made beside the file, by one
    process at a time, and renamed.

    Args:
        file: its folder is there.

    Raises:
        OSError, MlflowException, SQLAlchemyError: it cannot be made.
    """
    if _has_content(file):
        return
    lock = file.with_name(f".{file.name}.lock")
    with lock.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not _has_content(file):
            draft = file.with_name(f".{file.name}.new")
            for left in (draft, draft.with_name(f"{draft.name}-journal")):  # by a process that was killed
                left.unlink(missing_ok=True)
            MlflowClient(f"sqlite:///{draft}").get_experiment_by_name("Default")
            draft.replace(file)
        lock.unlink(missing_ok=True)  # who still waits for it finds the file


def _has_content(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0
