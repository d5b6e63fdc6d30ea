"""Several processes on one study: owners, who is gone, locks that die with their holders, waiting for a
storage that is unavailable."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace

import optuna
import pytest
import sqlalchemy
import study_process
from filelock import FileLock, Timeout
from forked import Talking
from held_lock import held_elsewhere
from job_results import ended
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy.exc import OperationalError, PendingRollbackError, ProgrammingError
from studies import space_of, study_of
from study_process import opened

from plait.core.errors import SearchError, StorageError
from plait.core.settings import SearchSettings
from plait.search.locks import WORKERS, LifeLock, holder_lives, living
from plait.search.ownership import (
    BEAT_SECONDS,
    BEATS,
    ENDED,
    MISSED_BEATS,
    Owner,
    Workers,
    host_name,
    owner_of,
    this_host,
)
from plait.search.storage import (
    FIRST_DELAY,
    LONGEST_DELAY,
    Journal,
    Patience,
    advisory_lock,
    open_storage,
    passes,
    study_lock,
)
from plait.search.study import StudyTrials
from plait.utils.addresses import with_driver
from plait.utils.file_locks import file_lock


class Other:
    """A process that opens the study of a folder, takes two trials, and lives until it is killed."""

    def __init__(self, root: Path, address: str | None) -> None:
        self.process = Talking(study_process.take_two, str(root), address or "")
        assert self.process.stdout.readline() == "begins\n"

    @cached_property
    def took(self) -> list[int]:
        """The numbers of its trials, once it has them."""
        return [int(word) for word in self.process.stdout.readline().split()]

    def kill(self) -> None:
        self.process.kill()


@pytest.fixture(params=["journal", "SQLite", pytest.param("PostgreSQL", marks=pytest.mark.postgres)])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """Where the study is kept."""
    match request.param:
        case "journal":
            return None
        case "SQLite":
            return str(tmp_path / "study.db")
        case _:
            new_database: Callable[[], str] = request.getfixturevalue("new_database")
            return new_database()


@pytest.fixture
def other(tmp_path: Path, address: str | None) -> Iterator[Other]:
    made = Other(tmp_path, address)
    assert len(made.took) == 2
    yield made
    made.kill()


def test_a_living_process_keeps_its_trials_and_a_killed_one_gives_them_back(
    tmp_path: Path, address: str | None, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.search.ownership.POLL_SECONDS", 0.0)
    assert other.took == [0, 1]
    trials = opened(tmp_path, address)
    assert (trials.claims.to_resume(), trials.claims.others) == (0, 2)
    assert [trial.number for _ in range(3) if (trial := trials.ask())] == [2, 3]
    assert trials.claims.wait()
    with pytest.raises(SearchError, match="is being trained by another process"):
        opened(tmp_path, address, fresh=True)
    assert (trials.claims.adopted(), trials.claims.dead_workers(), trials.claims.orphaned) == (
        set(),
        [],
        set(),
    )
    other.kill()
    kept = (
        trials.checkpoints_folder / "trial-0001" / "step-00000020" if trials.checkpoints_folder else tmp_path
    )
    kept.mkdir(parents=True)
    (kept / "checkpoint.json").touch()
    assert trials.claims.adopted() == set()
    assert [gone.describe() for gone in trials.claims.dead_workers()] == [
        f"process {other.process.pid} on {socket.gethostname()} is dead: its trials 0 (from step 0), "
        "1 (from step 20) resume when a slot is free"
    ]
    assert trials.claims.orphaned == {"trial-0000", "trial-0001"}
    assert (trials.claims.adopted(), trials.claims.dead_workers()) == (set(), [])  # reported once
    assert (trials.claims.to_resume(), trials.claims.others) == (2, 0)
    assert trials.claims.wait()  # for what was left since it last asked
    assert [trial.number for _ in range(3) if (trial := trials.ask())] == [0, 1]
    assert not trials.claims.wait()
    trials.close()


def test_a_process_that_was_interrupted_is_not_called_dead(tmp_path: Path) -> None:
    one, two = opened(tmp_path, None), opened(tmp_path, None)
    trial = one.ask()
    assert trial is not None
    one.pause(trial, tmp_path)
    one.close()
    assert two.claims.adopted() == set()
    (gone,) = two.claims.dead_workers()
    assert "has ended: its trial 0 (from step 0) resumes when a slot is free" in gone.describe()
    two.close()


def test_trials_left_at_the_beginning_are_not_reported_as_new(tmp_path: Path) -> None:
    """It is in the first line that a search prints."""
    first = opened(tmp_path)
    first.ask()
    first.close()
    second = opened(tmp_path)
    assert second.claims.to_resume() == 1
    assert (second.claims.adopted(), second.claims.dead_workers()) == (set(), [])
    second.close()


def test_a_process_does_not_report_trials_that_were_adopted_from_it(tmp_path: Path) -> None:
    """It was thought dead: stopped for a long time, or out of reach."""
    first = opened(tmp_path)
    trial = first.ask()
    assert trial is not None
    first.close()  # lets go of its lock, as if it had died
    second = opened(tmp_path)
    taken = second.ask()
    assert taken is not None
    assert taken.number == trial.number
    assert (first.claims.adopted(), second.claims.adopted()) == ({trial.number}, set())
    assert first.claims.adopted() == set()  # reported once
    first.tell(trial, ended("finished", 1.0))
    assert second.finished() == []

    def write() -> None:
        """All that the first might write of it before its next look."""
        first.report(trial, 1, 1.0)
        first.rungs.measure(trial.number, 2, 1.0)
        first.rungs.let_past(trial.number, 2)
        first.pause(trial, tmp_path)

    write()
    second.report(taken, 3, 2.0)
    second.rungs.measure(taken.number, 4, 2.0)
    second.rungs.let_past(taken.number, 4)
    second.tell(taken, ended("finished", 2.0))
    write()
    assert [item.objective for item in second.finished()] == [2.0]
    (kept, *_) = second._study.get_trials()
    assert kept.intermediate_values == {3: 2.0, 4: 2.0}
    assert (kept.user_attrs["plait.passed"], kept.user_attrs.get("plait.checkpoint")) == (4, None)
    second.close()


def test_no_trial_is_taken_while_another_process_locks_the_study(tmp_path: Path, address: str | None) -> None:
    """Drawing waits for the lock, in another process."""
    trials = opened(tmp_path, address)
    with ThreadPoolExecutor(1) as pool:
        with trials.shared.exclusive():
            other = Other(tmp_path, address)
            waiting = pool.submit(lambda: other.took)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.7)
            first = trials._ask(new=True)
        took = waiting.result()
    assert first is not None
    other.kill()
    assert [first.number, *took] == [0, 1, 2]
    trials.close()


@pytest.mark.postgres
def test_an_advisory_lock_is_waited_for(new_database: Callable[[], str]) -> None:
    engine = sqlalchemy.create_engine(with_driver(new_database()))
    held, waits = (
        threading.Event(),
        sqlalchemy.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"),
    )

    def second() -> None:
        with advisory_lock(engine, "a"):
            held.set()

    with ThreadPoolExecutor(1) as pool, engine.connect() as watch:
        with advisory_lock(engine, "a"):
            other = pool.submit(second)
            while not watch.scalar(waits) and not other.done():
                watch.rollback()
            assert not held.is_set()
        other.result()
    assert held.is_set()
    engine.dispose()


@pytest.mark.postgres
@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to end a connection without a word")
def test_a_lock_is_free_when_its_host_is_gone(new_database: Callable[[], str], tmp_path: Path) -> None:
    address = new_database()
    storage = open_storage(f"{address}?options=-clock_timeout%3D20s", tmp_path)  # it waits for no hours
    other = Talking(study_process.vanish, address)
    assert other.stdout.readline() == "held\n"
    other.kill()
    with study_lock(storage, "s"):
        pass
    assert isinstance(storage, RDBStorage)
    storage.engine.dispose()


def test_a_database_without_a_lock_is_refused(tmp_path: Path) -> None:
    """Two workers would train the same trials there."""
    storage = open_storage(str(tmp_path / "study.db"), tmp_path)
    assert isinstance(storage, RDBStorage)
    url = sqlalchemy.make_url("mysql+pymysql://me:secret@host/db")
    storage.engine = SimpleNamespace(url=url)
    with pytest.raises(StorageError, match="only in PostgreSQL, SQLite and journal files") as caught:
        study_lock(storage, "s")
    assert "mysql+pymysql://me:***@host/db" in str(caught.value)


def test_a_loaded_study_has_the_lock_of_its_database(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "study.db"), tmp_path)
    study = optuna.create_study(study_name="s", storage=storage)
    with (
        study_lock(study._storage, "s"),
        pytest.raises(Timeout),
        FileLock(f"{tmp_path}/study.db.study-lock", 0),
    ):
        pass


# ---- who is gone ------------------------------------------------------------------------------------------


class Beats:
    """A clock, and what a worker elsewhere has written."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.number = 1
        self.far = Owner("far", "another host", str(folder / "nowhere" / "far"))
        self.workers = Workers(folder / "workers", lambda *_: None, clock=lambda: self.now, host="here")

    def gone(self) -> bool:
        return self.workers.dead(self.far, {BEATS + "far": self.number})


