"""Hydra's override syntax as a search space.

It reads ``a,b``, ``choice``, ``range`` (without its stop, as everywhere in Hydra), ``interval`` (whole
numbers if the key needs them, or with ``int(interval(...))``), ``tag(log, ...)`` and ``glob``, on the command
line or in ``search.params``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    IntervalSweep,
    Override,
    Quote,
    QuotedString,
    RangeSweep,
    Sweep,
    Transformer,
)
from hydra.errors import HydraException

from plait.config.build import JOB_GROUPS, JOB_SPECS, RUN_GROUPS, is_whole, key_of, takes_list
from plait.config.fields import likely, meant_by
from plait.core.errors import ConfigError, SearchError
from plait.core.space import Choice, Dimension, Domain, Real, Space, Value, Whole


@dataclass(frozen=True, slots=True)
class Request:
    """What a command line requests: a space, and the overrides that apply to every trial."""

    space: Space
    fixed: tuple[str, ...]


def read_request(
    arguments: Sequence[str],
    params: Mapping[str, str],
    default_params: Mapping[str, str],
    loader: ConfigLoader | None = None,
    *,
    data_keys: Iterable[str] = (),
) -> Request:
    """The space of a command line, of ``search.params``, or else of ``search.default_params``.

    A key on the command line replaces the same key in ``params``. Of a key that is given several times the
    last counts, as in Hydra. The defaults are used only if neither sweeps anything, and then without the keys
    that have fixed values.

    Args:
        data_keys: keys of the data source, to be suggested if a key does not exist.

    Raises:
        SearchError: there is nothing to search, or a domain makes no sense.
        ConfigError: a key cannot be swept.
    """
    given = _parse(arguments, loader)
    from_file = [
        override
        for override in _params(params, loader)
        if _name(override) not in {_name(item) for item in given}
    ]
    overrides = [*given, *from_file]
    fixed = [item for item in overrides if not item.is_sweep_override()]
    last = {_name(item): item for item in overrides}
    swept = [item for item in overrides if item.is_sweep_override() and item is last[_name(item)]]
    if not swept:
        settled = {_name(item) for item in fixed}
        swept = [item for item in _params(default_params, loader) if _name(item) not in settled]
        if not swept:
            raise _nothing(default_params)
    dimensions = tuple(_dimension(override, data_keys) for override in swept)
    return Request(Space(dimensions), tuple(item.input_line or "" for item in fixed))


def is_sweep(argument: str) -> bool:
    """Whether a command-line argument sweeps something; False if it does not parse."""
    try:
        return bool(OverridesParser.create().parse_override(argument).is_sweep_override())
    except HydraException:
        return False


def spaces(arguments: Sequence[str]) -> list[str]:
    """The command-line arguments that sweep something; without those followed by another value of their key,
    as they do not count."""
    last = {key_of(argument): argument for argument in arguments}
    return [each for each in arguments if last[key_of(each)] is each and is_sweep(each)]


def read_setting(text: str) -> Any:
    """The value that an override such as ``train.lr=2e-4`` gives, typed as in a configuration file.

    Raises:
        SearchError: it gives none, or several.
    """
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise SearchError(text, "It cannot be read.", "Write KEY=VALUE as on the command line.") from error
    if override.is_sweep_override() or override.is_delete():
        raise SearchError(text, "A trial has one value for each key.", "Choose one.")
    return _bare(override.value())


def _bare(element: Any) -> Any:
    if isinstance(element, QuotedString):
        return str(element.text)
    return [_bare(each) for each in element] if isinstance(element, list) else element


def _dimension(override: Override, data_keys: Iterable[str]) -> Dimension:
    name = _name(override)
    _check_scope(name, data_keys)
    prefix = "++" if override.is_force_add() else "+" if override.is_add() else ""
    try:
        return Dimension(name, _domain(override, whole=is_whole(name)), prefix)
    except SearchError as error:
        raise SearchError(f"{name}: {error.value}", error.rule, error.remedy) from None


def _parse(lines: Iterable[str], loader: ConfigLoader | None) -> list[Override]:
    parsed: list[Override] = OverridesParser.create(config_loader=loader).parse_overrides(list(lines))
    return parsed


def _params(params: Mapping[str, str], loader: ConfigLoader | None) -> list[Override]:
    try:
        return _parse((f"{key}={value}" for key, value in params.items()), loader)
    except HydraException as error:
        first, *rest = str(error).splitlines()
        raise SearchError(
            f"search.params: {first}", " ".join(rest[:1]), "Write it as on the command line."
        ) from error


def _name(override: Override) -> str:
    return str(override.get_key_element()).lstrip("+~")


def _check_scope(name: str, data_keys: Iterable[str]) -> None:
    root = name.split(".")[0].split("@")[0].split("/")[0]
    if root in JOB_GROUPS:
        return
    if root in RUN_GROUPS or root == "sweeps":
        listed = f" A list is written in brackets: {name}=[…]." if takes_list(name) else ""
        raise ConfigError(
            f"{name} is swept",
            f"{root} applies to the whole run; only keys of {', '.join(JOB_GROUPS)} can be swept.",
            f"Start one sweep for each value of {name}.{listed}",
        )
    keys = [f"{group}.{each.name}" for group, spec in JOB_SPECS.items() for each in fields(spec)]
    keys += [f"data.{key}" for key in data_keys]
    known = [*keys, *JOB_GROUPS, *RUN_GROUPS]
    remedy = meant_by(name, known)
    if any(each in RUN_GROUPS for each in likely(name, known)):
        remedy += "It belongs to the run; start one sweep for each of its values."
    raise ConfigError(
        f"{name} is swept", f"Only keys of {', '.join(JOB_GROUPS)} can be swept.", remedy.strip()
    )


def _domain(override: Override, *, whole: bool) -> Domain:
    value = override.value()
    if not isinstance(value, Sweep):  # glob(...): the names of a group's files
        if not (files := list(override.sweep_iterator())):
            raise SearchError("glob(...)", "It selects files of a config group, and none match.")
        return _choice(files)
    log = "log" in value.tags
    if unknown := sorted(value.tags - {"log"}):
        raise SearchError(f"tag({unknown[0]},...)", "The only tag is log.")
    if isinstance(value, RangeSweep):
        return replace(_range(value), log=log) if log else _range(value)
    if isinstance(value, IntervalSweep):
        return _interval(value, whole=whole, log=log)
    assert isinstance(value, ChoiceSweep)
    if log:
        raise SearchError(
            "tag(log,choice(...))", "Only intervals and ranges can have a log scale.", "Leave out the tag."
        )
    return _choice(value.list)


def _choice(elements: Sequence[Any]) -> Choice:
    if any(isinstance(each, Sweep) for each in elements):
        raise SearchError(
            "a space within choice(...)",
            "A choice holds single values.",
            "List all of them, as in choice(4,8,16). A value that is a list has brackets: choice([a],[a,b]).",
        )
    return Choice(tuple(map(_stored, elements)), tuple(map(_text, elements)))


def _text(element: Any) -> str:
    """The element as override text. Hydra loses the quotes inside choice(...), so text that would be read
    as something else is quoted again."""
    text = str(Transformer.str(element))
    if isinstance(element, str) and not _reads_as(text, element):
        return QuotedString(element, Quote.single).with_quotes()
    return text


def _reads_as(text: str, value: str) -> bool:
    try:
        read = OverridesParser.create().parse_override(f"key={text}").value()
    except HydraException:
        return False
    return isinstance(read, str) and read == value


def _stored(element: Any) -> Value:
    if isinstance(element, QuotedString):
        return str(element.text)
    if element is None or isinstance(element, (bool, int, float, str)):
        return element
    return str(Transformer.str(element))


def _range(sweep: RangeSweep) -> Whole | Real:
    start, stop, step = sweep.start, sweep.stop, sweep.step
    assert start is not None
    assert stop is not None
    text = f"range({start},{stop},{step})"
    if step == 0:
        raise SearchError(text, "The step must not be 0.")
    # Exact, as in Hydra: 0.1 + 0.1 + 0.1 must not miss or pass the stop by a rounding error.
    first, end, by = (Fraction(str(number)) for number in (start, stop, step))
    count = math.ceil((end - first) / by)
    if count < 1:
        raise SearchError(text, "The range is empty: it does not include its stop value.")
    low, high = sorted((first, first + (count - 1) * by))
    if all(isinstance(number, int) for number in (start, stop, step)):
        return Whole(int(low), int(high), abs(int(step)))
    return Real(float(low), float(high), float(abs(by)))


def _interval(sweep: IntervalSweep, *, whole: bool, log: bool) -> Whole | Real:
    start, end = sweep.start, sweep.end
    assert start is not None
    assert end is not None
    # Hydra reads interval(4,32) as floats, so the key's own type decides.
    if whole and float(start).is_integer() and float(end).is_integer():
        return Whole(int(start), int(end), log=log)
    if isinstance(start, int) and isinstance(end, int):
        return Whole(start, end, log=log)
    return Real(float(start), float(end), log=log)


def _nothing(default_params: Mapping[str, str]) -> SearchError:
    rule = "A sweep needs at least one key with several values."
    if default_params:
        rule += f" The default keys ({', '.join(default_params)}) all have fixed values."
    return SearchError(
        "nothing to search", rule, "Sweep a key, for example adapter.rank=8,16, or use `plait train`."
    )
