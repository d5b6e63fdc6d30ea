"""Processes of a run, forked from one that has imported everything: imports take longest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest
import torch
from forked import FORKING, FORKS, Forked, fork_from, forking_address
from laboratory import random_data

from plait.core.settings import ClusterSettings, EngineSettings, ModelSettings, RunSettings
from plait.distributed import join, launch, process
from plait.distributed.fleet import Fleet
from plait.distributed.launch import Launcher
from plait.distributed.places import Address
from plait.distributed.stage_worker import StageWorker
from plait.engine.catalogue import DataCatalogue
from plait.engine.local_worker import LocalWorker
from plait.engine.memory import PeakSampler
from plait.engine.span_recorder import SpanRecorder


class ForkedProcess:
    """A process of a run, as ``Launcher`` wants one started.

    Attributes:
        ahead: seconds by which the clock of each is ahead of that of the one before, as on other hosts.
        short_at: microbatches in which memory runs out, counted from 1, by the number of the process.
        listed: file to which the number of each is added, if there is one.
        observes_once: whether each observes the peak of one iteration alone.
    """

    ahead = 0.0
    short_at: ClassVar[Mapping[int, int]] = {}
    listed: ClassVar[Path | None] = None
    observes_once: ClassVar[bool] = False

    def __init__(
        self, address: Address, key: bytes, number: int, log: Path | None, _local: int | None = None
    ) -> None:
        given = (address, key, number, str(log or ""), self.ahead * number, self.short_at.get(number))
        place = str(Path.cwd()), dict(os.environ)  # else those of the process that forks
        self._process: Any = FORKS.Process(target=_serve, args=(place, *given, self.observes_once))
        self._process.start()
        self.pid = self._process.pid
        if self.listed is not None:
            with self.listed.open("a") as listed:
                listed.write(f"{self.pid}\n")

    def poll(self) -> int | None:
        self._process.join(0)
        return self._process.exitcode  # type: ignore[no-any-return]

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def _serve(
    place: tuple[str, dict[str, str]],
    address: Address,
    key: bytes,
    number: int,
    log: str,
    ahead: float,
    short_at: int | None,
    observes_once: bool,
) -> None:
    folder, environment = place
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if log:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
    process.BEATS = 0.2  # so that tests of silence need not wait for long
    process.SpanRecorder = partial(SpanRecorder, lambda: time.monotonic() + ahead)  # type: ignore[misc]
    if short_at is not None:
        LocalWorker._forward = _running_short(LocalWorker._forward, short_at)  # type: ignore[method-assign]
        StageWorker.forward = _running_short(StageWorker.forward, short_at)  # type: ignore[method-assign]
    if observes_once:
        PeakSampler.wanted = wanted_once  # type: ignore[method-assign]
    process.serve(address, key, number)


def wanted_once(
    self: PeakSampler,
    jobs: Collection[str],
    tokens: Sequence[int],
    wanted: Callable[..., bool] = PeakSampler.wanted,
) -> bool:
    """In place of ``PeakSampler.wanted``: the first iteration that it chooses, and no other. Counting takes a
    fifth of a short run."""
    return not self._observed and wanted(self, jobs, tokens)


def _running_short(forward: Any, at: int) -> Any:
    counted = count(1)

    def short(*given: Any, **named: Any) -> Any:
        if next(counted) == at:
            raise torch.OutOfMemoryError("no room")
        return forward(*given, **named)

    return short


def _run_forking(
    arguments: Sequence[str], folder: str, log: str, environment: Mapping[str, str], last: int | None
) -> None:
    fork_from(environment[FORKING])
    ForkedProcess.listed = _list_of(Path(folder), os.getpid())
    join.start_process = launch.start_process = ForkedProcess  # type: ignore[assignment]
    Forked.run(arguments, folder, log, environment, last)


def _list_of(folder: Path, coordinator: int) -> Path:
    return folder / f"processes-{coordinator}"


class ForkedSearch(Forked):
    """A search of several processes, or a launched process of one, whose own processes are forked, too."""

    run = staticmethod(_run_forking)

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        log: str = "sweep.log",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        super().__init__(arguments, folder, log, {**(environment or {}), FORKING: forking_address()})

    def processes(self) -> list[psutil.Process]:
        """Those of the run that live, as far as they have started."""
        found, listed = [], _list_of(self._folder, self.pid)
        for pid in listed.read_text().split() if listed.exists() else ():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found


def wait_no_longer(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the limit for joining has passed once the first process is there: those of other hosts are
    given up without a wait, and the first one has as long as a busy machine takes."""
    ahead = 0.0

    def watch() -> None:
        nonlocal ahead
        if 0 in launcher._waiting.all:
            ahead = 1000.0

    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead))
    launcher.watch = watch


@contextmanager
def fleet(
    processes: int, model: ModelSettings, engine: EngineSettings, folder: Path, **cluster: Any
) -> Iterator[Fleet]:
    """A fleet of forked processes on random data."""
    patient = {"join_seconds": 240.0} | cluster  # on a machine that does other work, too
    settings = RunSettings(
        model=model, engine=engine, cluster=ClusterSettings(processes=processes, **patient)
    )
    launcher = Launcher(settings.cluster, start=ForkedProcess)
    with closing(launcher):
        yield launcher.fleet(folder, settings, DataCatalogue(random_data))
