"""The source "reasoning_gym": generated tasks with verifiers. Only this module imports reasoning-gym."""

from __future__ import annotations

import contextlib
import decimal
import functools
import hashlib
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from plait.core.checks import Rule, at_least
from plait.core.errors import ConfigError, DataError, choices
from plait.data.examples import Example, Pair
from plait.data.sources import GENERATION, SOURCES, VALIDATION, Rows, Source, VerifiedOptions
from plait.utils.spelling import did_you_mean

LEAST_ALIKE = 0.5  # least ratio of difflib, for the name of a task or of its setting

# Tasks whose rows depend on Python's hash seed, found by generating every task of reasoning-gym 0.1.25 with
# two seeds.
HASH_DEPENDENT = frozenset(
    {
        "isomorphic_strings",
        "knight_swap",
        "list_functions",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    }
)
OF_ROWS = ("task", "size", "seed", "difficulty", "task_options")  # options that change the rows
OWN_KEYS = Rule("without size and seed: use data.size and data.seed", {"size", "seed"}.isdisjoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions(VerifiedOptions):
    """Options of a generated task.

    Attributes:
        task: its name in reasoning-gym.
        difficulty: level of the task's curriculum, from 0; None: the task's defaults.
        task_options: the task's own settings (``min_terms`` and the like), which override those of the level.
    """

    task: str = "gsm_symbolic"
    size: Annotated[int, at_least(1)] = 500
    validation: Annotated[float | None, VALIDATION] = 32
    difficulty: Annotated[int | None, at_least(0)] = None
    task_options: Annotated[dict[str, Any], OWN_KEYS] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A task's rows as generated, and the verifier that made them."""

    name: str
    rows: tuple[dict[str, Any], ...]
    verifier: Any  # reasoning_gym.dataset.ProceduralDataset, which has no types

    @property
    def digest(self) -> str:
        """Digest of questions and answers."""
        content = json.dumps([(row["question"], row["answer"]) for row in self.rows])
        return hashlib.sha256(content.encode()).hexdigest()

    def examples(self) -> list[tuple[str, Example]]:
        """Question and answer of each row, separated by a line break, with the row's place."""
        return [
            (f"{self.name}, row {number}", Pair(row["question"], row["answer"], "\n"))
            for number, row in enumerate(self.rows)
        ]

    def score(self, rows: Sequence[int], texts: Sequence[str]) -> tuple[float, ...]:
        """The verifier's scores of answers to ``rows``: 1 is right, lower is partly right or wrong."""
        return tuple(self._score(row, text.strip()) for row, text in zip(rows, texts, strict=True))

    def _score(self, row: int, text: str) -> float:
        try:
            with _own_decimals():
                return float(self.verifier.score_answer(text, self.rows[row]))
        except Exception:  # some verifiers raise on a text that they cannot parse
            return 0.0


def generate_task(options: TaskOptions) -> Task:
    """The rows of a task; within a process, the same options give the same objects.

    Another process makes the same rows, but another release of reasoning-gym may not, so the digest is that
    of the rows, not of the options.

    Raises:
        ConfigError: unknown task, level or setting.
        DataError: the task's rows have no written answer.
    """
    return _generate(_content(options))


def check_task(options: TaskOptions) -> None:
    """Check what :func:`generate_task` would, with the first row only, and that there are enough rows."""
    _generate(_content(replace(options, size=1)))
    options.check_split(options.size, options.task)


def open_rows(options: TaskOptions) -> Rows:
    """The rows of a task."""
    task = generate_task(options)
    return Rows(task.name, task.digest, task.examples)


def score(options: TaskOptions, rows: Sequence[int], texts: Sequence[str]) -> tuple[float, ...]:
    """The scores of :meth:`Task.score`."""
    return generate_task(options).score(rows, texts)


SOURCES.add("reasoning_gym", Source(TaskOptions, open_rows, check_task, score, no_effect=GENERATION))


def _content(options: TaskOptions) -> TaskOptions:
    """The options, with those that do not change the rows set to their defaults."""
    return TaskOptions(**{name: getattr(options, name) for name in OF_ROWS})


@functools.lru_cache(maxsize=16)
def _generate(options: TaskOptions) -> Task:
    name = options.task
    if name in HASH_DEPENDENT and sys.flags.hash_randomization:
        raise ConfigError(
            f"data.task={name!r} in a process with a random hash seed",
            "The rows of this task depend on Python's hash seed, and a resumed search needs the same rows.",
            "Set PYTHONHASHSEED=0 in the environment, or choose another task.",
        )
    with contextlib.redirect_stdout(io.StringIO()), _own_decimals():  # some generators print
        dataset = _dataset(options)
        try:
            rows = tuple(dataset[index] for index in range(options.size))
        except Exception as error:
            raise DataError(
                f"data.task={name!r}, data.task_options={options.task_options}",
                f"The task could not generate its rows: {type(error).__name__}: {error}.",
                "Change data.task_options, data.difficulty or data.size.",
            ) from error
    if not all(isinstance(row["answer"], str) for row in rows):
        raise DataError(
            f"data.task={name!r}",
            "This task has a verifier but no answers to learn from.",
            "Choose another task.",
        )
    return Task(name, rows, dataset)


def _own_decimals() -> contextlib.AbstractContextManager[decimal.Context]:
    """Decimals with Python's precision, and the process's own afterwards: some tasks set it to a few digits,
    and Optuna's steps would be rounded with it."""
    return decimal.localcontext(decimal.DefaultContext)


def _dataset(options: TaskOptions) -> Any:
    from reasoning_gym import factory  # takes a second, so it is imported only if used

    name, given = options.task, options.task_options
    if name not in factory.DATASETS:
        meant = did_you_mean(name, factory.DATASETS, cutoff=LEAST_ALIKE)
        raise ConfigError(
            f"data.task={name!r}",
            "reasoning-gym has no such task.",
            f"{meant}Choose one of {choices(factory.DATASETS)}.",
        )
    _, config_class = factory.DATASETS[name]
    known = [item.name for item in fields(config_class) if item.name not in ("seed", "size")]
    for option in given:
        if option not in known:
            raise ConfigError(
                f"data.task_options.{option}={given[option]!r}",
                f"The task {name} has no setting {option!r}.",
                f"{did_you_mean(option, known, cutoff=LEAST_ALIKE)}Its settings are {choices(known)}.",
            )
    settings = _level(name, options.difficulty) | given | {"size": options.size, "seed": options.seed}
    try:
        return factory.create_dataset(name, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"data.task={name!r}, data.task_options={given}",
            f"The task rejects these settings: {error}.",
            f"Its settings are {choices(known)}.",
        ) from error


def _level(name: str, difficulty: int | None) -> dict[str, Any]:
    """The settings of a level of the task's curriculum."""
    from reasoning_gym import factory

    if difficulty is None:
        return {}
    if not factory.has_curriculum(name):
        raise ConfigError(
            f"data.difficulty={difficulty}",
            f"The task {name} has no curriculum.",
            "Set data.difficulty=null and use data.task_options.",
        )
    curriculum = factory.create_curriculum(name)
    levels = max(len(attribute.levels) for attribute in curriculum.attributes.values())
    if difficulty >= levels:
        raise ConfigError(f"data.difficulty={difficulty}", f"The levels of {name} are 0 to {levels - 1}.")
    curriculum.set_global_level(difficulty)
    config = curriculum.generate_configuration()
    return {
        item.name: getattr(config, item.name) for item in fields(config) if item.name not in ("seed", "size")
    }
