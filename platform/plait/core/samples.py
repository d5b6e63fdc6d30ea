"""Tokenised data as plain arrays: what the engine trains on and the planner measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
MAX_WASTE = 1.25  # most padded area of a bucket over its real area


class Sample(NamedTuple):
    """One tokenised sequence. ``labels[i]`` says that predicting ``tokens[i]`` from the tokens before it
    counts in the loss; ``labels[0]`` is always False, since there are none before it.
    """

    tokens: Int32  # (length,)
    labels: Bool  # (length,)


@dataclass(frozen=True, slots=True)
class RowCounts:
    """What became of the rows that a split was made from.

    Attributes:
        rows: how many there were.
        truncated: how many samples lack their end because the model's limit is shorter.
        dropped: how many rows are left out because of their length.
        unlabelled: how many rows are left out because nothing in them would count in the loss.
    """

    rows: int = 0
    truncated: int = 0
    dropped: int = 0
    unlabelled: int = 0

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(
            self.rows + other.rows,
            self.truncated + other.truncated,
            self.dropped + other.dropped,
            self.unlabelled + other.unlabelled,
        )


class Share(NamedTuple):
    """Consecutive samples of a split that are taken with a weight of their own: one source of a mixture."""

    samples: int
    weight: float


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Samples end to end: sample i is ``tokens[offsets[i]:offsets[i + 1]]``.

    Attributes:
        rows: the row of the source that each sample was made from; a verifier scores answers by it.
        counts: what became of the rows.
        shares: the parts of a mixture, in order, that together have all samples; empty: all samples count
            alike.
    """

    tokens: Int32  # (total,)
    labels: Bool  # (total,)
    offsets: Int64  # (samples + 1,)
    rows: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))  # (samples,)
    counts: RowCounts = RowCounts()
    shares: tuple[Share, ...] = ()

    @classmethod
    def of(
        cls,
        samples: list[Sample],
        rows: Sequence[int] | None = None,
        counts: RowCounts | None = None,
        shares: tuple[Share, ...] = (),
    ) -> Split:
        """Make a split from single samples; ``labels[0]`` of each is forced to False.

        Args:
            rows: the source's row of each; None if sample i is row i.
            counts: None if every row became a sample unchanged.
        """
        offsets = np.cumsum([0] + [len(sample.tokens) for sample in samples], dtype=np.int64)
        tokens = np.concatenate([np.zeros(0, np.int32)] + [sample.tokens for sample in samples])
        labels = np.concatenate([np.zeros(0, np.bool_)] + [sample.labels for sample in samples])
        labels[offsets[:-1]] = False
        origins = np.arange(len(samples)) if rows is None else np.asarray(rows)
        counts = RowCounts(len(samples)) if counts is None else counts
        return cls(tokens.astype(np.int32), labels, offsets, origins.astype(np.int64), counts, shares)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def prompt(self, index: int) -> tuple[int, ...]:
        """A sample's tokens before the first label."""
        tokens, labels = self[index]
        return tuple(tokens[: int(labels.argmax())].tolist())

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a split of {len(self)}")
        start, stop = self.offsets[index], self.offsets[index + 1]
        return Sample(self.tokens[start:stop], self.labels[start:stop])

    @property
    def lengths(self) -> Int64:
        """Tokens of each sample (samples,)."""
        return np.diff(self.offsets)

    @property
    def labelled(self) -> Int64:
        """Labelled tokens of each sample (samples,)."""
        total = np.concatenate([[0], np.cumsum(self.labels, dtype=np.int64)])
        return np.asarray(total[self.offsets[1:]] - total[self.offsets[:-1]], dtype=np.int64)

    def summary(self) -> dict[str, float]:
        """Samples, tokens and lengths in a few figures, for tracking."""
        lengths = self.lengths
        if not len(lengths):
            return {"samples": 0, "tokens": 0}
        return {
            **asdict(self.counts),
            "samples": len(self),
            "tokens": int(lengths.sum()),
            "shortest": int(lengths.min()),
            "mean": float(lengths.mean()),
            "longest": int(lengths.max()),
            **{f"p{percent}": float(np.percentile(lengths, percent)) for percent in (50, 95, 99)},
            "labelled_share": float(self.labels.mean()),
        }


@dataclass(frozen=True, slots=True, eq=False)
class TokenisedData:
    """A data set ready for training. ``digest`` names its content: samples, tokeniser, template, split."""

    digest: str
    train: Split
    validation: Split


def bucket_samples(lengths: Sequence[int]) -> list[list[int]]:
    """Divide samples into buckets that attention pads to one length: sorted by falling length, with a cut
    wherever padding would waste too much.

    Returns:
        Indices of each bucket's samples, longest first; ties keep the samples' order.
    """
    buckets: list[list[int]] = []
    real = 0
    for sample in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        area = lengths[sample] ** 2
        if buckets:
            longest = lengths[buckets[-1][0]]
            if longest**2 * (len(buckets[-1]) + 1) <= MAX_WASTE * (real + area):
                buckets[-1].append(sample)
                real += area
                continue
        buckets.append([sample])
        real = area
    return buckets
