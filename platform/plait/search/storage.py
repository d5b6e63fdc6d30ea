"""Opens the storage of a study (journal file, SQLite, database by URL), locks it, and waits while it is
down."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import optuna
import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import FrozenTrial
from sqlalchemy.engine import make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
    PendingRollbackError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from plait.core.errors import StorageError
from plait.utils.addresses import (
    DAMAGED,
    check_login,
    first_line,
    foreign_tables,
    redact,
    server_refuses,
    sqlite_fault,
    sqlite_says,
    with_driver,
)
from plait.utils.file_locks import NOT_OURS, file_lock
from plait.utils.files import check_writable, disk_errors
from plait.utils.line_log import LineLog, check_kind
from plait.utils.paths import user_path

SQLITE_SUFFIXES = (".db", ".sqlite", ".sqlite3")
CONNECT_SECONDS = 10
# How soon both ends of a link to PostgreSQL notice that the other is gone, in libpq's words: seconds until an
# idle link is probed, and between probes; how many may fail; milliseconds in which what is sent must arrive.
LIMITS = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
SQLITE = "sqlite:///"
JOURNAL = "optuna.journal"  # the default, in tracking.root
HOLDS = "The study is kept in this SQLite file: its trials, their values and results."
OTHER = "search.storage=PATH"


def open_storage(storage: str | None, root: Path) -> BaseStorage:
    """Optuna's storage for ``search.storage``; None means a journal file under ``root``.

    Raises:
        StorageError: the folder cannot be written, or the database does not answer.
    """
    if storage is None:
        return _journal(user_path(root) / JOURNAL)
    if "://" in storage:
        return _database(storage)
    path = user_path(storage)
    if path.suffix in SQLITE_SUFFIXES:
        _make_folder(path.parent)
        return _database(f"{SQLITE}{path.absolute()}")
    return _journal(path)


def missing_file(storage: str | None, root: Path) -> Path | None:
    """The file that :func:`open_storage` would create; None if it creates none."""
    if storage is None:
        path: Path | None = user_path(root) / JOURNAL
    else:
        path = _sqlite_file(storage) if "://" in storage else user_path(storage)
    return None if path is None or path.exists() else path


def _sqlite_file(url: str) -> Path | None:
    """The file of a SQLite database; None for other databases, one in memory, and SQLite's own URIs."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return None
    file = parsed.database or ""
    if parsed.get_backend_name() != "sqlite" or file in ("", ":memory:") or file.startswith("file:"):
        return None
    return Path(file)


def existing_storage(storage: str | None, root: Path) -> BaseStorage | None:
    """Like :func:`open_storage`, but creates nothing: None if the file does not exist yet.

    Raises:
        StorageError: it cannot be made there, or as for :func:`open_storage`.
    """
    if (missing := missing_file(storage, root)) is None:
        return open_storage(storage, root)
    folder, remedy = missing.absolute().parent, "Set a writable path: search.storage=PATH."
    check_writable(folder, f"search.storage: {missing}", "The study is kept there.", remedy)
    return None


def from_anywhere(storage: str | None) -> str | None:
    """``search.storage`` made independent of the current folder."""
    if storage is None:
        return None
    scheme = SQLITE if storage.startswith(SQLITE) else ""
    file = storage.removeprefix(scheme)
    if "://" in file or file in ("", ":memory:") or file.startswith("file:"):
        return storage
    path = Path(file) if scheme else user_path(file)
    return f"{scheme}{path.absolute()}"


def in_memory() -> BaseStorage:
    """A storage that ends with the process, for studies that are never resumed."""
    return InMemoryStorage()


def study_lock(storage: BaseStorage, name: str, what: str = "study") -> AbstractContextManager[None]:
    """The lock that one process at a time holds while it takes or reports a trial of a study, or does
    something else (``what``), which has a separate lock.

    Processes that use a file are on one host. PostgreSQL serves several hosts. A storage in memory is for one
    process.

    Args:
        storage: the study's storage, as opened or as wrapped by Optuna's study.

    Raises:
        StorageError: it is another database, in which two processes would train the same trials.
    """
    if isinstance(storage, _CachedStorage):  # a loaded study wraps a database in this
        storage = storage._backend
    if isinstance(storage, JournalStorage) and isinstance(storage._backend, Journal):
        path = storage._backend.path
        return file_lock(path.with_name(f"{path.name}.{what}-lock"))
    if isinstance(storage, RDBStorage):
        url = storage.engine.url
        if url.get_backend_name() == "postgresql":
            return advisory_lock(
                storage.engine, f"plait {name}" if what == "study" else f"plait {what} {name}"
            )
        if url.get_backend_name() != "sqlite":
            raise StorageError(
                f"search.storage={redact(str(url))}",
                "So that two processes never take the same trial, Plait locks the study, which is "
                "possible only in PostgreSQL, SQLite and journal files.",
                "Give search.storage=postgresql://..., a path that ends in .db, or leave it out.",
            )
        if url.database not in (None, "", ":memory:"):
            return file_lock(Path(f"{url.database}.{what}-lock"))
        return nullcontext()
    assert isinstance(storage, InMemoryStorage)  # of this module, which makes no others
    return nullcontext()


