"""Starts the processes of a run on this machine and waits until each has loaded its model.

A seam: the one place that knows how processes start; loaded only where a run has several.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from plait.core.errors import PlaitError, ProcessError
from plait.core.settings import RunSettings
from plait.distributed.channel import Address, Answer, Channel, Door, Hello, Load, Refusal
from plait.distributed.fleet import Fleet, Process
from plait.distributed.process import ADDRESS, KEY, NUMBER
from plait.engine.catalogue import DataCatalogue
from plait.engine.devices import allowed_cores

HERE = ("127.0.0.1", 0)
LOG_LINES = 5  # of a process that died, shown


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
        folder: for what the processes print.
        start: starts one; None: as a Python process of its own.

    Raises:
        ProcessError: one did not come, or died.
        ModelError: the model cannot be loaded.
    """
    cluster, engine, count = settings.cluster, settings.engine, settings.cluster.processes
    folder.mkdir(parents=True, exist_ok=True)
    key = secrets.token_bytes(32)
    door = Door(HERE, key)
    shared = tempfile.TemporaryDirectory(prefix="plait-")
    logs = [folder / f"process-{number}.log" for number in range(count)]
    started = [(start or start_process)(door.address, key, number, log) for number, log in enumerate(logs)]

    def closed() -> None:
        for each in started:
            each.kill()
            each.wait()
        shared.cleanup()

    try:
        processes = _gather(door, started, logs, cluster.join_seconds)
        store = str(Path(shared.name) / "store")
        for process in processes:
            number, seconds = process.hello.process, cluster.join_seconds
            process.channel.send(Load(settings.model, engine.device, number, count, store, seconds))
        for process in processes:
            _loaded(process.channel, logs[process.hello.process])
        threads = engine.threads or max(1, (allowed_cores() or os.cpu_count() or 1) // count)
        engine = replace(engine, threads=threads)
        return Fleet(processes, data, engine, silence=cluster.silence_seconds, closed=closed)
    except BaseException:
        closed()
        raise
    finally:
        door.close()


def _gather(door: Door, started: Sequence[Started], logs: Sequence[Path], seconds: float) -> list[Process]:
    """The processes that have said who they are, in the order of their numbers."""
    came: dict[int, Process] = {}
    end = time.monotonic() + seconds
    while len(came) < len(started):
        channel = door.next(0.2)
        if channel is not None:
            hello = channel.receive()
            assert isinstance(hello, Hello)
            came[hello.process] = Process(hello, channel)
        for number, each in enumerate(started):
            if number not in came and each.poll() is not None:
                raise _died(number, logs[number], f"ended with status {each.poll()}")
        if time.monotonic() > end:
            number = next(number for number in range(len(started)) if number not in came)
            raise _died(number, logs[number], f"did not come within {seconds:.0f} s")
    return [came[number] for number in sorted(came)]


def _loaded(channel: Channel, log: Path) -> None:
    """Wait until a process has loaded its model."""
    while True:
        try:
            message = channel.receive()
        except (EOFError, OSError) as error:
            raise _died(None, log, "died while it loaded the model") from error
        if isinstance(message, Refusal):
            raise message.error
        if isinstance(message, Answer):
            return


def _died(number: int | None, log: Path, how: str) -> PlaitError:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    said = "\n".join(lines[-LOG_LINES:])
    which = log.stem.replace("-", " ") if number is None else f"process {number}"
    return ProcessError(f"{which} {how}", f"Its last lines ({log}):\n{said}", "Start the search again.")
