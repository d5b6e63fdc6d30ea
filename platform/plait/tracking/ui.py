"""MLflow's web pages on the store that Plait writes to."""

from __future__ import annotations

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
    host, port = _option(arguments, ("--host", "-h"), HOST), _option(arguments, ("--port", "-p"), PORT)
    command = [sys.executable, "-m", "mlflow", "server", *arguments]
    for options, value in ((("--host", "-h"), HOST), (("--port", "-p"), PORT), (("--workers", "-w"), "1")):
        if _option(arguments, options, "") == "":
            command += [options[0], value]
    environment = {
        "MLFLOW_BACKEND_STORE_URI": location.uri,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # workers for evaluations that Plait has no use for
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    if location.artifacts is not None:
        environment["MLFLOW_DEFAULT_ARTIFACT_ROOT"] = location.artifacts
    shown = "127.0.0.1" if host == "0.0.0.0" else host
    return UiCommand(f"http://{shown}:{port}", tuple(command), environment)


def check_port(command: UiCommand) -> None:
    """Raise where another program listens already at the address that the pages are to have.

    Raises:
        ConfigError: it does.
    """
    try:
        address = urlsplit(command.url)
        if command.command and address.hostname and address.port:
            socket.create_server((address.hostname, address.port)).close()
    except ValueError:
        return  # no port number, as MLflow will say
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


def _option(arguments: Sequence[str], spellings: Sequence[str], default: str) -> str:
    """Value of an option given as ``--port 5001``, ``--port=5001`` or ``-p 5001``."""
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in spellings:
            if equals:
                return value
            return arguments[at + 1] if at + 1 < len(arguments) else default
    return default
