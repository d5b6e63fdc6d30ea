"""Sharing out seconds: every nanosecond of the device belongs to one job, and the sums are exact.

Whole nanoseconds, because sums of floating-point shares drift away from the total.
"""

from __future__ import annotations

from collections.abc import Sequence

NANOSECONDS = 1_000_000_000


def nanoseconds(seconds: float) -> int:
    """Seconds as whole nanoseconds."""
    return round(seconds * NANOSECONDS)


def share(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """``total`` split in proportion to ``weights`` (at least 0), by largest remainder; the sum is ``total``.

    Equal shares where all weights are 0. Ties go to the earlier entry.

    Raises:
        ValueError: no weights, or one of them negative.
    """
    if not weights or min(weights) < 0:
        raise ValueError(f"weights {tuple(weights)}: at least one is needed and none may be negative")
    if sum(weights) == 0:
        weights = [1] * len(weights)
    whole = sum(weights)
    shares = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % whole))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)
