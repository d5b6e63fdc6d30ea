"""Non-negative least squares on relative errors, with the spread of its own residuals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plait.core.errors import InputError

Float64 = npt.NDArray[np.float64]

CONFIDENCE = 0.99  # confidence of the one-sided prediction interval behind every margin
FAR, NEAR = 4.0, 1e-9  # an outlier's error is FAR times the median; NEAR is the size of rounding errors
UNKNOWN_MARGIN = 0.1  # used while there are no more observations than coefficients


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted linear model target ≈ Σ coefficient · feature, all coefficients ≥ 0.

    Attributes:
        coefficients: one for each feature.
        errors: (predicted − observed) / observed for each observation.
        margin: the share by which a new observation may exceed its prediction, at :data:`CONFIDENCE`,
            computed from the residuals and the number of observations.
    """

    coefficients: tuple[float, ...]
    errors: tuple[float, ...]
    margin: float

    @property
    def mean_absolute_error(self) -> float:
        """Mean of |errors|."""
        return float(np.mean(np.abs(self.errors)))

    @property
    def max_absolute_error(self) -> float:
        """Largest of |errors|."""
        return float(np.max(np.abs(self.errors)))


def fit_relative(features: npt.ArrayLike, targets: npt.ArrayLike, names: tuple[str, ...]) -> Fit:
    """Minimise Σ (predicted / observed − 1)² over coefficients ≥ 0.

    Args:
        features: (observations, coefficients), all ≥ 0.
        targets: (observations,), all above 0.

    Raises:
        InputError: no observations, or an entry that is negative, missing or not finite.
    """
    from scipy.optimize import nnls  # slow to import, and many commands fit nothing

    matrix, target = np.asarray(features, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    _check(matrix, target, names)
    scaled = matrix / target[:, None]
    size = scaled.max(axis=0)  # columns of equal size: bytes per token² and per token differ by 1e6
    used = size > 0
    coefficients = np.zeros(len(names))
    solved, _ = nnls(scaled[:, used] / size[used], np.ones(len(target)))
    coefficients[used] = solved / size[used]
    errors = scaled @ coefficients - 1.0
    return Fit(tuple(coefficients.tolist()), tuple(errors.tolist()), _margin(errors, coefficients))


def fit_undisturbed(features: npt.ArrayLike, targets: npt.ArrayLike, names: tuple[str, ...]) -> Fit:
    """:func:`fit_relative` without outliers.

    Other work on the machine sometimes makes a measurement many times too long. So the model is fitted to all
    observations, then twice to those whose error is at most ``FAR`` times the median. ``errors`` covers all.

    Raises:
        InputError: as :func:`fit_relative`.
    """
    matrix, target = np.asarray(features, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    fit = fit_relative(matrix, target, names)
    for _ in range(2):
        off = np.abs(1.0 - target / np.maximum(matrix @ fit.coefficients, np.finfo(float).tiny))
        near = off <= FAR * float(np.median(off)) + NEAR
        kept = fit_relative(matrix[near], target[near], names)
        errors = matrix @ kept.coefficients / target - 1.0
        fit = Fit(kept.coefficients, tuple(errors.tolist()), kept.margin)
    return fit


def _check(matrix: Float64, target: Float64, names: tuple[str, ...]) -> None:
    if len(target) == 0:
        raise InputError(
            "no observations", "A fit needs at least one observation.", "Measure some with `plait profile`."
        )
    if matrix.ndim != 2 or matrix.shape[1] != len(names) or matrix.shape[0] != len(target):
        raise InputError(f"a table of shape {matrix.shape}", f"It needs one column for each of {names}.")
    for row in np.flatnonzero(~np.isfinite(target) | (target <= 0)):
        raise InputError(f"observed value {target[row]} in row {row}", "Observed values must be above 0.")
    for row, column in np.argwhere(~np.isfinite(matrix) | (matrix < 0)):
        raise InputError(
            f"{names[column]}={matrix[row, column]} in row {row}", f"{names[column]} must be 0 or more."
        )


def _margin(errors: Float64, coefficients: Float64) -> float:
    """Upper end of the prediction interval, relative; each active coefficient takes a degree of freedom."""
    count, active = len(errors), int(np.count_nonzero(coefficients))
    freedom = count - active
    if freedom < 1:
        return UNKNOWN_MARGIN
    from scipy.special import stdtrit

    spread = math.sqrt(float(errors @ errors) / freedom)
    interval = float(stdtrit(freedom, CONFIDENCE)) * spread * math.sqrt(1.0 + active / count)
    return max(interval, float(-errors.min()))  # never less than what was seen already
