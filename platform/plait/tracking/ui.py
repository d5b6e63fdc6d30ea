"""MLflow's web pages for the store that Plait writes to."""

from __future__ import annotations

import argparse
import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import IO
from urllib.parse import urlencode, urlsplit

from plait.core.errors import ConfigError
from plait.core.objectives import MINIMISE
from plait.core.settings import SearchSettings, TrackingSettings
from plait.tracking import names
from plait.tracking.location import locate

SHARED_VIEW = "mlflow.sharedViewState."  # prefix of a tag; the key in the address follows
HOST = "127.0.0.1"
PORT = "5000"
ANYWHERE = {"0.0.0.0": HOST, "::": "::1"}  # where a server that listens on all addresses is reached
GRACE_SECONDS = 10
START_SECONDS = 60  # after which the address is shown although nothing has answered
LOOK_SECONDS = 0.1
MOST_SHOWN = 8000  # bytes of a failed server's output


@dataclass(frozen=True, slots=True)
class UiCommand:
    """How the pages are served.

    Attributes:
        url: address of the pages.
        command: program and arguments; empty if a server already shows them.
        environment: variables that the program needs in addition to the present ones; addresses are passed
            this way, because every user of the machine can read a password on a command line.
    """

    url: str
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict, hash=False)


def search_page(address: str, experiment_id: str, run_id: str) -> str:
    """The address of a search's trials in MLflow's table of runs, with the columns of
    :func:`page_settings`."""
    words = urlencode({"workflowType": "machine_learning", "viewStateShareKey": _share_key(run_id)})
    return f"{address}/#/experiments/{experiment_id}/runs?{words}"


def page_settings(run_id: str, search: SearchSettings, searched: Sequence[str]) -> tuple[str, str]:
    """How MLflow's pages show the trials of a search: a tag of the experiment in the form that the pages
    write when a user shares a view (MLflow 3.17).

    Args:
        run_id: id of the search's run.
        searched: searched config keys and groups.
    """
    first = search.objectives[0]
    metrics = dict.fromkeys([names.OBJECTIVE, names.EVAL_LOSS, names.TRAIN_LOSS, names.DEVICE_SECONDS])
    columns = [f"tags.`{names.TAG_STATE}`", *(f"metrics.`{each}`" for each in metrics)]
    columns += [f"params.`{key if '.' in key else f'{key}.source'}`" for key in searched]
    state = {
        "searchFilter": f"tags.`{names.TAG_PARENT}` = '{run_id}'",
        "orderByKey": f"metrics.`{names.OBJECTIVE}`",
        "orderByAsc": first.direction == MINIMISE,
        "selectedColumns": [*columns, "attributes.`Dataset`"],
    }
    return page_tag(run_id), json.dumps(state)


def page_tag(run_id: str) -> str:
    """The name of the experiment's tag for how the trials of a search's run are shown."""
    return f"{SHARED_VIEW}{_share_key(run_id)}"


def _share_key(run_id: str) -> str:
    return f"plait-{run_id[:16]}"


def ui_command(settings: TrackingSettings, arguments: Sequence[str] = ()) -> UiCommand:
    """The command that ``plait ui`` runs; ``arguments`` are passed to ``mlflow server``.

    Raises:
        StorageError: MLflow cannot serve this kind of address.
    """
    location = locate(settings)
    if location.is_server:
        return UiCommand(location.pages)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for long, short, default in (("--host", "-h", HOST), ("--port", "-p", PORT), ("--workers", "-w", "1")):
        parser.add_argument(long, short, default=default)
    known, rest = parser.parse_known_args(arguments)
    command = [sys.executable, "-m", "mlflow", "server", *rest]
    for name, value in vars(known).items():
        command += [f"--{name}", value]
    environment = {
        "MLFLOW_BACKEND_STORE_URI": location.uri,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # workers for evaluations, which Plait does not use
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONSAFEPATH": "1",  # otherwise a file mlflow.py in the current folder would run
    }
    if location.artifacts is not None:
        environment["MLFLOW_DEFAULT_ARTIFACT_ROOT"] = location.artifacts
    shown = ANYWHERE.get(known.host, known.host)
    shown = f"[{shown}]" if ":" in shown else shown
    return UiCommand(f"http://{shown}:{known.port}", tuple(command), environment)


def check_port(command: UiCommand) -> None:
    """Check that the address of the pages is free.

    Raises:
        ConfigError: the port is invalid, or another program uses it.
    """
    try:
        address = urlsplit(command.url)
        if command.command and address.hostname and address.port:
            family = socket.AF_INET6 if ":" in address.hostname else socket.AF_INET
            socket.create_server((address.hostname, address.port), family=family).close()
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


def run_ui(command: UiCommand, ready: Callable[[], None]) -> int:
    """Serve the pages until interrupted. What the server prints is shown only if it fails.

    Args:
        ready: called when the pages answer.

    Returns:
        The server's exit status; 0 after an interrupt.
    """
    with tempfile.TemporaryFile() as log:
        try:
            with serving(command, log) as (server, _):
                if server.poll() is None:
                    ready()
                status = server.wait()
        except KeyboardInterrupt:
            return 0
        if status:
            log.seek(0)
            sys.stderr.write(log.read()[-MOST_SHOWN:].decode(errors="replace"))
        return status


@contextmanager
def serving(command: UiCommand, log: IO[bytes]) -> Iterator[tuple[subprocess.Popen[bytes], bool]]:
    """The server's process, which writes to ``log``, and whether its pages answer: once they do, it has
    ended, or ``START_SECONDS`` have passed. It is ended afterwards."""
    server = subprocess.Popen(
        command.command, env=os.environ | command.environment, stdout=log, stderr=subprocess.STDOUT
    )
    try:
        yield server, _comes(command.url, server)
    finally:
        _end(server)


def _comes(url: str, server: subprocess.Popen[bytes]) -> bool:
    """Wait until the pages answer, the server has ended, or ``START_SECONDS`` have passed; whether they
    answer."""
    until = time.monotonic() + START_SECONDS
    while server.poll() is None:
        if _answers(url):
            return True
        if time.monotonic() >= until:
            break
        time.sleep(LOOK_SECONDS)
    return False


def _answers(url: str) -> bool:
    """Whether the pages answer, within a second."""
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or HOST, address.port, timeout=1)
    with closing(connection), suppress(OSError, HTTPException):
        connection.request("GET", "/health")
        connection.getresponse()
        return True
    return False


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server if it still runs."""
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
