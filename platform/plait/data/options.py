"""What each source of data may be asked for, as frozen dataclasses checked where they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from plait.config.fields import build
from plait.core.checks import NOT_EMPTY, Rule, at_least, check
from plait.core.errors import ConfigError, choices
from plait.core.jobs import DataSpec, Seed

Loss = Literal["completion", "all"]
Template = Literal["plain", "chat"]
Overlong = Literal["error", "drop", "truncate"]
VALIDATION = Rule(
    "a share of the rows in [0, 1) or a whole number of rows",
    lambda share: 0 <= share < 1 or share == int(share) >= 1,
)
OWN_KEYS = Rule("without size and seed: use data.size and data.seed", {"size", "seed"}.isdisjoint)


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

    size: Annotated[int | None, at_least(1)] = None
    validation: Annotated[float | None, VALIDATION] = None
    seed: Seed = 0
    loss: Loss = "completion"
    template: Template = "plain"
    separator: str | None = None
    overlong: Overlong = "error"

    def __post_init__(self) -> None:
        check(self, "data")


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
    size: Annotated[int, at_least(1)] = 500
    validation: Annotated[float | None, VALIDATION] = 32
    difficulty: Annotated[int | None, at_least(0)] = None
    task_options: Annotated[dict[str, Any], OWN_KEYS] = field(default_factory=dict, hash=False)
    generate: bool = False
    max_new_tokens: Annotated[int, at_least(1)] = 32

    def __post_init__(self) -> None:
        CommonOptions.__post_init__(self)
        if self.generate and self.loss != "completion":
            raise ConfigError(
                f"data.loss={self.loss!r} with data.generate=true",
                "Answers can only be generated where the prompt is not part of the loss.",
                "Set data.loss=completion or data.generate=false.",
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

    path: Annotated[str, NOT_EMPTY]
    validation_path: str | None = None
    prompt_field: str | None = None
    completion_field: str | None = None

    def __post_init__(self) -> None:
        CommonOptions.__post_init__(self)
        if (self.prompt_field is None) != (self.completion_field is None):
            raise ConfigError(
                f"data.prompt_field={self.prompt_field}, data.completion_field={self.completion_field}",
                "Fields are named in pairs.",
                "Set both or neither.",
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
