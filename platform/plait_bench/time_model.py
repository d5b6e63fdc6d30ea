"""Seconds predicted for measurements of LobRA's layer-time table that the fit has not seen."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plait.config.fields import build
from plait.core.errors import ConfigError, DataError, InputError
from plait.core.figures import Figure, Report
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.cost.fitting import Fit
from plait.cost.time import LayerTime, MicrobatchShape, fit_layer
from plait.utils.benchmarks import BENCHMARKS

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


@dataclass(frozen=True, slots=True)
class Options:
    """Of the benchmark.

    Attributes:
        table: CSV file of layer times.
        held_out: rows that are not fitted to, from 0.
    """

    table: Path
    held_out: tuple[int, ...]


@BENCHMARKS.register("lobra/time_model")
def run(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Mean relative error on the held-out rows, by tensor-parallel degree and over all.

    Raises:
        ConfigError: a wrong option, or a row held out that the table does not have.
        DataError: the table is not there or cannot be used.
    """
    del settings, jobs
    asked = build(Options, options, "bench.options")
    rows = read_layer_times(asked.table)
    held = set(asked.held_out)
    if not held or min(held) < 0 or max(held) >= len(rows):
        raise ConfigError(
            f"bench.options.held_out of {len(held)} rows",
            f"They must be row numbers from 0 to {len(rows) - 1} of the table.",
        )
    seen = [row for index, row in enumerate(rows) if index not in held]
    unseen = [rows[index] for index in sorted(held)]
    fits = fit_by_degree(seen)
    layers = {tp: layer for tp, (layer, _) in fits.items()}
    if lost := sorted({row.tp for row in unseen} - set(layers)):
        raise ConfigError(
            f"bench.options.held_out holds every row of tp={lost[0]}", "Some must be left to fit to."
        )
    figures = []
    for tp, (_, fit) in fits.items():
        errors = 100.0 * np.abs(relative_errors([row for row in unseen if row.tp == tp], layers))
        note = f"fitted {100.0 * fit.mean_absolute_error:.2f} %, largest held-out {errors.max():.1f} %"
        case = f"tp={tp}, {len(errors)} rows"
        figures.append(Figure(case, float(errors.mean()), "%", "computed", note=note))
    mean = 100.0 * float(np.abs(relative_errors(unseen, layers)).mean())
    figures.append(Figure(f"all, {len(unseen)} of {len(rows)} rows", mean, "%", "computed"))
    return Report("Held-out mean relative error of layer seconds, Llama-2-7B on A100-40GB", tuple(figures))
