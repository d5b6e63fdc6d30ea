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
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from plait.core.errors import (
    ConfigError,
    GatheringInterruptedError,
    LostProcessError,
    ModelError,
    ProcessError,
)
from plait.core.plans import ReplicaShape
from plait.core.settings import ClusterSettings, RunSettings
from plait.distributed.channel import Door, Join, Load, See
from plait.distributed.fleet import Fleet
from plait.distributed.places import Meeting, Place, announce, retract, shared_key
from plait.distributed.processes import Fate, Process, Processes
from plait.distributed.start import AGAIN, Start, Started, start_process
from plait.distributed.waiting import OTHER_MODEL, Waiting
from plait.engine.catalogue import DataCatalogue
from plait.engine.devices import Cores, choose_device, thread_shares
from plait.engine.restarts import Restarts
from plait.utils.files import disk_errors

HERE, ANYWHERE = "127.0.0.1", "0.0.0.0"
LOG_LINES = 5  # of a process that died, shown
LINGER_SECONDS = 15.0  # in which a process that was launched with this one may come to a run that is over


class Launcher:
    """The processes of a run on its coordinator's side: from the first to the last time they come together.

    Processes from elsewhere may come from the beginning, and wait for the model to be known.

    Args:
        place: of this process among those that a launcher started; None: it starts all itself.
        start: starts one; None: as a Python process of its own.

    Attributes:
        watch: called several times a second while processes are waited for.
        stopping: whether the user wants no more; asked as often.
        say: tells the user.

    Raises:
        ConfigError: hosts differ and share no key; the port is taken.
    """

    def __init__(
        self, cluster: ClusterSettings, place: Place | None = None, *, start: Start | None = None
    ) -> None:
        self.watch: Callable[[], None] = lambda: None
        self.stopping: Callable[[], bool] = lambda: False
        self.say: Callable[[str], None] = lambda _: None
        self._cluster = cluster
        self._start = start or start_process
        self._count = cluster.processes if place is None else place.processes
        self._own = range(self._count if place is None else 1)
        self._from_elsewhere = set(range(self._count)) - set(self._own)
        self._one_host = place is None or place.one_host
        key = secrets.token_hex(32).encode() if self._one_host else shared_key(cluster)
        with _port_named(cluster):
            host, port = (HERE, 0) if self._one_host else (ANYWHERE, cluster.port)
            self._door = Door((host, port), key, cluster.silence_seconds)
        self._meeting = Meeting((HERE, self._door.address[1]), key)
        self._announced = announce(place, self._meeting) if place is not None and self._one_host else None
        self._store: TCPStore | None = None
        self._store_port = 0
        self._generation = 0
        self._waiting = Waiting(self._door, self._count, lambda words: self.say(words))
        self._here: _Here | None = None
        self._processes: Processes | None = None
        self._preferred: tuple[ReplicaShape, ...] = ()
        self._request: Load | None = None
        self._layers: int | None = None  # of the model, once it was cut
        self._tiles = ""
        self._trained = ""  # the digest of the model, once all have come together
        self._restarts = Restarts(cluster.restarts)  # before that
        self._losses: dict[int, Restarts] = {}  # of each process

    def fleet(self, folder: Path, settings: RunSettings, data: DataCatalogue, tiles: str = "") -> Fleet:
        """The processes as one worker: all of them the first time. After a loss those of this host and
        whichever come from elsewhere in time; else those that train and those that have come since.

        Args:
            folder: for what the processes of this host print; it is kept where one dies.
            tiles: of the kernels, as the facts of an earlier fleet of the search had them.

        Raises:
            LostProcessError: one did not come, or died: before the first time, again and again.
            ProcessError: one did not come the first time.
            ModelError: the model cannot be loaded.
        """
        self._tiles = tiles
        while True:
            try:
                return self._together(folder, settings, data)
            except GatheringInterruptedError:
                raise
            except LostProcessError as error:
                if self._trained or self._ended_by_itself or not self._restarts.another():
                    raise
                self.say(f"{error.value}. Restarting with the processes that come back ...")

    @property
    def _ended_by_itself(self) -> bool:
        """Whether the process that was lost has ended with an error of its own, as it would again."""
        status = None if self._processes is None else self._processes.status
        return status is not None and status > 0 and status != AGAIN

    def _together(self, folder: Path, settings: RunSettings, data: DataCatalogue) -> Fleet:
        """One attempt to bring the processes together; as :meth:`fleet`."""
        self._generation += 1
        device = choose_device(settings.engine.device).type  # the same for all: NCCL and gloo do not mix
        self._request = Load(settings.model, device)
        processes = self._processes
        if processes is None or not processes.live:
            self._blame()
            here = self._here = _Here(folder, self._own)
            processes = self._processes = Processes(self._cluster.silence_seconds, here.fate, here.end)
        try:
            processes.all = self._grow(processes) if processes.all else self._gather(processes)
            self._check_folder(processes, folder, settings.cluster)
            fleet = self._load_or_leave_out(processes, settings, data)
        except BaseException as error:
            if isinstance(error, LostProcessError):
                processes.error = error
            processes.close(lost=processes.error is not None)
            raise
        self._trained = fleet.facts.model
        return fleet

    def grown(self) -> bool:
        """Whether a process has come, and loaded the model, that does not train yet. Those that load it are
        waited for, up to the limit for joining: each change takes time."""
        self._waiting.look()
        assert self._request is not None
        assert self._processes is not None
        new = self._waiting.all.keys() - {each.hello.process for each in self._processes.all}
        self._waiting.load(self._request, new, self._trained)
        came = [self._waiting.all[number] for number in new & self._waiting.all.keys()]
        late = time.monotonic() - self._cluster.join_seconds
        loading = any(each.busy and each.asked > late for each in came)
        return not loading and any(each.ready for each in came)

    def prefer(self, stages: tuple[int, ...]) -> None:
        """Let each replica of the next fleets have so many processes, as far as there are enough."""
        self._preferred = tuple(map(ReplicaShape, stages))

    def close(self, *, linger: bool = True) -> None:
        """End all processes; ``linger``: tell those that are still to come that there is nothing to do."""
        ended = set(self._waiting.left_out)
        if self._processes is not None:
            self._processes.close()
            ended |= self._processes.dismissed
        ended |= self._waiting.dismiss_all()
        end = time.monotonic() + (min(LINGER_SECONDS, self._cluster.join_seconds) if linger else 0.0)
        while self._from_elsewhere - ended and time.monotonic() < end:
            self._waiting.look(0.2)
            ended |= self._waiting.dismiss_all()
        self._door.close()
        self._store = None
        if self._announced is not None:
            retract(self._announced, self._meeting)

    # ---- who is there ----------------------------------------------------------------------------------

    @property
    def _expected(self) -> set[int]:
        """The numbers of those that may train."""
        return set(range(self._count)) - self._waiting.left_out.keys()

    def _grow(self, processes: Processes) -> list[Process]:
        """The processes that train, and others that have come since and are ready.

        Raises:
            LostProcessError: one that trained is gone.
        """
        processes.look()
        there = {each.hello.process: each for each in processes.all}
        there |= self._waiting.take(lambda each: each.ready and each.hello.process not in there)
        return [there[number] for number in sorted(there)]

    def _gather(self, processes: Processes) -> list[Process]:
        """Start those of this host and wait for all; once all have trained, those from elsewhere may stay
        away.

        Raises:
            LostProcessError: one was killed; once all have trained, one of this host ended or did not come.
            ProcessError: before that.
        """
        assert self._here is not None
        seconds = self._cluster.join_seconds
        end = time.monotonic() + seconds
        own = self._expected & set(self._own)
        for number in sorted(own):
            self._here.start(self._start, self._meeting, number)
        while True:
            self._waiting.look(0.2)
            missing = self._expected - {number for number, each in self._waiting.all.items() if not each.busy}
            late = time.monotonic() > end
            may_stay = self._trained and missing.isdisjoint(own) and missing < self._expected
            if not missing or (late and may_stay):
                came = self._waiting.take(lambda each: not each.busy)
                return [came[number] for number in sorted(came)]
            for number in sorted(missing & own):
                self._check_coming(processes, number, late=late)
            if late:
                raise self._missing(sorted(missing), seconds)
            self._look()

    def _look(self) -> None:
        """What is done again and again while processes are waited for.

        Raises:
            GatheringInterruptedError: the user wants no more.
        """
        self.watch()
        if self.stopping():
            raise GatheringInterruptedError("interrupted while the processes were joining")

    def _check_coming(self, processes: Processes, number: int, *, late: bool) -> None:
        """See whether a process of this host may still come.

        Raises:
            LostProcessError: it was killed.
            ProcessError: before all have trained, it has ended by itself, or is ``late``.
        """
        assert self._here is not None
        fate = self._here.fate(number)
        assert fate is not None
        seconds = self._cluster.join_seconds
        if fate.status is not None or late:
            how = f"did not join within {seconds:.0f} s" if late else f"ended with status {fate.status}"
            processes.culprit, processes.how = number, how
            killed = fate.status is not None and fate.status < 0
            kind = LostProcessError if killed or self._trained else ProcessError  # else it would end so again
            raise kind(
                f"process {number} {how}",
                f"All processes must join before the model is loaded.{fate.log}",
                "Start the search again; cluster.join_seconds sets how long they are waited for.",
            )

    def _blame(self) -> None:
        """Leave the process that was lost out, if it is lost again and again and there is another one."""
        lost = self._processes
        if lost is None or lost.culprit is None or lost.error is None:
            return
        losses = self._losses.setdefault(lost.culprit, Restarts(max(1, self._cluster.restarts // 2)))
        if not losses.another() and self._expected - {lost.culprit}:
            why = f"lost {losses.count} times; the last time it {lost.how}"
            self._waiting.leave_out(lost.culprit, why)

    def _missing(self, numbers: Sequence[int], seconds: float) -> ProcessError:
        there = ", ".join(str(each) for _, each in sorted(self._waiting.all.items()))
        refused = sorted(self._door.refused.items())
        wrong = "".join(f" From {host} a process came with {what}." for host, what in refused)
        kind = LostProcessError if self._trained else ProcessError
        return kind(
            f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} of {self._count} did "
            f"not join within {seconds:.0f} s",
            f"All processes must join before the model is loaded. Here: {there}.{wrong}",
            "See what they printed. They must reach this host (cluster.address, cluster.port) with its "
            "key; cluster.join_seconds sets how long they are waited for.",
        )

    # ---- what they load --------------------------------------------------------------------------------

    def _load_or_leave_out(self, processes: Processes, settings: RunSettings, data: DataCatalogue) -> Fleet:
        """As :meth:`_load`; once all have trained, who cannot load the model any more is left out.

        Raises:
            LostProcessError: one is left out, so that the others have to come together again.
        """
        try:
            return self._load(processes, settings, data)
        except ModelError as error:
            unable = processes.refused
            if not self._trained or not 0 < len(unable) < len(processes):
                raise
            for number, each in unable.items():
                self._waiting.leave_out(processes.all[number].hello.process, each.value)
            raise LostProcessError(error.value, error.rule, error.remedy) from error

    def _load(self, processes: Processes, settings: RunSettings, data: DataCatalogue) -> Fleet:
        """Have all load the model that have not, and all join each other."""
        engine, all_processes, request = settings.engine, processes.all, self._request
        assert request is not None
        processes.watch = self._look
        loading = {number: request for number, each in enumerate(all_processes) if not each.loaded}
        for number, answer in processes.ask(loading).items():
            all_processes[number].loaded = answer.model
        self._check_model(processes)
        processes.ask({number: self._join(number, all_processes) for number in range(len(processes))})
        per_host = Counter(each.hello.host for each in all_processes)
        memory = None
        if request.device == "cpu":
            memory = min(each.hello.memory_bytes // per_host[each.hello.host] for each in all_processes)
        threads = engine.threads or _threads(all_processes)
        numbers = [each.hello.process for each in all_processes]
        preferred = self._preferred or settings.cluster.shapes
        cluster = _remaining(settings.cluster, numbers, preferred, self._layers)
        for words in _given_up(settings.cluster, cluster):
            self.say(words)
        fleet = Fleet(processes, data, replace(engine, threads=threads), memory, cluster, self._tiles)
        self._layers = fleet.facts.shape.layers
        return fleet

    def _check_model(self, processes: Processes) -> None:
        """See that all have the model that has been trained with, if there is one.

        Raises:
            ModelError: some have not.
        """
        error = ModelError(OTHER_MODEL, "All processes must train with the same base model.")
        places = enumerate(processes.all)
        other = {number: error for number, each in places if self._trained not in ("", each.loaded)}
        if other:
            processes.refused = other
            raise error

    def _check_folder(self, processes: Processes, folder: Path, cluster: ClusterSettings) -> None:
        """See that those who read or write the search's files have its folder: the first process, and all
        that may be stages.

        Raises:
            StorageError: one on another host has not.
        """
        here = socket.gethostname()
        reading = processes.all if cluster.staged or cluster.redeploy else processes.all[:1]
        far = [number for number, each in enumerate(reading) if each.hello.host != here]
        if not far:
            return
        file = folder / f".{secrets.token_hex(8)}"
        with disk_errors(file, "The search's files are there."):
            file.touch()
        try:
            processes.ask(dict.fromkeys(far, See(file)))
        finally:
            file.unlink(missing_ok=True)

    def _join(self, number: int, processes: Sequence[Process]) -> Join:
        outward = next((each.channel.near for each in processes if each.channel.far != HERE), "")
        cluster = self._cluster
        return Join(
            number,
            self._served(),
            self._generation,
            len(processes),
            cluster.join_seconds,
            outward if processes[number].channel.far == HERE else "",
            cluster.interface,
            0.0 if self._one_host else cluster.silence_seconds,
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


def _remaining(
    cluster: ClusterSettings, numbers: Sequence[int], preferred: Sequence[ReplicaShape], layers: int | None
) -> ClusterSettings:
    """The settings of the processes that have come, by the numbers that they were launched with.

    Args:
        preferred: shapes of the replicas that there should be.
        layers: of the model; None: not known yet.
    """
    capacities = tuple(cluster.capacities[number] for number in numbers if cluster.capacities)
    speeds = tuple(cluster.speeds[number] for number in numbers if cluster.speeds)
    shapes = fitted(preferred, len(numbers), layers)
    return replace(
        cluster,
        processes=len(numbers),
        capacities=capacities,
        speeds=speeds,
        pipeline=1,
        deployment=tuple(map(str, shapes)),
        tensor=1,
        shard_base=cluster.shard_base and len(numbers) > 1,
        layer_split=cluster.layer_split
        if {shape.pipeline for shape in shapes} - {1} == {len(cluster.layer_split)}
        else (),
    )


def _given_up(given: ClusterSettings, cluster: ClusterSettings) -> Iterator[str]:
    """What was set and does not hold for the processes that are left, in words."""
    replicas = f"replicas of {list(cluster.stages)} processes"
    if given.layer_split != cluster.layer_split:
        yield f"cluster.layer_split={list(given.layer_split)} does not hold for {replicas}: they are balanced"
    if given.slicing and not cluster.slicing:
        yield f"{given.slicing} does not hold for {replicas}: each stage has whole layers"
    if given.shard_base != cluster.shard_base:
        yield "cluster.shard_base=true does not hold for one process: it has the whole base model"


def fitted(
    shapes: Sequence[ReplicaShape], processes: int, most: int | None = None
) -> tuple[ReplicaShape, ...]:
    """A deployment for another number of processes: what fits into a replica is kept as long as possible.

    The largest replicas stay. Those that are left join the last of them as stages, and come as single ones
    where each process is a replica.

    Args:
        most: stages of a replica, since each has at least one layer; what is more are replicas.
    """
    left = processes
    if sum(shape.processes for shape in shapes) == processes:
        return tuple(shapes)
    found: list[ReplicaShape] = []
    for each in sorted(shapes, key=lambda shape: shape.processes, reverse=True):
        if each.processes <= left:
            found.append(each)
            left -= each.processes
    if max(shape.processes for shape in shapes) == 1 or not left:
        return (*found, *(ReplicaShape(),) * left)
    last = (found.pop().processes if found else 0) + left
    full, rest = divmod(last, most or last)
    return (*found, *(ReplicaShape(most or last),) * full, *(ReplicaShape(rest),) * (rest > 0))


def _threads(processes: Sequence[Process]) -> int:
    """Threads of every process: the same for all, or their sums would round differently."""
    hosts: dict[str, list[Cores]] = {}
    for each in processes:
        hosts.setdefault(each.hello.host, []).append(each.hello.cores)
    return min(share for cores in hosts.values() for share in thread_shares(cores))


@contextmanager
def _port_named(cluster: ClusterSettings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cluster.port={cluster.port}: {error.strerror}",
            "Processes on other hosts connect to this port and the next one.",
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
