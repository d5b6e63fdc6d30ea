"""Examples as text, with the spans that count in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plait.core.errors import DataError
from plait.data.examples import Conversation, Example, Pair, Text, Turn
from plait.data.options import CommonOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_NAMES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}


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
            "Give data.template=plain, or choose an instruction-tuned model.",
        )


def render(
    example: Example, where: str, options: CommonOptions, tokeniser: PreTrainedTokenizerBase
) -> Rendered:
    """The text of an example under the template that the options ask for.

    Raises:
        DataError: the chat template refuses the roles, or renders earlier turns otherwise once later ones
            follow, so that the assistant's turns cannot be told apart.
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
                    "The chat template renders a turn otherwise once another follows, so what counts in the "
                    "loss cannot be told.",
                    "Give data.template=plain or data.loss=all.",
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
            "Correct the row, or give data.template=plain.",
        ) from error
