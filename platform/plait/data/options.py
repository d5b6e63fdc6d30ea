"""What each source of data may be asked for, as frozen dataclasses checked where they are made."""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal

from plait.errors import ConfigError, choices
from plait.jobs import DataSpec

Loss = Literal["completion", "all"]
Template = Literal["plain", "chat"]
Overlong = Literal["error", "drop", "truncate"]

LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """Options of every source.

    Attributes:
        size: most rows to take; None takes all.
        validation: rows kept for validation, as a share (below 1) or a count; 0 keeps none.
        seed: chooses the validation rows, and makes the rows of a generated task.
        loss: "completion" counts what the model should answer (of a conversation, the assistant's turns),
            "all" counts every token.
        template: "chat" renders with the tokeniser's chat template, "plain" joins the texts.
        separator: between prompt and completion under ``template: plain``; None is the format's own.
        overlong: what becomes of a sample longer than model and capacity allow.
    """

    size: int | None = None
    validation: float | int | None = None
    seed: int = 0
    loss: Loss = "completion"
    template: Template = "plain"
    separator: str | None = None
    overlong: Overlong = "error"

    def __post_init__(self) -> None:
        _check_types(self)
        _require(self.size is None or self.size >= 1, "size", self.size, "at least 1, or null for all rows")
        _require(0 <= self.seed <= LARGEST_SEED, "seed", self.seed, f"between 0 and {LARGEST_SEED}")
        share = self.validation
        _require(
            share is None or 0 <= share < 1 or (share >= 1 and share == int(share)),
            "validation",
            share,
            "a share of the rows in [0, 1) or a whole number of rows",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions(CommonOptions):
    """A generated task of reasoning-gym.

    Attributes:
        task: its name.
        difficulty: level of the task's curriculum, from 0; None takes the task's defaults.
        task_options: the task's own settings (``min_terms`` and the like), over those of the level.
        generate: at the end of a job, answer the validation prompts and let the verifier judge.
        max_new_tokens: longest answer then.
    """

    task: str = "gsm_symbolic"
    size: int | None = 500
    validation: float | int | None = 32
    difficulty: int | None = None
    task_options: dict[str, Any] = field(default_factory=dict, hash=False)
    generate: bool = False
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        CommonOptions.__post_init__(self)
        _require(self.size is not None, "size", self.size, "a number of rows to generate")
        _require(self.difficulty is None or self.difficulty >= 0, "difficulty", self.difficulty, "0 or more")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        own = {"size", "seed"} & self.task_options.keys()
        _require(
            not own,
            "task_options",
            self.task_options,
            "free of size and seed, which are data.size, data.seed",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlOptions(CommonOptions):
    """A file with one JSON object a line.

    Attributes:
        path: the file.
        validation_path: a file of its own for validation; then nothing is split off ``path``, and
            ``validation`` says how many of this file's rows to take.
        prompt_field: names the field that holds the prompt, where it is not one of the known formats.
        completion_field: names the field that holds the completion.
    """

    path: str = ""
    validation_path: str | None = None
    prompt_field: str | None = None
    completion_field: str | None = None

    def __post_init__(self) -> None:
        CommonOptions.__post_init__(self)
        _require(bool(self.path), "path", self.path, "the path of a file with one JSON object a line")
        _require(
            (self.prompt_field is None) == (self.completion_field is None),
            "prompt_field",
            f"{self.prompt_field}, data.completion_field={self.completion_field}",
            "given together with data.completion_field, or neither",
        )


SourceOptions = TaskOptions | JsonlOptions
SOURCES: dict[str, type[TaskOptions] | type[JsonlOptions]] = {
    "reasoning_gym": TaskOptions,
    "jsonl": JsonlOptions,
}


def parse_options(spec: DataSpec) -> SourceOptions:
    """The options of ``spec`` as its source's dataclass.

    Raises:
        ConfigError: unknown source or option, or a value that breaks an option's rule.
    """
    if spec.source not in SOURCES:
        raise ConfigError(
            f"data.source={spec.source!r}", "No such source of data.", f"Choose one of {choices(SOURCES)}."
        )
    kind = SOURCES[spec.source]
    given = spec.mapping()
    known = [item.name for item in fields(kind)]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"data.{name}={given[name]!r}",
                f"data={spec.source} has no option {name!r}.{closest(name, known)}",
                f"Its options are {choices(known)}.",
            )
    return kind(**given)


def closest(name: str, known: typing.Iterable[str]) -> str:
    """A sentence that offers the names most like ``name``, or "" where none is alike."""
    alike = get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(alike)}?" if alike else ""


def _require(ok: bool, key: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"data.{key}={value!r}", f"data.{key} must be {rule}.")


def _check_types(options: CommonOptions) -> None:
    hints = typing.get_type_hints(type(options))
    for item in fields(options):
        value = getattr(options, item.name)
        if not _fits(value, hints[item.name]):
            _require(False, item.name, value, _describe(hints[item.name]))


def _fits(value: object, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, member) for member in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    kind = hint if origin is None else origin
    return isinstance(value, kind) and not (isinstance(value, bool) and kind in (int, float))


def _describe(hint: Any) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        str: "a text",
        bool: "true or false",
        type(None): "null",
    }
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_describe(member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return f"one of {choices(typing.get_args(hint))}"
    return names.get(hint, "a mapping of names to values")
