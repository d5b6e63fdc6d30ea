"""A real MLflow server in a process of its own, forked from one that has imported most of it, that can be
stopped, hung, killed and started again."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
import urllib.request
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from forked import FORKS

from plait.core.settings import TrackingSettings
from plait.tracking.ui import ui_command

STARTUP_SECONDS = 120


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def forget_server() -> None:
    """Let MLflow's server be imported again: it reads the environment as it is imported."""
    for name in [name for name in sys.modules if f"{name}.".startswith("mlflow.server.")]:
        del sys.modules[name]


def tell_whole() -> None:
    """In a forked process: print whether MLflow still has its other parts, with which its server answers."""
    import_module("mlflow.server")
    forget_server()
    import_module("mlflow.server")
    import mlflow

    print(hasattr(mlflow, "protos"))


def _serve(command: Sequence[str], environment: dict[str, str], log: str) -> None:
    """Do what the command does, but run the server that it would start in this process; never returns."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        import mlflow.server
        import uvicorn
        from mlflow.cli import cli

        def run(words: Sequence[str], *, extra_env: dict[str, str], **_: object) -> None:
            os.environ.update(extra_env)
            forget_server()
            assert words[1:3] == ["-m", "uvicorn"]
            uvicorn.main(words[3:])

        mlflow.server._exec_cmd = run  # type: ignore[attr-defined]
        cli(list(command[3:]))
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


class MlflowServer:
    """Always on the same port, with the same database, and artifacts that it keeps itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: Any = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        arguments = ["--port", str(self.port), "--artifacts-destination", str(self.folder / "kept")]
        database = TrackingSettings(uri=f"sqlite:///{self.folder / 'mlflow.db'}", root=self.folder)
        command = ui_command(database, arguments)
        environment = os.environ | command.environment
        environment.pop("MLFLOW_DEFAULT_ARTIFACT_ROOT", None)
        self._process = FORKS.Process(
            target=_serve, args=(command.command, environment, str(self.folder / "log")), daemon=True
        )
        self._process.start()
        for _ in range(STARTUP_SECONDS * 5):
            assert self._process.is_alive(), (self.folder / "log").read_text()
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
            self._process.join(60)
            assert not self._process.is_alive(), "it does not end"
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)
