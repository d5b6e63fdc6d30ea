"""Sources of data: the options of each, how its rows are read, and what it can do.

Each source is registered in :data:`SOURCES` by the module that defines it. Another package names such a
module in the entry-point group ``plait.data_sources``; then ``data.source=NAME`` with ``+data.KEY=VALUE``
uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from plait.config.fields import build
from plait.core.checks import Rule, at_least, check
from plait.core.errors import ConfigError, DataError
from plait.core.jobs import DataSpec, Seed
from plait.core.space import as_written
from plait.data.examples import Example, NamedFields
from plait.utils.counts import counted
from plait.utils.registry import Registry

Template = Literal["auto", "chat", "plain"]
Overlong = Literal["truncate", "drop", "refuse"]

DEFAULT_SHARE = 0.1  # share of the rows that is for validation if data.validation is null
VALIDATION = Rule(
    "a share of the rows in [0, 1), or a whole number of rows",
    lambda share: 0 <= share < 1 or share == int(share) >= 1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """Options of every source.

    Attributes:
        size: most rows to take; None takes all.
        validation: rows kept for validation, as a share (below 1) or a count; 0 keeps none.
        seed: seed of the choice of validation rows, and of a generated task's rows.
        completion_only_loss: count only the completion of a row that has a prompt; None means True.
            False counts the prompt, too. Rows without a prompt always count in full.
        assistant_only_loss: count only the assistant's messages; every row must then be a conversation.
        template: "auto" renders conversations with the chat template and joins other texts; "chat" also
            renders prompt and completion with it, as messages of user and assistant; "plain" uses none.
        chat_template: the chat template, or a file that holds it; None: the tokeniser's own.
        separator: text between texts that are joined; None: the format's own.
        overlong: what happens to a sample that is too long for the model.
    """

    size: Annotated[int | None, at_least(1)] = None
    validation: Annotated[float | None, VALIDATION] = None
    seed: Seed = 0
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    template: Template = "auto"
    chat_template: str | None = None
    separator: str | None = None
    overlong: Overlong = "truncate"

    def __post_init__(self) -> None:
        check(self, "data")
        if self.template == "plain" and self.chat_template is not None:
            raise ConfigError(
                "data.chat_template with data.template=plain",
                "data.template=plain uses no chat template.",
                "Leave one out.",
            )

    def validation_rows(self, count: int) -> int:
        """How many of ``count`` rows are for validation."""
        share = DEFAULT_SHARE if self.validation is None else self.validation
        return int(share) if share == 0 or share >= 1 else max(1, round(count * share))

    def check_split(self, count: int, name: str) -> None:
        """Check that ``count`` rows of the origin ``name`` leave some to train on; DataError otherwise."""
        wanted = self.validation_rows(count)
        if wanted >= count:
            raise DataError(
                f"{name}: {counted(count, 'row')}, {wanted} of them for validation",
                "At least one row must be left to train on.",
                "Use more rows, or fewer for validation (data.validation).",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedOptions(CommonOptions):
    """Options of a source whose answers can be scored, by its own verifier or by a function.

    Attributes:
        generate: answer the validation prompts and score the answers.
        generate_at: at the end of a job, or whenever its validation loss is measured, as at rungs.
        max_new_tokens: tokens of the longest answer.
        scorer: "package.module:function", which scores answers in place of the source's verifier: it takes a
            list of texts and a list of rows, and returns a number for each; 1 is right.
    """

    generate: bool = False
    generate_at: Literal["end", "evaluation"] = "end"
    max_new_tokens: Annotated[int, at_least(1)] = 32
    scorer: str | None = None

    def __post_init__(self) -> None:
        CommonOptions.__post_init__(self)
        if self.generate and self.completion_only_loss is False:
            raise ConfigError(
                "data.completion_only_loss=false with data.generate=true",
                "Answers can only be generated if the prompt is not part of the loss.",
                "Leave data.completion_only_loss out, or set data.generate=false.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldOptions(VerifiedOptions):
    """Options of a source whose rows can have fields with other names.

    Attributes:
        prompt_field: the field that holds the prompt, if the rows have none of the known formats.
        completion_field: the field that holds the completion.
    """

    prompt_field: str | None = None
    completion_field: str | None = None

    def __post_init__(self) -> None:
        VerifiedOptions.__post_init__(self)
        if (self.prompt_field is None) != (self.completion_field is None):
            raise ConfigError(
                f"data.prompt_field={as_written(self.prompt_field)}, "
                f"data.completion_field={as_written(self.completion_field)}",
                "Both fields must be named together.",
                "Set both or neither.",
            )

    @property
    def named(self) -> NamedFields | None:
        """The fields that hold prompt and completion, if they are named."""
        if self.prompt_field is None or self.completion_field is None:
            return None
        return NamedFields(self.prompt_field, self.completion_field)


@dataclass(frozen=True, slots=True)
class Rows:
    """A source's rows, opened and not yet read.

    Attributes:
        name: the origin's name, for errors ("train.jsonl").
        digest: changes whenever the rows do.
        read: returns the examples, each with its place ("train.jsonl, line 7").
        validation: separate rows for validation; None: they are split off these.
        parts: the sources of a mixture that these rows belong to, each split separately.
        weight: share of the training samples that come from these rows, if they are part of a mixture.
    """

    name: str
    digest: str
    read: Callable[[], list[tuple[str, Example]]]
    validation: Rows | None = None
    parts: tuple[Rows, ...] = ()
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A source of data.

    Attributes:
        options: dataclass of its options; a subclass of :class:`VerifiedOptions` if it has a verifier.
        open: returns the rows that the options describe.
        check: raises the errors that can be found before a model is loaded; None: found by reading all rows.
        score: its verifier, which scores answers to rows, given by number; 1 is right. None: a function that
            ``data.scorer`` names scores them.
        no_effect: options that do not change the samples, or change ``Rows.digest`` with them.
    """

    options: type[CommonOptions]
    open: Callable[[Any], Rows]
    check: Callable[[Any], None] | None = None
    score: Callable[[Any, Sequence[int], Sequence[str]], tuple[float, ...]] | None = None
    no_effect: tuple[str, ...] = ()


# Options of answers, which do not change the samples.
_COMMON = {each.name for each in fields(CommonOptions)}
GENERATION = tuple(each.name for each in fields(VerifiedOptions) if each.name not in _COMMON)

SOURCES: Registry[Source] = Registry(
    "data source",
    key="data.source",
    modules=("plait.data.files", "plait.data.hub", "plait.data.mixture", "plait.data.tasks"),
    group="plait.data_sources",
)


def parse_options(spec: DataSpec) -> CommonOptions:
    """The options of ``spec`` as its source's dataclass.

    Raises:
        ConfigError: unknown source or option, or a value that breaks an option's rule.
    """
    return build(SOURCES.get(spec.source).options, spec.mapping(), "data")
