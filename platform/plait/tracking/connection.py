"""Opens the tracking store, and checks within seconds, before a model is loaded, whether it can be used."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests
import sqlalchemy
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from plait.core.errors import StorageError
from plait.core.settings import TrackingSettings
from plait.tracking.location import ARTIFACTS, DATABASE, Location, check_folder, locate, sqlite_in
from plait.tracking.mlflow_store import Store
from plait.utils.addresses import first_line, foreign_tables, server_refuses, sqlite_fault
from plait.utils.file_locks import file_lock

ANSWER_SECONDS = 5
NOT_NOW = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE")  # MLflow's codes for a server that fails or is down
LOST = (2002, 2003, 2006, 2013)  # MySQL's codes for failed connections


class AwayError(StorageError):
    """The store does not answer now; it may answer later."""


def check_tracking(settings: TrackingSettings) -> Location:
    """Check that runs, artifacts and files can be written, and make folder, database and experiment.

    Returns:
        The absolute address, for printing and for :class:`~plait.tracking.tracker.Tracker`.

    Raises:
        AwayError: nothing answers at the address within seconds.
        StorageError: it refuses, the folder cannot be written, the disk is full, or the experiment was
            deleted.
    """
    location = locate(settings)
    check_folder(location.root, "tracking.root")
    open_store(location, settings.experiment)
    return location


def open_store(location: Location, experiment: str, *, reading: bool = False) -> Store:
    """The store at an address, after checking within seconds that something answers there; errors as for
    :func:`check_tracking`. For ``reading`` only, a database may be write-protected."""
    if location.is_server:
        _check_server(location)
    elif (file := location.sqlite_file) is not None:
        with storage_errors(location):
            if not (reading and file.exists()):
                check_folder(file.parent, "tracking.uri")
                _make_database(file)
            _check_tables(file)
    else:
        _check_database(location)
    with storage_errors(location):
        store = Store(location, experiment)
        stage = store.client.get_experiment(store.experiment_id).lifecycle_stage
    if stage != "active":
        raise StorageError(
            f"tracking.experiment={experiment!r} was deleted in {location}",
            "Runs can only be written to an active experiment.",
            f"Restore it (mlflow experiments restore -x {store.experiment_id}), or set tracking.experiment "
            "to another name.",
        )
    if not reading:
        check_place(store)
    return store


def check_place(store: Store) -> None:
    """Refuse a folder of runs that was moved or copied: its database still names the old one for artifacts.

    Raises:
        StorageError: it was.
    """
    root = store.location.root
    if store.location.uri != sqlite_in(root):
        return
    with storage_errors(store.location):
        artifacts = Path(store.client.get_experiment(store.experiment_id).artifact_location)
    old = artifacts.parent
    if _same(old, root) or _same(artifacts, root / ARTIFACTS) or _chosen(artifacts):
        return
    link = shlex.join(("ln", "-s", str(root), str(old)))
    raise StorageError(
        f"tracking.root={root} was moved or copied from {old}",
        "MLflow's database in it names that folder for artifacts: adapters are written and looked for there.",
        f"If that folder is still there, use it. If not, move this one back, or make a link: {link}. "
        "Or begin another experiment: tracking.experiment=NAME.",
    )


def _same(one: Path, other: Path) -> bool:
    """Whether both are one folder, under whatever name: of a link, or of a disk that is mounted twice."""
    try:
        return one.samefile(other)
    except OSError:  # one is not there, or in a folder that is closed to this user
        return False


def _chosen(artifacts: Path) -> bool:
    """Whether the user has chosen this folder: it has another name, or is there without a database beside
    it."""
    if not artifacts.is_absolute() or artifacts.name != ARTIFACTS:
        return True
    try:
        return artifacts.is_dir() and not (artifacts.parent / DATABASE).exists()
    except OSError:
        return False


class Connection:
    """The store of a search, opened when it first answers, because a resumed search can begin without it. All
    threads of a process share one.

    Attributes:
        run_id: id of the run that must exist when the store is opened late; "" while none is known. If the
            store came back without it, everything sent for it would be lost.
        opened: the store, once it has answered.
    """

    def __init__(self, location: Location, experiment: str) -> None:
        self.run_id = ""
        self._location = location
        self._experiment = experiment
        self._lock = threading.Lock()
        self.opened: Store | None = None

    def store(self) -> Store:
        """The store; each call tries for some seconds, until it has answered once.

        Raises:
            StorageError: it does not answer (``AwayError``) or refuses, or the search's run does not exist.
        """
        with self._lock:
            if self.opened is None:
                store = open_store(self._location, self._experiment)
                if self.run_id:
                    self._check_run(store)
                self.opened = store
            return self.opened

    def _check_run(self, store: Store) -> None:
        with storage_errors(self._location):
            if store.run(self.run_id) is None:
                raise StorageError(
                    f"run {self.run_id} is not in {self._location}, experiment {self._experiment!r}",
                    "The search was recorded in this run, which no longer exists.",
                    "Restore the run or the database. Records that have not been sent are kept.",
                )


@contextmanager
def storage_errors(location: Location) -> Iterator[None]:
    """Turn every error of the store into a StorageError that names the address."""
    try:
        yield
    except (MlflowException, sqlalchemy.exc.SQLAlchemyError, OSError, ImportError) as error:  # no driver
        holds = "MLflow keeps all runs in this SQLite file: settings, losses, states."
        fault = sqlite_fault(error, f"tracking.uri={location}", holds, "tracking.root=FOLDER")
        if fault is not None:
            raise fault from error
        kind = AwayError if _is_away(location, error) else StorageError
        raise kind(
            f"tracking.uri={location}: {first_line(error)}",
            "The installed MLflow must be able to use the store at this address.",
            "Check the address and your permissions. After an update of MLflow, run `mlflow db upgrade` "
            "on a database.",
        ) from error


def _is_away(location: Location, error: Exception) -> bool:
    """Whether an error of the store may be temporary; an error of a file is not."""
    if location.sqlite_file is not None:
        return False
    if isinstance(error, sqlalchemy.exc.OperationalError):
        if location.scheme == "mysql":
            return any(f"({number}," in str(error) for number in LOST)
        return not server_refuses(error)
    if not isinstance(error, MlflowException):
        return isinstance(error, ConnectionError)
    if not location.is_server:
        return str(error.error_code) == "TEMPORARILY_UNAVAILABLE"
    return str(error.error_code) in NOT_NOW and "valid JSON" not in str(error)


def _check_server(location: Location) -> None:
    """Send one short request, because MLflow's own client would wait for a minute."""
    try:
        status = requests.get(f"{location.uri.rstrip('/')}/health", timeout=ANSWER_SECONDS).status_code
        cause = "" if status < 500 else f"status {status}"  # else MLflow's client reports what is wrong
    except requests.exceptions.SSLError:
        return  # it answers; the settings of MLflow's client decide which certificates to trust
    except (requests.RequestException, ValueError) as error:  # urllib3's own of some addresses
        cause = first_line(error)
    if cause:
        raise AwayError(
            f"tracking.uri={location}: no answer ({cause})",
            "An MLflow server must answer at this address.",
            "Start it (mlflow server), correct tracking.uri or MLFLOW_TRACKING_URI, or unset both to write "
            "to a SQLite file.",
        )


