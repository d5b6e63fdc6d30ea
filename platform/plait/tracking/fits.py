"""The table of fits: every model of seconds and of bytes that training was predicted with, and its errors.

One JSON object a line below the search's folder, appended over restarts; the same as a table of the search's
run in MLflow.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

from plait.engine.messages import ModelFitted
from plait.errors import StorageError

FITS_FILE = "fits.jsonl"
FITS_ARTIFACT = "fits.json"
COLUMNS = tuple(field.name for field in fields(ModelFitted))


class Fits:
    """The table of one search, in its folder, which must be there."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FITS_FILE

    def add(self, fitted: ModelFitted) -> None:
        """Append one fit.

        Raises:
            StorageError: it cannot be written.
        """
        row = asdict(fitted) | {"coefficients": dict(fitted.coefficients)}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise StorageError(
                f"{self.path}: {error.strerror}",
                "The search's folder keeps a table of its fits.",
                "Make room, or make the folder writable, and start the same command again: it goes on.",
            ) from error

    def artifact(self) -> str:
        """The table in the form that MLflow shows; coefficients as JSON text."""
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # a line that a crash left unfinished
                continue
            rows.append([json.dumps(row[name]) if name == "coefficients" else row[name] for name in COLUMNS])
        return json.dumps({"columns": COLUMNS, "data": rows})