@contextmanager
def advisory_lock(engine: sqlalchemy.Engine, name: str) -> Iterator[None]:
    """A named lock of PostgreSQL, held until the context or its connection ends."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})
        yield


def _journal(path: Path) -> BaseStorage:
    _make_folder(path.parent)
    try:
        return JournalStorage(Journal(path.absolute()))
    except StorageError:
        raise
    except (OSError, ValueError) as error:
        raise StorageError(
            f"search.storage: {path}",
            f"Optuna cannot use it as a journal: {error}",
            "Set a writable path: search.storage=PATH.",
        ) from error
    except (
        AssertionError,
        LookupError,
        TypeError,
    ) as error:  # for lines that are not Optuna's
        raise StorageError(
            f"search.storage: {path}",
            "The file has lines that Optuna does not write into a journal.",
            "Use another file, or move this one: search.storage=PATH.",
        ) from error


def _database(url: str) -> BaseStorage:
    check_login("search.storage", url)
    file = _sqlite_file(url)
    if file is not None and (tables := foreign_tables(file, "studies", "version_info")):
        raise StorageError(
            f"search.storage={file}: a SQLite file with the tables {tables}",
            "It belongs to another program, and Optuna would add its own tables to it.",
            "Name another file: search.storage=PATH.",
        )
    server = url.startswith("postgres")
    arguments = {"connect_timeout": CONNECT_SECONDS} | LIMITS if server else {}
    try:
        opened = RDBStorage(
            with_driver(url), engine_kwargs={"connect_args": arguments, "pool_pre_ping": True}
        )
        if server:
            sqlalchemy.event.listen(opened.engine, "connect", limit_server)
            opened.engine.dispose()  # connections that were made before
        return opened
    except (ImportError, NoSuchModuleError) as error:
        raise StorageError(
            f"search.storage={redact(url)}",
            f"The driver for this database is not installed: {error}",
            "Install it: pip install 'plait[postgresql]'."
            if url.startswith("postgres")
            else "Give search.storage=postgresql://..., a path that ends in .db, or leave it out.",
        ) from error
    except Exception as error:  # SQLAlchemy, the driver and Optuna each raise their own
        named = f"search.storage={file or redact(url)}"
        if isinstance(error, RuntimeError):  # Optuna compares the version of the tables with its own
            raise StorageError(
                f"{named}: its tables are of another version of Optuna",
                first_line(error),
                "End all processes that use it, and copy it first. All hosts need the same version.",
            ) from error
        if (fault := sqlite_fault(error, named, HOLDS, OTHER)) is not None:
            raise fault from error
        raise StorageError(
            f"search.storage={redact(url)}",
            f"The database does not answer: {first_line(error.__cause__ or error)}",
            "Check the URL and that the server runs; leave search.storage out to use a local file.",
        ) from error


def limit_server(connection: Any, _: object) -> None:
    """Have PostgreSQL notice, too, that this host is gone.

    Otherwise a host that loses its power or its network keeps the study's lock for two hours, as long as the
    system waits with a first probe. A server that does not know one of these settings keeps its own.
    """
    for name, value in LIMITS.items():
        try:
            with connection.cursor() as cursor:
                cursor.execute(f"SET tcp_{name.removeprefix('tcp_')} = {value}")
            connection.commit()
        except connection.Error:  # the driver's class, which each connection has (PEP 249)
            connection.rollback()


def _make_folder(folder: Path) -> None:
    with disk_errors(folder, "The folder cannot be created.", f"Choose another: {OTHER}."):
        folder.mkdir(parents=True, exist_ok=True)


def quiet() -> None:
    """Silence Optuna's own log messages, because the terminal view shows the trials."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)


BEGINS = b'{"op_code":'  # the beginning of every line that Optuna writes


