"""The verb `plait report`: a search as one HTML page that opens without a network."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from plait.errors import EXIT_DONE, StorageError
from plait.settings import TrackingSettings


def main(arguments: Sequence[str]) -> int:
    """a search's figures as one HTML page that opens without a network

    Raises:
        SearchError: there is no such search; it lists those there are.
        AwayError: the store does not answer.
        StorageError: the store cannot be read, or the page cannot be written.
    """
    known = _parser().parse_args(arguments)
    from plait.tracking import AwayError
    from plait_dashboards.figures import all_figures
    from plait_dashboards.page import report
    from plait_dashboards.reading import read_sweep

    settings = TrackingSettings(uri=known.uri, root=known.root, experiment=known.experiment)
    try:
        sweep = read_sweep(settings, known.name, known.storage)
    except AwayError as error:
        remedy = (
            f"{error.remedy}\nThe curves are in that store alone; `plait leaderboard {known.name or 'NAME'}` "
            "shows meanwhile what the search's study knows."
        )
        raise AwayError(error.value, error.rule, remedy) from error
    path = known.output or Path(f"{sweep.name}.html")
    write(path, report(sweep, all_figures(sweep)))
    print(f"{sweep.name}: {path}")
    return EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    defaults = TrackingSettings()
    parser = argparse.ArgumentParser(
        prog="plait report", description="A search's figures as one HTML page that needs no network."
    )
    parser.add_argument("name", nargs="?", help="name or MLflow run id of the search; the newest by default")
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="the page (NAME.html)")
    parser.add_argument("--storage", help="of the study (search.storage), where it is not the recorded one")
    parser.add_argument("--uri", help="MLflow tracking URI; MLFLOW_TRACKING_URI, else SQLite under --root")
    parser.add_argument(
        "--root", type=Path, default=defaults.root, help=f"folder of the runs ({defaults.root})"
    )
    parser.add_argument(
        "--experiment", default=defaults.experiment, help=f"MLflow experiment ({defaults.experiment})"
    )
    return parser


def write(path: Path, text: str) -> None:
    """Write a page whole or not at all.

    Raises:
        StorageError: its folder is not there or cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".report-", suffix=".html")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"--output {path}: {error.strerror or error}",
            "The page is written there.",
            "Name a file in a folder that you may write.",
        ) from error
