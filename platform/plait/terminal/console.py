"""The console of a search: the search outlives whatever reads its output."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress

from rich.console import Console

OUTPUT_CLOSED = "The output was closed. The search continues without it."


def leave_terminal() -> None:
    """Stop writing to a terminal that was closed: each attempt would be an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)


class SearchConsole(Console):
    """A console whose search continues when its reader has left: with `plait sweep | tee log`, a tee that is
    killed must not end days of training."""

    def on_broken_pipe(self) -> None:
        """Stop writing, and say so once on standard error."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        with suppress(OSError):
            os.write(2, f"{OUTPUT_CLOSED}\n".encode())
