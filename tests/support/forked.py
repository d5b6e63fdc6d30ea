"""Searches in separate processes, forked from one that has imported everything: imports take longest."""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

from disk_operations import Operations

os.environ.setdefault("OMP_NUM_THREADS", "1")  # libraries read it as the first process imports them
FORKING = "PLAIT_TESTS_FORKING"  # address of the process that forks for all workers of a run of tests
HELD_AT = 4  # iteration
HANGS = 300.0  # seconds until something is taken to hang: no promise of how fast a loaded machine is

IMPORTED = [
    "few_collections",
    "without_gpu",
    "mlflow.store.tracking.sqlalchemy_store",
    "plait.distributed.process",
    "plait.engine.local_worker",
    "plait.search.launch",
    "plait_dashboards.figures",
    "reasoning_gym",
    "transformers",
    "transformers.models.gemma2.modeling_gemma2",
    "transformers.models.llama.modeling_llama",
    "used_once",
    "imports_frozen",
]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(IMPORTED)  # there is one such process, and one list: a second would replace it


def _start_forking(start: Callable[[], None] = forkserver._forkserver.ensure_running) -> None:
    """Start the process that forks, if there is none; Python 3.11 does not tell it where modules are."""
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        start()


forkserver._forkserver.ensure_running = _start_forking  # type: ignore[method-assign]


def tell_missing() -> None:
    """In a forked process: print what should have been imported before it was forked, and is not."""
    print(sorted(set(IMPORTED) - sys.modules.keys()))


def tell_left() -> None:
    """In a forked process: print whether Hydra still has the command that ran before it was forked."""
    from hydra.core.hydra_config import HydraConfig

    print(HydraConfig.initialized())


def end_likewise() -> None:
    """In a forked process: end as the process that forks will, and print that this is not the end."""
    atexit._run_exitfuncs()
    print("on")


def share_forking() -> None:
    """Start the process that forks, for the workers that this process is going to start, too."""
    os.environ[FORKING] = forking_address()


def forking_address() -> str:
    """Of the process that forks, which is started if there is none."""
    forkserver._forkserver.ensure_running()
    return str(forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]


def fork_from(address: str) -> None:
    """Let this process have its processes forked by another's, which has imported everything."""
    server: Any = forkserver._forkserver
    server._forkserver_address = address
    server.ensure_running = lambda: None
    if server._forkserver_alive_fd is None:  # what it sends to each: only its own holder's counts
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)


if FORKING in os.environ:
    fork_from(os.environ[FORKING])


class Talking:
    """A function in a process of its own, whose standard input and output are in the caller's hands.

    Args:
        target: a function of a module of tests/support.
        arguments: what it is called with.
    """

    def __init__(self, target: Callable[..., None], *arguments: str) -> None:
        near, far = multiprocessing.Pipe()
        self._process: Any = FORKS.Process(target=_talk, args=(far, target, arguments))
        self._process.start()
        self.pid: int = self._process.pid
        far.close()
        self.stdout = os.fdopen(os.dup(near.fileno()), "r")
        self.stdin = os.fdopen(os.dup(near.fileno()), "w", buffering=1)
        near.close()

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        self._process.join(HANGS)
        status: int | None = self._process.exitcode
        assert status is not None, "it hangs"
        return status

    def kill(self) -> None:
        """End it whatever it does."""
        self._process.kill()
        self.wait()
        self.stdout.close()
        self.stdin.close()


