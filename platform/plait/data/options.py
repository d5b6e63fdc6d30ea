"""What each source of data may be asked for, as frozen dataclasses checked where they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from plait.config.fields import build
from plait.core.errors import ConfigError, choices
from plait.core.jobs import DataSpec

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
    validation: float | None = None
    seed: int = 0
    loss: Loss = "completion"
    template: Template = "plain"
    separator: str | None = None
    overlong: Overlong = "error"

    def __post_init__(self) -> None:
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
    validation: float | None = 32
    difficulty: int | None = None
    task_options: dict[str, Any] = field(default_factory=dict, hash=False)
    generate: bool = False
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        CommonOptions.__post_init__(self)
        _require(self.size is not None, "size", self.size, "a number of rows to generate")
        _require(self.difficulty is None or self.difficulty >= 0, "difficulty", self.difficulty, "0 or more")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        _require(
            not self.generate or self.loss == "completion",
            "loss",
            self.loss,
            "completion where data.generate=true: an answer goes on from what is not labelled",
        )
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
    return build(SOURCES[spec.source], spec.mapping(), "data")


def _require(ok: bool, key: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"data.{key}={value!r}", f"data.{key} must be {rule}.")
