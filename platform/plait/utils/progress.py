"""Says on standard error what a command is doing, before whatever takes long."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print one line to stderr immediately."""
    print(text, file=sys.stderr, flush=True)
