"""Which processes train a study's trials, and which of them are gone.

A process on this host is gone when the lock on its file is free: at once, and without any clock. One on
another host counts up a number in the study; it is gone when that number has stood still in several looks
that lie a beat apart by this process's own rising clock. Wall clocks may jump, and a storage may be away:
while nobody can look, nobody is given up.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from plait.search.locks import LifeLock, holder_lives, remove_dead

BOOT = Path("/proc/sys/kernel/random/boot_id")
BEAT_SECONDS = 10.0
MISSED_BEATS = 6  # looks in a row without a new beat, after which a worker is given up
BEATS = "plait.worker."  # study attribute of a worker's beats, before its name


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that trains trials: its name in the study, its host, and its file there."""

    name: str
    host: str
    file: str

    def to_json(self) -> str:
        """As text, kept with each trial."""
        return json.dumps(asdict(self))

    @property
    def process(self) -> str:
        """For its owner to read: ``process 18491 on vm``."""
        return f"process {process_id(Path(self.file))} on {host_name(self.host)}"


def process_id(file: Path) -> str:
    """Of the process that a worker's file belongs to."""
    return file.name.partition("-")[0]


def owner_of(text: object) -> Owner | None:
    """The owner that a trial names; None where it names none."""
    try:
        return Owner(**json.loads(str(text)))
    except (ValueError, TypeError):
        return None


def this_host() -> str:
    """This host, as long as it is up: its name, and what is another after each boot where that is known."""
    return f"{socket.gethostname()} {BOOT.read_text().strip() if BOOT.exists() else ''}".strip()


def host_name(host: str) -> str:
    """The name alone of what :func:`this_host` gave."""
    return host.partition(" ")[0]


def living(folder: Path) -> list[Path]:
    """The files of the processes of this host that train a search; not to be asked where this one is among
    them.

    Args:
        folder: of the workers' files.
    """
    found = []
    for path in sorted(folder.glob("*")):
        with suppress(FileNotFoundError):
            found += [path] if holder_lives(path) else []
    return found


class Workers:
    """This process among those that train a study's trials.

    Args:
        folder: for the workers' files on this host.
        beat: writes a study attribute.
        clock: seconds, rising.
    """

    def __init__(
        self,
        folder: Path,
        beat: Callable[[str, int], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        host: str | None = None,
    ) -> None:
        name = uuid4().hex[:12]
        self._lock = LifeLock(folder.absolute() / f"{os.getpid()}-{name}")
        self.own = Owner(name, host or this_host(), str(self._lock.path))
        self._beat = beat
        self._clock = clock
        self._seen: dict[str, tuple[object, float, int]] = {}  # beat, time of the last look, looks without
        self._ended = threading.Event()
        self._sweep(folder)

    def start(self) -> None:
        """Beat in the background until :meth:`close`."""
        threading.Thread(target=self._beats, name="plait-beats", daemon=True).start()

    def close(self) -> None:
        """This process trains no more."""
        self._ended.set()
        self._lock.release()

    def gone(self, owner: Owner | None, attributes: Mapping[str, Any]) -> bool:
        """Whether nobody trains a trial of this owner any more.

        Args:
            owner: as the trial names it.
            attributes: of the study, read just now.
        """
        if owner is None:  # killed between drawing the trial and signing it
            return True
        if owner.name == self.own.name:
            return False
        if owner.host == self.own.host:
            with suppress(FileNotFoundError):
                return not holder_lives(Path(owner.file))
            if Path(owner.file).parent.is_dir():  # it tidied up after itself
                return True
        return self._silent(owner.name, attributes.get(BEATS + owner.name))

    def surely_lives(self, owner: Owner) -> bool:
        """Whether another process of this host is an owner, and lives."""
        if owner.host != self.own.host or owner.name == self.own.name:
            return False
        with suppress(FileNotFoundError):
            return holder_lives(Path(owner.file))
        return False

    def _silent(self, name: str, beat: object) -> bool:
        now = self._clock()
        last, looked, missed = self._seen.get(name, (beat, now, 0))
        if beat != last:
            looked, missed = now, 0
        elif now - looked >= BEAT_SECONDS:
            looked, missed = now, missed + 1
        self._seen[name] = beat, looked, missed
        return missed >= MISSED_BEATS

    def _beats(self) -> None:
        number = 0
        while not self._ended.is_set():
            number += 1
            with suppress(Exception):  # a storage that is away: the next beat may come through
                self._beat(BEATS + self.own.name, number)
            self._ended.wait(BEAT_SECONDS)

    def _sweep(self, folder: Path) -> None:
        """Remove the files of processes that were killed."""
        for path in folder.absolute().iterdir():
            if path != self._lock.path:
                with suppress(OSError):
                    remove_dead(path)
