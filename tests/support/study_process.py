"""What another process on a study does in tests, and the study as each of them opens it."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import psutil
from studies import space_of, study_of

from plait.core.settings import SearchSettings, TrackingSettings
from plait.search import storage
from plait.search.locks import LifeLock
from plait.search.storage import open_storage, study_lock
from plait.search.study import StudyTrials
from plait.tracking.connection import check_tracking, open_store
from plait.utils.file_locks import file_lock

TCP_REPAIR = 19  # of Linux: a socket in this state closes without telling the other end


def opened(root: Path, address: str | None = None, **settings: object) -> StudyTrials:
    search = SearchSettings(name="s", trials=4, sampler="grid", **settings)  # type: ignore[arg-type]
    space = space_of("adapter.rank=1,2,3,4")
    return study_of(space, search, open_storage(address, root), folder=lambda name: root / name)


def take_two(root: str, address: str) -> None:
    """Open a folder's study, by its address where it has one, take two trials, and wait."""
    print("begins", flush=True)
    trials = opened(Path(root), address or None)
    print(*(trial.number for _ in range(2) if (trial := trials.ask())), flush=True)
    sys.stdin.read()
    trials.close()


def hold(path: str, kind: str) -> None:
    """Take a lock, and wait."""
    print("begins", flush=True)
    if kind == "LifeLock":
        lock = LifeLock(Path(path))
        print("held", flush=True)
        sys.stdin.read()
        lock.release()
    else:
        with file_lock(Path(path)):
            print("held", flush=True)
            sys.stdin.read()


def vanish(address: str) -> None:
    """Take a study's lock in PostgreSQL and be gone without a word, like a host that loses its power."""
    storage.LIMITS["keepalives_idle"] = 1
    with study_lock(open_storage(address, Path()), "s"):
        time.sleep(0.5)  # until the server knows that what it said has arrived: else it says so again
        for each in psutil.Process().net_connections("tcp"):
            if each.raddr:
                socket.socket(fileno=os.dup(each.fd)).setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        print("held", flush=True)
        os._exit(0)


def open_tracking_store(root: str) -> None:
    """Open the tracking store of a folder, once told to; make it if need be."""
    print("begins", flush=True)
    sys.stdin.readline()
    print(open_store(check_tracking(TrackingSettings(root=Path(root))), "plait").experiment_id, flush=True)