def _talk(link: Any, target: Callable[..., None], arguments: tuple[str, ...]) -> None:
    """What happens in the process; never returns."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor in (0, 1):
        os.dup2(link.fileno(), descriptor)
    link.close()
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    status = 1
    try:
        target(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _run(
    arguments: Sequence[str], folder: str, log: str, environment: Mapping[str, str], last: int | None
) -> None:
    """What happens in the process; never returns."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal; ignored in the background
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # as Python's own
    operations = Operations(last)
    status = 1
    try:
        from plait.cli.main import main

        status = main(list(arguments))
        Path("operations").write_text(str(operations.count))
    except SystemExit as left:  # of argparse
        status = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Forked:
    """`plait ...` in a separate process, with its output in a file that others may have written to.

    Args:
        arguments: what follows `plait` on the command line.
        folder: in which it runs.
        log: name of the file of its output there.
        environment: variables besides those of this process; what is read at import does not change.
        last: it is killed right before so many operations on the disk. Where it lives to its end, the file
            ``operations`` of the folder has their number.
    """

    run = staticmethod(_run)

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path | None = None,
        log: str = "sweep.log",
        environment: Mapping[str, str] | None = None,
        last: int | None = None,
    ) -> None:
        folder = folder or Path.cwd()
        self.log = folder / log
        self.last = last
        self.lived = 0.0  # seconds of the processor that it has used, as far as status() saw
        self._start = self._read = self.log.stat().st_size if self.log.exists() else 0
        variables = os.environ | (environment or {})
        self._process: Any = FORKS.Process(
            target=self.run, args=(list(arguments), str(folder), log, dict(variables), last)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Of its process."""
        return int(self._process.pid)

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._bytes(self._start).decode()

    def status(self) -> int | None:
        """Its exit status, or its signal as a negative number; None while it lives."""
        with suppress(OSError):
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            self.lived = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        self._process.join(0)
        return self._process.exitcode  # type: ignore[no-any-return]

    def until(self, what: str | Callable[[], bool]) -> None:
        """Wait for a text in what it prints from here on, or for something else that comes while it lives."""
        end = time.monotonic() + HANGS
        while not (self._printed(what) if isinstance(what, str) else what()):
            assert time.monotonic() < end, self.output
            if self.status() is not None:
                assert self._printed(what) if isinstance(what, str) else what(), self.output
                return
            time.sleep(0.005)

    def _printed(self, text: str) -> bool:
        """Whether a text is in what has not been read; then up to the end of its line that counts as read."""
        before, found, after = self._bytes(self._read).partition(text.encode())
        if found:
            self._read += len(before) + len(found) + len(after.partition(b"\n")[0])
        return bool(found)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> int:
        """Its exit status, once it has ended by itself."""
        self.until(lambda: self.status() is not None)
        status = self.status()
        assert status is not None
        return status

    def kill(self) -> int:
        """End it whatever it does; its exit status."""
        self._process.kill()
        return self.end()

    def _bytes(self, start: int) -> bytes:
        if not self.log.exists():
            return b""
        with self.log.open("rb") as file:
            file.seek(start)
            return file.read()


def _elsewhere(folder: str) -> None:
    from plait.search import ownership

    ownership.this_host = lambda: f"{Path(folder).name} of-this-boot"
    ownership.BEAT_SECONDS = 0.5


def _hold() -> None:
    from plait.search.orders import Orders, StudyOrders

    asked = itertools.count(1)

    def read(self: StudyOrders) -> Orders:
        orders = self.read()
        if next(asked) == HELD_AT:
            while (orders := self.read()).mode == "running":
                time.sleep(0.02)
        return orders

    StudyOrders.poll = read  # type: ignore[method-assign]


def _run_eager(*given: Any) -> None:
    from plait.search import orders

    orders.POLL_SECONDS = 0.1
    _run(*given)


def _run_impatient(*given: Any) -> None:
    from plait.tracking import writer

    writer.FIRST_DELAY /= 10
    _run(*given)


def _run_endless(*given: Any) -> None:
    from plait.tracking.tracker import Tracker

    Tracker.end_search = lambda *_: os._exit(9)  # type: ignore[method-assign]
    _run(*given)


def _run_elsewhere(arguments: Sequence[str], folder: str, *given: Any) -> None:
    _elsewhere(folder)
    _run(arguments, folder, *given)


def _run_held(*given: Any) -> None:
    _hold()
    _run(*given)


def _run_held_elsewhere(*given: Any) -> None:
    _hold()
    _run_elsewhere(*given)


class HostSearch(Forked):
    """A search that takes itself to run on a host of its own, named after its folder."""

    run = staticmethod(_run_elsewhere)


class HeldHostSearch(Forked):
    """The same, which trains a few steps of its first trials and then waits for an order."""

    run = staticmethod(_run_held_elsewhere)


class EagerSearch(Forked):
    """A search that reads its user's orders twenty times as often as others."""

    run = staticmethod(_run_eager)


class ImpatientSearch(Forked):
    """A search that tries a store that does not answer again ten times as soon as others."""

    run = staticmethod(_run_impatient)


class EndlessSearch(Forked):
    """A search whose process dies with status 9 after its last trial, before it ends the search's run."""

    run = staticmethod(_run_endless)


class HeldSearch(Forked):
    """A search that trains a few steps of its first trials and then waits for an order of its user."""

    run = staticmethod(_run_held)
