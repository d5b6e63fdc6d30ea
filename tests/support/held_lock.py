"""A lock that another process holds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import plait


@contextmanager
def held_elsewhere(taking: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process holds a lock inside, until it is killed.

    Args:
        taking: statements that take it and keep it, with its path as ``path``.
        path: what is locked.
    """
    program = (
        f"import sys, time; from pathlib import Path; path = Path(sys.argv[1])\n{taking}\n"
        "print('taken', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        env=os.environ | {"PYTHONPATH": str(Path(plait.__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "taken\n"
            yield process
        finally:
            process.kill()
