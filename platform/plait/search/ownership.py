"""Which processes train a study's trials, and which of them are dead.

A process on this host is dead as soon as the lock on its file is free; this needs no clock. A process on
another host increases a counter in the study, and sets it to 0 when it ends; it is dead then, or when the
counter has not changed in several checks, one beat apart by this process's monotonic clock, because wall
clocks may jump. A storage may be unavailable, so no worker is called dead while the study cannot be read.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from optuna.trial import FrozenTrial, TrialState
from optuna.trial import Trial as LiveTrial

from plait.core.lifecycle import JobState
from plait.engine.checkpoints import newest_step
from plait.search.attributes import CURVES, OWNER, STATE, state_of
from plait.search.locks import LifeLock, holder_lives, remove_dead
from plait.search.storage import SharedStudy
from plait.search.trials import Trial

BOOT = Path("/proc/sys/kernel/random/boot_id")
POLL_SECONDS = 1.0  # interval of checks of the trials that others train
BEAT_SECONDS = 10.0
MISSED_BEATS = 6  # checks in a row without a new beat, after which a worker counts as dead
BEATS = "plait.worker."  # prefix of the study attribute with a worker's beats
ENDED = 0  # in place of a beat: the worker has ended


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that trains trials: its name in the study, its host, and its file on that host."""

    name: str
    host: str
    file: str

    @property
    def process(self) -> str:
        """The process in words: ``process 18491 on vm``."""
        return f"process {process_id(Path(self.file))} on {host_name(self.host)}"


def process_id(file: Path) -> str:
    """The process id in the name of a worker's file."""
    return file.name.partition("-")[0]


def owner_of(stored: Mapping[str, str] | None) -> Owner | None:
    """The worker that an attribute names; None if it names none."""
    return Owner(**stored) if stored else None


def trainer_of(item: FrozenTrial) -> Owner | None:
    """The worker that trains a trial; None if none has signed it."""
    return owner_of(item.user_attrs.get(OWNER))


def this_host() -> str:
    """Identifies this host until it is rebooted: its name and, if known, an id of this boot."""
    return f"{socket.gethostname()} {BOOT.read_text().strip() if BOOT.exists() else ''}".strip()


def host_name(host: str) -> str:
    """The host's name in a result of :func:`this_host`."""
    return host.partition(" ")[0]


def lives_here(owner: Owner | None) -> bool:
    """Whether a worker is a living process of this host. Must not be called for this process."""
    with suppress(FileNotFoundError):
        return owner is not None and owner.host == this_host() and holder_lives(Path(owner.file))
    return False


