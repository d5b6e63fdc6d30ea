"""Assumed length distributions, named so that every figure can say which it assumes.

Papers print mean, skewness and kurtosis, which do not determine a distribution. A generator is therefore a
family, a spread (sigma), a clip and a seed, and each of these is an assumption.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import brentq

from plait.core.checks import check
from plait.core.errors import ConfigError
from plait.core.samples import Int64
from plait_bench.inputs import Count, Positive

Family = Literal["lognormal", "gamma"]


@dataclass(frozen=True, slots=True)
class LengthGenerator:
    """Lengths of samples, drawn from a named family.

    Attributes:
        family: "lognormal" or "gamma".
        mean: tokens, before clipping.
        sigma: spread. Lognormal: standard deviation of the logarithm. Gamma: standard deviation over
            mean. See :func:`sigma_from_skewness` for the value that a published skewness implies.
        clip: longest length; longer draws are cut to it.
        seed: of the draws.
    """

    family: Family
    mean: Positive
    sigma: Positive
    clip: Count = 16384
    seed: int = 0

    def __post_init__(self) -> None:
        check(self, "lengths")

    def draw(self, count: int, *, stream: str = "") -> Int64:
        """``count`` lengths (count,), each between 1 and ``clip``; ``stream`` separates data sets."""
        rng = np.random.default_rng([self.seed, zlib.crc32(stream.encode())])
        if self.family == "lognormal":
            raw = rng.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, count)
        else:
            shape = 1.0 / self.sigma**2
            raw = rng.gamma(shape, self.mean / shape, count)
        return np.clip(np.rint(raw), 1, self.clip).astype(np.int64)

    def describe(self) -> str:
        """The assumption in one line."""
        return (
            f"assumed lengths: {self.family}, mean {self.mean:g}, sigma {self.sigma:.3g}, "
            f"clipped at {self.clip}, seed {self.seed}"
        )


def sigma_from_skewness(family: Family, skewness: float) -> float:
    """The spread at which the family has this skewness (above 0)."""
    if not skewness > 0:
        raise ConfigError(f"skewness={skewness}", "These families have a skewness above 0.")
    if family == "gamma":
        return skewness / 2.0

    def excess(sigma: float) -> float:
        w = math.exp(sigma * sigma)
        return (w + 2.0) * math.sqrt(w - 1.0) - skewness

    return float(brentq(excess, 1e-6, 6.0))