def test_a_worker_on_another_host_is_dead_when_its_beats_stop(tmp_path: Path) -> None:
    beats = Beats(tmp_path)
    for _ in range(100):  # however long it takes, as long as it beats
        beats.now += BEAT_SECONDS
        beats.number += 1
        assert not beats.gone()
    looks = 0
    while not beats.gone():
        beats.now += BEAT_SECONDS
        looks += 1
    assert looks == MISSED_BEATS
    beats.workers.close()


def test_no_worker_counts_as_dead_after_an_outage_of_the_storage(tmp_path: Path) -> None:
    """Nobody could beat meanwhile: one look long after the last says nothing."""
    beats = Beats(tmp_path)
    assert not beats.gone()
    beats.now += 100 * BEAT_SECONDS * MISSED_BEATS
    assert not beats.gone()
    beats.number += 1
    beats.now += BEAT_SECONDS
    assert not beats.gone()
    beats.workers.close()


def test_looking_often_does_not_make_a_worker_older(tmp_path: Path) -> None:
    beats = Beats(tmp_path)
    assert not any(beats.gone() for _ in range(1000))
    beats.workers.close()


def test_one_worker_writes_the_searchs_own_curves_until_it_leaves_or_dies(tmp_path: Path) -> None:
    def worker(folder: str) -> StudyTrials:
        space, settings = space_of("adapter.rank=1,2"), SearchSettings(name="s", sampler="grid")
        storage = open_storage(None, tmp_path)
        return study_of(space, settings, storage, folder=lambda _: tmp_path / folder)

    first, second, elsewhere = worker("a"), worker("a"), worker("b")
    assert [each.claims.writes_curves() for each in (first, second, elsewhere)] == [True, False, False]
    first.close()
    assert elsewhere.claims.writes_curves()
    assert not second.claims.writes_curves()
    assert elsewhere._workers is not None
    elsewhere._workers.close()  # as if it had been killed
    assert second.claims.writes_curves()
    second.close()


