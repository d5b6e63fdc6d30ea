"""Rendered text as samples: token ids and labels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from plait.core.errors import DataError
from plait.core.samples import Sample
from plait.data.options import Overlong
from plait.data.rendering import Rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_AT_ONCE = 1024  # bounds the memory of the offsets


def tokeniser_digest(tokeniser: PreTrainedTokenizerBase) -> str:
    """Digest of all that decides which tokens a text becomes."""
    content = [tokeniser.backend_tokenizer.to_str(), tokeniser.eos_token_id, tokeniser.bos_token_id]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def check_tokeniser(tokeniser: PreTrainedTokenizerBase) -> None:
    """Raise a DataError where the tokeniser cannot say which characters a token stands for, or has no end."""
    if not tokeniser.is_fast:
        raise DataError(
            f"tokeniser {type(tokeniser).__name__}",
            "Labels need a tokeniser of the `tokenizers` library, which knows each token's characters.",
            "Choose a model that has a tokenizer.json.",
        )
    if tokeniser.eos_token_id is None:
        raise DataError(
            f"tokeniser {type(tokeniser).__name__}",
            "Every sample ends with the end-of-sequence token, and this tokeniser has none.",
            "Choose a model whose tokeniser names its eos_token.",
        )


def tokenise(texts: Sequence[Rendered], tokeniser: PreTrainedTokenizerBase) -> list[Sample]:
    """One sample for each text, ended by the end-of-sequence token, which is labelled where the text is
    labelled to its end.

    Prompt and completion are tokenised together; a token counts in the loss when a character of it does.
    """
    samples: list[Sample] = []
    for start in range(0, len(texts), ROWS_AT_ONCE):
        for special, chunk in groupby(texts[start : start + ROWS_AT_ONCE], key=lambda text: text.special):
            samples += _tokenise(list(chunk), tokeniser, add_special_tokens=not special)
    return samples


def _tokenise(
    texts: Sequence[Rendered], tokeniser: PreTrainedTokenizerBase, *, add_special_tokens: bool
) -> list[Sample]:
    encoded = tokeniser(
        [text.text for text in texts],
        add_special_tokens=add_special_tokens,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    eos = int(tokeniser.eos_token_id)
    return [
        _sample(text, np.asarray(ids, np.int32), np.asarray(offsets, np.int64).reshape(-1, 2), eos)
        for text, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ]


def _sample(text: Rendered, ids: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], eos: int) -> Sample:
    labels = _labels(text.spans, offsets)
    if not len(ids) or ids[-1] != eos:  # some tokenisers append it themselves, and some templates write it
        ids, labels = np.append(ids, np.int32(eos)), np.append(labels, False)
    labels[-1] |= text.spans[-1][1] == len(text.text)
    labels[0] = False
    return Sample(ids, labels)


def _labels(spans: Sequence[tuple[int, int]], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which tokens (count, 2: first character, behind the last) have a character in one of the spans.

    Byte-level tokenisers leave blanks out of a token's range, so a token is taken to begin where the one
    before it ended. Special tokens that the tokeniser adds have the range (0, 0) and are in no span.
    """
    stops = offsets[:, 1]
    starts = np.minimum(offsets[:, 0], np.concatenate([[0], stops[:-1]]))
    labels = np.zeros(len(offsets), np.bool_)
    for start, stop in spans:
        labels |= (stops > start) & (starts < stop)
    return labels


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """Longest sample, in tokens.

    Attributes:
        model: what the model takes.
        capacity: what a microbatch holds; None where that does not limit.
        cluster: described cluster whose devices set the capacity; "": engine.capacity does.
    """

    model: int
    capacity: int | None = None
    cluster: str = ""

    @property
    def tokens(self) -> int:
        """The smaller limit."""
        return self.model if self.capacity is None else min(self.model, self.capacity)

    def rule(self, longest: int) -> str:
        """The limit that a sample of ``longest`` tokens breaks; of both the one that cannot be raised."""
        if longest > self.model:
            return f"The model takes samples of at most {self.model} tokens (model.max_length)."
        if self.cluster:
            return f"A sample lies in one microbatch: at most {self.capacity} tokens on {self.cluster}."
        return f"A sample lies in one microbatch, which holds {self.capacity} tokens (engine.capacity)."

    def remedy(self, longest: int) -> str:
        """What would let a sample of ``longest`` tokens through."""
        if longest > self.model:
            return "Raise model.max_length if the model takes more, take a model for longer texts"
        if self.cluster:
            return "Describe more or larger devices (cluster.options), choose another cluster"
        return f"Give engine.capacity={longest} or more"


def fit(
    samples: Sequence[Sample], places: Sequence[str], rule: Overlong, limit: LengthLimit
) -> list[int | None]:
    """For each sample the number of tokens to keep, or None to drop it.

    Raises:
        DataError: a sample is longer than the limit and the rule is "error", or no labelled token is left.
    """
    kept: list[int | None] = []
    longest = limit.tokens
    for sample, where in zip(samples, places, strict=True):
        length = len(sample.tokens)
        if length > longest and rule == "error":
            raise DataError(
                f"{where}: {length} tokens",
                limit.rule(length),
                f"{limit.remedy(_longest_allowed(samples, limit, length))}, "
                "or give data.overlong=drop or data.overlong=truncate.",
            )
        if length > longest and rule == "drop":
            kept.append(None)
            continue
        if not sample.labels[:longest].any():
            cut = f"{limit.remedy(length)}, or give data.overlong=drop."
            raise DataError(
                f"{where}: no labelled tokens in the first {min(length, longest)} of {length}",
                "A sample has at least one token that counts in the loss, and never its first.",
                cut if length > longest else "Remove the row.",
            )
        kept.append(min(length, longest))
    return kept


def _longest_allowed(samples: Sequence[Sample], limit: LengthLimit, length: int) -> int:
    """The longest of the samples that the model takes, so that one remedy serves for all of them."""
    if length > limit.model:
        return length
    return max(each for each in (len(sample.tokens) for sample in samples) if each <= limit.model)
