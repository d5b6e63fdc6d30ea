"""The location of tracking: one absolute address, decided once, that can be printed without secrets; and the
folder of the runs, which can be checked before MLflow is imported."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from plait.core.errors import StorageError
from plait.core.settings import TrackingSettings
from plait.utils.addresses import check_login, redact, with_driver
from plait.utils.files import check_writable
from plait.utils.paths import user_path

VARIABLE = "MLFLOW_TRACKING_URI"
DATABASE_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql")
SQLITE_PREFIX = "sqlite:///"
ARTIFACTS = "artifacts"  # folder in the root
DATABASE = "mlflow.db"  # file in the root
LEAST_FREE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Location:
    """An MLflow tracking URI made absolute.

    Attributes:
        uri: tracking URI for MLflow's client, with its driver, and its password if it has one.
        root: absolute folder of everything that Plait itself writes.
        artifacts: folder of the artifacts of a database's experiment; None leaves it to a server.
    """

    uri: str
    root: Path
    artifacts: str | None

    @property
    def scheme(self) -> str:
        """The URI's scheme without a driver: "sqlite", "postgresql", "http"."""
        return urlsplit(self.uri).scheme.split("+")[0]

    @property
    def is_server(self) -> bool:
        """Whether it is the address of an MLflow server."""
        return self.scheme in ("http", "https")

    @property
    def sqlite_file(self) -> Path | None:
        """The SQLite file, if the address is one."""
        if self.scheme != "sqlite":
            return None
        return Path(unquote(self.uri.split("?")[0].removeprefix(self.uri.split(":")[0] + ":///")))

    @property
    def pages(self) -> str:
        """The address of a server's pages, without a login."""
        parts = urlsplit(self.uri)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"

    def __str__(self) -> str:
        return redact(self.uri)


def locate(settings: TrackingSettings) -> Location:
    """The address given by the settings: ``uri``, else MLFLOW_TRACKING_URI, else SQLite in ``root``.

    Relative SQLite paths are relative to the current folder, as in MLflow, and are made absolute here.

    Raises:
        StorageError: MLflow can no longer write to this kind of address, or does not know it, or would take
            a part of the folder's name for something else.
    """
    root = user_path(settings.root).resolve()
    uri = settings.uri or os.environ.get(VARIABLE) or sqlite_in(root)
    uri = with_driver(uri)
    try:
        scheme = urlsplit(uri).scheme.split("+")[0]
    except ValueError as error:
        raise StorageError(
            f"tracking.uri={redact(uri)!r}",
            f"It must be the address of a database or a server ({error}).",
            "Correct it, for example http://host:5000 or sqlite:///mlflow.db.",
        ) from error
    if scheme in ("", "file"):
        raise StorageError(
            f"tracking.uri={redact(uri)!r}",
            "MLflow keeps runs in a database or behind a server, no longer in plain folders.",
            f"Use {SQLITE_PREFIX}{Path(urlsplit(uri).path) / 'mlflow.db'}, or a server's http:// address.",
        )
    check_login("tracking.uri", uri)
    if scheme == "sqlite":
        uri = _absolute_sqlite(uri)
    artifacts = f"{root / ARTIFACTS}" if scheme in DATABASE_SCHEMES else None
    if artifacts is not None and ("?" in str(root) or unquote(str(root)) != str(root)):
        raise StorageError(
            f"tracking.root={str(root)!r}",
            "MLflow takes a question mark, or a percent sign with two digits, for a part of an address.",
            "Choose a folder without them.",
        )
    return Location(uri, root, artifacts)


def check_folder(folder: Path, key: str, *, make: bool = True) -> None:
    """Check that a file can be written into a folder.

    Args:
        make: make it if it is not there; otherwise check the nearest folder above it that is.

    Raises:
        StorageError: it cannot be made or written, or its disk is full.
    """
    rule = "Plait writes its database, artifacts and adapters there."
    remedy = f"Free some space, or set {key} to a writable folder."
    there = check_writable(folder, f"{key}={folder}", rule, remedy, make=make)
    free = shutil.disk_usage(there).free
    if free < LEAST_FREE_BYTES:
        raise StorageError(
            f"{key}={folder}: {free / 2**20:.0f} MiB free",
            f"A run needs at least {LEAST_FREE_BYTES // 2**20} MiB.",
            f"Free some space, or set {key} to a folder on another disk.",
        )


def sqlite_in(root: Path) -> str:
    """The default address: a SQLite file in the folder."""
    return f"{SQLITE_PREFIX}{root / DATABASE}"


def store_elsewhere(settings: TrackingSettings) -> str | None:
    """The address given by the settings and the environment; None for the one in ``root``."""
    location = locate(settings)
    return None if location.uri == sqlite_in(location.root) else location.uri


def _absolute_sqlite(uri: str) -> str:
    prefix, separator, rest = uri.partition(":///")
    path, mark, query = rest.partition("?")
    if not separator or not path or path == ":memory:":
        raise StorageError(
            f"tracking.uri={uri!r}",
            "A SQLite address must name a file.",
            f"Write {SQLITE_PREFIX}folder/mlflow.db, or {SQLITE_PREFIX}/folder/mlflow.db (absolute).",
        )
    return f"{prefix}:///{user_path(path).resolve()}{mark}{query}"
