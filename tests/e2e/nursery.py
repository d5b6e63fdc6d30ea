"""A process that has imported everything, and forks searches that are killed: imports take longest.

Reads requests, one a line: a list of lives that are lived side by side, each {"arguments": [...],
"folder": str, "log": str, "seconds": float | null, "until": str, "grown": list | null,
"operations": int | null}. A life is ended by SIGKILL once it has used so many seconds of the processor, once
``until`` stands in its output, which goes to the file ``log`` of its folder, once a file of the folder has so
many bytes, ``grown``: [name, bytes], or right before that one of its operations on the disk; the file
``operations`` has their number where it lives to its end. Answers with one line: for each life its exit
status, or its signal as a negative number, and the seconds of the processor that it used.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import mlflow
import torch
import transformers
from disk_operations import Operations

import plait.engine.local_worker
import plait.search.launch
import plait.tracking
from plait.cli.main import main


def child(arguments: list[str], folder: str, log: str, last: int | None) -> None:
    """The search, with its output in a file; never returns."""
    os.chdir(folder)
    operations = Operations(last)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        status = main(arguments)
        Path("operations").write_text(str(operations.count))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def used(process: int) -> float:
    """Seconds of the processor that a child has used: the same moment of its life on a busy machine too."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Life:
    """One child."""

    def __init__(
        self,
        arguments: list[str],
        folder: str,
        log: str,
        seconds: float | None,
        until: str,
        grown: tuple[str, int] | None,
        operations: int | None,
    ) -> None:
        self._log = Path(folder) / log
        self._before = self._log.stat().st_size if self._log.exists() else 0
        self._seconds, self._until = seconds, until.encode()
        self._grown = None if grown is None else (Path(folder) / grown[0], grown[1])
        self.lived = 0.0
        self.status: int | None = None
        self._process = os.fork()
        if self._process == 0:
            child(arguments, folder, log, operations)

    def look(self) -> bool:
        """Whether it still lives; it is killed if its time has come."""
        if self.status is not None:
            return False
        self.lived = used(self._process)
        ended, status = os.waitpid(self._process, os.WNOHANG)
        if not ended and self._is_time():
            os.kill(self._process, signal.SIGKILL)
            ended, status = os.waitpid(self._process, 0)
        if ended:
            self.status = os.waitstatus_to_exitcode(status)
        return not ended

    def _is_time(self) -> bool:
        if self._seconds is not None and self.lived >= self._seconds:
            return True
        if self._grown is not None:
            file, size = self._grown
            return file.exists() and file.stat().st_size >= size
        return bool(self._until) and self._until in self._output()

    def _output(self) -> bytes:
        return self._log.read_bytes()[self._before :] if self._log.exists() else b""


def serve() -> None:
    """Answer requests until there are no more."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        lives = [Life(**life) for life in json.loads(line)]
        while sum(life.look() for life in lives):  # a look at every one
            time.sleep(0.002)
        print(json.dumps([[life.status, life.lived] for life in lives]), flush=True)


IMPORTED = (mlflow, transformers, plait.engine.local_worker, plait.search.launch, plait.tracking)

if __name__ == "__main__":
    serve()
