"""The source "hub": data sets of the Hugging Face hub, through the library `datasets`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from plait.core.checks import NOT_EMPTY
from plait.core.errors import DataError
from plait.data.datasets_library import SPLIT, read_hub
from plait.data.examples import Example, NamedFields, Row, read_example
from plait.data.sources import GENERATION, SOURCES, FieldOptions, Rows, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions(FieldOptions):
    """Options of a data set of the hub.

    Attributes:
        id: its name on the hub, such as "openai/gsm8k".
        name: the configuration to use, if it has several.
        revision: a branch, tag or commit; None: the newest.
        split: the rows to train on.
        validation_split: separate rows for validation; None: they are split off ``split``.
    """

    id: Annotated[str, NOT_EMPTY]
    name: str | None = None
    revision: str | None = None
    split: Annotated[str, NOT_EMPTY] = SPLIT
    validation_split: str | None = None


def open_rows(options: HubOptions) -> Rows:
    """The rows of the split, and those for validation.

    Raises:
        ConfigError: the library is missing.
        DataError: there is no such data set or split, or it cannot be reached.
    """
    separate = None
    if options.validation_split is not None:
        separate = _rows(options, options.validation_split, None)
    return _rows(options, options.split, options.size, separate)


SOURCES.add("hub", Source(HubOptions, open_rows, no_effect=GENERATION))


def _rows(options: HubOptions, split: str, limit: int | None, separate: Rows | None = None) -> Rows:
    rows = read_hub(options.id, name=options.name, revision=options.revision, split=split, limit=limit)
    state = hashlib.sha256()
    for row in rows:
        state.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    name = f"{options.id}, {split}"
    return Rows(name, state.hexdigest(), partial(_examples, rows, name, options.named), separate)


def _examples(rows: Sequence[Row], name: str, named: NamedFields | None) -> list[tuple[str, Example]]:
    if not rows:
        raise DataError(f"{name}: no rows", "A split must have at least one row.", "Check data.split.")
    places = (f"{name}, row {number}" for number in range(len(rows)))
    return [(where, read_example(row, where, named)) for where, row in zip(places, rows, strict=True)]
