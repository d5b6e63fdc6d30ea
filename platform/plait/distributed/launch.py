"""Brings the processes of a run together: starts those of this host, lets in those of others, and says who
is missing.

A seam: the one place that knows how processes start; loaded only where a run has several.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from plait.core.errors import ConfigError, LostProcessError
from plait.core.settings import ClusterSettings, RunSettings
from plait.distributed.channel import Channel, Door, Goodbye, Hello, Join, Load
from plait.distributed.fleet import Fleet
from plait.distributed.places import Meeting, Place, announce, random_key, retract, shared_key
from plait.distributed.processes import Fate, Process, Processes
from plait.distributed.start import Start, Started, start_process
from plait.engine.catalogue import DataCatalogue
from plait.engine.devices import Cores, choose_device, thread_shares

HERE, ANYWHERE = "127.0.0.1", "0.0.0.0"
LOG_LINES = 5  # of a process that died, shown
LINGER_SECONDS = 15.0  # in which a process that was launched with this one may come to a run that is over
HELLO_SECONDS = 10.0  # that a process which has the key may take to say who it is


class Launcher:
    """The processes of a run on its coordinator's side: from the first to the last time they come together.

    Processes from elsewhere may come from the beginning, and wait for the model to be known.

    Args:
        place: of this process among those that a launcher started; None: it starts all itself.
        start: starts one; None: as a Python process of its own.

    Attributes:
        watch: called several times a second while processes are waited for.

    Raises:
        ConfigError: hosts differ and share no key; the port is taken.
    """

    def __init__(
        self, cluster: ClusterSettings, place: Place | None = None, *, start: Start | None = None
    ) -> None:
        self.watch: Callable[[], None] = lambda: None
        self._cluster = cluster
        self._start = start or start_process
        self._count = cluster.processes if place is None else place.processes
        self._own = range(self._count if place is None else 1)
        self._from_elsewhere = set(range(self._count)) - set(self._own)
        self._one_host = place is None or place.one_host
        key = random_key() if self._one_host else shared_key(cluster)
        with _port_named(cluster):
            host, port = (HERE, 0) if self._one_host else (ANYWHERE, cluster.port)
            self._door = Door((host, port), key, cluster.silence_seconds)
        self._meeting = Meeting((HERE, self._door.address[1]), key)
        self._announced = announce(place, self._meeting) if place is not None and self._one_host else None
        self._store: TCPStore | None = None
        self._store_port = 0
        self._generation = 0
        self._waiting: dict[int, Process] = {}  # from elsewhere, by the number that they were launched with
        self._here: _Here | None = None
        self._processes: Processes | None = None

    def fleet(self, folder: Path, settings: RunSettings, data: DataCatalogue) -> Fleet:
        """The processes as one worker: all of them the first time; later those of this host and whichever
        come from elsewhere in time.

        Args:
            folder: for what the processes of this host print; it is kept where one dies.

        Raises:
            LostProcessError: one did not come, or died.
            ModelError: the model cannot be loaded.
        """
        self._generation += 1
        here = self._here = _Here(folder, self._own)
        processes = self._processes = Processes(self._cluster.silence_seconds, here.fate, here.end)
        try:
            processes.all = self._gather(here)
            return self._load(processes, settings, data)
        except BaseException as error:
            processes.close(lost=isinstance(error, LostProcessError))
            raise

    def close(self, *, linger: bool = True) -> None:
        """End all processes; ``linger``: tell those that are still to come that there is nothing to do."""
        ended: set[int] = set()
        if self._processes is not None:
            self._processes.close()
            ended |= self._processes.dismissed
        end = time.monotonic() + (min(LINGER_SECONDS, self._cluster.join_seconds) if linger else 0.0)
        while self._from_elsewhere - ended and time.monotonic() < end:
            if (channel := self._door.next(0.2)) is not None:
                self._welcome(channel)
            for number in list(self._waiting):
                ended.add(number)
                _refuse(self._waiting.pop(number).channel, "")
        self._door.close()
        self._store = None
        if self._announced is not None:
            retract(self._announced, self._meeting)

    # ---- who is there ----------------------------------------------------------------------------------

    def _gather(self, here: _Here) -> list[Process]:
        """Start the processes of this host and wait for all; those from elsewhere may stay away later on.

        Raises:
            LostProcessError: one did not come.
        """
        seconds = self._cluster.join_seconds
        end = time.monotonic() + seconds
        for number in self._own:
            here.start(self._start, self._meeting, number)
        while True:
            self._waiting = {number: each for number, each in self._waiting.items() if each.channel.idle}
            missing = set(range(self._count)) - set(self._waiting)
            late = time.monotonic() > end
            if not missing or (late and self._generation > 1 and missing.isdisjoint(self._own)):
                came, self._waiting = self._waiting, {}
                return [came[number] for number in sorted(came)]
            for number in sorted(missing & set(self._own)):
                here.check_coming(number, seconds, late=late)
            if late:
                raise self._missing(sorted(missing), seconds)
            self.watch()
            if (channel := self._door.next(0.2)) is not None:
                self._welcome(channel)

    def _welcome(self, channel: Channel) -> None:
        """Take in a process that says who it is; one that came before under its number is gone."""
        with suppress(EOFError, OSError):  # one that died at once is named by its exit status
            hello = channel.receive() if channel.connection.poll(HELLO_SECONDS) else None
            if not isinstance(hello, Hello):
                channel.close()
            elif not 0 <= hello.process < self._count:
                _refuse(channel, f"the coordinator waits for {self._count} processes, from 0 on")
            else:
                if (before := self._waiting.pop(hello.process, None)) is not None:
                    before.channel.close()
                self._waiting[hello.process] = Process(hello, channel)

    def _missing(self, numbers: Sequence[int], seconds: float) -> LostProcessError:
        there = ", ".join(str(self._waiting[number]) for number in sorted(self._waiting))
        refused = sorted(self._door.refused.items())
        wrong = "".join(f" From {host} a process came with {what}." for host, what in refused)
        return LostProcessError(
            f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} of {self._count} did "
            f"not come within {seconds:.0f} s",
            f"All processes must come before the model is loaded. Here: {there}.{wrong}",
            "Look at what they printed. They must reach this host (cluster.address, cluster.port) with its "
            "key; cluster.join_seconds is the longest wait.",
        )

    # ---- what they load --------------------------------------------------------------------------------

    def _load(self, processes: Processes, settings: RunSettings, data: DataCatalogue) -> Fleet:
        """Have all load the model and join each other."""
        engine, all_processes = settings.engine, processes.all
        device = choose_device(engine.device).type  # the same for all: NCCL and gloo do not mix
        requests = (Load(settings.model, device, number) for number in range(len(processes)))
        processes.ask(dict(enumerate(requests)))
        processes.ask({number: self._join(number, all_processes) for number in range(len(processes))})
        per_host = Counter(each.hello.host for each in all_processes)
        memory = None
        if device == "cpu":
            memory = min(each.hello.memory_bytes // per_host[each.hello.host] for each in all_processes)
        threads = engine.threads or _threads(all_processes)
        cluster = _remaining(settings.cluster, [each.hello.process for each in all_processes])
        return Fleet(processes, data, replace(engine, threads=threads), memory, cluster)

    def _join(self, number: int, processes: Sequence[Process]) -> Join:
        outward = next((each.channel.near for each in processes if each.channel.far != HERE), "")
        cluster = self._cluster
        return Join(
            self._served(),
            self._generation,
            len(processes),
            cluster.join_seconds,
            outward if processes[number].channel.far == HERE else "",
            cluster.interface,
        )

    def _served(self) -> int:
        """The port of the store in which the processes find each other."""
        if self._store is None:
            host, port = (HERE, 0) if self._one_host else (ANYWHERE, self._cluster.port + 1)
            with _port_named(self._cluster):
                listener = socket.create_server((host, port), backlog=1024)
            self._store_port = int(listener.getsockname()[1])
            self._store = TCPStore(
                HERE,
                self._store_port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._cluster.join_seconds),
                master_listen_fd=listener.detach(),
            )
        return self._store_port


def _remaining(cluster: ClusterSettings, numbers: Sequence[int]) -> ClusterSettings:
    """The settings of the processes that have come, by the numbers that they were launched with."""
    capacities = tuple(cluster.capacities[number] for number in numbers if cluster.capacities)
    speeds = tuple(cluster.speeds[number] for number in numbers if cluster.speeds)
    return replace(cluster, processes=len(numbers), capacities=capacities, speeds=speeds)


def _threads(processes: Sequence[Process]) -> int:
    """Threads of every process: the same for all, or their sums would round differently."""
    hosts: dict[str, list[Cores]] = {}
    for each in processes:
        hosts.setdefault(each.hello.host, []).append(each.hello.cores)
    return min(share for cores in hosts.values() for share in thread_shares(cores))


def _refuse(channel: Channel, reason: str) -> None:
    with suppress(OSError):
        channel.send(Goodbye(reason))
    channel.close()


@contextmanager
def _port_named(cluster: ClusterSettings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cluster.port={cluster.port}: {error.strerror}",
            "The processes of other hosts come in at this port and the next one.",
            "Set cluster.port to another one, the same for all.",
        ) from error


class _Here:
    """What was started on this host: processes and what they print."""

    def __init__(self, folder: Path, numbers: range) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        run = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._logs = {number: folder / f"{run}-{number}.log" for number in numbers}
        self._started: dict[int, Started] = {}

    def start(self, start: Start, meeting: Meeting, number: int) -> None:
        """Start the process of a number."""
        self._started[number] = start(meeting.address, meeting.key, number, self._logs[number])

    def check_coming(self, number: int, seconds: float, *, late: bool) -> None:
        """See whether a process may still come.

        Raises:
            LostProcessError: it has ended, or it is ``late``.
        """
        fate = self.fate(number)
        assert fate is not None
        if fate.status is not None or late:
            how = f"did not come within {seconds:.0f} s" if late else f"ended with status {fate.status}"
            raise LostProcessError(
                f"process {number} {how}",
                f"All processes must come before the model is loaded.{fate.log}",
                "Start the search again; cluster.join_seconds is the longest wait.",
            )

    def fate(self, number: int) -> Fate | None:
        """How a process stands, with the last lines of what it printed; None if it was started elsewhere."""
        if number not in self._started:
            return None
        log = self._logs[number]
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        lines = "\n".join(text.splitlines()[-LOG_LINES:])
        return Fate(self._started[number].poll(), f"\nLast lines of {log}:\n{lines}" if lines else "")

    def end(self, lost: bool) -> None:
        """End all processes; what they printed is kept where one was lost."""
        for each in self._started.values():
            each.kill()
            each.wait()
        for file in () if lost else self._logs.values():
            file.unlink(missing_ok=True)
