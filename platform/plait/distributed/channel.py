"""The link between the coordinator and one process: pickled messages over an authenticated connection.

``multiprocessing.connection`` does both. Messages are commands, answers and data sets, never tensors. Before
the first of them each end has the other's versions as plain bytes: what another version pickled may not be
read, or may mean something else.
"""

from __future__ import annotations

import os
import platform
import queue
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from pathlib import Path
from typing import Any

import psutil
import torch

from plait.core.errors import PlaitError
from plait.core.jobs import DataSpec
from plait.core.messages import WorkerEvent
from plait.core.plans import ReplicaShape
from plait.core.samples import TokenisedData
from plait.core.settings import EngineSettings, ModelSettings
from plait.core.spans import Span
from plait.core.version import __version__
from plait.distributed.places import Address
from plait.engine.devices import Cores
from plait.engine.worker import WorkerFacts

# ---- what the coordinator sends, besides the commands of plait.core.messages ---------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Load the base model."""

    model: ModelSettings
    device: str


@dataclass(frozen=True, slots=True)
class See:
    """See that a file of the search's folder is there: asked of those on other hosts that read and write
    it."""

    file: Path


@dataclass(frozen=True, slots=True)
class Join:
    """Join the other processes, once all have loaded their model; a group that was joined before is left.

    Attributes:
        number: of this one.
        port: of the store in which they find each other, on the coordinator's host.
        generation: how often the processes of this run have come together.
        processes: how many there are.
        seconds: longest wait until all have joined.
        address: of the network by which the others reach this one; "": that of its link.
        interface: of that network, if it was given.
        unreached: seconds after which a process on another host that cannot be reached is given up; 0: all
            are on one host.
    """

    number: int
    port: int
    generation: int
    processes: int
    seconds: float
    address: str = ""
    interface: str | None = None
    unreached: float = 0.0