def _check_database(location: Location) -> None:
    """Connect once, briefly, because MLflow's own client would retry for minutes."""
    if location.scheme not in ("postgresql", "mysql"):
        return
    try:
        engine = sqlalchemy.create_engine(location.uri, connect_args={"connect_timeout": ANSWER_SECONDS})
        with engine.connect():
            pass
        engine.dispose()
    except (sqlalchemy.exc.SQLAlchemyError, ImportError) as error:
        kind = AwayError if _is_away(location, error) else StorageError
        raise kind(
            f"tracking.uri={location}: {first_line(error)}",
            "A database must answer at this address.",
            "Start the database, correct tracking.uri, install the driver (pip install "
            "'plait[postgresql]'), or unset tracking.uri to write to a SQLite file.",
        ) from error


def _make_database(file: Path) -> None:
    """Make a SQLite file with MLflow's tables if there is none yet.

    MLflow takes seconds for this, in dozens of steps that SQLite does not undo: a process that is killed in
    between leaves tables that MLflow can neither use nor complete. So they are made in a temporary file, by
    one process at a time, which is then renamed.

    Raises:
        StorageError: the file system has no locks.
    """
    if _has_content(file):
        return
    lock = file.with_name(f".{file.name}.lock")
    with file_lock(lock):
        if not _has_content(file):
            draft = file.with_name(f".{file.name}.new")
            for left in (draft, draft.with_name(f"{draft.name}-journal")):  # of a killed process
                left.unlink(missing_ok=True)
            MlflowClient(f"sqlite:///{draft}").get_experiment_by_name("Default")
            draft.replace(file)
        lock.unlink(missing_ok=True)  # a process that still waits for it finds the database


def _has_content(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def _check_tables(file: Path) -> None:
    """Refuse another program's database, because MLflow would add its own tables to it.

    Raises:
        StorageError: it has tables other than MLflow's.
    """
    if tables := foreign_tables(file, "experiments"):
        raise StorageError(
            f"{file}: a SQLite file with the tables {tables}",
            "It belongs to another program, and MLflow would add its own tables to it.",
            "Name another file: tracking.uri=sqlite:///FILE.",
        )
