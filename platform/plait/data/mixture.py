"""The source "mixture": several sources in one job, with weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from plait.config.fields import build, convert, unknown_key
from plait.core.checks import NOT_EMPTY
from plait.core.errors import ConfigError, DataError, choices
from plait.data.examples import Example
from plait.data.sources import GENERATION, SOURCES, CommonOptions, Rows, Source

MIXTURE = "mixture"
WEIGHT, SOURCE = "weight", "source"
# The source that an entry's key implies, if the entry does not name one.
MEANT = {"path": "file", "id": "hub", "task": "reasoning_gym"}
# Options of the whole mixture; each entry has its own size.
SHARED = tuple(each.name for each in fields(CommonOptions) if each.name != "size")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOptions(CommonOptions):
    """Options of a mixture. Each source has its own ``size``.

    Attributes:
        sources: each is a mapping with the options of its source (identified by ``path``, ``id``, ``task`` or
            ``source``) and ``weight``, its share of the training samples. Without weights, all rows count
            alike.
    """

    sources: Annotated[tuple[dict[str, Any], ...], NOT_EMPTY]

    def __post_init__(self) -> None:
        CommonOptions.__post_init__(self)
        if self.size is not None:
            raise ConfigError(
                f"data.size={self.size} with data=mixture",
                "Each source of a mixture has its own size.",
                "Set it there: {path: a.jsonl, size: 100}.",
            )
        weights = [_weight(entry, number) for number, entry in enumerate(self.sources)]
        if None in weights and any(weight is not None for weight in weights):
            raise ConfigError(
                f"data.sources[{weights.index(None)}] has no weight, but others do",
                "Either all sources of a mixture must have a weight, or none.",
                "Add it: {path: a.jsonl, weight: 1}.",
            )


def open_rows(options: MixtureOptions) -> Rows:
    """The rows of all sources, each with its weight.

    Raises:
        ConfigError, DataError: those of the sources; the error names the entry's key if that is wrong.
    """
    shared = {name: getattr(options, name) for name in SHARED}
    parts = []
    state = hashlib.sha256()
    for number, entry in enumerate(options.sources):
        key = f"data.sources[{number}]"
        with _named_entry(key):
            source, own = _own_options(entry, key, shared)
            rows = replace(_named_by(key, source.open(own)), weight=_weight(entry, number))
        state.update(f"{rows.digest} {rows.validation.digest if rows.validation else ''};".encode())
        parts.append(rows)

    def read() -> list[tuple[str, Example]]:
        return [each for part in parts for each in part.read()]

    return Rows(MIXTURE, state.hexdigest(), read, parts=tuple(parts))


SOURCES.add(MIXTURE, Source(MixtureOptions, open_rows))


def _named_by(key: str, rows: Rows) -> Rows:
    """The rows of an entry; errors in reading them name it."""

    def read() -> list[tuple[str, Example]]:
        with _named_entry(key):
            return rows.read()

    separate = None if rows.validation is None else _named_by(key, rows.validation)
    return replace(rows, read=read, validation=separate)


@contextmanager
def _named_entry(key: str) -> Iterator[None]:
    """Raise errors of a source with the key of its entry, such as data.sources[0]."""
    try:
        yield
    except (ConfigError, DataError) as error:
        value = error.value if key in error.value else f"{key}: {error.value}"
        raise type(error)(value, error.rule, error.remedy) from error


def _weight(entry: Mapping[str, Any], number: int) -> float | None:
    if entry.get(WEIGHT) is None:
        return None
    key = f"data.sources[{number}].{WEIGHT}"
    weight: float = convert(float, entry[WEIGHT], key)
    if weight <= 0:
        raise ConfigError(
            f"{key}={weight}", f"{key} must be above 0.", "Leave the source out if it should not be used."
        )
    return weight


def _own_options(
    entry: Mapping[str, Any], key: str, shared: Mapping[str, Any]
) -> tuple[Source, CommonOptions]:
    """The source that an entry names, and its options combined with those of the mixture."""
    given = {name: value for name, value in entry.items() if name not in (WEIGHT, SOURCE)}
    named = convert(str | None, entry.get(SOURCE), f"{key}.{SOURCE}")
    name = named or next((MEANT[each] for each in MEANT if each in given), "")
    if not name or name == MIXTURE:
        raise ConfigError(
            f"{key}={json.dumps(dict(entry), default=str)}",
            f"A source of a mixture must have one of the keys {choices(MEANT)}, or the key {SOURCE}.",
            "For example {path: a.jsonl, weight: 1}.",
        )
    source = SOURCES.get(name)
    allowed = [each.name for each in fields(source.options) if each.name not in {*SHARED, *GENERATION}]
    for each in given:
        if each in shared:
            raise ConfigError(
                f"{key}.{each}={given[each]!r}",
                f"{each} applies to the whole mixture.",
                f"Set data.{each} instead.",
            )
        if each not in allowed:
            raise unknown_key(f"{key}.{each}", [f"{key}.{known}" for known in (*allowed, WEIGHT, SOURCE)])
    return source, build(source.options, {**shared, **given}, key)
