"""MLflow's web pages on the store that Plait writes to."""

from __future__ import annotations

import argparse
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from plait.core.errors import ConfigError
from plait.core.settings import TrackingSettings
from plait.tracking.location import locate

HOST = "127.0.0.1"
PORT = "5000"
GRACE_SECONDS = 10


@dataclass(frozen=True, slots=True)
class UiCommand:
    """How the pages are served.

    Attributes:
        url: where they are.
        command: program and arguments; empty where a server shows them already.
        environment: what the program needs beside the present environment; addresses go this way, since
            a password on a command line can be read by everybody on the machine.
    """

    url: str
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict, hash=False)


def ui_command(settings: TrackingSettings, arguments: Sequence[str] = ()) -> UiCommand:
    """The command behind ``plait ui``; ``arguments`` are handed to ``mlflow server``.

    Raises:
        StorageError: an address of a kind that MLflow cannot serve.
    """
    location = locate(settings)
    if location.is_server:
        return UiCommand(str(location))
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for long, short, default in (("--host", "-h", HOST), ("--port", "-p", PORT), ("--workers", "-w", "1")):
        parser.add_argument(long, short, default=default)
    known, rest = parser.parse_known_args(arguments)
    command = [sys.executable, "-m", "mlflow", "server", *rest]
    for name, value in vars(known).items():
        command += [f"--{name}", value]
    environment = {
        "MLFLOW_BACKEND_STORE_URI": location.uri,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # workers for evaluations that Plait has no use for
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONSAFEPATH": "1",  # or a file mlflow.py of the current folder would run
    }
    if location.artifacts is not None:
        environment["MLFLOW_DEFAULT_ARTIFACT_ROOT"] = location.artifacts
    shown = HOST if known.host == "0.0.0.0" else known.host
    return UiCommand(f"http://{shown}:{known.port}", tuple(command), environment)


def check_port(command: UiCommand) -> None:
    """Make sure that the pages can have their address.

    Raises:
        ConfigError: its port is not a port, or another program uses it.
    """
    try:
        address = urlsplit(command.url)
        if command.command and address.hostname and address.port:
            socket.create_server((address.hostname, address.port)).close()
    except ValueError as error:
        raise ConfigError(
            command.url, "A port is a whole number from 1 to 65535.", f"Choose one: plait ui --port {PORT}"
        ) from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"{command.url} is taken",
                "Another program, perhaps an earlier `plait ui`, uses this port.",
                f"Choose another port: plait ui --port {address.port + 1 if address.port else PORT}",
            ) from error


def run_ui(command: UiCommand) -> int:
    """Serve the pages until interrupted.

    Returns:
        the server's exit status; 0 after an interrupt.
    """
    server = subprocess.Popen(command.command, env=os.environ | command.environment)
    try:
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        if server.poll() is None:
            server.terminate()
            try:
                server.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
