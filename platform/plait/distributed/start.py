"""Starts a process of a run on this host. Imports no torch, as :mod:`plait.distributed.join` needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

from plait.distributed.places import ADDRESS, KEY, LOCAL, NUMBER, Address

AGAIN = 75  # exit status of a process that may come again: its coordinator closed the link


class Started(Protocol):
    """What was started: it can be looked at and ended."""

    def poll(self) -> int | None:
        """Its exit status; None while it lives."""

    def kill(self) -> None:
        """End it."""

    def wait(self) -> object:
        """Wait for its end."""


Start = Callable[[Address, bytes, int, Path], Started]


def start_process(
    address: Address, key: bytes, number: int, log: Path | None, local: int | None = None
) -> Started:
    """Start a process of a run.

    Args:
        log: for its output; None: that of this process.
        local: its number on its host; None: the same.
    """
    variables = {
        ADDRESS: f"{address[0]}:{address[1]}",
        KEY: key.decode(),
        NUMBER: str(number),
        LOCAL: str(number if local is None else local),
    }
    with nullcontext() if log is None else log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "plait.distributed"],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
        )
