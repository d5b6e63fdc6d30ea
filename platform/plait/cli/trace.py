"""`plait trace`: what the processes of a search did, and when, as a file that Perfetto opens.

A seam: loaded only for this verb.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.cli.parser import Parser
from plait.core.errors import EXIT_DONE, ConfigError
from plait.tracking.spans import write_trace
from plait.utils.files import disk_errors, write_text
from plait.utils.paths import as_path, begun_name, file_name, no_such_search, search_folder, search_names


def main(arguments: Sequence[str]) -> int:
    """Write what the processes of a search did, and when, for Perfetto."""
    parser = Parser(
        prog="plait trace",
        description="Write a timeline of what each process of a search did, as trace-event JSON: "
        "microbatches, exchanges, steps, evaluations, checkpoints, and waiting. Open it at ui.perfetto.dev "
        "or chrome://tracing.",
    )
    parser.add_argument("name", help="name of the search, as `plait sweep` prints it")
    parser.add_argument("--to", type=as_path, metavar="FILE", help="default: NAME-trace.json")
    parser.add_root()
    known = parser.parse_args(arguments)
    known.name = begun_name(known.name, search_names(known.root))
    folder = search_folder(known.root, known.name)
    if not folder.is_dir():
        raise no_such_search(known.name, known.root, search_names(known.root))
    text = write_trace(folder)
    if text is None:
        raise ConfigError(
            f"plait trace {known.name}",
            "No process of this search has trained in this folder yet.",
            "Start it; a trace can be written while it runs.",
        )
    path = known.to or Path(f"{file_name(known.name)}-trace.json")
    with disk_errors(path, "The trace cannot be written there."):
        write_text(path, text)
    print(f"{path}: open it at https://ui.perfetto.dev")
    return EXIT_DONE
