"""The verbs that read what has been trained: ui, leaderboard, export."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.errors import EXIT_DONE, ConfigError, StorageError, choices
from plait.core.settings import TrackingSettings

if TYPE_CHECKING:
    from plait.tracking import JobRecord, SearchResult


def ui(arguments: Sequence[str]) -> int:
    """Open MLflow's pages on the store that Plait writes to."""
    parser = store_parser("ui", "Serve MLflow's pages on what has been trained; Ctrl-C ends it.")
    parser.epilog = "Further options go to `mlflow server`, as in --port 5001."
    known, rest = parser.parse_known_args(arguments)
    from plait.tracking import check_port, run_ui, ui_command

    command = ui_command(store_settings(known), rest)
    check_port(command)
    print(f"MLflow: {command.url}", flush=True)
    return run_ui(command) if command.command else EXIT_DONE


def leaderboard(arguments: Sequence[str]) -> int:
    """Print a search's adapters, best first."""
    parser = store_parser("leaderboard", "A search's adapters, best first.")
    parser.add_argument("name", nargs="?", help="name or MLflow run id of the search; the newest by default")
    parser.add_argument("--format", default="table", help="table (the default), csv or json")
    parser.add_argument("--sort", metavar="COLUMN", help="sort by a column instead of the objective")
    parser.add_argument("--reverse", action="store_true", help="with --sort: largest first")
    known = parser.parse_args(arguments)
    from rich.console import Console

    from plait.tracking import print_leaderboard

    result = _search(store_settings(known), known.name)
    order = None
    if known.sort:
        result = replace(result, records=sort_records(result.records, known.sort, reverse=known.reverse))
        order = f"by {known.sort}, {'largest' if known.reverse else 'smallest'} first"
    print_leaderboard(result, known.format, Console(), order=order)
    return EXIT_DONE


def _search(settings: TrackingSettings, name: str | None) -> SearchResult:
    """A search as the store has it; as its study has it while the store is away."""
    from plait.tracking import AwayError, load_search

    try:
        return load_search(settings, name)
    except AwayError as error:
        from plait.search.study_board import board_of_study

        found = None
        with suppress(StorageError):  # the study's database may be away with it: the store is to be told of
            found = board_of_study(settings, name) if name else None
        if found is None:
            raise
        print(f"{error.value}. This is what the search's study knows:", file=sys.stderr)
        return found


def sort_records(
    records: Sequence[JobRecord], column: str, *, reverse: bool = False
) -> tuple[JobRecord, ...]:
    """The records by a column, called by its name or as the table heads it, smallest first or last; those
    without a value at the end.

    Raises:
        ConfigError: there is no such column.
    """
    from plait.tracking.leaderboard import columns, heading

    names, rows = columns(records)
    if column not in names:
        column = next((name for name in names if heading(name) == column), column)
    if column not in names:
        raise ConfigError(f"--sort {column}", "There is no such column.", f"There are: {choices(names)}.")
    at = names.index(column)
    paired = [(row[at], record) for row, record in zip(rows, records, strict=True)]
    present = [(value, record) for value, record in paired if value is not None]
    number = all(isinstance(value, (int, float)) for value, _ in present)
    present.sort(key=lambda pair: pair[0] if number else str(pair[0]), reverse=reverse)
    return tuple(record for _, record in [*present, *(pair for pair in paired if pair[0] is None)])


def export(arguments: Sequence[str]) -> int:
    """Copy an adapter's PEFT folder out of the store."""
    parser = store_parser("export", "Copy an adapter's PEFT folder out of the store.")
    parser.add_argument(
        "name", nargs="?", help="search, or MLflow run id of one adapter; the newest search by default"
    )
    parser.add_argument(
        "--to", type=Path, required=True, metavar="DIR", help="a folder that is not there yet"
    )
    parser.add_argument(
        "--trial", type=int, metavar="N", help="which trial of the search; the best by default"
    )
    known = parser.parse_args(arguments)
    from plait.tracking import export as export_adapter

    record, folder = export_adapter(store_settings(known), known.name, known.to, trial=known.trial)
    print(f"{record.name}: {folder}")
    return EXIT_DONE


_STORE_KEY = re.compile(r"^tracking\.(uri|root|experiment)=")


class _StoreParser(argparse.ArgumentParser):
    """Takes ``tracking.root=DIR`` and the like, as they are given to `plait sweep`, for ``--root DIR``."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As of every parser."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_STORE_KEY.sub(r"--\1=", word) for word in words], namespace)


def store_parser(verb: str, description: str) -> argparse.ArgumentParser:
    """Of a verb that reads the store: the options that say where it is."""
    parser = _StoreParser(prog=f"plait {verb}", description=description)
    defaults = TrackingSettings()
    parser.add_argument("--uri", help="MLflow tracking URI; MLFLOW_TRACKING_URI, else SQLite under --root")
    parser.add_argument(
        "--root", type=Path, default=defaults.root, help=f"folder of the runs ({defaults.root})"
    )
    parser.add_argument(
        "--experiment", default=defaults.experiment, help=f"MLflow experiment ({defaults.experiment})"
    )
    return parser


def store_settings(known: argparse.Namespace) -> TrackingSettings:
    """What the options of :func:`store_parser` say."""
    return TrackingSettings(uri=known.uri, root=known.root, experiment=known.experiment)
