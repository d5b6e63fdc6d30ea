"""Published or measured tables of layer times, checked on reading."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.core.errors import DataError, InputError
from plait.cost.fitting import Fit
from plait.cost.shapes import MicrobatchShape
from plait.cost.time import LayerTime, fit_layer

COLUMNS = ("tp", "seq_len", "mbs", "time")


@dataclass(frozen=True, slots=True)
class LayerMeasurement:
    """Seconds of one layer, forward and backward, for ``samples`` sequences of ``length`` tokens."""

    tp: int
    length: int
    samples: int
    seconds: float

    @property
    def shape(self) -> MicrobatchShape:
        """As a microbatch."""
        return MicrobatchShape.of([self.length] * self.samples)


def read_layer_times(path: Path) -> tuple[LayerMeasurement, ...]:
    """The rows of a CSV file with the columns tp, seq_len, mbs and time (in milliseconds), in order.

    Raises:
        DataError: the file or a column is missing, or an entry is missing, negative or no number.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "The table of layer times must be readable.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: {error}", "The table of layer times is a CSV file in UTF-8.") from error
    return tuple(_measurement(path, number, row) for number, row in enumerate(rows, start=2))


def _measurement(path: Path, line: int, row: dict[str, str | None]) -> LayerMeasurement:
    values = []
    for column in COLUMNS:
        text = row.get(column)
        try:
            value = float(text or "")
        except ValueError:
            value = math.nan
        if not (value > 0 and math.isfinite(value)):
            raise DataError(f"{path} line {line}: {column}={text!r}", "Every entry is a number above 0.")
        values.append(value)
    tp, length, samples, milliseconds = values
    return LayerMeasurement(int(tp), int(length), int(samples), milliseconds / 1e3)


def fit_by_degree(rows: Sequence[LayerMeasurement]) -> dict[int, tuple[LayerTime, Fit]]:
    """One fit for each tensor-parallel degree of the table.

    Raises:
        InputError: no rows.
    """
    if not rows:
        raise InputError("no measurements", "A fit needs some for each tensor-parallel degree.")
    degrees = sorted({row.tp for row in rows})
    return {tp: fit_layer((row.shape, row.seconds) for row in rows if row.tp == tp) for tp in degrees}


def relative_errors(rows: Sequence[LayerMeasurement], layers: dict[int, LayerTime]) -> list[float]:
    """(predicted − measured) / measured of each row."""
    return [layers[row.tp].seconds(row.shape) / row.seconds - 1.0 for row in rows]
