"""Where a study is kept: a journal file, SQLite, or a database by URL."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage

from plait.core.errors import StorageError
from plait.search.journal import Journal
from plait.search.locks import FileLock, advisory_lock
from plait.utils.addresses import redact, with_driver

SQLITE_SUFFIXES = (".db", ".sqlite", ".sqlite3")
CONNECT_SECONDS = 10
SQLITE = "sqlite:///"
JOURNAL = "optuna.journal"  # the default, in tracking.root


def open_storage(storage: str | None, root: Path) -> BaseStorage:
    """Optuna's storage for ``search.storage``; None stands for a journal file under ``root``.

    Raises:
        StorageError: the folder cannot be written, or the database does not answer.
    """
    if storage is None:
        return _journal(root / JOURNAL)
    if "://" in storage:
        return _database(storage)
    path = Path(storage).expanduser()
    if path.suffix in SQLITE_SUFFIXES:
        _make_folder(path.parent)
        return _database(f"{SQLITE}{path.absolute()}")
    return _journal(path)


def from_anywhere(storage: str | None) -> str | None:
    """``search.storage`` so that it names the same from every folder."""
    if storage is None:
        return None
    scheme = SQLITE if storage.startswith(SQLITE) else ""
    file = storage.removeprefix(scheme)
    if "://" in file or file in ("", ":memory:"):
        return storage
    path = Path(file) if scheme else Path(file).expanduser()
    return f"{scheme}{path.absolute()}"


def in_memory() -> BaseStorage:
    """A storage that ends with the process, for studies that nobody goes on with."""
    return optuna.storages.InMemoryStorage()


def study_lock(storage: BaseStorage, name: str, what: str = "study") -> AbstractContextManager[None]:
    """What one process at a time holds while it takes a trial of a study, or tells of one; or does something
    else (``what``), which holds up nobody who does that.

    Processes that use a file are on one host. PostgreSQL serves several hosts. A storage in memory is for one
    process.

    Raises:
        StorageError: another database, in which two processes would train the same trials.
    """
    if isinstance(storage, JournalStorage) and isinstance(storage._backend, Journal):
        path = storage._backend.path
        return FileLock(path.with_name(f"{path.name}.{what}-lock")).held()
    if isinstance(storage, RDBStorage):
        url = storage.engine.url
        if url.get_backend_name() == "postgresql":
            return advisory_lock(
                storage.engine, f"plait {name}" if what == "study" else f"plait {what} {name}"
            )
        if url.get_backend_name() != "sqlite":
            raise StorageError(
                f"search.storage={redact(str(url))}",
                "So that two processes never take the same trial, Plait locks the study: it can do so in "
                "PostgreSQL, SQLite and journal files only.",
                "Give search.storage=postgresql://..., a path that ends in .db, or leave it out.",
            )
        if url.database not in (None, "", ":memory:"):
            return FileLock(Path(f"{url.database}.{what}-lock")).held()
    return nullcontext()


def _journal(path: Path) -> BaseStorage:
    _make_folder(path.parent)
    try:
        return JournalStorage(Journal(path.absolute()))
    except StorageError:
        raise
    except (OSError, ValueError) as error:
        raise StorageError(
            f"search.storage: {path}",
            f"It cannot be used as Optuna's journal: {error}",
            "Give a path that can be written: search.storage=PATH.",
        ) from error


def _database(url: str) -> BaseStorage:
    arguments = {"connect_timeout": CONNECT_SECONDS} if url.startswith("postgres") else {}
    try:
        return RDBStorage(with_driver(url), engine_kwargs={"connect_args": arguments, "pool_pre_ping": True})
    except ImportError as error:
        raise StorageError(
            f"search.storage={redact(url)}",
            f"Its driver is missing: {error}",
            "Install it: pip install 'plait[postgresql]'."
            if url.startswith("postgres")
            else "Give search.storage=postgresql://..., a path that ends in .db, or leave it out.",
        ) from error
    except Exception as error:  # SQLAlchemy, the driver and Optuna each raise their own
        raise StorageError(
            f"search.storage={redact(url)}",
            f"The database does not answer: {_first_line(error)}",
            "Check the URL and that the server runs; leave search.storage out to use a local file.",
        ) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{folder}",
            f"The folder cannot be made: {error.strerror or error}.",
            "Choose another with tracking.root=FOLDER.",
        ) from error


def _first_line(error: Exception) -> str:
    text = str(error.__cause__ or error).strip() or type(error).__name__
    return redact(text.splitlines()[0])


def quiet() -> None:
    """Leave Optuna's own running commentary out: the terminal view shows the trials."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