def test_a_worker_that_ends_leaves_curves_and_trials_to_another_host_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = []
    for host in ("node1", "node2"):
        monkeypatch.setattr("plait.search.ownership.this_host", lambda host=host: host)
        space, settings = space_of("adapter.rank=1,2"), SearchSettings(name="s", sampler="grid")
        both.append(study_of(space, settings, open_storage(None, tmp_path), folder=lambda _: tmp_path))
    first, second = both
    assert [each.claims.writes_curves() for each in both] == [True, False]
    trial = first.ask()
    assert second.claims.others == 1
    first.close()
    assert second.claims.writes_curves()
    assert second.claims.others == 0
    assert trial == second.ask()
    second.close()


def test_heartbeats_survive_an_outage_and_end_with_their_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.search.ownership.BEAT_SECONDS", 0.001)
    before = set(threading.enumerate())
    written: list[tuple[str, int]] = []
    tries, enough = itertools.count(), threading.Event()

    def beat(key: str, number: int) -> None:
        if next(tries) in (0, 2):
            raise StorageInternalError
        written.append((key, number))
        if len(written) == 4:
            enough.set()

    workers = Workers(tmp_path / "workers", beat)
    workers.start()
    (thread,) = set(threading.enumerate()) - before
    assert enough.wait(60)
    workers.close()
    thread.join(60)
    assert not thread.is_alive()
    assert {key for key, _ in written} == {BEATS + workers.own.name}
    *numbers, last = [number for _, number in written]
    assert numbers == sorted(set(numbers))
    assert last == ENDED


