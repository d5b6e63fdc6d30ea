"""The console of a search, which outlives whoever reads it."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress

from rich.console import Console

LEFT = "Nobody reads the output any more: the search goes on without it."


def leave_terminal() -> None:
    """Write to a terminal that was closed no more: each attempt would be an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)


class SearchConsole(Console):
    """A console on which a search goes on when its reader has left: with `plait sweep | tee log`, a tee that
    is killed must not take days of training with it."""

    def on_broken_pipe(self) -> None:
        """Write no more; say so once where somebody may still see it."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        with suppress(OSError):
            os.write(2, f"{LEFT}\n".encode())
