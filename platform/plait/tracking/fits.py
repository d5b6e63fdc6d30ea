"""The table of fits: every model of seconds and of bytes that training was predicted with, and its errors.

One JSON object a line below the search's folder, appended over restarts; the same as a table of the search's
run in MLflow, thinned evenly where there are many.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

from plait.engine.messages import ModelFitted
from plait.errors import StorageError

FITS_FILE = "fits.jsonl"
FITS_ARTIFACT = "fits.json"
MOST_ROWS = 400  # of the artifact
GROWTH = 1.25  # the artifact is written anew when the table has grown by this much: its cost stays linear
COLUMNS = tuple(field.name for field in fields(ModelFitted))


class Fits:
    """The table of one search, in its folder, which must be there."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FITS_FILE
        self._count = len(self._lines())
        self._shown = 0

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
        self._count += 1

    @property
    def grown(self) -> bool:
        """Whether enough was added since :meth:`artifact` to write that anew."""
        return self._count >= max(1, GROWTH * self._shown)

    @property
    def behind(self) -> bool:
        """Whether anything was added since :meth:`artifact`."""
        return self._count > self._shown

    def artifact(self) -> str:
        """The table in the form that MLflow shows, at most ``MOST_ROWS`` rows, the newest among them;
        coefficients as JSON text."""
        self._shown = self._count
        lines = self._lines()
        kept = lines[:: -max(1, -(-len(lines) // MOST_ROWS))]
        rows = []
        for line in reversed(kept):
            try:
                row = json.loads(line)
            except ValueError:  # a line that a crash left unfinished
                continue
            rows.append([json.dumps(row[name]) if name == "coefficients" else row[name] for name in COLUMNS])
        return json.dumps({"columns": COLUMNS, "data": rows})

    def _lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
