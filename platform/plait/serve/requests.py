"""Requests to generate text, what comes back, and when a text ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from plait.core.errors import InputError, PlaitError

Reason = Literal["stop", "length", "scored", "not finite"]
MOST_LOG_PROBABILITIES = 20  # as OpenAI's
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # in place of a character of which bytes are missing


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen, and when a text ends.

    Attributes:
        max_new_tokens: most new tokens; a text also ends at the model's own limit.
        temperature: 0 takes the most likely token.
        top_p: only the likeliest tokens that together have at least this probability.
        seed: chooses the same tokens again, whatever else is in the batch.
        stop: texts that end the text and are not part of it.
        stop_tokens: tokens that end it and are not part of it; None: the model's own.
        log_probabilities: number of likeliest tokens that are reported with each token; None: nothing is.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] | None = None
    log_probabilities: int | None = None

    def __post_init__(self) -> None:
        rules = (
            ("max_new_tokens", self.max_new_tokens, "at least 1", self.max_new_tokens >= 1),
            (
                "temperature",
                self.temperature,
                "0 or more, and finite",
                self.temperature >= 0 and math.isfinite(self.temperature),
            ),
            ("top_p", self.top_p, "above 0 and at most 1", 0 < self.top_p <= 1),
            ("seed", self.seed, "from 0 to 2**64 - 1", 0 <= self.seed < 2**64),
            ("stop", self.stop, "texts of at least one character", all(self.stop)),
            (
                "log_probabilities",
                self.log_probabilities,
                f"from 0 to {MOST_LOG_PROBABILITIES}",
                self.log_probabilities is None or 0 <= self.log_probabilities <= MOST_LOG_PROBABILITIES,
            ),
        )
        for name, value, rule, kept in rules:
            if not kept:
                raise InputError(f"{name}={value!r}", f"{name} is {rule}.")


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens to continue or to score, and the adapter to use.

    Attributes:
        adapter: None: the base model without an adapter.
        scored: so many tokens at the end are scored, given those before them, beside the likeliest token at
            their place; nothing is generated. 0: the tokens are a prompt to continue.
    """

    tokens: tuple[int, ...]
    adapter: str | None = None
    sampling: Sampling = GREEDY
    scored: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """The log-probability of a chosen or given token, and the likeliest tokens with theirs.

    They are the model's own, before temperature and top-p.
    """

    log_probability: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A text that has ended.

    Attributes:
        tokens: new tokens without the stop token; with a stop text, those that it is made of too.
        text: their text, without the stop text.
        scores: one for each token, if they were requested; of the prompt's tokens, if these are scored.
    """

    tokens: tuple[int, ...]
    text: str
    reason: Reason
    scores: tuple[Score, ...] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """What one iteration added to a request's text.

    Attributes:
        ended: the whole of it, at its end.
        error: why the request has ended without a text: its adapter could not be read.
        token, score: the new token, if it belongs to the text, and its score if these were requested. The
            token's text may come later.
    """

    request: int
    text: str
    ended: Completion | None = None
    error: PlaitError | None = None
    token: int | None = None
    score: Score | None = None


class GrowingText:
    """The text of a growing list of tokens, given out in pieces that later tokens cannot change.

    Held back are a character of which bytes are missing, and what may become a stop text. Only the newest
    tokens are decoded, beside those just before them, on which their text may depend.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: tuple[str, ...]) -> None:
        self._decode = decode
        self._stop = stop
        self._given = 0
        self._settled = ""  # the text of all tokens before the last ones
        self._before, self._settling = 0, 0  # tokens decoded beside the last ones, and where these begin
        self.text = ""

    def extend(self, tokens: Sequence[int]) -> bool:
        """Take all tokens so far; whether a stop text ends them."""
        before = self._decode(tokens[self._before : self._settling])
        last = self._decode(tokens[self._before :])[len(before) :]
        whole = self._settled + last
        # what has been given out holds no stop text, and none's beginning
        ends = [at for at in (whole.find(stop, self._given) for stop in self._stop) if at >= 0]
        if last and not last.endswith(REPLACEMENT):
            self._settled, self._before, self._settling = whole, self._settling, len(tokens)
        self.text = whole[: min(ends)] if ends else whole
        return bool(ends)

    def piece(self, *, last: bool) -> str:
        """The next piece; the last one has all that is left."""
        safe = self.text if last else self.text.rstrip(REPLACEMENT)
        if not last:
            safe = safe[: len(safe) - max((_begun(safe, stop) for stop in self._stop), default=0)]
        piece = safe[self._given :]
        self._given = max(self._given, len(safe))
        return piece


def _begun(text: str, stop: str) -> int:
    """Characters at the end of a text with which a stop text begins."""
    most = min(len(stop) - 1, len(text))
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
