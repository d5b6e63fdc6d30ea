"""Entries of a described cluster or a stored profile: each is checked where it is read, and named."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar, cast

from plait.core.errors import ConfigError, choices

T = TypeVar("T")


def need(raw: Mapping[str, Any], key: str, owner: str) -> Any:
    """The entry ``key`` of ``raw``, which is called ``owner`` in messages.

    Raises:
        ConfigError: it is missing. So do the others where an entry is of the wrong kind.
    """
    if raw.get(key) is None:
        raise ConfigError(f"{owner}.{key} is missing", f"{owner} has {choices(dict(raw))}.")
    return raw[key]


def mapping(value: object, owner: str, keys: Collection[str] | None = None) -> Mapping[str, Any]:
    """Keys with values; ``keys``: all that there may be."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{owner}={value!r}", f"{owner} has keys with values.")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{owner}: key {key!r}", "Keys are names.")
        if keys is not None and key not in keys:
            raise ConfigError(f"{owner}.{key}", f"{owner} has the keys {choices(keys)}.")
    return value


def rows(value: object, owner: str) -> Sequence[Any]:
    """A list."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{owner}={value!r}", f"{owner} is a list of rows.")
    return value


def number(raw: Mapping[str, Any], key: str, owner: str) -> float:
    """A finite number."""
    value = need(raw, key, owner)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{owner}.{key}={value!r}", "It must be a number.")
    if not abs(value) <= 1e300:  # nan, infinite, or an int that no float holds
        raise ConfigError(f"{owner}.{key}={value}", "It must be a finite number.")
    return float(value)


def whole(raw: Mapping[str, Any], key: str, owner: str) -> int:
    """A whole number from 1 on."""
    value = number(raw, key, owner)
    if value < 1 or not math.floor(value) == value:
        raise ConfigError(f"{owner}.{key}={raw[key]}", "It must be a whole number of at least 1.")
    return int(value)


def numbers(kind: type[T], value: object, owner: str) -> T:
    """A dataclass of numbers."""
    known = {each.name: each for each in fields(cast(Any, kind))}
    raw = mapping(value, owner, known)
    for name, each in known.items():
        if each.default is MISSING and raw.get(name) is None:
            raise ConfigError(f"{owner}.{name} is missing", f"{owner} has the keys {choices(known)}.")
    return kind(**{name: number(raw, name, owner) for name in raw})


def by_degree(value: object, kind: type[T], owner: str) -> dict[int, T]:
    """Rows such as {tp: 2, fixed: …, token: …} as dataclasses of numbers, by tensor-parallel degree."""
    found: dict[int, T] = {}
    for row in rows(value, owner):
        entries = mapping(row, owner)
        tp = whole(entries, "tp", owner)
        if tp in found:
            raise ConfigError(f"{owner} has tp={tp} twice", "Each tensor-parallel degree has one row.")
        found[tp] = numbers(kind, {name: entry for name, entry in entries.items() if name != "tp"}, owner)
    return found
