"""Says on standard error what a command is doing, before whatever takes long."""

from __future__ import annotations

import sys
from contextlib import suppress


def say(text: str) -> None:
    """Print one line to stderr immediately. A line that a full disk does not take ends no command."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
