"""Starts the processes of a run on this machine and waits until each has loaded its model.

A seam: the one place that knows how processes start; loaded only where a run has several.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from plait.core.errors import ProcessError
from plait.core.settings import ClusterSettings, RunSettings
from plait.distributed.channel import Address, Channel, Door, Hello, Join, Load
from plait.distributed.fleet import Fleet
from plait.distributed.process import ADDRESS, KEY, NUMBER
from plait.distributed.processes import Fate, Process, Processes
from plait.engine.catalogue import DataCatalogue
from plait.engine.devices import choose_device, device_bytes, usual_threads

HERE = ("127.0.0.1", 0)
LOG_LINES = 5  # of a process that died, shown
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Started(Protocol):
    """What was started: it can be looked at and ended."""

    def poll(self) -> int | None:
        """Its exit status; None while it lives."""

    def kill(self) -> None:
        """End it."""

    def wait(self) -> object:
        """Wait for its end."""


Start = Callable[[Address, bytes, int, Path], Started]


def start_process(address: Address, key: bytes, number: int, log: Path) -> Started:
    """Start a process of a run, with its output in a file."""
    variables = {ADDRESS: f"{address[0]}:{address[1]}", KEY: key.hex(), NUMBER: str(number)}
    if sys.platform == "linux":  # all are here; the address of the host's name may lead elsewhere
        variables |= {name: os.environ.get(name, "lo") for name in INTERFACES}
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "plait.distributed.process"],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def launch_here(
    settings: RunSettings, data: DataCatalogue, folder: Path, *, start: Start | None = None
) -> Fleet:
    """Start the run's processes on this machine, as one worker.

    Args:
        folder: for what the processes print; it is kept where one dies.
        start: starts one; None: as a Python process of its own.

    Raises:
        ProcessError: one did not come, or died.
        ModelError: the model cannot be loaded.
    """
    cluster, engine = settings.cluster, settings.engine
    device = choose_device(engine.device)
    memory = device_bytes(device) // cluster.processes if device.type == "cpu" else None
    here = _Here(folder, cluster.processes)
    processes = Processes(cluster.silence_seconds, here.fate, here.end)
    try:
        processes.all = here.start(start or start_process, cluster)
        processes.ask_all(Load(settings.model, engine.device))
        wait_seconds = max(
            cluster.join_seconds, 2 * cluster.silence_seconds
        )  # the coordinator gives up first
        processes.ask_all(Join(str(here.store), cluster.processes, wait_seconds))
        threads = engine.threads or max(1, usual_threads() // cluster.processes)
        return Fleet(processes, data, replace(engine, threads=threads), memory, cluster)
    except BaseException as error:
        processes.close(lost=isinstance(error, ProcessError))
        raise


class _Here:
    """What was started on this machine: processes, their logs, and the file in which they find each other."""

    def __init__(self, folder: Path, count: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        run = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.store = folder / f"{run}.store"
        self._logs = [folder / f"{run}-{number}.log" for number in range(count)]
        self._started: list[Started] = []

    def start(self, start: Start, cluster: ClusterSettings) -> list[Process]:
        """Start the processes and wait until all have come.

        Raises:
            ProcessError: one did not.
        """
        key = secrets.token_bytes(32)
        door = Door(HERE, key, cluster.silence_seconds)
        came: dict[int, Process] = {}
        end = time.monotonic() + cluster.join_seconds
        try:
            for number, log in enumerate(self._logs):
                self._started.append(start(door.address, key, number, log))
            while len(came) < len(self._logs):
                if (channel := door.next(0.2)) is not None:
                    self._welcome(channel, came)
                for number in set(range(len(self._logs))) - set(came):
                    self._check_coming(number, cluster.join_seconds, late=time.monotonic() > end)
        finally:
            door.close()
        return [came[number] for number in sorted(came)]

    @staticmethod
    def _welcome(channel: Channel, came: dict[int, Process]) -> None:
        with suppress(EOFError, OSError):  # one that died at once is named by its exit status
            hello = channel.receive()
            assert isinstance(hello, Hello)
            came[hello.process] = Process(hello, channel)

    def _check_coming(self, number: int, seconds: float, *, late: bool) -> None:
        fate = self.fate(number)
        if fate.status is not None or late:
            how = f"did not come within {seconds:.0f} s" if late else f"ended with status {fate.status}"
            raise ProcessError(
                f"process {number} {how}",
                f"All processes must come before the model is loaded.{fate.log}",
                "Start the search again; cluster.join_seconds is the longest wait.",
            )

    def fate(self, number: int) -> Fate:
        """How a process stands, with the last lines of what it printed."""
        log = self._logs[number]
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        lines = "\n".join(text.splitlines()[-LOG_LINES:])
        return Fate(self._started[number].poll(), f"\nLast lines of {log}:\n{lines}" if lines else "")

    def end(self, lost: bool) -> None:
        """End all processes; what they printed is kept where one was lost."""
        for each in self._started:
            each.kill()
            each.wait()
        for file in [self.store, *(() if lost else self._logs)]:
            file.unlink(missing_ok=True)
