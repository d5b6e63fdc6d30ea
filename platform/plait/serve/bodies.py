"""The bodies of OpenAI's completions and chat completions: what is read, and what is answered.

A seam: pure data, without a server.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, model_validator

from plait.core.errors import InputError
from plait.serve.requests import MOST_LOG_PROBABILITIES, REPLACEMENT, Completion, Sampling

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
IGNORED = ("user", "metadata", "store", "safety_identifier")


class StreamOptions(BaseModel):
    """What a stream has besides its pieces."""

    include_usage: bool = False


class _Body(BaseModel):
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
        if self.stream and self.scored is not None:
            raise InputError("log-probabilities with stream", "They are given without stream alone.")
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


class AdapterBody(BaseModel):
    """The body of /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

    lora_name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    lora_path: str | None = None


class Answer:
    """Forms of one answer: whole, or piece by piece.

    Args:
        prompt: tokens of the prompt.
        counted: whether a stream ends with its usage.
    """

    def __init__(self, model: str, prompt: int, *, chat: bool, counted: bool = False) -> None:
        self._chat = chat
        self._model = model
        self._prompt = prompt
        self.counted = counted
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}"
        self._created = int(time.time())

    def whole(self, ended: Completion, tokens: Sequence[str], tops: Sequence[Any]) -> Any:
        """The answer with its usage.

        Args:
            tokens: each new token's text.
            tops: for each new token, pairs of text and log-probability.
        """
        message = {"role": "assistant", "content": ended.text}
        part = {"message": message} if self._chat else {"text": ended.text}
        scores = _scores(ended, tokens, tops, chat=self._chat) if ended.scores else None
        choice = {"index": 0, "finish_reason": ended.reason, "logprobs": scores} | part
        return self._frame("chat.completion" if self._chat else "text_completion", choice) | self._used(ended)

    def piece(self, text: str, reason: str | None) -> Any:
        """One chunk of a stream."""
        part = {"delta": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, "finish_reason": reason, "logprobs": None} | part
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


def _scores(ended: Completion, tokens: Sequence[str], tops: Sequence[Any], *, chat: bool) -> dict[str, Any]:
    own = [score.log_probability for score in ended.scores]
    if chat:
        content = [
            _score(token, value) | {"top_logprobs": [_score(*each) for each in top]}
            for token, value, top in zip(tokens, own, tops, strict=True)
        ]
        return {"content": content}
    offsets = [len("".join(tokens[:index])) for index in range(len(tokens))]
    tables = [dict(top) for top in tops]
    return {"tokens": list(tokens), "token_logprobs": own, "top_logprobs": tables, "text_offset": offsets}


def _score(token: str, value: float) -> dict[str, Any]:
    """A token with its bytes; those of one that is a part of a character are not known by its text."""
    return {"token": token, "logprob": value, "bytes": None if REPLACEMENT in token else list(token.encode())}
