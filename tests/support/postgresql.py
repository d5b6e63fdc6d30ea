"""A throw-away PostgreSQL server from the distribution's programs, that can be stopped and started again."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
import sqlalchemy

from plait.utils.addresses import with_driver

PROGRAMS = Path("/usr/lib/postgresql")  # Debian's place, by version


class PostgresqlServer:
    """Always on the same port, with the same data.

    Args:
        data: its folder, made by ``initdb``.
        control: the words that begin a call of ``pg_ctl``.
    """

    def __init__(self, data: Path, control: list[str]) -> None:
        self._folder = data.parent
        self._control = [*control, "-D", str(data), "-w", "-l", str(self._folder / "log")]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._url = f"postgresql://plait:secret@127.0.0.1:{self._port}"
        self.running = False

    def start(self) -> None:
        """Start it and wait until it answers."""
        options = f"-p {self._port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        self._call("-o", options, "start")
        self.running = True

    def stop(self) -> None:
        """End it at once, with all its connections."""
        self._call("-m", "immediate", "stop")
        self.running = False

    def _call(self, *words: str) -> None:
        subprocess.run([*self._control, *words], cwd=self._folder, check=True, capture_output=True)

    def new_database(self) -> str:
        """Make an empty database; its URL, as a user would write it."""
        name = f"test_{uuid4().hex}"
        engine = sqlalchemy.create_engine(with_driver(f"{self._url}/postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return f"{self._url}/{name}"


@contextmanager
def postgresql_server() -> Iterator[PostgresqlServer]:
    """A running server; skips the test if there are no programs for it."""
    programs = _programs()
    before, user = _as_common_user()
    # Not below pytest's folders, which only their owner may enter.
    folder = Path(tempfile.mkdtemp(prefix="plait-postgresql-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        data = folder / "data"
        make = [*before, str(programs / "initdb"), "-D", str(data), "-U", "plait", "-A", "trust", "--no-sync"]
        subprocess.run(make, cwd=folder, check=True, capture_output=True)
        server = PostgresqlServer(data, [*before, str(programs / "pg_ctl")])
        server.start()
        try:
            yield server
        finally:
            if server.running:
                server.stop()
    finally:
        shutil.rmtree(folder)


def _programs() -> Path:
    folders = sorted(PROGRAMS.glob("*/bin"), key=lambda path: float(path.parent.name))
    if not folders or not (folders[-1] / "initdb").exists():
        pytest.skip(f"Debian's package postgresql is not installed: no {PROGRAMS}/*/bin/initdb")
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
