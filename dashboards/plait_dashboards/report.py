"""The verb `plait report`: a search as one HTML page that opens without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.cli.results import READING, store_parser, store_settings
from plait.core.errors import EXIT_DONE
from plait.utils.files import disk_errors, write_text
from plait.utils.paths import as_path, file_name
from plait.utils.progress import say


def main(arguments: Sequence[str]) -> int:
    """write a search's figures as one HTML page that opens without a network

    Raises:
        SearchError: the search does not exist; the message lists those that do.
        AwayError: the store does not answer.
        StorageError: the store cannot be read, or the page cannot be written.
    """
    parser = store_parser("report", "Write a search's figures as one HTML page that opens without a network.")
    parser.add_argument("name", nargs="?", help="name or MLflow run id of the search; default: the newest")
    parser.add_argument(
        "--output", "-o", type=as_path, metavar="FILE", help="the file to write; default: NAME.html"
    )
    parser.add_argument("--storage", help="storage of the study (search.storage), if it has moved")
    known = parser.parse_args(arguments)
    say(READING)
    from plait.tracking.connection import AwayError
    from plait_dashboards.figures import all_figures
    from plait_dashboards.page import report
    from plait_dashboards.reading import read_sweep

    try:
        sweep = read_sweep(store_settings(known), known.name, known.storage)
    except AwayError as error:
        remedy = (
            f"{error.remedy}\nThe curves are only in that store; in the meantime, `plait leaderboard "
            f"{known.name or 'NAME'}` shows what the search's study holds."
        )
        raise AwayError(error.value, error.rule, remedy) from error
    path = known.output or Path(f"{file_name(sweep.name)}.html")
    write(path, report(sweep, all_figures(sweep)))
    print(f"{sweep.name}: {path}")
    return EXIT_DONE


def write(path: Path, text: str) -> None:
    """Write a page, completely or not at all.

    Raises:
        StorageError: its folder does not exist or cannot be written.
    """
    rule, remedy = "The report cannot be written there.", "Choose a file in a writable folder."
    with disk_errors(f"--output {path}", rule, remedy):
        path.parent.resolve(strict=True)  # so that a misspelt folder is not created
        write_text(path, text, durable=False)
