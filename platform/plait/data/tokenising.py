"""Renders examples as text with the spans that count in the loss, and text as samples: token ids and labels.

A seam: only this module decides what a row becomes; files, splits and the cache are elsewhere. The rules are
those of TRL's SFTTrainer; docs/data.md says where Plait differs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from plait.core.errors import ConfigError, DataError, InputError
from plait.core.samples import Sample
from plait.data.examples import Conversation, Example, Pair, Text, shortened, shown
from plait.data.sources import CommonOptions
from plait.utils.paths import user_path
from plait.utils.time_limit import time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_NAMES = {
    "system": "System",
    "developer": "Developer",
    "user": "User",
    "assistant": "Assistant",
    "tool": "Tool",
}
ROWS_AT_ONCE = 1024  # bounds the memory of the offsets
TEMPLATE_SECONDS = 5.0  # of the processor, for one row; a template that takes longer is wrong
TEMPLATE_FILES = (".jinja", ".jinja2", ".j2")
# Written in a template around the text that the model generates, so that only this can be counted.
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
USUAL_NAME = re.compile(r"[A-Za-z0-9_.-]+")  # of a function: written as it is, whatever the template
WITHOUT_TURNS = (
    "Set data.assistant_only_loss=false, or data.chat_template to a template with {% generation %} around "
    "the assistant's messages."
)
Ids = npt.NDArray[np.int32]
Labels = npt.NDArray[np.bool_]
Spans = tuple[tuple[int, int], ...]
Template = str | dict[str, str] | None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A sample as text.

    Attributes:
        text: prompt and completion.
        prompt: the text of the prompt, which does not count; None if everything counts.
        spans: half-open character ranges that count, in order; None: all of the text.
        templated: whether a chat template made the text, so that it already has every special token.
    """

    text: str
    prompt: str | None = None
    spans: Spans | None = None
    templated: bool = False


def chat_template(options: CommonOptions, tokeniser: PreTrainedTokenizerBase) -> Template:
    """The chat template chosen by the options; None if there is none, or none is used.

    Raises:
        ConfigError: it is neither a template nor a file that can be read.
    """
    if options.template == "plain":
        return None
    if options.chat_template is None:
        own: Template = tokeniser.chat_template or None
        return own
    return read_template(options.chat_template)


def read_template(given: str) -> str:
    """The chat template that is given, as itself or as a file.

    Raises:
        ConfigError: it is neither a template nor a file that can be read.
    """
    if "{" in given:
        return given
    path = user_path(given)
    try:
        if path.suffix in TEMPLATE_FILES:
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template={shortened(given)}: {getattr(error, 'strerror', None) or error}",
            f"The file must be readable text; Plait looked for {path.absolute()}.",
            "Set the path of a Jinja template, or leave it out to use the tokeniser's own.",
        ) from error
    raise ConfigError(
        f"data.chat_template={shortened(given)}",
        f"It must be a Jinja template, or a file whose name ends in one of {', '.join(TEMPLATE_FILES)}.",
        "For example data.chat_template=chat.jinja.",
    )


