"""Seconds of one optimiser step on one replica whose sequences are packed together, as Plait's engine packs.

Nothing is padded, and sequences of all buckets share microbatches. With n microbatches of at most M tokens,

    T(d) = max over stages of [ fixed·n + Σ_j each_j·d_j ]  +  (pp − 1)·(seconds of the longest microbatch).

n is bounded from below by dual feasible functions, and packing nearly always reaches this bound; a pipeline
may use more microbatches than necessary, so that none is long. So the seconds here are a proved lower bound
for every packing. The seconds of an actual packing are in ``plait.planner.packed``. A seam: the planner's
search uses this cost or LobRA's through the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from plait.cost.replica import Float64, Int64, ReplicaCost

MOST_PARTS = 8  # largest k of the functions u_k, which count long sequences
WHOLE = 1e-9  # an excess over a whole number of microbatches below this is rounding


@dataclass(frozen=True)
class PackedCost(ReplicaCost):
    """T of a configuration for sequences of given lengths, packed together without padding."""

    @cached_property
    def room(self) -> Float64:
        """Share of a microbatch that a sequence of each bucket takes (n, R); by every row, a microbatch holds
        at most 1.

        The rows are dual feasible functions: tokens, and u_k of Fekete and Schepers (2001), by which a
        sequence of more than 1/(k + 1) of the capacity takes 1/k.
        """
        most = self.configuration.max_tokens
        share = np.where(self.batch > 0, self.lengths / most, 0.0)
        rows = [share]
        for k in range(1, MOST_PARTS + 1):
            parts, rest = np.divmod((k + 1) * self.lengths, most)
            rows.append(np.where(self.batch > 0, np.where(rest == 0, share, parts / k), 0.0))
        every = np.unique(np.array(rows), axis=0)
        return np.array([row for row in every if not _below(row, every)])

    @cached_property
    def linear(self) -> Float64:
        """Seconds a sequence of each bucket (n, R): by every row, T is at least Σ_j row_j·d_j."""
        rows = self.each[:, None, :] + self.fixed[:, None, None] * self.room[None]
        return np.asarray(rows.reshape(-1, len(self.lengths)))

    def microbatches(self, counts: Int64) -> Float64:
        """A lower bound on the microbatches that each row of ``counts`` (rows, R) needs: (rows,)."""
        return np.asarray(np.ceil((counts @ self.room.T).max(axis=1) - WHOLE))

    def seconds_many(self, counts: Int64) -> Float64:
        """T of each row of ``counts`` (rows, R), which no packing can beat; inf if a sequence does not
        fit."""
        unsupported = (counts[:, self.supported :] > 0).any(axis=1)
        least = self.microbatches(counts)[:, None]
        work = counts @ self.each.T
        seconds = (least * self.fixed + work).max(axis=1)
        if self.ramp:
            # The longest microbatch takes at least as long as the longest sequence alone, and as the mean.
            alone = np.where(counts > 0, (self.fixed[:, None] + self.each).max(axis=0), 0.0).max(axis=1)
            best = np.sqrt(self.ramp * work / np.maximum(self.fixed, 1e-300))
            number = np.maximum(np.maximum(least, best), 1.0)
            even = ((self.fixed * number + work) * (1.0 + self.ramp / number)).max(axis=1)
            seconds = np.where(least[:, 0] > 0, np.maximum(seconds + self.ramp * alone, even), 0.0)
        return np.where(unsupported, np.inf, seconds)

    def seconds_with(self, counts: Int64, buckets: Int64, more: Int64) -> Float64:
        """T of each row of ``counts`` (T, R) with ``more[m, t]`` further sequences of bucket ``buckets[m]``:
        (M, T)."""
        rows = np.repeat(counts[None], len(buckets), axis=0)
        rows[np.arange(len(buckets))[:, None], np.arange(len(counts))[None], buckets[:, None]] += more
        return self.seconds_many(rows.reshape(-1, counts.shape[1])).reshape(more.shape)


def _below(row: Float64, every: Float64) -> bool:
    """Whether another row is at least as large everywhere, so that this one is redundant."""
    return bool(((every >= row).all(axis=1) & (every > row).any(axis=1)).any())
