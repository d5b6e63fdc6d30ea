"""Seconds predicted for measurements of LobRA's layer-time table that the fit has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plait.config.fields import build
from plait.core.errors import ConfigError
from plait.core.figures import Figure, Report
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.cost.tables import fit_by_degree, read_layer_times, relative_errors
from plait.utils.benchmarks import BENCHMARKS


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
