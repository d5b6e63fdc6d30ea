"""The link between the coordinator and one process: pickled messages over an authenticated connection.

``multiprocessing.connection`` does both. Messages are commands, answers and data sets, never tensors.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any

from plait.core.errors import PlaitError
from plait.core.jobs import DataSpec
from plait.core.messages import WorkerEvent
from plait.core.samples import TokenisedData
from plait.core.settings import EngineSettings, ModelSettings
from plait.core.spans import Span
from plait.engine.worker import WorkerFacts

Address = tuple[str, int]

# ---- what the coordinator sends, besides the commands of plait.core.messages ---------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Load the base model."""

    model: ModelSettings
    device: str


@dataclass(frozen=True, slots=True)
class Join:
    """Join the other processes, once all have loaded their model.

    Attributes:
        store: file in which the processes find each other.
        processes: how many there are.
        seconds: longest wait for another process.
    """

    store: str
    processes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Build:
    """Make the engine's worker: with kernels that the first process has chosen, so that all have the same."""

    engine: EngineSettings


@dataclass(frozen=True, slots=True)
class Measure:
    """Say how fast the device multiplies matrices: asked where devices differ."""


@dataclass(frozen=True, slots=True)
class Provide:
    """A data set, before the first job that asks for it is attached."""

    spec: DataSpec
    data: TokenisedData


@dataclass(frozen=True, slots=True)
class Share:
    """Take a job's tensors from the first process, which may have resumed it.

    Attributes:
        best: with the weights of its best evaluation.
    """

    job: str
    best: bool


# ---- what a process sends ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """A process is there."""

    process: int
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A request is done.

    Attributes:
        seconds: by the clock, waiting for other processes included.
        facts: of a worker that was built.
        rate: matrix products a second, if that was asked.
        began, ended: when the process took the request and was done, by its own clock.
        spans: what it did since its answer before.
    """

    events: tuple[WorkerEvent, ...] = ()
    seconds: float = 0.0
    facts: WorkerFacts | None = None
    rate: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request could not be carried out; the process serves further ones."""

    error: PlaitError


@dataclass(frozen=True, slots=True)
class Beat:
    """The process lives and carries out a request."""


class Channel:
    """One end of a link. Any thread may send; one receives.

    Args:
        send_seconds: longest wait for the other end to take a message; None: no limit.
    """

    def __init__(self, connection: Connection, send_seconds: float | None = None) -> None:
        self.connection = connection
        self._sending = threading.Lock()
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else 40 ms for a small message
            if send_seconds is not None:
                limit = struct.pack("ll", int(send_seconds), 0)
                link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            OSError: the other end is gone.
        """
        with self._sending:
            self.connection.send(message)

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError, OSError: the other end is gone.
        """
        return self.connection.recv()

    def close(self) -> None:
        """Close this end."""
        with suppress(OSError):
            self.connection.close()


def connect(address: Address, key: bytes) -> Channel:
    """The process's end of a link.

    Raises:
        OSError: no process listens there.
        multiprocessing.AuthenticationError: the key is another one.
    """
    return Channel(Client(address, authkey=key))


class Door:
    """Where processes come in. Threads accept them and check their keys, so that every wait has a limit.

    Args:
        send_seconds: as :class:`Channel`.
    """

    def __init__(self, address: Address, key: bytes, send_seconds: float | None = None) -> None:
        self._listener = Listener(address, backlog=64)
        self._key = key
        self._send_seconds = send_seconds
        self._came: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._open = True
        threading.Thread(target=self._accept, daemon=True, name="door").start()

    @property
    def address(self) -> Address:
        """Where it listens."""
        host, port = self._listener.address
        return str(host), int(port)

    def _accept(self) -> None:
        while self._open:
            with suppress(OSError):
                connection = self._listener.accept()
                threading.Thread(target=self._check, args=(connection,), daemon=True).start()

    def _check(self, connection: Connection) -> None:
        """Let a process in that has the key, as ``multiprocessing``'s own listener does."""
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            self._came.put(Channel(connection, self._send_seconds))
        except (AuthenticationError, EOFError, OSError):
            connection.close()

    def next(self, seconds: float) -> Channel | None:
        """The next process that comes in; None where none does in time."""
        try:
            return self._came.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Accept no further process."""
        self._open = False
        with suppress(OSError):
            socket.create_connection(self.address).close()  # wakes the thread that accepts
        self._listener.close()
