"""The console of a search, which outlives whoever reads it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from rich.console import Console

LEFT = "Nobody reads the output any more: the search goes on without it."


class SearchConsole(Console):
    """A console on which a search goes on when its reader has left: with `plait sweep | tee log`, a tee that
    is killed must not take days of training with it."""

    def on_broken_pipe(self) -> None:
        """Write no more; say so once where somebody may still see it."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        with suppress(OSError):
            os.write(2, f"{LEFT}\n".encode())
