"""The bodies of OpenAI's completions and chat completions: what is read, and what is answered.

A seam: pure data, without a server.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from plait.core.errors import InputError
from plait.serve.requests import MOST_LOG_PROBABILITIES, REPLACEMENT, Completion, Sampling, Score, Update
from plait.utils.spelling import did_you_mean

# Options that change nothing with these values; a client may send them.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "service_tier": ("auto", "default"),
}
PROMPT = "a text, a list of texts, a list of token ids, or a list of such lists"
MOST_ANSWERS = 128  # of one request, as OpenAI's
ALIKE = 0.85  # of difflib: names that other servers know are no misspelled ones of this one
LOOKED_UP = 5  # unknown names of a body; streams stand still meanwhile, and one is refused in any case
IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key")


def _number(value: Any) -> Any:
    """Refuse true and false, which pydantic takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("It must be a number.")
    return value


Whole = Annotated[int, BeforeValidator(_number)]
Real = Annotated[float, BeforeValidator(_number)]


class _Spelled(BaseModel):
    """A body in which a misspelled name is refused."""

    @model_validator(mode="before")
    @classmethod
    def _spelled(cls, values: Any) -> Any:
        if isinstance(values, dict):
            known = (*cls.model_fields, *cls._also())
            for name in islice((name for name in values if name not in known), LOOKED_UP):
                if meant := did_you_mean(name, known, cutoff=ALIKE):
                    raise ValueError(f"{name}: There is no such name here. {meant.strip()}")
        return values

    @classmethod
    def _also(cls) -> Iterable[str]:
        """Names that are known beside the fields."""
        return ()


class StreamOptions(_Spelled):
    """What a stream has besides its pieces."""

    include_usage: bool | None = None


class _Body(_Spelled):
    model_config = ConfigDict(extra="allow")

    model: str
    max_tokens: Whole | None = None
    temperature: Real = Field(1.0, ge=0, le=2)
    top_p: Real = Field(1.0, gt=0, le=1)
    n: Whole = Field(1, ge=1, le=MOST_ANSWERS)
    seed: Whole | None = Field(None, ge=0, lt=2**63)
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
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
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

    def samplings(self, most_new_tokens: int) -> list[Sampling]:
        """How the tokens of each of a prompt's ``n`` answers are chosen: by the seed and those that follow
        it, or by a random one.

        Raises:
            InputError: an option that is not supported, or out of range.
        """
        for name, value in (self.model_extra or {}).items():
            if name not in IGNORED and value not in NEUTRAL.get(name, ()):
                raise InputError(f"{name}={str(value)[:100]}", "This server does not support it.")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stop) > 4:
            raise InputError(f"{len(stop)} stop texts", "At most four are allowed.")
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options without stream", "They apply only to a stream.")
        wanted = self._new_tokens(most_new_tokens)
        first = secrets.randbits(63) if self.seed is None else self.seed
        one = Sampling(wanted, self.temperature, self.top_p, stop=stop, log_probabilities=self.scored)
        return [replace(one, seed=first + more) for more in range(self.n)]

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

    prompt: Any
    max_tokens: Whole | None = 16
    logprobs: Whole | None = Field(None, ge=0, le=5)

    @field_validator("prompt")
    @classmethod
    def _prompt(cls, value: Any) -> Any:
        """Any of OpenAI's forms, in one message; pydantic's own would name each of them."""
        if not (_is_prompt(value) or (isinstance(value, list) and value and all(map(_is_prompt, value)))):
            raise ValueError(f"It is {PROMPT}.")
        return value

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The texts or token ids to continue."""
        many = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return self.prompt if many else [self.prompt]

    @property
    def scored(self) -> int | None:
        """As asked for."""
        return self.logprobs


def _is_prompt(value: Any) -> bool:
    """Whether it is one prompt: a text, or token ids."""
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
    )


class Part(BaseModel):
    """A part of a message; only text can be read."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    @model_validator(mode="before")
    @classmethod
    def _without_calls(cls, values: Any) -> Any:
        """Refuse calls of functions, which would be missing in the prompt."""
        for name in ("tool_calls", "function_call"):
            if isinstance(values, dict) and values.get(name):
                raise ValueError(f"{name}: This server does not support it.")
        return values

    @field_validator("content", mode="before")
    @classmethod
    def _content(cls, value: Any) -> Any:
        """A text or parts of text, in one message; pydantic's own would name both forms of each part."""
        parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "text" or type(part.get("text")) is not str:
                raise ValueError('It is a text, or a list of parts {"type": "text", "text": …}.')
        return value

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
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole = Field(0, ge=0, le=MOST_LOG_PROBABILITIES)

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

    lora_name: str
    lora_path: str | None = None

    @field_validator("lora_name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", value):
            raise ValueError(
                "It has at most 128 letters, digits, dots, _ and -, and begins with one of the first two."
            )
        return value


