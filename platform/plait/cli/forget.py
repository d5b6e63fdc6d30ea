"""`plait forget NAME`: takes a search away."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from plait.cli.named import no_such_search
from plait.core.errors import EXIT_DONE, ConfigError
from plait.core.settings import TrackingSettings
from plait.utils.paths import search_folder


def main(arguments: Sequence[str]) -> int:
    """Take a search away: its folder, its study and its MLflow runs."""
    known = _parser().parse_args(arguments)
    if not search_folder(known.root, known.name).is_dir():
        raise no_such_search("plait forget", known.root, known.name)
    from plait.search.forget import find_remains  # Optuna and MLflow take their time

    remains = find_remains(known.root, known.name)
    print(
        f"{known.name}: this goes", *(f"  {line}" for line in remains.describe(known.keep_adapters)), sep="\n"
    )
    if not known.yes and not _agreed(known.name):
        print("Nothing was removed.")
        return EXIT_DONE
    remains.remove(known.keep_adapters)
    print(f"{known.name} is forgotten.")
    return EXIT_DONE


def _agreed(name: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            f"plait forget {name}",
            "It asks before it removes anything, and this is no terminal.",
            "Give --yes.",
        )
    return input("Remove it? [y/N] ").strip().lower() in ("y", "yes")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plait forget",
        description="Take a search away: its folder with checkpoints and adapters, its study and its MLflow "
        "runs. Shows what goes, and asks.",
    )
    root = TrackingSettings().root
    parser.add_argument("name", help="of the search")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--keep-adapters", action="store_true", help="leave the exported adapters")
    parser.add_argument("--root", type=Path, default=root, help=f"folder of the runs ({root})")
    return parser
