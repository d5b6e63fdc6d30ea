"""Shell completion: verbs first, then whatever Hydra knows of the verb's keys and groups."""

from __future__ import annotations

import os
from collections.abc import Sequence

from plait.cli.app import run
from plait.cli.verbs import verbs
from plait.core.errors import EXIT_DONE


def complete(arguments: Sequence[str]) -> int:
    """Answer Hydra's completion script, which knows `plait` only: install it, or complete a line.

    Args:
        arguments: "-sc" and "install=bash", "uninstall=bash" or "query=bash" (or zsh, fish).
    """
    if not any(argument.startswith("query=") for argument in arguments):
        return run("plait", arguments)
    line = os.environ.get("COMP_LINE", "plait ")
    words = line.split(" ")
    verb = words[1] if len(words) > 2 else None
    known = verbs()
    if verb is None:
        print(" ".join(sorted(known)))
        return EXIT_DONE
    if verb not in known or not known[verb].hydra:
        return EXIT_DONE
    os.environ["COMP_LINE"] = " ".join([words[0], *words[2:]])
    return run("plait", arguments)
