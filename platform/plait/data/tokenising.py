"""Examples as text with the spans that count in the loss, and text as samples: token ids and labels.

A seam: what a row becomes is decided here alone, apart from files, splits and the cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from plait.core.errors import DataError
from plait.core.samples import Sample
from plait.data.examples import Conversation, Example, Pair, Text, Turn
from plait.data.sources import CommonOptions, Overlong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_NAMES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
ROWS_AT_ONCE = 1024  # bounds the memory of the offsets


@dataclass(frozen=True, slots=True)
class Rendered:
    """A sample as text.

    Attributes:
        spans: half-open character ranges that count in the loss, in order.
        special: whether the text already has the special tokens that it should begin with.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    special: bool


def check_template(options: CommonOptions, tokeniser: PreTrainedTokenizerBase) -> None:
    """Raise a DataError where a chat template is asked for and the tokeniser has none."""
    if options.template == "chat" and not tokeniser.chat_template:
        raise DataError(
            "data.template='chat'",
            "This model's tokeniser has no chat template.",
            "Set data.template=plain, or choose an instruction-tuned model.",
        )


def render(
    example: Example, where: str, options: CommonOptions, tokeniser: PreTrainedTokenizerBase
) -> Rendered:
    """The text of an example under the template that the options ask for.

    Raises:
        DataError: the chat template refuses the roles, or renders earlier turns otherwise once later ones
            follow, so that the assistant's turns cannot be distinguished.
    """
    rendered = _render(example, where, options, tokeniser)
    if options.loss == "all":
        return replace(rendered, spans=((0, len(rendered.text)),))
    # Nothing behind the last labelled character can change the loss.
    return replace(rendered, text=rendered.text[: rendered.spans[-1][1]])


def _render(
    example: Example, where: str, options: CommonOptions, tokeniser: PreTrainedTokenizerBase
) -> Rendered:
    if isinstance(example, Text):
        return Rendered(example.text, ((0, len(example.text)),), special=False)
    if isinstance(example, Pair):
        if options.template == "chat":
            turns = (Turn("user", example.prompt, False), Turn("assistant", example.completion, True))
            return _render_chat(Conversation(turns), where, tokeniser)
        head = example.prompt + (example.separator if options.separator is None else options.separator)
        text = head + example.completion
        return Rendered(text, ((len(head), len(text)),), special=False)
    if options.template == "chat":
        return _render_chat(example, where, tokeniser)
    return _render_plain(example, "\n\n" if options.separator is None else options.separator, tokeniser)


def _render_plain(conversation: Conversation, separator: str, tokeniser: PreTrainedTokenizerBase) -> Rendered:
    """Turns behind their names ("User: …"); each of the assistant's ends the sequence, as the last does."""
    text, spans = "", []
    for number, turn in enumerate(conversation.turns):
        text += (separator if number else "") + f"{PLAIN_NAMES[turn.role]}: "
        start = len(text)
        text += turn.content
        if turn.answer and number + 1 < len(conversation.turns):
            text += str(tokeniser.eos_token)
        if turn.answer:
            spans.append((start, len(text)))
    return Rendered(text, tuple(spans), special=False)


def _render_chat(conversation: Conversation, where: str, tokeniser: PreTrainedTokenizerBase) -> Rendered:
    messages = [{"role": turn.role, "content": turn.content} for turn in conversation.turns]
    whole = _apply(tokeniser, messages, where, generation=False)
    spans = []
    for number, turn in enumerate(conversation.turns):
        if turn.answer:
            head = _apply(tokeniser, messages[:number], where, generation=True)
            through = _apply(tokeniser, messages[: number + 1], where, generation=False)
            if not (through.startswith(head) and whole.startswith(through)):
                raise DataError(
                    f"{where}: message {number + 1} of {len(messages)}",
                    "The chat template changes a turn when another one follows, so Plait cannot tell which "
                    "tokens count in the loss.",
                    "Set data.template=plain or data.loss=all.",
                )
            spans.append((len(head), _end_of_turn(through, tokeniser)))
    return Rendered(whole[: _end_of_turn(whole, tokeniser)], tuple(spans), special=True)


def _end_of_turn(text: str, tokeniser: PreTrainedTokenizerBase) -> int:
    """Where the text ends for a reader that stops at the end-of-sequence token: many templates put a line
    break behind it.
    """
    visible = len(text.rstrip())
    return visible if text.endswith(str(tokeniser.eos_token), 0, visible) else len(text)


def _apply(
    tokeniser: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], where: str, *, generation: bool
) -> str:
    try:
        return str(
            tokeniser.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation)
        )
    except Exception as error:  # a template may raise anything of Jinja's
        raise DataError(
            f"{where}: {error}",
            "The tokeniser's chat template refuses these messages.",
            "Correct the row, or set data.template=plain.",
        ) from error


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
            return f"The model accepts samples of at most {self.model} tokens (model.max_length)."
        if self.cluster:
            return f"A sample must fit into one microbatch: at most {self.capacity} tokens on {self.cluster}."
        return f"A sample must fit into one microbatch, which holds {self.capacity} tokens (engine.capacity)."

    def remedy(self, longest: int) -> str:
        """What would let a sample of ``longest`` tokens through."""
        if longest > self.model:
            return "Raise model.max_length if the model accepts more, choose a model for longer texts"
        if self.cluster:
            return "Describe more or larger devices (cluster.options), choose another cluster"
        return f"Set engine.capacity={longest} or more"


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
                "or set data.overlong=drop or data.overlong=truncate.",
            )
        if length > longest and rule == "drop":
            kept.append(None)
            continue
        if not sample.labels[:longest].any():
            cut = f"{limit.remedy(length)}, or set data.overlong=drop."
            raise DataError(
                f"{where}: no labelled tokens in the first {min(length, longest)} of {length}",
                "A sample needs at least one token that counts in the loss, and its first token never "
                "counts.",
                cut if length > longest else "Remove the row.",
            )
        kept.append(min(length, longest))
    return kept


def _longest_allowed(samples: Sequence[Sample], limit: LengthLimit, length: int) -> int:
    """The longest of the samples that the model takes, so that one remedy serves for all of them."""
    if length > limit.model:
        return length
    return max(each for each in (len(sample.tokens) for sample in samples) if each <= limit.model)