@dataclass(frozen=True, slots=True)
class Build:
    """Make the engine's worker, together with all others; with kernels that the first process has chosen.

    Attributes:
        sharded: whether it keeps the moments of its own part of every adapter alone.
        shapes: of the replicas, in their order; empty: each process holds one.
        split: layers of each stage; empty: balanced.
        shards: whether each process keeps its part of the base model's layers alone.
    """

    engine: EngineSettings
    sharded: bool = False
    shapes: tuple[ReplicaShape, ...] = ()
    split: tuple[int, ...] = ()
    shards: bool = False

    @property
    def together(self) -> bool:
        """Whether processes read the model's layers together, so that each waits for the others."""
        return self.shards or any(shape.tensor > 1 for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class Choose:
    """Choose kernels as the settings say: asked of the first process, for all."""

    kernels: str


@dataclass(frozen=True, slots=True)
class TakeTiles:
    """Take these tiles of the kernels, JSON by kind of device and layer, in place of measuring or measured
    ones."""

    tiles: str


@dataclass(frozen=True, slots=True)
class Measure:
    """Say how fast the device multiplies matrices: asked where devices differ."""


@dataclass(frozen=True, slots=True)
class Provide:
    """What the next job trains on, before it is attached.

    Attributes:
        digest: of the content; several specs may name the same.
        data: None if the process has this content.
    """

    spec: DataSpec
    digest: str
    data: TokenisedData | None


@dataclass(frozen=True, slots=True)
class Share:
    """Take a job's tensors from the first process, which may have resumed it.

    Attributes:
        best: with the weights of its best evaluation.
    """

    job: str
    best: bool


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The run is over, or the process is not let in: why; "" if all is well.

    Attributes:
        wrong: whether the process was started in a wrong way.
    """

    reason: str = ""
    wrong: bool = True


# ---- what a process sends ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """A process is there.

    Attributes:
        process: its number, as it was launched.
        cores: of its host, that it may use.
        memory_bytes: of its host's processors, that it may count on.
    """

    process: int
    host: str
    pid: int
    cores: Cores = field(default_factory=Cores)
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A request is done.

    Attributes:
        seconds: by the clock, waiting for other processes included.
        facts: of a worker that was built.
        rate: matrix products a second, if that was asked.
        kernels: that it has chosen, if that was asked.
        model: digest of the model that was loaded.
        began, ended: when the process took the request and was done, by its own clock.
        spans: what it did since its answer before.
    """

    events: tuple[WorkerEvent, ...] = ()
    seconds: float = 0.0
    facts: WorkerFacts | None = None
    rate: float = 0.0
    kernels: str = ""
    model: str = ""
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


MOST_SECONDS = 86400.0  # that every system takes as a limit
UNREACHED_SECONDS = 60.0  # after which those who wait for a host without a limit notice that it has left


def limit_links(seconds: float) -> None:
    """Have the system end every link of this process whose other end cannot be reached for so long.

    torch.distributed sets no such limit on its own links: what is sent into a broken network is repeated for
    15 minutes, and who only receives waits for ever.
    """
    links = []
    with suppress(psutil.Error):  # a system that does not list them sets no limit either
        links = psutil.Process().net_connections("tcp")
    for each in links:
        with suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as link:  # it may be closed by now
            _limit(link, seconds)


def _limit(link: socket.socket, seconds: float) -> None:
    """End a link whose other end does not answer for so long, whether or not something is sent to it.

    Its system answers, not its process, which may compute for longer.
    """
    seconds = min(seconds, MOST_SECONDS)
    third, sixth = max(1, int(seconds / 3)), max(1, int(seconds / 6))
    options = {"TCP_KEEPIDLE": third, "TCP_KEEPINTVL": sixth, "TCP_KEEPCNT": 4}
    options["TCP_USER_TIMEOUT"] = int(1000 * seconds)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Channel:
    """One end of a link. Any thread may send; one receives.

    Args:
        seconds: longest wait for the other end to take a message, or to finish one that it has begun to send
            and that is read; None: no limit.

    Attributes:
        near, far: addresses of this end and of the other; "" for one that is closed already.
    """

    near = far = ""

    def __init__(self, connection: Connection, seconds: float | None = None) -> None:
        self.connection = connection
        self._sending = threading.Lock()
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as link:
            self.near, self.far = str(link.getsockname()[0]), str(link.getpeername()[0])
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else 40 ms for a small message
            _limit(link, UNREACHED_SECONDS)
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO) if seconds is not None else ():
                link.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds or 0), 0))

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            BlockingIOError: the other end does not take it in time.
            OSError: the other end is gone.
        """
        with self._sending:
            self.connection.send(message)

    def receive(self) -> Any:
        """The next message.

        Raises:
            BlockingIOError: the other end does not finish it in time.
            EOFError, OSError: the other end is gone.
        """
        return self.connection.recv()

    def close(self) -> None:
        """Close this end."""
        with suppress(OSError):
            self.connection.close()


VERSIONS = (
    f"Plait {__version__}, torch {torch.__version__.partition('+')[0]}, "
    f"Python {'.'.join(platform.python_version_tuple()[:2])}"
)
WELCOME = b"welcome"
HELLO_SECONDS = 10.0  # that a process which has the key may take to say who it is
LONGEST_WORDS = 1024  # bytes that are read before the other end's versions are known


class VersionError(Exception):
    """The coordinator has other versions; the text says which."""


def connect(address: Address, key: bytes, versions: str = VERSIONS) -> Channel:
    """The process's end of a link.

    Raises:
        EOFError, OSError: no process listens there.
        multiprocessing.AuthenticationError: the key is another one.
        VersionError: the versions are others.
    """
    connection = Client(address, authkey=key)
    connection.send_bytes(versions.encode())
    if (answer := connection.recv_bytes(LONGEST_WORDS)) != WELCOME:
        connection.close()
        raise VersionError(answer.decode(errors="replace"))
    return Channel(connection)


class Door:
    """Where processes come in. Threads accept them, check keys and versions and hear who they are, so that
    every wait has a limit.

    Args:
        seconds: as :class:`Channel`.

    Attributes:
        refused: what those had that were not let in, by their addresses: another key, other versions.
    """

    def __init__(self, address: Address, key: bytes, seconds: float | None = None) -> None:
        self._listener = Listener(address, backlog=64)
        self._key = key
        self._seconds = seconds
        self._came: queue.SimpleQueue[tuple[Channel, Hello]] = queue.SimpleQueue()
        self._open = True
        self.refused: dict[str, str] = {}
        threading.Thread(target=self._accept, daemon=True, name="door").start()

    @property
    def address(self) -> Address:
        """Where it listens."""
        host, port = self._listener.address
        return str(host), int(port)

    def _accept(self) -> None:
        while self._open:
            with suppress(OSError):
                channel = Channel(self._listener.accept(), self._seconds)
                threading.Thread(target=self._check, args=(channel,), daemon=True).start()

    def _check(self, channel: Channel) -> None:
        """Let a process in that has the key, as ``multiprocessing``'s own listener does, and the versions."""
        link = channel.connection
        try:
            deliver_challenge(link, self._key)
            answer_challenge(link, self._key)
            if (theirs := link.recv_bytes(LONGEST_WORDS).decode(errors="replace")) == VERSIONS:
                link.send_bytes(WELCOME)
                hello = channel.receive() if link.poll(HELLO_SECONDS) else None
                if isinstance(hello, Hello):
                    self._came.put((channel, hello))
                    return
            else:
                self.refused[channel.far] = theirs
                link.send_bytes(f"it has {theirs}, the coordinator {VERSIONS}: use the same for all".encode())
        except AuthenticationError:
            self.refused[channel.far] = "another key"
        except (EOFError, OSError):
            pass
        channel.close()

    def next(self, seconds: float) -> tuple[Channel, Hello] | None:
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
