"""Seconds predicted for measurements of LobRA's layer-time table that the fit has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from plait.bench.figures import Figure, Report
from plait.cost.tables import fit_by_degree, read_layer_times, relative_errors
from plait.jobs import JobSpec
from plait.settings import RunSettings


def run(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Mean relative error on the held-out rows, by tensor-parallel degree and over all.

    Options: ``table`` (path of the CSV file), ``held_out`` (row indices from 0).

    Raises:
        DataError: the table is not there or cannot be used.
    """
    del settings, jobs
    rows = read_layer_times(Path(str(options["table"])))
    held = sorted(cast("Sequence[int]", options["held_out"]))
    seen = [row for index, row in enumerate(rows) if index not in set(held)]
    unseen = [rows[index] for index in held]
    fits = fit_by_degree(seen)
    layers = {tp: layer for tp, (layer, _) in fits.items()}
    figures = []
    for tp, (_, fit) in fits.items():
        errors = 100.0 * np.abs(relative_errors([row for row in unseen if row.tp == tp], layers))
        note = f"fitted {100.0 * fit.mean_absolute_error:.2f} %, largest held-out {errors.max():.1f} %"
        case = f"tp={tp}, {len(errors)} rows"
        figures.append(Figure(case, float(errors.mean()), "%", "computed", note=note))
    mean = 100.0 * float(np.abs(relative_errors(unseen, layers)).mean())
    figures.append(Figure(f"all, {len(unseen)} of {len(rows)} rows", mean, "%", "computed"))
    return Report("Held-out mean relative error of layer seconds, Llama-2-7B on A100-40GB", tuple(figures))