def messages_text(tokeniser: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], **more: Any) -> str:
    """Messages that a user wrote, as the tokeniser's template has them, with the assistant's turn begun.

    Raises:
        InputError: the template refuses them.
    """
    options = {"add_generation_prompt": True} | more
    try:
        with time_limit(TEMPLATE_SECONDS):
            return str(tokeniser.apply_chat_template(list(messages), tokenize=False, **options))
    except Exception as error:  # a template may raise any error of Jinja's
        raise InputError(f"messages: {error}", "The chat template refuses them.") from error


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renders examples as text, by the options and the model's tokeniser."""

    options: CommonOptions
    tokeniser: PreTrainedTokenizerBase
    template: Template

    @classmethod
    def of(cls, options: CommonOptions, tokeniser: PreTrainedTokenizerBase) -> Renderer:
        """The renderer of a source's options.

        Raises:
            ConfigError: as :func:`chat_template`.
        """
        return cls(options, tokeniser, chat_template(options, tokeniser))

    def render(self, example: Example, where: str) -> Rendered:
        """The text of an example.

        Raises:
            DataError: the template is missing or refuses the messages; only the assistant's messages should
                count but there are none, or they cannot be distinguished; or the text is not valid Unicode.
        """
        rendered = self._render(example, where)
        for text in (rendered.text, rendered.prompt or ""):
            _check_unicode(text, where)
        return rendered

    def _render(self, example: Example, where: str) -> Rendered:
        options = self.options
        if isinstance(example, Pair) and options.template == "chat":
            user = {"role": "user", "content": example.prompt}
            example = Conversation((user, {"role": "assistant", "content": example.completion}), prompt=1)
        if options.assistant_only_loss:
            _check_assistant(example, where)
        if isinstance(example, Text):
            return Rendered(example.text)
        if isinstance(example, Pair):
            head = example.prompt + (example.separator if options.separator is None else options.separator)
            return Rendered(head + example.completion, self._prompt(head))
        return self._plain(example, where) if options.template == "plain" else self._chat(example, where)

    def _prompt(self, text: str) -> str | None:
        return None if self.options.completion_only_loss is False else text

    def _plain(self, conversation: Conversation, where: str) -> Rendered:
        """Messages after their speakers' names ("User: …"). Each message of the assistant ends the sequence,
        as the last one does.
        """
        if conversation.tools or any("tool_calls" in message for message in conversation.messages):
            raise DataError(
                f"{where}: {'tools' if conversation.tools else 'tool_calls'}, with data.template=plain",
                "Tools and tool calls can only be rendered with a chat template.",
                "Leave data.template out, or remove the row.",
            )
        separator = "\n\n" if self.options.separator is None else self.options.separator
        text, head, spans = "", None, []
        for number, message in enumerate(conversation.messages):
            text += (separator if number else "") + f"{PLAIN_NAMES[message['role']]}: "
            if number == conversation.prompt:
                head = self._prompt(text)
            start = len(text)
            text += message.get("content", "")
            if message["role"] == "assistant":
                if number + 1 < len(conversation.messages):
                    text += str(self.tokeniser.eos_token)
                spans.append((start, len(text)))
        return Rendered(text, head, tuple(spans) if self.options.assistant_only_loss else None)

    def _chat(self, conversation: Conversation, where: str) -> Rendered:
        spans: Spans | None = None
        if not self.options.assistant_only_loss:
            text = self._apply(conversation, where)
        elif MARKED.search(self._template_text(conversation)):
            text, spans = self._marked(conversation, where)
        else:
            text = self._apply(conversation, where)
            spans = self._turns(conversation, text, where)
        _check_calls(conversation, text, where)
        head = None
        if conversation.prompt is not None and self.options.completion_only_loss is not False:
            head = self._apply(conversation, where, conversation.prompt, generation=True)
        return Rendered(text, head, spans, templated=True)

    def _turns(self, conversation: Conversation, text: str, where: str) -> Spans:
        """The spans of the assistant's messages in the text, found from prefixes of the conversation: each
        begins after the prompt for its generation."""
        spans = []
        count = len(conversation.messages)
        for number, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            through = self._apply(conversation, where, number + 1)
            head = self._before(conversation, where, number, through)
            if not text.startswith(through):  # some templates end every conversation with this token
                through = through.removesuffix(str(self.tokeniser.eos_token))
            if not (through.startswith(head) and text.startswith(through)):
                raise DataError(
                    f"{where}: message {number + 1} of {count}",
                    "The chat template changes a message when another one follows, so Plait cannot tell "
                    "which tokens count in the loss.",
                    WITHOUT_TURNS,
                )
            generated = through[len(head) :].lstrip()
            if not generated.startswith(str(message.get("content", "")).strip()):
                self._check_generation_prompt(conversation, where, number, head)
            spans.append((len(head), len(through)))
        return tuple(spans)

    def _check_generation_prompt(
        self, conversation: Conversation, where: str, number: int, head: str
    ) -> None:
        """Check that the header of a message is distinct from what the model generates. Raises a DataError if
        the text before the message does not end in the prompt for its generation."""
        bare = self._apply(conversation, where, number) if number else ""
        if head not in (bare, bare.removesuffix(str(self.tokeniser.eos_token))):
            return
        raise DataError(
            f"{where}: message {number + 1} of {len(conversation.messages)}",
            "The chat template has no generation prompt (add_generation_prompt), so Plait cannot tell "
            "the header of an assistant's message from its content.",
            WITHOUT_TURNS,
        )

    def _before(self, conversation: Conversation, where: str, number: int, through: str) -> str:
        """The text before a message: the conversation up to it, and the prompt for its generation.

        Args:
            through: the conversation up to and including the message.
        """
        if number:
            return self._apply(conversation, where, number, generation=True)
        # A template cannot render an empty conversation: the prompt is what it adds after the message.
        prompt = self._apply(conversation, where, 1, generation=True).removeprefix(through)
        return through[: through.index(prompt) + len(prompt)] if prompt in through else ""

    def _template_text(self, conversation: Conversation) -> str:
        tools = list(conversation.tools) or None
        try:
            return str(self.tokeniser.get_chat_template(self._explicit, tools))
        except ValueError:  # there is none: _apply reports it
            return ""

    @property
    def _explicit(self) -> str | None:
        """The template if it is not the tokeniser's own, of which there may be several by name."""
        return self.template if isinstance(self.template, str) else None

    def _apply(
        self, conversation: Conversation, where: str, count: int | None = None, *, generation: bool = False
    ) -> str:
        """The text of the first ``count`` messages."""
        self._check_template(where)
        try:
            with time_limit(TEMPLATE_SECONDS):
                return str(
                    self.tokeniser.apply_chat_template(
                        [dict(message) for message in conversation.messages[:count]],
                        tools=list(conversation.tools) or None,
                        chat_template=self._explicit,
                        tokenize=False,
                        add_generation_prompt=generation,
                        **conversation.settings,
                    )
                )
        except Exception as error:  # a template may raise any error of Jinja's
            raise _refused(where, error) from error

    def _marked(self, conversation: Conversation, where: str) -> tuple[str, Spans]:
        """The text, and the spans that the template marks as generated by the assistant."""
        from transformers.utils.chat_template_utils import render_jinja_template

        self._check_template(where)
        settings: Mapping[str, Any] = {**self.tokeniser.special_tokens_map, **conversation.settings}
        try:
            with time_limit(TEMPLATE_SECONDS):
                rendered: Any = render_jinja_template(  # its annotation names only the texts
                    [[dict(message) for message in conversation.messages]],
                    tools=list(conversation.tools) or None,
                    chat_template=self._template_text(conversation),
                    return_assistant_tokens_mask=True,
                    **settings,
                )
            (text,), (spans,) = rendered
        except Exception as error:  # a template may raise any error of Jinja's
            raise _refused(where, error) from error
        return str(text), tuple((int(start), int(stop)) for start, stop in spans)

    def _check_template(self, where: str) -> None:
        if self.template is None:
            raise DataError(
                f"{where}: messages",
                "Messages need a chat template, and this model's tokeniser has none.",
                'Set data.chat_template=FILE.jinja, or data.template=plain for "User: …", or choose an '
                "instruction-tuned model.",
            )