def test_own_trials_are_not_orphaned_and_unsigned_ones_are(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "workers", lambda *_: None)
    assert not workers.dead(workers.own, {})
    assert workers.dead(None, {})
    assert owner_of(asdict(workers.own)) == workers.own
    assert owner_of(None) is None
    workers.close()


# ---- locks ------------------------------------------------------------------------------------------------


def hold(path: Path, kind: str) -> Talking:
    """Another process that holds a lock until it is killed."""
    process = begin(path, kind)
    assert [process.stdout.readline() for _ in range(2)] == ["begins\n", "held\n"]
    return process


def begin(path: Path, kind: str) -> Talking:
    """The same, as soon as it is about to take the lock."""
    return Talking(study_process.hold, str(path), kind)


def test_a_killed_holder_releases_its_lock(tmp_path: Path) -> None:
    life = tmp_path / "workers" / "life"
    process = hold(life, "LifeLock")
    assert holder_lives(life)
    Workers(life.parent, lambda *_: None).close()
    assert life.exists()
    process.kill()
    assert not holder_lives(life)
    Workers(life.parent, lambda *_: None).close()
    assert not any(life.parent.iterdir())  # those of the dead are swept
    own = LifeLock(tmp_path / "own")
    own.release()
    assert not (tmp_path / "own").exists()

    process = hold(tmp_path / "file", "file_lock")
    process.kill()
    with file_lock(tmp_path / "file"):
        pass


def test_who_can_only_read_a_search_sees_which_of_its_processes_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, opened = LifeLock(tmp_path / "lives"), os.open
    (tmp_path / "dead").touch()

    def read_only(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, mode)

    with monkeypatch.context() as here:
        here.setattr(os, "open", read_only)
        assert living(tmp_path) == [tmp_path / "lives"]
    lock.release()


