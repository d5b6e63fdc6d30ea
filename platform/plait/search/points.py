"""Points of a search space: reads them as users write them ("adapter.rank=64", "train.lr=2e-4"), and counts
them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from plait.config.build import JOB_SPECS
from plait.config.fields import build
from plait.config.overrides import read_setting
from plait.core.errors import SearchError, choices
from plait.core.settings import SearchSettings
from plait.core.space import Choice, Dimension, Point, Real, Space, Value, Whole, as_written

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


OUTSIDE = "plait.outside"  # trial: settings outside the search space, by key: as written, and the value


class OutsideValue(NamedTuple):
    """A setting outside the search space: as written in an override, and its value."""

    text: str
    value: Value


def read_enqueued(settings: SearchSettings, space: Space) -> dict[str, dict[str, Value]]:
    """The points of ``search.enqueue``, in order, by what identifies each independently of its position. A
    point given twice is tried twice.

    Raises:
        SearchError: a point is not in the space.
    """
    found: dict[str, dict[str, Value]] = {}
    times: Counter[str] = Counter()
    for at, written in enumerate(settings.enqueue):
        try:
            values = read_values(space, written)
        except SearchError as error:
            raise SearchError(f"search.enqueue[{at}]: {error.value}", error.rule, error.remedy) from error
        text = json.dumps(dict(values), sort_keys=True)
        found[f"enqueue {text} {times[text]}"] = values
        times[text] += 1
    return found


def read_values(space: Space, values: Mapping[str, object]) -> dict[str, Value]:
    """The values that a configuration file gives to searched keys; other keys are left open.

    Raises:
        SearchError: a key is not searched, or its value is outside the key's domain.
    """
    known = {dimension.name: dimension for dimension in space.dimensions}
    for key, value in values.items():
        if key not in known:
            raise SearchError(
                f"{key}={as_written(value)}",
                f"This search does not search over {key}.",
                f"The searched keys are: {choices(known)}.",
            )
    return {key: read_value(known[key], as_written(value)) for key, value in values.items()}


class AddedPoint(NamedTuple):
    """What a user gives to an additional trial: searched keys within their domains, and other settings of the
    job, outside their domains or not searched at all."""

    values: Mapping[str, Value]
    outside: Mapping[str, OutsideValue]


def read_added(space: Space, overrides: Sequence[str]) -> AddedPoint:
    """The settings given by overrides, which may be outside the space: those of adapter and train may be any
    that is valid for a job. Data must be prepared by the search already.

    Raises:
        ConfigError: a value is invalid for any job.
        SearchError: one is not ``key=value``, a key is given twice, or it applies to the whole search.
    """
    known = {dimension.name: dimension for dimension in space.dimensions}
    values: dict[str, Value] = {}
    outside: dict[str, OutsideValue] = {}
    for override in overrides:
        key, text = _split(override, known)
        if key in values or key in outside:
            raise SearchError(override, f"{key} is given twice.", "Give it once.")
        free = key.partition(".")[0] in JOB_SPECS and "." in key
        if key in known and (not free or _lies_inside(known[key], text)):
            values[key] = read_value(known[key], text)
        elif free:
            outside[key] = _read_outside(key, text)
        else:
            raise SearchError(
                override,
                f"This search does not search over {key}, which has the same value in all trials.",
                f"An added trial can set any key of {choices(JOB_SPECS)}, and the searched keys: "
                f"{choices(known)}.",
            )
    return AddedPoint(values, outside)


def _read_outside(key: str, text: str) -> OutsideValue:
    group, _, name = key.partition(".")
    value = read_setting(f"{key}={text}")
    build(JOB_SPECS[group], {name: value}, group)
    return OutsideValue(text, as_written(value) if isinstance(value, list) else value)


def _lies_inside(dimension: Dimension, text: str) -> bool:
    try:
        read_value(dimension, text)
    except SearchError:
        return False
    return True


def _split(override: str, known: Iterable[str]) -> tuple[str, str]:
    key, equals, text = override.partition("=")
    if not equals:
        raise SearchError(override, "A value is given as KEY=VALUE.", f"Keys are: {choices(list(known))}.")
    return key.lstrip("+"), text


def read_value(dimension: Dimension, text: str) -> Value:
    """Read a value of one searched key from its text.

    Raises:
        SearchError: it is outside the key's domain.
    """
    domain = dimension.domain
    if isinstance(domain, Choice):
        return _chosen(dimension, domain, text.strip())
    try:
        number = int(text) if isinstance(domain, Whole) else float(text)
    except ValueError:
        number = math.nan
    if not _lies_on(domain, number):
        raise _outside(dimension, text)
    return number


def _chosen(dimension: Dimension, domain: Choice, text: str) -> Value:
    for value, known in zip(domain.values, domain.texts, strict=True):
        if text == known or text == str(value) or _same_number(text, value):
            return value
    raise _outside(dimension, text)


def _same_number(text: str, value: Value) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return float(text) == value
    except ValueError:
        return False


def _lies_on(domain: Whole | Real, number: float) -> bool:
    if not domain.low <= number <= domain.high:  # false for NaN, too
        return False
    if domain.step is None:
        return True
    steps = (number - domain.low) / domain.step
    return math.isclose(steps, round(steps), abs_tol=1e-9)


def _outside(dimension: Dimension, text: str) -> SearchError:
    return SearchError(
        f"{dimension.name}={text}",
        f"It must come from {dimension.domain}.",
        "Choose one of its values, or widen the space; in a search that has begun, with another search.name.",
    )


def outside_of(item: FrozenTrial) -> dict[str, OutsideValue]:
    """The settings of a trial outside the search space, by key."""
    return {key: OutsideValue(*each) for key, each in item.user_attrs.get(OUTSIDE, {}).items()}


def values_of(item: FrozenTrial) -> dict[str, Value]:
    """The values of a trial's searched keys and of its settings outside the space."""
    return item.params | {key: each.value for key, each in outside_of(item).items()}


def overrides_of(space: Space, values: Mapping[str, Value], outside: Mapping[str, OutsideValue]) -> list[str]:
    """The overrides of a trial: its searched keys in the order of the space, then what is not searched."""
    overrides = [
        f"{each.prefix}{each.name}={outside[each.name].text}"
        if each.name in outside
        else each.override(values[each.name])
        for each in space.dimensions
    ]
    searched = {each.name for each in space.dimensions}
    return overrides + [f"{key}={each.text}" for key, each in outside.items() if key not in searched]


def tried_points(trials: Iterable[FrozenTrial], space: Space) -> frozenset[Point]:
    """The points of all trials, including failed ones, which would fail again, and enqueued ones; trials with
    settings outside the space do not count."""
    values = (
        item.system_attrs.get("fixed_params", {}) | item.params for item in trials if not outside_of(item)
    )
    return frozenset(point for each in values if (point := space.point(each)) is not None)


def points_left(trials: Sequence[FrozenTrial], space: Space) -> int | None:
    """How many combinations no trial has; None if they cannot be counted."""
    return None if space.size is None else space.size - len(tried_points(trials, space))


def too_few_points(settings: SearchSettings, space: Space) -> str:
    """What to say if fewer combinations exist than trials were requested, because none is trained twice; ""
    if there are enough."""
    size = space.size
    if size is None or size >= settings.trials:
        return ""
    if size == 1:
        return "Only 1 combination exists, so 1 trial runs."
    return f"Only {size} combinations exist; running {size} trials."
