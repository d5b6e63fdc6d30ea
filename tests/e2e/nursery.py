"""A process that has imported everything, and forks searches that are killed: imports take longest.

Reads one JSON request a line: {"arguments": [...], "folder": str, "seconds": float | null, "until": str}.
The child is killed once it has used so many seconds of the processor, or once ``until`` stands in its output;
its output goes to the file ``log`` of its folder. Answers with one line: the child's exit status, or its
signal as a negative number, and the seconds of the processor that it has used.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import mlflow
import torch
import transformers

import plait.engine.worker
import plait.search.launch
import plait.tracking
from plait.cli.main import main


def child(arguments: list[str], folder: str) -> None:
    """The search, with its output in a file; never returns."""
    os.chdir(folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        status = main(arguments)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def used(process: int) -> float:
    """Seconds of the processor that a child has used: the same moment of its life on a busy machine too."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve() -> None:
    """Answer requests until there are no more."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        log = Path(request["folder"]) / "log"
        before = log.stat().st_size if log.exists() else 0
        process = os.fork()
        if process == 0:
            child(request["arguments"], request["folder"])
        seconds, until = request["seconds"], request["until"].encode()
        while True:
            lived = used(process)
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                break
            said = until and log.exists() and until in log.read_bytes()[before:]
            if said or (seconds is not None and lived >= seconds):
                os.kill(process, signal.SIGKILL)
                _, status = os.waitpid(process, 0)
                break
            time.sleep(0.002)
        print(json.dumps([os.waitstatus_to_exitcode(status), lived]), flush=True)


IMPORTED = (mlflow, transformers, plait.engine.worker, plait.search.launch, plait.tracking)

if __name__ == "__main__":
    serve()
