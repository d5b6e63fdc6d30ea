"""The table of fits: every model of seconds and of bytes that training was predicted with, and its errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from plait.core.messages import ModelFitted
from plait.tracking.line_table import LineTable

FITS_FILE = "fits.jsonl"  # below the search's folder
FITS_ARTIFACT = "fits.json"  # of the search's run
MOST_ROWS = 400  # of the artifact
COLUMNS = tuple(field.name for field in fields(ModelFitted))


class Fits(LineTable):
    """The table of one search.

    Args:
        folder: of the search; made where it is not there.

    Raises:
        StorageError: the folder cannot be made or the table cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / FITS_FILE, COLUMNS, MOST_ROWS, _cells)

    def add(self, fitted: ModelFitted) -> None:
        """Append one fit.

        Raises:
            StorageError: it cannot be written.
        """
        self.append(asdict(fitted) | {"coefficients": dict(fitted.coefficients)})


def _cells(_number: int, raw: Mapping[str, Any]) -> list[Any]:
    """MLflow shows coefficients as JSON text."""
    return [json.dumps(raw[name]) if name == "coefficients" else raw[name] for name in COLUMNS]
