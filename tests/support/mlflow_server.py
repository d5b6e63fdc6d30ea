"""A real MLflow server in a separate process, that can be stopped, hung, killed and started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

from plait.core.settings import TrackingSettings
from plait.tracking.ui import ui_command

STARTUP_SECONDS = 120


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class MlflowServer:
    """Always on the same port, with the same database, and artifacts that it keeps itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        arguments = ["--port", str(self.port), "--artifacts-destination", str(self.folder / "kept")]
        database = TrackingSettings(uri=f"sqlite:///{self.folder / 'mlflow.db'}", root=self.folder)
        command = ui_command(database, arguments)
        environment = os.environ | command.environment
        environment.pop("MLFLOW_DEFAULT_ARTIFACT_ROOT", None)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command.command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        for _ in range(STARTUP_SECONDS * 5):
            assert self._process.poll() is None, (self.folder / "log").read_text()
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"no answer from {self.url}: {(self.folder / 'log').read_text()}")

    def hang(self) -> None:
        """Let it take connections and never answer."""
        self._signal(signal.SIGSTOP)

    def stop(self) -> None:
        """End it in order, if it runs."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, if it runs."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._signal(number)
            self._process.wait(60)
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        """To the server and the processes that it made."""
        assert self._process is not None
        os.killpg(self._process.pid, number)