class Journal(JournalFileBackend):
    """A journal whose lines are complete or absent.

    Raises:
        StorageError: the file exists and is not a journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            check_kind(path, BEGINS)
        super().__init__(str(path))

    def append_logs(self, logs: Sequence[dict[str, Any]]) -> None:
        """Write lines and sync them to the disk, all or none.

        Raises:
            OSError: the disk is full or fails, or the file is being removed.
            StorageError: the file system has no locks.
        """
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with LineLog(self.path, BEGINS, make=False) as journal:
            if not journal.lock():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
            journal.append(lines.encode())
            try:
                journal.commit()
            except OSError:
                journal.cut(journal.end - len(lines.encode()))
                raise


FIRST_DELAY = 0.25  # seconds before the second attempt; doubles with each
LONGEST_DELAY = 10.0
SLICE = 0.25  # seconds of waiting between two checks whether to stop
Result = TypeVar("Result")


def lasts(error: BaseException | None) -> bool:
    """Whether an error means that the storage cannot be read or written, and will not be by itself."""
    match error:
        case OSError():
            return error.errno in NOT_OURS  # waiting does not cure it
        case DBAPIError() if sqlite_says(error, DAMAGED):
            return True
        case OperationalError():
            read_only = getattr(error.orig, "sqlite_errorname", "").startswith("SQLITE_READONLY")
            return read_only or server_refuses(error)
        case StorageInternalError() | PendingRollbackError():
            return lasts(error.__cause__ or error.__context__)
        case _:
            return False


def passes(error: BaseException | None) -> bool:
    """Whether an error means that the storage is unavailable, and not that the request was wrong."""
    match error:
        case _ if lasts(error):
            return False
        case OSError():
            return True
        case OperationalError() | InterfaceError() | PoolTimeout():
            return True
        case DBAPIError():
            return error.connection_invalidated
        case StorageInternalError() | PendingRollbackError():
            # Optuna uses the transaction once more although its connection is lost
            return passes(error.__cause__ or error.__context__)
        case _:
            return False


def _not_ours(error: Exception) -> StorageError:
    if (fault := sqlite_fault(error, "search.storage", HOLDS, OTHER)) is not None:
        return fault
    rule = "The study of a search is read and written by every process that trains it."
    if not isinstance(error, OSError):
        remedy = "Let this role connect to the database, then give the same command again."
        return StorageError(f"search.storage: {first_line(error.__cause__ or error)}", rule, remedy)
    return StorageError(
        f"{error.filename or 'search.storage'}: {error.strerror or error}",
        rule,
        "Make the file and its folder writable, or choose others with search.storage=PATH.",
    )


class Patience:
    """Repeats calls that a storage could not answer until it can. The calls must be safe to repeat.

    Args:
        say: called when waiting begins and when it ends.
        stop: called while waiting; True gives up.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        say: Callable[[str], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.say = say
        self.stop = stop
        self._sleep = sleep

    def __call__(self, action: Callable[[], Result]) -> Result:
        """The result of an action that reads or writes the study.

        Raises:
            StorageError: a stop was requested while the storage was unavailable, or it cannot be written at
                all.
        """
        delay, waited = FIRST_DELAY, False
        while True:
            try:
                result = action()
            except Exception as error:
                if lasts(error):
                    raise _not_ours(error) from error
                if not passes(error):
                    raise
                if not waited:
                    why = first_line(error.__cause__ or error)
                    self.say(f"The study's storage is unavailable ({why}). Waiting for it.")
                waited = True
                self._wait(delay, error)
                delay = min(2 * delay, LONGEST_DELAY)
            else:
                if waited:
                    self.say("The study's storage is back.")
                return result

    @contextmanager
    def holding(self, lock: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Hold a lock in the storage, waiting for it as in a call. The code inside runs once; if the lock is
        lost by its end, it has served its purpose.

        Raises:
            StorageError: as for a call.
        """

        def take() -> AbstractContextManager[None]:
            taken = lock()
            taken.__enter__()
            return taken

        taken = self(take)
        try:
            yield
        finally:
            try:
                taken.__exit__(None, None, None)
            except Exception as error:
                if not passes(error):
                    raise

    def _wait(self, seconds: float, error: Exception) -> None:
        while seconds > 0:
            if self.stop():
                raise StorageError(
                    f"The study's storage does not answer: {first_line(error.__cause__ or error)}",
                    "Trials cannot start or end without it.",
                    "Run the same command again when it is back; it resumes from the last checkpoints.",
                ) from error
            self._sleep(min(SLICE, seconds))
            seconds -= SLICE


class SharedStudy:
    """A study that several processes read and write, in a storage that may be temporarily unavailable."""

    def __init__(self, study: Study, patience: Patience | None = None) -> None:
        self.study = study
        self.patience = patience or Patience()

    def trials(self) -> list[FrozenTrial]:
        """All trials, by number."""
        return self.study.get_trials(deepcopy=False)

    def live(self, number: int) -> tuple[FrozenTrial, optuna.trial.Trial]:
        """The present state of a trial, and the object through which it is changed."""
        frozen = self.trials()[number]
        return frozen, optuna.trial.Trial(self.study, frozen._trial_id)

    def exclusive(self, what: str = "study") -> AbstractContextManager[None]:
        """A lock for what only one process of this study does at a time; ``what`` as for
        :func:`study_lock`."""
        return study_lock(self.study._storage, self.study.study_name, what)

    def holding(self, what: str) -> AbstractContextManager[None]:
        """The same, waiting for the storage; the code inside runs once."""
        return self.patience.holding(lambda: self.exclusive(what))

    def locked(self, action: Callable[[], Result]) -> Result:
        """The result of an action under the study's lock, waiting for the storage."""

        def attempt() -> Result:
            with self.exclusive():
                return action()

        return self.patience(attempt)
