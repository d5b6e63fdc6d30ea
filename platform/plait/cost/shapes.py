"""What a microbatch weighs: the few sums that memory and time depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.core.plans import Microbatch


@dataclass(frozen=True, slots=True)
class MicrobatchShape:
    """Sums over the samples of one microbatch.

    Attributes:
        tokens: Σℓ, ℓ the samples' lengths.
        squares: Σℓ².
        labelled: tokens that count in the loss.
        rank_tokens: Σ rank·ℓ, the rank being that of the sample's adapter.
    """

    tokens: int
    squares: int
    labelled: int
    rank_tokens: int = 0

    @classmethod
    def of(
        cls, lengths: Sequence[int], *, labelled: int | None = None, ranks: Sequence[int] | int = 0
    ) -> MicrobatchShape:
        """The shape of samples of these lengths.

        Args:
            labelled: labelled tokens; None counts every token.
            ranks: one rank for all samples, or one for each.
        """
        tokens = sum(lengths)
        each = [ranks] * len(lengths) if isinstance(ranks, int) else ranks
        return cls(
            tokens=tokens,
            squares=sum(length * length for length in lengths),
            labelled=tokens if labelled is None else labelled,
            rank_tokens=sum(rank * length for rank, length in zip(each, lengths, strict=True)),
        )

    @classmethod
    def of_microbatch(
        cls, microbatch: Microbatch, *, ranks: Mapping[str, int], labelled: int
    ) -> MicrobatchShape:
        """The shape of a planned microbatch, given each job's rank and the labelled tokens in it."""
        segments = microbatch.segments
        return cls(
            tokens=microbatch.tokens,
            squares=sum(length * length for segment in segments for length in segment.lengths),
            labelled=labelled,
            rank_tokens=sum(ranks[segment.job] * segment.tokens for segment in segments),
        )

    def __add__(self, other: MicrobatchShape) -> MicrobatchShape:
        return MicrobatchShape(
            self.tokens + other.tokens,
            self.squares + other.squares,
            self.labelled + other.labelled,
            self.rank_tokens + other.rank_tokens,
        )


EMPTY = MicrobatchShape(0, 0, 0, 0)