def _refused(where: str, error: Exception) -> DataError:
    if isinstance(error, (TimeoutError, MemoryError)):
        return DataError(
            f"{where}: the chat template is {str(error) or 'too large for the memory'}",
            f"A template must render a row within {TEMPLATE_SECONDS:g} s; this one may loop forever.",
            "Correct it, or set data.chat_template=FILE.jinja or data.template=plain.",
        )
    return DataError(
        f"{where}: {error}",
        "The chat template rejects these messages.",
        "Correct the row, or set data.chat_template=FILE.jinja or data.template=plain.",
    )


def _check_unicode(text: str, where: str) -> None:
    """Check that a tokeniser can encode the text; DataError otherwise. A row's functions, the separator or
    the template may contain half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: its text has {text[error.start]!a} at character {error.start + 1}",
            "The text must be valid Unicode: this is half of a surrogate pair, or a byte that is not UTF-8.",
            "Correct the row, data.separator or data.chat_template.",
        ) from error


def _check_calls(conversation: Conversation, text: str, where: str) -> None:
    """Check that the template writes the calls of functions, with their names; DataError otherwise. Without
    them the model would learn to answer nothing instead."""
    for number, message in enumerate(conversation.messages, start=1):
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            called = call.get("function", call) if isinstance(call, dict) else None
            name = called.get("name") if isinstance(called, dict) else None
            if isinstance(name, str) and USUAL_NAME.fullmatch(name) and name not in text:
                raise DataError(
                    f"{where}: message {number} calls the function {shown(name)}",
                    "The chat template leaves the call out, so the model would learn a message without it.",
                    "Set data.chat_template=FILE.jinja to one that writes tool_calls, or remove the row.",
                )


def _check_assistant(example: Example, where: str) -> None:
    if not isinstance(example, Conversation):
        raise DataError(
            f"{where}: no messages, with data.assistant_only_loss=true",
            "Only the assistant's messages count then, so every row must be a conversation.",
            "Leave data.assistant_only_loss out: of prompt and completion, the completion counts.",
        )
    if all(message["role"] != "assistant" for message in example.messages[example.prompt or 0 :]):
        raise DataError(
            f"{where}: roles {', '.join(message['role'] for message in example.messages)}",
            "With data.assistant_only_loss=true the assistant's messages count, and this row has none.",
            "Add an assistant message, or remove the row.",
        )


def tokeniser_digest(tokeniser: PreTrainedTokenizerBase) -> str:
    """Digest of everything that decides which tokens a text becomes."""
    content = [tokeniser.backend_tokenizer.to_str(), tokeniser.eos_token_id, tokeniser.bos_token_id]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def check_tokeniser(tokeniser: PreTrainedTokenizerBase) -> None:
    """Check that the tokeniser reports the characters of each token and has an end-of-sequence token;
    DataError otherwise."""
    if not tokeniser.is_fast:
        raise DataError(
            f"tokeniser {type(tokeniser).__name__}",
            "Labels need a tokeniser from the `tokenizers` library, which can map tokens to characters.",
            "Choose a model that has a tokenizer.json.",
        )
    if tokeniser.eos_token_id is None:
        raise DataError(
            f"tokeniser {type(tokeniser).__name__}",
            "Every sample ends with the end-of-sequence token, and this tokeniser has none.",
            "Choose a model whose tokeniser names its eos_token.",
        )


def tokenise(
    texts: Sequence[Rendered], tokeniser: PreTrainedTokenizerBase, most: int | None = None
) -> list[Sample]:
    """One sample for each text. An end-of-sequence token ends those not made by a chat template.

    The prompt ends where the tokens of the whole text differ from those of the prompt alone: a token that
    merges both belongs to the completion. In a text with spans, a token counts if one of its characters does.

    Args:
        most: how many characters of each text are tokenised; None: all.
    """
    samples: list[Sample] = []
    for start in range(0, len(texts), ROWS_AT_ONCE):
        for templated, chunk in groupby(texts[start : start + ROWS_AT_ONCE], key=lambda text: text.templated):
            samples += _tokenise(list(chunk), tokeniser, most, templated=templated)
    return samples


def _tokenise(
    texts: Sequence[Rendered], tokeniser: PreTrainedTokenizerBase, most: int | None, *, templated: bool
) -> list[Sample]:
    """Samples of texts that are all made by a chat template, or all not."""

    def encode(each: Sequence[str]) -> Mapping[str, list[Any]]:
        encoded: Mapping[str, list[Any]] = tokeniser(
            [text[:most] for text in each],
            add_special_tokens=not templated,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        return encoded

    encoded = encode([text.text for text in texts])
    heads = [text.prompt for text in texts if text.prompt is not None]
    prompts = iter(encode(heads)["input_ids"] if heads else ())
    samples = []
    for text, given, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        ids = np.asarray(given, np.int32)
        labels = np.ones(len(ids), np.bool_)
        if text.spans is not None:
            labels &= _labels(text.spans, np.asarray(offsets, np.int64).reshape(-1, 2))
        if text.prompt is not None:
            labels[: _common(ids, next(prompts))] = False
        if not templated and (most is None or len(text.text) <= most):
            ids, labels = _ended(text, ids, labels, int(tokeniser.eos_token_id))
        labels[:1] = False  # there is no token before it
        samples.append(Sample(ids, labels))
    return samples


def _common(ids: Ids, prompt: Sequence[int]) -> int:
    """The length of the common prefix of the tokens of the whole text and of the prompt alone."""
    count = min(len(ids), len(prompt))
    differ = np.flatnonzero(ids[:count] != np.asarray(prompt[:count], np.int32))
    return int(differ[0]) if len(differ) else count


def _ended(text: Rendered, ids: Ids, labels: Labels, eos: int) -> tuple[Ids, Labels]:
    """The tokens with an end-of-sequence token, which counts if the end of the text does."""
    if not len(ids) or ids[-1] != eos:  # some tokenisers append it themselves, and some texts have it
        ids, labels = np.append(ids, np.int32(eos)), np.append(labels, False)
    labels[-1] = text.spans is None or (bool(text.spans) and text.spans[-1][1] == len(text.text))
    return ids, labels


def _labels(spans: Spans, offsets: npt.NDArray[np.int64]) -> Labels:
    """Which tokens have a character in one of the spans; ``offsets`` (count, 2) are their half-open ranges.

    Byte-level tokenisers leave blanks out of a token's range, so a token is assumed to begin where the
    previous one ended. Special tokens added by the tokeniser have the range (0, 0) and are in no span.
    """
    stops = offsets[:, 1]
    starts = np.minimum(offsets[:, 0], np.concatenate([[0], stops[:-1]]))
    labels = np.zeros(len(offsets), np.bool_)
    for start, stop in spans:
        labels |= (stops > start) & (starts < stop)
    return labels
