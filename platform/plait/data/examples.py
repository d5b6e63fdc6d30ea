"""Rows of every format as one of three kinds of example: text, pair, or conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from plait.core.errors import DataError, choices

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
FORMATS = (
    "{messages}, {conversations}, {prompt, completion}, {instruction, input, output}, {text}, "
    "or fields named by data.prompt_field and data.completion_field"
)

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text; all of it is what the model should learn to write."""

    text: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and what the model should answer; ``separator`` is the format's own."""

    prompt: str
    completion: str
    separator: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One message; ``answer`` says that the model should learn to write it."""

    role: str
    content: str
    answer: bool


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order, at least one of them an answer."""

    turns: tuple[Turn, ...]


Example = Text | Pair | Conversation


@dataclass(frozen=True, slots=True)
class NamedFields:
    """Which fields hold prompt and completion."""

    prompt: str
    completion: str


def read_example(row: Row, where: str, named: NamedFields | None = None) -> Example:
    """The example that a row holds; ``where`` ("train.jsonl, line 7") stands in errors.

    Raises:
        DataError: the row has none of the known formats, a field of the wrong kind, an unknown role, or
            no turn of the assistant.
    """
    if named is not None:
        texts = [_text(row, name, where) for name in (named.prompt, named.completion)]
        return Pair(texts[0], texts[1], "\n")
    for needed, read in _FORMATS:
        if all(name in row for name in needed):
            return read(row, where)
    raise DataError(
        f"{where}: fields {choices(list(row)) or '(none)'}",
        f"A row must have one of these sets of fields: {FORMATS}.",
        "Name its fields, for example data.prompt_field=question data.completion_field=answer.",
    )


def _text(row: Row, name: str, where: str) -> str:
    if name not in row:
        raise DataError(
            f"{where}: fields {choices(list(row)) or '(none)'}",
            f"The row has no field {name!r}.",
            "Correct the row, or name another field.",
        )
    value = row[name]
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is {value!r}", f"{name} must be text.", "Correct the row.")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can write half of a pair, as where a text was cut in an emoji
        raise DataError(
            f"{where}: {name} has {value[error.start]!a} at character {error.start + 1}",
            f"{name} must be valid Unicode text: this is half of a surrogate pair.",
            "Correct the row.",
        ) from error
    return value


def _read_prompt_completion(row: Row, where: str) -> Example:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        head = _turns(prompt, "prompt", where, answers=False)
        return _conversation(head + _turns(completion, "completion", where, answers=True), where)
    return Pair(_text(row, "prompt", where), _text(row, "completion", where), "")


def _read_messages(row: Row, where: str) -> Example:
    return _conversation(_turns(row["messages"], "messages", where, answers=True), where)


def _read_sharegpt(row: Row, where: str) -> Example:
    turns = _entries(row["conversations"], "conversations", where)
    read = [_turn(turn, "from", "value", SHAREGPT_ROLES, where, answers=True) for turn in turns]
    if row.get("system"):
        read.insert(0, Turn("system", _text(row, "system", where), False))
    return _conversation(tuple(read), where)


def _read_alpaca(row: Row, where: str) -> Example:
    prompt = _text(row, "instruction", where)
    if row.get("input"):
        prompt += "\n\n" + _text(row, "input", where)
    return Pair(prompt, _text(row, "output", where), "\n\n")


def _read_text(row: Row, where: str) -> Example:
    return Text(_text(row, "text", where))


# In this order: a row may carry more fields than its format needs.
_FORMATS: tuple[tuple[tuple[str, ...], Callable[[Row, str], Example]], ...] = (
    (("messages",), _read_messages),
    (("conversations",), _read_sharegpt),
    (("prompt", "completion"), _read_prompt_completion),
    (("instruction", "output"), _read_alpaca),
    (("text",), _read_text),
)


def _entries(value: object, name: str, where: str) -> list[Row]:
    if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
        raise DataError(
            f"{where}: {name} is {_short(value)}", f"{name} must be a list of messages.", "Correct the row."
        )
    return value


def _turns(value: object, name: str, where: str, *, answers: bool) -> tuple[Turn, ...]:
    roles = dict(zip(ROLES, ROLES, strict=True))
    return tuple(
        _turn(turn, "role", "content", roles, where, answers=answers) for turn in _entries(value, name, where)
    )


def _turn(
    row: Row, role_field: str, text_field: str, roles: Mapping[str, str], where: str, *, answers: bool
) -> Turn:
    role = _text(row, role_field, where)
    if role not in roles:
        raise DataError(
            f"{where}: {role_field} is {role!r}", f"Roles are {choices(roles)}.", "Correct the row."
        )
    return Turn(roles[role], _text(row, text_field, where), answers and roles[role] == "assistant")


def _conversation(turns: tuple[Turn, ...], where: str) -> Conversation:
    if not any(turn.answer for turn in turns):
        raise DataError(
            f"{where}: roles {', '.join(turn.role for turn in turns)}",
            "The loss counts the assistant's turns, and this row has none.",
            "Add an assistant turn or remove the row.",
        )
    return Conversation(turns)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
