"""The one validator: rules written in the fields of a dataclass, checked when an instance is made.

Write ``rank: Annotated[int, at_least(1)] = 16``, and ``check(self, "adapter")`` in ``__post_init__``. In
addition to its own rules, every number must be finite, a whole number at most ``LARGEST``, and a ``Literal``
one of its choices. None passes: the type says whether a field may be None (``plait.config.fields``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from plait.core.errors import ConfigError, choices
from plait.core.space import as_given, as_written

LARGEST = 2**53  # whole numbers above it are not exact as floats, and no setting needs them


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must be, in words that follow "must be", and the function that checks it."""

    words: str
    holds: Callable[[Any], bool]


def at_least(least: float) -> Rule:
    """At least ``least``."""
    return Rule(f"at least {least}", lambda value: value >= least)


def above(bound: float) -> Rule:
    """More than ``bound``."""
    return Rule(f"above {bound}", lambda value: value > bound)


def between(least: float, most: float) -> Rule:
    """From ``least`` to ``most``, both included."""
    return Rule(f"between {least} and {most}", lambda value: least <= value <= most)


def one_of(*names: str) -> Rule:
    """One of these names."""
    return Rule(f"one of {choices(names)}", lambda value: value in names)


FRACTION = Rule("in [0, 1)", lambda value: 0 <= value < 1)
POSITIVE_SHARE = Rule("in (0, 1]", lambda value: 0 < value <= 1)


def each(rule: Rule) -> Rule:
    """A list all of whose entries keep a rule."""
    return Rule(f"a list of numbers {rule.words}", lambda values: all(map(rule.holds, values)))


NOT_BLANK = Rule("more than blanks", lambda value: not value or bool(value.strip()))
NOT_EMPTY = Rule("non-empty", lambda value: len(value) > 0)
_FINITE = Rule("finite", lambda value: all(map(math.isfinite, _numbers(value))))
_NOT_ABSURD = Rule(
    f"at most {LARGEST}",
    lambda value: all(abs(each) <= LARGEST for each in _numbers(value) if isinstance(each, int)),
)


def check(settings: object, group: str) -> None:
    """Check every field of a dataclass instance.

    Args:
        group: the config key of the dataclass, such as "train".

    Raises:
        ConfigError: a value breaks a rule; the message gives the field's rules and its default.
    """
    kind: Any = type(settings)
    for name, rules, default in _rules_of(kind):
        value = getattr(settings, name)
        if value is None:
            continue
        absurd = [rule for rule in (_FINITE, _NOT_ABSURD) if not rule.holds(value)][:1]
        if absurd or not all(rule.holds(value) for rule in rules):
            wanted = " and ".join(rule.words for rule in (*rules, *absurd))
            key = f"{group}.{name}"
            raise ConfigError(
                f"{key}={as_given(value)}",
                f"{key} must be {wanted}.",
                "" if default in (MISSING, None) else f"The default is {as_written(default)}.",
            )


@cache
def _rules_of(kind: type[Any]) -> list[tuple[str, list[Rule], object]]:
    """Name, rules and default of each field."""
    hints = get_type_hints(kind, include_extras=True)
    return [(each.name, list(_declared(hints[each.name])), each.default) for each in fields(kind)]


def _declared(hint: Any) -> Iterator[Rule]:
    origin = get_origin(hint)
    if origin in (Union, UnionType):  # of one type and None
        for member in get_args(hint):
            yield from _declared(member)
    elif origin is Annotated:
        yield from (each for each in hint.__metadata__ if isinstance(each, Rule))
        yield from _declared(hint.__origin__)
    elif origin is Literal:
        yield one_of(*get_args(hint))


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, (int, float)):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _numbers(each)
