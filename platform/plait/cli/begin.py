"""How the program `plait` begins, while it cannot answer Ctrl-C yet. A seam: imported before all else."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Within the context, Ctrl-C ends the program at once, and Python shows no traceback. Where it is
    ignored, it stays so."""
    answered = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if answered:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if answered:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> int:
    """Run `plait` with the program's arguments and return its exit status."""
    with ended_by_interrupts():
        from plait.cli.main import main as run
    return run()
