"""What must be set before any test module is imported, and servers that several folders of tests use."""

from __future__ import annotations

import logging
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import sqlalchemy
import torch

from plait.addresses import with_driver

# Triton decides at its own import whether its kernels are interpreted, and other libraries import it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

DATABASE_PROGRAMS = Path("/usr/lib/postgresql")  # Debian's place, by version


def _database_programs() -> Path:
    folders = sorted(DATABASE_PROGRAMS.glob("*/bin"), key=lambda path: float(path.parent.name))
    if not folders or not (folders[-1] / "initdb").exists():
        pytest.skip(f"Debian's package postgresql is not installed: no {DATABASE_PROGRAMS}/*/bin/initdb")
    return folders[-1]


def _as_common_user() -> tuple[list[str], str | None]:
    """Words before a command that PostgreSQL must not run as root, and the user that they change to."""
    if os.geteuid() != 0:
        return [], None
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("PostgreSQL does not run as root, and there is no setpriv to become somebody else")
    known = {entry.pw_name for entry in pwd.getpwall()}
    user = "postgres" if "postgres" in known else "nobody"
    return [setpriv, f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups"], user


@pytest.fixture(scope="session")
def _postgresql_server() -> Iterator[str]:
    """A throw-away PostgreSQL server on a port of its own, as a URL without database."""
    programs = _database_programs()
    before, user = _as_common_user()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Not below pytest's folders, which only their owner may enter.
    folder = Path(tempfile.mkdtemp(prefix="plait-postgresql-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        data = str(folder / "data")
        start = [*before, str(programs / "initdb"), "-D", data, "-U", "plait", "-A", "trust", "--no-sync"]
        subprocess.run(start, cwd=folder, check=True, capture_output=True)
        control = [*before, str(programs / "pg_ctl"), "-D", data, "-w", "-l", str(folder / "log")]
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        subprocess.run([*control, "-o", options, "start"], cwd=folder, check=True, capture_output=True)
        try:
            yield f"postgresql://plait:secret@127.0.0.1:{port}"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], cwd=folder, check=True, capture_output=True)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def new_database(_postgresql_server: str) -> Callable[[], str]:
    """Makes an empty PostgreSQL database and gives its URL, as a user would write it."""

    def make() -> str:
        name = f"test_{uuid4().hex}"
        url = with_driver(f"{_postgresql_server}/postgres")
        engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return f"{_postgresql_server}/{name}"

    return make


@pytest.fixture(autouse=True)
def log_handlers() -> Iterator[None]:
    """Put the root logger's handlers back: Hydra, called in this process, makes ones on a captured stream."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