def test_a_life_lock_that_cannot_be_removed_hides_no_other_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a folder became read-only: then something else has failed before, which is to be told."""
    lock = LifeLock(tmp_path / "own")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "own"))

    with monkeypatch.context() as here:
        here.setattr(Path, "unlink", refuse)
        lock.release()
    assert not holder_lives(tmp_path / "own")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    path, flock, times = tmp_path / "life", fcntl.flock, iter([True])

    def swept(handle: int, operation: int) -> None:
        if next(times, False):
            path.unlink()
            if replaced:
                path.touch()
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", swept)
    lock = LifeLock(path)
    assert holder_lives(path)
    lock.release()
    assert not path.exists()


def test_a_host_is_another_after_a_reboot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot = tmp_path / "boot_id"
    monkeypatch.setattr("plait.search.ownership.BOOT", boot)
    hosts = [this_host()]
    for booted in ("one\n", "other\n"):
        boot.write_text(booted)
        hosts.append(this_host())
    name = socket.gethostname()
    assert hosts == [name, f"{name} one", f"{name} other"]
    assert {host_name(host) for host in hosts} == {name}


def test_a_file_that_is_swept_is_not_the_one_that_a_worker_is_about_to_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has made its file; whoever sweeps finds that free, and then it is locked."""
    life, begun = tmp_path / "workers" / "life", list[Talking]()
    life.parent.mkdir()
    life.touch()
    unlink = Path.unlink

    def late(path: Path, missing_ok: bool = False) -> None:
        if path == life:
            begun.append(begin(path, "LifeLock"))
            assert begun[0].stdout.readline() == "begins\n"
            select.select([begun[0].stdout], [], [], 0.5)  # it gets its lock now, or waits for it
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", late)
        workers = Workers(life.parent, lambda *_: None)
    (other,) = begun
    assert other.stdout.readline() == "held\n"
    assert holder_lives(life)
    other.kill()
    workers.close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A file that stood for a lock would outlive a holder that is killed."""
    storage = open_storage(None, tmp_path)
    (tmp_path / "life").touch()

    def flock(_file: int, _operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)

    def hold() -> None:
        with file_lock(tmp_path / "file"):
            pass

    for action in (
        hold,
        lambda: LifeLock(tmp_path / "own"),
        lambda: holder_lives(tmp_path / "life"),
        lambda: Patience()(lambda: optuna.create_study(study_name="s", storage=storage)),
    ):
        with pytest.raises(
            StorageError, match=f"(?s){os.strerror(number)}.*does not support locks.*tracking.root"
        ):
            action()


def test_a_lock_file_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user's file with the mode 0644."""

    def refuse(path: str, *_: object, **_options: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "open", refuse)
    for action in (lambda: LifeLock(tmp_path / "lock"), lambda: file_lock(tmp_path / "lock").__enter__()):
        with pytest.raises(StorageError, match=f"(?s)lock: {os.strerror(errno.EACCES)}.*be able to write it"):
            action()


def test_who_holds_up_a_search_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any user who can read a file can lock it for as long as they like."""
    taking = "import fcntl, os; fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)"
    journal = Journal(tmp_path / "optuna.journal")
    lock = tmp_path / "lock"
    lock.touch()
    monkeypatch.setattr("plait.utils.file_locks.SILENT_SECONDS", 0.0)

    def take() -> None:
        with file_lock(lock):
            pass

    for path, action in ((journal.path, lambda: journal.append_logs([op(1)])), (lock, take)):
        with held_elsewhere(taking, path) as process:

            def heard(_seconds: float, process: Popen[str] = process) -> None:
                process.kill()
                process.wait()

            with monkeypatch.context() as patch:
                patch.setattr(time, "sleep", heard)
                action()
        assert capsys.readouterr().err == f"Waiting for {path}, which another process has locked.\n"


# ---- the journal ------------------------------------------------------------------------------------------


def op(number: int) -> dict[str, int]:
    return {"op_code": number}


@pytest.mark.parametrize("text", ["my notes", "my notes\n", "{\n"])
def test_a_file_that_is_not_a_journal_is_left_unchanged(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(StorageError, match=r"notes\.txt"):
        optuna.create_study(study_name="s", storage=open_storage(str(path), tmp_path))
    assert path.read_text() == text


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "optuna.journal")
    journal.append_logs([op(1)])
    before = journal.path.read_bytes()
    really = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, text: really(file, text[: len(text) // 2]))
        with pytest.raises(OSError, match="No space"):
            journal.append_logs([op(2)])
    assert journal.path.read_bytes() == before

    def failing(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(OSError, match="Input/output"):
            journal.append_logs([op(2)])
    assert journal.path.read_bytes() == before
    journal.append_logs([op(2)])
    assert [log["op_code"] for log in journal.read_logs(0)] == [1, 2]


def test_a_journal_that_is_removed_while_a_line_waits_for_it_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written to the file that has no name any more, the line would be lost without a word."""
    journal = Journal(tmp_path / "optuna.journal")
    journal.append_logs([op(1)])
    flock, times = fcntl.flock, iter([True])

    def replaced(handle: int, operation: int) -> None:
        if next(times, False):
            text = journal.path.read_bytes()
            journal.path.unlink()
            journal.path.write_bytes(text)
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", replaced)
    Patience(sleep=lambda _: None)(lambda: journal.append_logs([op(2)]))
    assert [log["op_code"] for log in Journal(journal.path).read_logs(0)] == [1, 2]


