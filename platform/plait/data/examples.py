"""Rows of every format as one of three kinds of example: text, pair, or conversation."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.core.errors import DataError, choices
from plait.utils.spelling import did_you_mean

ROLES = {name: name for name in ("system", "developer", "user", "assistant", "tool")}
SHAREGPT_ROLES = ROLES | {"human": "user", "gpt": "assistant", "observation": "tool"}
# How messages are written: the fields of role and text, and what roles mean.
Wording = tuple[str, str, Mapping[str, str]]
USUAL: Wording = ("role", "content", ROLES)
SHAREGPT: Wording = ("from", "value", SHAREGPT_ROLES)
FORMATS = (
    "{messages}, {conversations}, {prompt, completion}, {instruction, input, output}, {text}, "
    "or fields named by data.prompt_field and data.completion_field"
)
NOT_TEXT = ("messages", "conversations", "tools", "chat_template_kwargs")
MOST_SHOWN = 60  # characters of a value in an error
MOST_NAMES = 20  # fields of a row in an error
LEAST_ALIKE = 0.8  # least ratio of difflib, for the name of a field

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and what the model should answer; ``separator`` is the format's own."""

    prompt: str
    completion: str
    separator: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order.

    Attributes:
        messages: each with ``role``, ``content`` (text) if there is any, and other fields that a chat
            template may read (``tool_calls``).
        tools: descriptions of functions, for the chat template.
        settings: the row's own variables of the chat template (``chat_template_kwargs``).
    """

    messages: tuple[dict[str, Any], ...]
    prompt: int | None = None
    tools: tuple[dict[str, Any], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


Example = Text | Pair | Conversation


@dataclass(frozen=True, slots=True)
class NamedFields:
    """Which fields hold prompt and completion."""

    prompt: str
    completion: str


def read_example(row: Row, where: str, named: NamedFields | None = None) -> Example:
    """The example in a row; errors name its place ``where`` ("train.jsonl, line 7").

    A field that is null counts as absent, because tables have every column in every row.

    Raises:
        DataError: the row has none of the known formats, a field of the wrong kind, or an unknown role.
    """
    row = {name: value for name, value in row.items() if value is not None}
    if named is not None:
        return _pair(row, named.prompt, named.completion, "\n", where)
    for needed, read in _FORMATS:
        if all(name in row for name in needed):
            return read(row, where)
    raise DataError(
        f"{where}: {_fields(row)}",
        f"{_lacking(row)}A row must have one of these sets of fields: {FORMATS}.",
        "Complete the row, or name its fields, for example data.prompt_field=question "
        "data.completion_field=answer.",
    )


def _lacking(row: Row) -> str:
    """Sentences about the fields that a row of a known format lacks, or has misspelled; "" if it has none."""
    known = dict.fromkeys(name for needed, _ in _FORMATS for name in needed)
    for name in itertools.islice(row, MOST_NAMES):
        if name not in known and (meant := did_you_mean(name, known.keys() - row.keys(), cutoff=LEAST_ALIKE)):
            return f"It has {shortened(name)}. {meant}"
    for needed, _ in _FORMATS:
        if there := [name for name in needed if name in row]:
            lacking = next(name for name in needed if name not in row)
            return f"It has {' and '.join(there)}, but no {lacking}. "
    return ""


def _fields(row: Row) -> str:
    names = [shortened(name) for name in row]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"fields {choices(names[:MOST_NAMES]) or '(none)'}{more}"


def _text(row: Row, name: str, where: str) -> str:
    if name not in row:
        raise DataError(
            f"{where}: {_fields(row)}",
            f"The row has no field {name!r}. {did_you_mean(name, row, cutoff=LEAST_ALIKE)}".strip(),
            "Correct the row, or name another field.",
        )
    value = row[name]
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is {shown(value)}", f"{name} must be text.", "Correct the row.")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can encode half of a surrogate pair
        raise DataError(
            f"{where}: {name} has {value[error.start]!a} at character {error.start + 1}",
            f"{name} must be valid Unicode text; this is half of a surrogate pair.",
            "Correct the row.",
        ) from error
    return value


def _pair(row: Row, prompt: str, completion: str, separator: str, where: str) -> Example:
    """A prompt and its completion, both text or both messages."""
    if not any(isinstance(row.get(name), list) for name in (prompt, completion)):
        return Pair(_text(row, prompt, where), _text(row, completion, where), separator)
    head = _messages(row.get(prompt), prompt, where)
    tail = _messages(row.get(completion), completion, where)
    return _conversation(row, head + tail, where, prompt=len(head))


def _read_messages(row: Row, where: str) -> Example:
    return _conversation(row, _messages(row["messages"], "messages", where), where)


def _read_sharegpt(row: Row, where: str) -> Example:
    read = _messages(row["conversations"], "conversations", where, SHAREGPT)
    if row.get("system"):
        read = ({"role": "system", "content": _text(row, "system", where)}, *read)
    return _conversation(row, read, where)


def _read_alpaca(row: Row, where: str) -> Example:
    prompt = _text(row, "instruction", where)
    if row.get("input"):
        prompt += "\n\n" + _text(row, "input", where)
    return Pair(prompt, _text(row, "output", where), "\n\n")


# The order matters: a row may have more fields than its format needs.
_FORMATS: tuple[tuple[tuple[str, ...], Callable[[Row, str], Example]], ...] = (
    (("messages",), _read_messages),
    (("conversations",), _read_sharegpt),
    (("prompt", "completion"), lambda row, where: _pair(row, "prompt", "completion", "", where)),
    (("instruction", "output"), _read_alpaca),
    (("text",), lambda row, where: Text(_text(row, "text", where))),
)


def _conversation(
    row: Row, messages: tuple[dict[str, Any], ...], where: str, prompt: int | None = None
) -> Conversation:
    settings = _parsed(row.get("chat_template_kwargs", {}))
    if not isinstance(settings, dict):
        raise DataError(
            f"{where}: chat_template_kwargs is {shown(row['chat_template_kwargs'])}",
            "chat_template_kwargs must be an object.",
            "Correct the row.",
        )
    tools = _objects(row["tools"], "tools", where) if row.get("tools") else ()
    return Conversation(messages, prompt, tools, _without_nulls(settings))


def _messages(value: object, name: str, where: str, wording: Wording = USUAL) -> tuple[dict[str, Any], ...]:
    return tuple(_message(each, where, wording) for each in _objects(value, name, where))


def _message(given: Row, where: str, wording: Wording) -> dict[str, Any]:
    role_field, text_field, roles = wording
    role = _text(given, role_field, where)
    if role not in roles:
        raise DataError(
            f"{where}: {role_field} is {shown(role)}", f"Roles are {choices(roles)}.", "Correct the row."
        )
    rest = {name: value for name, value in given.items() if name not in (role_field, text_field)}
    if text_field in given or "tool_calls" not in given:  # a message that only calls functions has no text
        rest = {"content": _text(given, text_field, where)} | rest
    return {"role": roles[role]} | rest


def _objects(value: object, name: str, where: str) -> tuple[dict[str, Any], ...]:
    """A list of objects, possibly given as JSON text. Fields that are null, at any depth, count as absent."""
    given = _parsed(value)
    if not isinstance(given, list) or not given or not all(isinstance(entry, dict) for entry in given):
        what = "descriptions of functions" if name == "tools" else "messages"
        raise DataError(
            f"{where}: {name} is {shown(value)}", f"{name} must be a list of {what}.", "Correct the row."
        )
    return tuple(_without_nulls(entry) for entry in given)


def _parsed(value: object) -> object:
    """The value of JSON text, because a CSV file has neither lists nor objects; other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _without_nulls(value: Any) -> Any:
    """A value without the null fields of its objects: Parquet and `datasets` give every object in a column
    the fields of all others."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def csv_row(cells: Mapping[str, str]) -> Row:
    """A row of a text-only file in the form of the other formats: an empty cell of a non-text field is
    absent, and prompt and completion become messages if both are JSON lists of messages."""
    row: dict[str, object] = {
        name: cell for name, cell in cells.items() if cell.strip() or name not in NOT_TEXT
    }
    pair = {name: _parsed(cells.get(name)) for name in ("prompt", "completion")}
    return row | pair if all(_are_messages(each) for each in pair.values()) else row


def _are_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(entry, dict) and "role" in entry for entry in value)
    )


def shown(value: object) -> str:
    """A value as shown in an error, truncated if long."""
    if isinstance(value, (str, bytes)):  # repr would first process all of it
        return shortened(repr(value[: MOST_SHOWN + 1]))
    if isinstance(value, (list, tuple)) and len(value) > MOST_SHOWN:
        return f"{type(value).__name__} of {len(value)}"
    return shortened(repr(value))


def shortened(text: str) -> str:
    """A text as shown in an error, truncated if long."""
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."