class Workers:
    """The processes that train a study's trials, seen from this one.

    Args:
        folder: folder of the workers' files on this host.
        beat: writes a study attribute.
        clock: returns seconds that never decrease.
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
        self._seen: dict[str, tuple[object, float, int]] = {}  # beat, last check, checks without a beat
        self._ended = threading.Event()
        self._beating = threading.Lock()
        self._began = False
        self._sweep(folder)

    def start(self) -> None:
        """Beat in the background until :meth:`close`."""
        self._began = True
        threading.Thread(target=self._beats, name="plait-beats", daemon=True).start()

    def close(self) -> None:
        """Stop beating: this process trains no more. If the storage answers, other hosts know at once."""
        self._ended.set()
        try:
            with self._beating, suppress(Exception):
                if self._began:
                    self._beat(BEATS + self.own.name, ENDED)
        finally:
            self._lock.release()

    def dead(self, owner: Owner | None, attributes: Mapping[str, Any]) -> bool:
        """Whether this worker is dead, so that its trials are orphaned.

        Args:
            owner: the worker, as named by the trial.
            attributes: the study's attributes, just read.
        """
        if owner is None:  # killed between suggesting the trial and signing it
            return True
        if owner.name == self.own.name:
            return False
        if owner.host == self.own.host:
            with suppress(FileNotFoundError):
                return not holder_lives(Path(owner.file))
            if Path(owner.file).parent.is_dir():  # it removed its file when it ended
                return True
        return self._silent(owner.name, attributes.get(BEATS + owner.name))

    def _silent(self, name: str, beat: object) -> bool:
        if beat == ENDED:
            return True
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
            with self._beating, suppress(Exception):  # the storage is unavailable: the next beat may succeed
                if not self._ended.is_set():
                    self._beat(BEATS + self.own.name, number)
            self._ended.wait(BEAT_SECONDS)

    def _sweep(self, folder: Path) -> None:
        """Remove the files of processes that were killed."""
        for path in folder.absolute().iterdir():
            if path != self._lock.path:
                with suppress(OSError):
                    remove_dead(path)


@dataclass(frozen=True, slots=True)
class DeadWorker:
    """A worker that trains no more.

    Attributes:
        trials: numbers of the trials that it left, with the step of each one's newest checkpoint.
        paused: it had paused them all, as one that is interrupted does.
    """

    owner: Owner
    trials: Mapping[int, int]
    paused: bool = False

    def describe(self) -> str:
        """The worker and its trials in one line."""
        which = ", ".join(f"{number} (from step {step})" for number, step in self.trials.items())
        what = f"its trials {which} resume" if len(self.trials) > 1 else f"its trial {which} resumes"
        return f"{self.owner.process} {'has ended' if self.paused else 'is dead'}: {what} when a slot is free"


class Claims:
    """The trials of a study, by the worker that trains them.

    Args:
        workers: this process among others; None: it is the only one.
        saved: returns the folder of a trial's checkpoints.

    Attributes:
        own: numbers of the trials that this process trains.
    """

    def __init__(
        self,
        shared: SharedStudy,
        workers: Workers | None,
        saved: Callable[[FrozenTrial], Path | None],
    ) -> None:
        self._shared = shared
        self._patience = shared.patience
        self._workers = workers
        self._saved = saved
        self.own: set[int] = set()
        self._known_dead: set[str] = set()  # names of workers
        self._dead: list[DeadWorker] = []

    # ---- callable at any time; each reads all trials -------------------------------------------------------

    @property
    def others(self) -> int:
        """How many trials other processes train."""
        trials = self._patience(self._shared.trials)
        return len(self._not_own(trials)) - len(self._patience(lambda: self.orphans(trials)))

    @property
    def orphaned(self) -> set[str]:
        """Names of the trials whose worker is dead and that no other worker has adopted yet."""
        left = self._patience(lambda: self.orphans(self._shared.trials()))
        return {Trial(item.number).name for item in left if state_of(item) != JobState.PAUSED}

    def to_resume(self) -> int:
        """How many trials earlier processes left; :meth:`dead_workers` reports those left from now on."""
        self._patience(lambda: self.notice(self._shared.trials()))
        self._dead = []
        return len(self._patience(lambda: self.orphans(self._shared.trials())))

    def adopted(self) -> set[int]:
        """Numbers of the trials that other workers have adopted from this one, each returned once."""

        def look() -> set[int]:
            trials = self._shared.trials()
            self.notice(trials)
            return {number for number in self.own if not self.signed(trials[number])}

        adopted = self._patience(look)
        self.own -= adopted
        return adopted

    def dead_workers(self) -> list[DeadWorker]:
        """The workers that were detected as dead since the last call."""
        found, self._dead = self._dead, []
        return found

    def wait(self) -> bool:
        """Wait a moment for trials that other processes train, or have left since one was last asked for;
        False if there are none."""
        if self._workers is None or not self._not_own(self._patience(self._shared.trials)):
            return False
        time.sleep(POLL_SECONDS)
        return True

    # ---- the search's own curves ---------------------------------------------------------------------------

    def writes_curves(self) -> bool:
        """Whether this process writes the search's own curves: the study names one that does; when that is
        dead or has left, the first one that asks takes its place. Does not wait for the storage.
        """
        workers, study = self._workers, self._shared.study
        if workers is None:
            return True
        attributes = study.user_attrs
        named = owner_of(attributes.get(CURVES))
        if named is None or workers.dead(named, attributes):
            with self._shared.exclusive():
                found = owner_of(study.user_attrs.get(CURVES))
                if found == named:  # no other process was faster
                    found = workers.own
                    study.set_user_attr(CURVES, asdict(found))
            named = found
        return named == workers.own

    # ---- under the study's lock ----------------------------------------------------------------------------

    def sign(self, item: FrozenTrial) -> None:
        """Record this process as the one that trains a trial."""
        storage = self._shared.study._storage
        if self._workers is not None:
            storage.set_trial_user_attr(item._trial_id, OWNER, asdict(self._workers.own))
        if STATE in item.user_attrs:  # it was paused
            storage.set_trial_user_attr(item._trial_id, STATE, JobState.RUNNING)

    def signed(self, item: FrozenTrial) -> bool:
        """Whether a trial is signed by this process, and not by one that adopted it."""
        return self._workers is None or trainer_of(item) == self._workers.own

    def change(self, number: int, action: Callable[[FrozenTrial, LiveTrial], None]) -> None:
        """Change a trial of this process, given its present state and the object that writes to it; nothing
        is written to one that another worker has adopted. The action must be safe to repeat."""

        def attempt() -> None:
            frozen, live = self._shared.live(number)
            if self.signed(frozen):
                action(frozen, live)

        self._patience(attempt)

    def orphans(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """RUNNING trials whose worker is dead."""
        running = self._not_own(trials)
        if self._workers is None or not running:
            return running
        attributes = self._shared.study.user_attrs
        owners: dict[Owner | None, bool] = {}
        for item in running:
            owner = trainer_of(item)
            if owner not in owners:
                mine = owner == self._workers.own  # claimed, but the claim was never confirmed
                owners[owner] = mine or self._workers.dead(owner, attributes)
        return [item for item in running if owners[trainer_of(item)]]

    def notice(self, trials: Sequence[FrozenTrial]) -> None:
        """Detect dead workers and their orphaned trials."""
        found: dict[Owner, list[FrozenTrial]] = {}
        for item in self.orphans(trials):
            owner = trainer_of(item)
            if owner is not None and not self.signed(item) and owner.name not in self._known_dead:
                found.setdefault(owner, []).append(item)
        self._known_dead |= {owner.name for owner in found}
        for owner, left in found.items():
            steps = {item.number: newest_step(self._saved(item)) for item in left}
            paused = all(state_of(item) == JobState.PAUSED for item in left)
            self._dead.append(DeadWorker(owner, steps, paused))

    def _not_own(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        return [item for item in trials if item.state == TrialState.RUNNING and item.number not in self.own]