# ---- patience ---------------------------------------------------------------------------------------------


def test_requests_are_repeated_when_the_storage_is_back() -> None:
    failures = iter(range(9))
    said: list[str] = []
    slept: list[float] = []

    def action() -> str:
        if next(failures, None) is not None:
            raise OSError(28, "No space left on device")
        return "done"

    assert Patience(said.append, sleep=slept.append)(action) == "done"
    assert len(said) == 2
    assert "No space left" in said[0]
    assert said[1] == "The study's storage is back."
    assert 9 * FIRST_DELAY < sum(slept) <= 9 * LONGEST_DELAY


def test_a_stop_request_ends_the_waiting() -> None:
    said: list[str] = []
    patience = Patience(said.append, stop=lambda: len(said) > 0, sleep=lambda _: None)

    def action() -> None:
        raise OSError("gone")

    with pytest.raises(StorageError, match="gone"):
        patience(action)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_storage_that_may_not_be_written_is_not_waited_for(number: int) -> None:
    def action() -> None:
        raise OSError(number, os.strerror(number), "optuna.journal")

    with pytest.raises(StorageError, match=f"(?s)optuna.journal: {os.strerror(number)}.*search.storage=PATH"):
        Patience(sleep=lambda _: pytest.fail("it waits"))(action)


def test_a_sqlite_file_that_is_only_read_is_not_waited_for(tmp_path: Path) -> None:
    open_storage(str(tmp_path / "s.db"), tmp_path)
    read = open_storage(f"sqlite:///file:{tmp_path / 's.db'}?mode=ro&uri=true", tmp_path)
    with pytest.raises(StorageError, match=r"(?s)search\.storage: .*readonly.*search\.storage=PATH"):
        Patience(sleep=lambda _: pytest.fail("it waits"))(lambda: optuna.create_study(storage=read))


def test_a_database_that_lets_its_role_in_no_more_is_not_waited_for() -> None:
    said = 'connection to server at "h", port 5432 failed: FATAL:  permission denied for database "plait"'

    def action() -> None:
        raise StorageInternalError("trouble") from OperationalError("SELECT", {}, Exception(said))

    with pytest.raises(StorageError, match=r"(?s)search\.storage: .*denied.*Let this role connect"):
        Patience(sleep=lambda _: pytest.fail("it waits"))(action)


def test_an_invalid_request_is_not_repeated() -> None:
    refused = ProgrammingError("SELECT", {}, Exception("no such table"))
    assert not passes(refused)
    assert not passes(ValueError("x"))
    gone = OperationalError("SELECT", {}, Exception("server closed the connection"))
    assert passes(gone)
    wrapped = StorageInternalError("trouble")
    wrapped.__cause__ = gone
    assert passes(wrapped)
    lost = PendingRollbackError("Can't reconnect until invalid transaction is rolled back.")
    lost.__context__ = gone  # as when Optuna asks again in the transaction whose connection is lost
    pending = StorageInternalError("x")
    pending.__cause__ = lost
    assert passes(pending)
    assert not passes(PendingRollbackError("after a flush that failed"))
    wrapped.__cause__ = refused
    assert not passes(wrapped)


def test_a_study_that_cannot_be_opened_leaves_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may live on, as a notebook's does: others would wait for its trials."""

    def full(*_: object) -> None:
        raise StorageError("no space left")

    monkeypatch.setattr("plait.search.study.keep_space", full)
    with pytest.raises(StorageError, match="no space left"):
        study_of(space_of("adapter.rank=4,8"), SearchSettings(name="s"), folder=lambda _: tmp_path)
    assert living(tmp_path / WORKERS) == []
