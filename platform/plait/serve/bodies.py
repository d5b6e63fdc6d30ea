"""The bodies of OpenAI's completions and chat completions: what is read, and what is answered.

A seam: pure data, without a server.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, model_validator

from plait.core.errors import InputError
from plait.serve.requests import MOST_LOG_PROBABILITIES, REPLACEMENT, Completion, Sampling, Score, Update
from plait.utils.spelling import did_you_mean

# Options that change nothing with these values; a client may send them.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
}
ALIKE = 0.85  # of difflib: names that other servers know are no misspelled ones of this one
IGNORED = ("user", "metadata", "store", "safety_identifier")


class _Spelled(BaseModel):
    """A body in which a misspelled name is refused."""

    @model_validator(mode="before")
    @classmethod
    def _spelled(cls, values: Any) -> Any:
        if isinstance(values, dict):
            known = (*cls.model_fields, *cls._also())
            for name in values:
                meant = did_you_mean(name, known, cutoff=ALIKE) if name not in known else ""
                if meant:
                    raise ValueError(f"{name}: There is no such name here. {meant.strip()}")
        return values

    @classmethod
    def _also(cls) -> Iterable[str]:
        """Names that are known beside the fields."""
        return ()


class StreamOptions(_Spelled):
    """What a stream has besides its pieces."""

    include_usage: bool = False


class _Body(_Spelled):
    model_config = ConfigDict(extra="allow")

    model: str
    max_tokens: int | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Null leaves an option out. JSON's escapes can name what no UTF-8 has, which is refused."""
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("half of a surrogate pair is no character") from error
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def _also(cls) -> Iterable[str]:
        return (*NEUTRAL, *IGNORED)

    @property
    def asked(self) -> str:
        """The name under which the most new tokens are asked for."""
        return "max_tokens"

    @property
    def scored(self) -> int | None:
        """How many likeliest tokens are reported; None: no log-probabilities."""
        return None

    def sampling(self, most_new_tokens: int) -> Sampling:
        """How tokens are chosen; without a seed by one of its own, so that a prompt has several answers.

        Raises:
            InputError: an option that is not supported, or out of range.
        """
        for name, value in (self.model_extra or {}).items():
            if name not in IGNORED and value not in NEUTRAL.get(name, ()):
                raise InputError(f"{name}={str(value)[:100]}", "This server does not support it.")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stop) > 4:
            raise InputError(f"{len(stop)} stop texts", "There may be four.")
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options without stream", "They are options of a stream.")
        wanted = self._new_tokens(most_new_tokens)
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return Sampling(wanted, self.temperature, self.top_p, seed, stop=stop, log_probabilities=self.scored)

    def _new_tokens(self, most: int) -> int:
        """The most new tokens: those asked for, or as many as may be."""
        wanted: int | None = getattr(self, self.asked)
        if wanted is None or self.asked not in self.model_fields_set:
            return most if wanted is None else min(wanted, most)
        if not 1 <= wanted <= most:
            raise InputError(
                f"{self.asked}={wanted}",
                f"This server generates from 1 to {most} tokens for a request.",
                "Ask for no more, or start it with `plait serve --max-new-tokens N`.",
            )
        return wanted


class TextBody(_Body):
    """The body of /v1/completions."""

    prompt: str
    max_tokens: int | None = 16
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def scored(self) -> int | None:
        """As asked for."""
        return self.logprobs


class Part(BaseModel):
    """A part of a message; only text can be read."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    def plain(self) -> dict[str, str]:
        """The message as a chat template reads it."""
        parts = self.content
        return {
            "role": self.role,
            "content": parts if isinstance(parts, str) else "".join(part.text for part in parts),
        }


class ChatBody(_Body):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int = Field(0, ge=0, le=MOST_LOG_PROBABILITIES)

    @property
    def asked(self) -> str:
        """The new name or the old one."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def scored(self) -> int | None:
        """As asked for."""
        return self.top_logprobs if self.logprobs else None


class AdapterBody(_Spelled):
    """The body of /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

    lora_name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    lora_path: str | None = None


class Answer:
    """Forms of one answer: whole, or piece by piece.

    Args:
        prompt: tokens of the prompt.
        word: the text of a token.
        counted: whether a stream ends with its usage.
    """

    def __init__(
        self, model: str, prompt: int, word: Callable[[int], str], *, chat: bool, counted: bool = False
    ) -> None:
        self._word = word
        self._offset = 0  # letters of the tokens whose scores have been given
        self._chat = chat
        self._model = model
        self._prompt = prompt
        self.counted = counted
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}"
        self._created = int(time.time())

    def whole(self, ended: Completion) -> Any:
        """The answer with its usage."""
        message = {"role": "assistant", "content": ended.text}
        part = {"message": message} if self._chat else {"text": ended.text}
        scores = self._scores(ended.tokens, ended.scores) if ended.scores else None
        choice = {"index": 0, "finish_reason": ended.reason, "logprobs": scores} | part
        return self._frame("chat.completion" if self._chat else "text_completion", choice) | self._used(ended)

    def piece(self, update: Update) -> Any:
        """One chunk of a stream."""
        text, ended = update.text, update.ended
        part = {"delta": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        scores = None
        if update.token is not None and update.score is not None:
            scores = self._scores((update.token,), (update.score,))
        reason = None if ended is None else ended.reason
        choice = {"index": 0, "finish_reason": reason, "logprobs": scores} | part
        return self._chunk(choice) | ({"usage": None} if self.counted else {})

    def usage(self, ended: Completion) -> Any:
        """The chunk of a stream that has its usage alone."""
        return self._chunk() | self._used(ended)

    def _used(self, ended: Completion) -> dict[str, Any]:
        new = len(ended.tokens)
        counts = {"prompt_tokens": self._prompt, "completion_tokens": new, "total_tokens": self._prompt + new}
        return {"usage": counts}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return self._frame("chat.completion.chunk" if self._chat else "text_completion", *choices)

    def _frame(self, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return head | {"choices": list(choices)}

    def _scores(self, tokens: Sequence[int], scores: Sequence[Score]) -> dict[str, Any]:
        """The scores of tokens that follow those of the call before."""
        words = [self._word(token) for token in tokens]
        own = [score.log_probability for score in scores]
        tops = [[(self._word(token), value) for token, value in score.top] for score in scores]
        if self._chat:
            content = [
                _score(word, value) | {"top_logprobs": [_score(*each) for each in top]}
                for word, value, top in zip(words, own, tops, strict=True)
            ]
            return {"content": content}
        *offsets, self._offset = accumulate(map(len, words), initial=self._offset)
        tables = [dict(top) for top in tops]
        return {"tokens": words, "token_logprobs": own, "top_logprobs": tables, "text_offset": offsets}


def _score(token: str, value: float) -> dict[str, Any]:
    """A token with its bytes; those of one that is a part of a character are not known by its text."""
    return {"token": token, "logprob": value, "bytes": None if REPLACEMENT in token else list(token.encode())}
