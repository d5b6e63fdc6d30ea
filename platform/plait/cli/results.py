"""The verbs for finished and running searches: ui, leaderboard, forget."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from plait.cli.parser import STORE_KEY, Parser
from plait.core.errors import EXIT_DONE, ConfigError
from plait.core.settings import TrackingSettings
from plait.utils.paths import no_such_search, search_folder, search_names
from plait.utils.progress import say


def ui(arguments: Sequence[str]) -> int:
    """Open MLflow's pages on the store that Plait writes to."""
    parser = store_parser("ui", "Open the results in MLflow's web pages; Ctrl-C stops the server.")
    parser.usage = "plait ui [NAME] [--uri URI] [--root ROOT] [--experiment EXPERIMENT] [--port PORT] ..."
    parser.epilog = (
        "NAME is the search to show, by default the newest. Other options are passed on to `mlflow server`."
    )
    words = list(arguments)
    named = bool(words) and not words[0].startswith("-") and not STORE_KEY.match(words[0])
    name = words.pop(0) if named else None
    known, rest = parser.parse_known_args(words)
    say(READING)
    from plait.tracking.results import search_address
    from plait.tracking.ui import check_port, run_ui, ui_command

    settings = store_settings(known)
    command = ui_command(settings, rest)
    check_port(command)
    shown = f"MLflow: {search_address(settings, name, command.url, say)}"
    if not command.command:
        print(shown)
        return EXIT_DONE
    say("Starting MLflow's server ...")
    return run_ui(command, lambda: print(f"{shown}\nCtrl-C stops it.", flush=True))


def leaderboard(arguments: Sequence[str]) -> int:
    """Print a search's adapters, best first."""
    parser = store_parser("leaderboard", "Print a search's adapters, best first.")
    parser.add_argument("name", nargs="?", help="name or MLflow run id of the search; default: the newest")
    parser.add_argument("--format", choices=("table", "csv", "json"), default="table", help="default: table")
    known = parser.parse_args(arguments)
    say(READING)
    from plait.cli.leaderboard import show

    show(store_settings(known), known.name, known.format)
    return EXIT_DONE


def store_parser(verb: str, description: str) -> Parser:
    """The parser of a verb that reads the store, with the options that say where the store is."""
    parser = Parser(prog=f"plait {verb}", description=description)
    defaults = TrackingSettings()
    parser.add_argument(
        "--uri", help="MLflow tracking URI; default: MLFLOW_TRACKING_URI, else SQLite under --root"
    )
    parser.add_root()
    parser.add_argument(
        "--experiment", default=defaults.experiment, help=f"MLflow experiment; default: {defaults.experiment}"
    )
    return parser


READING = "Reading the search from MLflow ..."  # said before MLflow is imported, which takes seconds


def store_settings(known: argparse.Namespace) -> TrackingSettings:
    """The settings that the options of :func:`store_parser` give."""
    return TrackingSettings(uri=known.uri, root=known.root, experiment=known.experiment)


def forget(arguments: Sequence[str]) -> int:
    """Delete a search: its folder, its study and its MLflow runs."""
    parser = Parser(
        prog="plait forget",
        description="Delete a search: its folder with checkpoints and adapters, its study and its MLflow "
        "runs. Lists what will be deleted and asks first. Hydra's folders with each trial's settings "
        "(multirun and outputs) are kept.",
    )
    parser.add_argument("name", help="name of the search")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--keep-adapters", action="store_true", help="keep the exported adapters")
    parser.add_root()
    known = parser.parse_args(arguments)
    if not search_folder(known.root, known.name).is_dir():
        raise no_such_search(known.name, known.root, search_names(known.root))
    say(READING)
    from plait.search.delete import find_remains  # Optuna and MLflow are slow to import

    remains = find_remains(known.root, known.name)
    lines = remains.describe(known.keep_adapters)
    print(f"{known.name}: these will be deleted", *(f"  {line}" for line in lines), sep="\n")
    if not known.yes and not _agreed(known.name):
        print("Nothing was deleted.")
        return EXIT_DONE
    remains.remove(known.keep_adapters)
    print(f"{known.name} was deleted.")
    return EXIT_DONE


def _agreed(name: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            f"plait forget {name}",
            "Deleting a search needs confirmation, and standard input is not a terminal.",
            "Confirm with --yes.",
        )
    return input("Delete it? [y/N] ").strip().lower() in ("y", "yes")
