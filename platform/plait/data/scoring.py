"""Scores of generated answers: by a source's verifier, or by a function that ``data.scorer`` names.

A seam: the only code of others that is called by name.
"""

from __future__ import annotations

import importlib
import math
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from numbers import Real
from typing import Any

from plait.core.errors import ConfigError, choices
from plait.core.jobs import DataSpec
from plait.data.examples import Conversation, Example, Pair
from plait.data.sources import SOURCES, VerifiedOptions, parse_options

NOT_OWN = (__file__, importlib.__file__)  # files on the way to a module's code
Function = Callable[[list[str], list[dict[str, Any]]], Sequence[float]]


def check_scorer(options: object, source: str) -> None:
    """Refuse answers that nothing can score.

    Raises:
        ConfigError: the source has no verifier and no function is named, or there is no such function.
    """
    if not isinstance(options, VerifiedOptions) or not options.generate:
        return
    if options.scorer is not None:
        named_function(options.scorer)
    elif SOURCES.get(source).score is None:
        able = [name for name in SOURCES if SOURCES.get(name).score is not None]
        raise ConfigError(
            f"data.generate=true with data.source={source!r}",
            f"This source has no verifier; {choices(able)} has.",
            "Name a function with data.scorer=package.module:function.",
        )


@cache
def named_function(name: str) -> Function:
    """The function "package.module:function".

    Raises:
        ConfigError: there is none.
    """
    module, _, attribute = name.partition(":")
    rule = "It is package.module:function, of a module that Python finds."
    try:
        loaded = import_module(module)
    except (Exception, SystemExit) as error:  # whatever its own code raises, too
        why, remedy = str(error), "Install the package, or add its folder to PYTHONPATH."
        if not attribute and "." in name:
            remedy = f"Write a colon before the function: data.scorer={':'.join(name.rsplit('.', 1))}"
        if (line := _line_of(error)) or isinstance(error, SyntaxError):
            why = f"{type(error).__name__}: {error}{line}"
            remedy = f"Correct the module: `python -c 'import {module}'` must work."
        raise ConfigError(f"data.scorer={name}: {why}", rule, remedy) from error
    found: Function | None = getattr(loaded, attribute, None)
    if not callable(found):
        raise ConfigError(
            f"data.scorer={name}: {attribute!r} is not a function of {loaded!r}",
            rule,
            "Name a function of this module. Another module of this name may come first in PYTHONPATH.",
        )
    return found


def _line_of(error: BaseException) -> str:
    """The line of a module that could not be imported: `` (FILE, line N)``; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith("<") and each.filename not in NOT_OWN]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def score(spec: DataSpec, rows: Sequence[int], texts: Sequence[str]) -> tuple[float, ...]:
    """The scores of answers: 1 is right, lower is partly right or wrong.

    Args:
        rows: rows of the source that the answers belong to: ``data.validation.rows`` of the samples.
        texts: the answers, in the same order.

    Raises:
        ConfigError: nothing can score them, or the named function does not return a number for each.
    """
    options = parse_options(spec)
    check_scorer(options, spec.source)
    scorer = options.scorer if isinstance(options, VerifiedOptions) else None
    if scorer is None:
        verifier = SOURCES.get(spec.source).score
        if verifier is None:
            raise ConfigError(f"data.source={spec.source!r}", "This data source has no verifier.")
        return verifier(options, rows, texts)
    examples = _validation_examples(spec)
    asked = [_row(examples[row]) for row in rows]
    try:
        found = list(named_function(scorer)(list(texts), asked))
    except (Exception, SystemExit) as error:  # of code that is not Plait's
        raise ConfigError(
            f"data.scorer={scorer}: {type(error).__name__}: {error}",
            "It must return one finite number for each text.",
            "A trial then fails at an evaluation, and has no accuracy at its end.",
        ) from error
    numbers = [each for each in found if isinstance(each, Real) and math.isfinite(each)]
    if len(found) != len(texts) or len(numbers) != len(found):
        raise ConfigError(
            f"data.scorer={scorer}: {str(found)[:100]}", "It must return one finite number for each text."
        )
    return tuple(map(float, numbers))


@cache
def _validation_examples(spec: DataSpec) -> list[Example]:
    """The examples from which validation samples come, by the row's number."""
    rows = SOURCES.get(spec.source).open(parse_options(spec))
    return [example for _, example in (rows if rows.validation is None else rows.validation).read()]


def _row(example: Example) -> dict[str, Any]:
    """What a scorer sees of a row: prompt and completion, or messages, or a text."""
    if isinstance(example, Pair):
        return {"prompt": example.prompt, "completion": example.completion}
    if isinstance(example, Conversation):
        return {"messages": [dict(message) for message in example.messages]}
    return {"text": example.text}
