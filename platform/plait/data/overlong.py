"""Truncates, drops or refuses samples that are too long for the model or have no labels, and counts them.

A seam: it decides which of a source's rows are trained on, as a pure function of lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from plait.core.errors import DataError
from plait.core.samples import RowCounts, Sample
from plait.data.sources import Overlong

Use = Literal["training", "validation"]

# At most so many characters for each token of the limit are tokenised: a text has 3 to 6 per token.
MOST_CHARACTERS = 64


class Candidate(NamedTuple):
    """A sample that may be trained on.

    Attributes:
        where: the row's place, for errors.
        number: the row's number.
        characters: characters of its whole text.
    """

    sample: Sample
    where: str
    number: int
    characters: int


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The longest sample, in tokens.

    Attributes:
        model: the model's limit; longer samples are overlong.
        capacity: the microbatch's capacity, which every sample must fit into; None: unlimited.
        cluster: described cluster whose devices set the capacity; "": ``key`` does.
    """

    model: int
    capacity: int | None = None
    cluster: str = ""
    key: str = "engine.capacity"

    @property
    def characters(self) -> int:
        """How many characters of a text are tokenised; a text with more is overlong."""
        return self.model * MOST_CHARACTERS

    def check_capacity(self, longest: int) -> None:
        """Check that a sample of ``longest`` tokens fits into a microbatch; DataError otherwise."""
        if self.capacity is None or longest <= self.capacity:
            return
        if self.cluster:
            rule = f"A sample must fit into one microbatch: at most {self.capacity} tokens on {self.cluster}."
            remedy = "Describe more or larger devices (cluster.options), choose another cluster"
        else:
            rule = f"A sample must fit into one microbatch: {self.key}={self.capacity} tokens."
            remedy = f"Raise {self.key} to {longest} or more"
        raise DataError(
            f"the longest sample has {longest} tokens",
            rule,
            f"{remedy}, or truncate samples with model.max_length={self.capacity}.",
        )


def fit(
    candidates: Sequence[Candidate], rule: Overlong, limit: LengthLimit, use: Use
) -> tuple[list[tuple[Sample, int]], RowCounts]:
    """The samples that are used, each with the number of its row, and what became of the others.

    Raises:
        DataError: with "refuse", a sample is too long or has no labels; otherwise, none is left.
    """
    kept: list[tuple[Sample, int]] = []
    truncated = dropped = unlabelled = 0
    for each in candidates:
        tokens, labels = each.sample
        long = len(tokens) > limit.model or each.characters > limit.characters
        if long and rule == "refuse":
            raise _too_long(each, limit)
        if long and rule == "drop":
            dropped += 1
        elif not labels[: limit.model].any():
            if rule == "refuse":
                raise _unlabelled(each)
            unlabelled += 1
        else:
            truncated += long
            kept.append((Sample(tokens[: limit.model], labels[: limit.model]), each.number))
    if candidates and not kept:
        raise _none_left(candidates, limit, dropped, unlabelled, use)
    return kept, RowCounts(len(candidates), truncated, dropped, unlabelled)


def described(counts: RowCounts, limit: int) -> Iterator[str]:
    """Descriptions of the rows that are truncated or left out."""
    if counts.truncated:
        yield f"{counts.truncated:,} truncated to {limit:,} tokens (model.max_length, data.overlong)"
    if counts.dropped:
        yield f"{counts.dropped:,} dropped, longer than {limit:,} tokens (model.max_length, data.overlong)"
    if counts.unlabelled:
        yield f"{counts.unlabelled:,} dropped, nothing in the first {limit:,} tokens counts in the loss"


def _size(each: Candidate, limit: LengthLimit) -> str:
    if each.characters > limit.characters:
        return f"{each.characters:,} characters"
    return f"{len(each.sample.tokens)} tokens"


def _model_rule(limit: LengthLimit) -> str:
    return f"The model accepts samples of at most {limit.model} tokens (model.max_length)."


def _too_long(each: Candidate, limit: LengthLimit) -> DataError:
    return DataError(
        f"{each.where}: {_size(each, limit)}",
        _model_rule(limit),
        "Set data.overlong=truncate or data.overlong=drop, raise model.max_length if the model accepts more, "
        "or choose a model for longer texts.",
    )


def _unlabelled(each: Candidate) -> DataError:
    return DataError(
        f"{each.where}: no labelled tokens in {len(each.sample.tokens)}",
        "A sample needs at least one token that counts in the loss, and its first token never counts.",
        "Remove the row, or set data.overlong=drop.",
    )


def _none_left(
    candidates: Sequence[Candidate], limit: LengthLimit, dropped: int, unlabelled: int, use: Use
) -> DataError:
    first = candidates[0].where
    reasons = [f"{dropped} longer than {limit.model} tokens"] * bool(dropped)
    reasons += [f"{unlabelled} without a token that counts in the loss"] * bool(unlabelled)
    value = f"{first} and later: no {use} row of {len(candidates)} is left: {' and '.join(reasons)}"
    lengths = [len(each.sample.tokens) for each in candidates]
    shortest, longest = min(lengths), max(lengths)
    if longest <= limit.model and not dropped:
        rule = f"Each has room for {limit.model} tokens (model.max_length), and the longest has {longest}."
        other = ", or choose other rows for validation (data.validation, data.seed)" * (use == "validation")
        return DataError(value, rule, f"Remove rows without text or without an answer{other}.")
    return DataError(
        value,
        f"{_model_rule(limit)} The shortest of these has {shortest}.",
        "Raise model.max_length if the model accepts more, choose a model for longer texts, or shorten the "
        "prompts: `plait data` shows what counts in the loss.",
    )