class Answer:
    """Forms of what one request is answered with: whole, or piece by piece. Each of its texts is a choice.

    Args:
        prompt: tokens of the prompts.
        word: the text of a token.
        counted: whether a stream ends with its usage.
    """

    def __init__(
        self, model: str, prompt: int, word: Callable[[int], str], *, chat: bool, counted: bool = False
    ) -> None:
        self._word = word
        self._offsets: Counter[int] = Counter()  # by choice: letters of tokens whose scores were given
        self._chat = chat
        self._model = model
        self._prompt = prompt
        self._new = 0  # tokens of choices that have ended
        self.counted = counted
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}"
        self._created = int(time.time())

    def whole(self, ended: Sequence[Completion]) -> Any:
        """All choices, with their usage."""
        choices = [self._choice(index, each) for index, each in enumerate(ended)]
        self._new = sum(len(each.tokens) for each in ended)
        return self._frame("chat.completion" if self._chat else "text_completion", *choices) | self._used()

    def _choice(self, index: int, ended: Completion) -> dict[str, Any]:
        message = {"role": "assistant", "content": ended.text}
        part = {"message": message} if self._chat else {"text": ended.text}
        scores = self._scores(index, ended.tokens, ended.scores) if ended.scores else None
        return {"index": index, "finish_reason": ended.reason, "logprobs": scores} | part

    def piece(self, index: int, update: Update) -> Any:
        """One chunk of a stream: what an update adds to a choice."""
        text, ended = update.text, update.ended
        part = {"delta": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        scores = None
        if update.token is not None and update.score is not None:
            scores = self._scores(index, (update.token,), (update.score,))
        reason = None
        if ended is not None:
            reason = ended.reason
            self._new += len(ended.tokens)
        choice = {"index": index, "finish_reason": reason, "logprobs": scores} | part
        return self._chunk(choice) | ({"usage": None} if self.counted else {})

    def usage(self) -> Any:
        """The last chunk of a stream, which has its usage alone."""
        return self._chunk() | self._used()

    def _used(self) -> dict[str, Any]:
        total = self._prompt + self._new
        counts = {"prompt_tokens": self._prompt, "completion_tokens": self._new, "total_tokens": total}
        return {"usage": counts}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return self._frame("chat.completion.chunk" if self._chat else "text_completion", *choices)

    def _frame(self, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return head | {"choices": list(choices)}

    def _scores(self, index: int, tokens: Sequence[int], scores: Sequence[Score]) -> dict[str, Any]:
        """The scores of a choice's tokens that follow those of the call before."""
        words = [self._word(token) for token in tokens]
        own = [score.log_probability for score in scores]
        tops = [[(self._word(token), value) for token, value in score.top] for score in scores]
        if self._chat:
            content = [
                _score(word, value) | {"top_logprobs": [_score(*each) for each in top]}
                for word, value, top in zip(words, own, tops, strict=True)
            ]
            return {"content": content}
        *offsets, self._offsets[index] = accumulate(map(len, words), initial=self._offsets[index])
        tables = [dict(top) for top in tops]
        return {"tokens": words, "token_logprobs": own, "top_logprobs": tables, "text_offset": offsets}


def _score(token: str, value: float) -> dict[str, Any]:
    """A token with its bytes; those of one that is a part of a character are not known by its text."""
    return {"token": token, "logprob": value, "bytes": None if REPLACEMENT in token else list(token.encode())}
