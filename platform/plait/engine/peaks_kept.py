"""Observed peaks of a search, kept in its folder, so that a restart admits by what was learnt before it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from plait.core.errors import StorageError
from plait.cost.memory import MemoryObservation, MemoryShape
from plait.utils.files import write_text


def write_peaks(path: Path, of: str, observations: Sequence[MemoryObservation]) -> None:
    """Keep observations in the place of earlier ones. What cannot be written is observed again one day.

    Args:
        of: what they hold for: model and options in words.
    """
    rows = [
        {"shape": asdict(each.shape), "peaks": dict(each.peaks), "static": each.static}
        for each in observations
    ]
    with suppress(OSError):
        write_text(path, json.dumps({"of": of, "observations": rows}), durable=False)


def read_peaks(path: Path, of: str) -> list[MemoryObservation]:
    """The observations kept, oldest first; none where there is no file, or one of another model.

    Raises:
        StorageError: the file is not one of :func:`write_peaks`.
    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        rows = kept["observations"] if kept["of"] == of else []
        return [
            MemoryObservation(MemoryShape(**each["shape"]), each["peaks"], each["static"]) for each in rows
        ]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(
            f"{path}: {error!r}",
            "The search's folder keeps the peaks of memory that were observed.",
            "Remove the file: they are observed again.",
        ) from error
