"""`plait ui` before it starts a server."""

import socket
from pathlib import Path

import pytest

from plait.cli.results import ui
from plait.core.errors import ConfigError
from plait.core.settings import TrackingSettings
from plait.tracking import UiCommand, check_port, ui_command


def command(folder: Path, port: object) -> UiCommand:
    return ui_command(TrackingSettings(root=folder), ["--port", str(port)])


def test_a_port_in_use_names_another(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            ui(["--root", str(tmp_path), "--port", str(port)])
    assert caught.value.value == f"http://127.0.0.1:{port} is taken"
    assert f"plait ui --port {port + 1}" in caught.value.remedy


def test_a_free_port_passes_and_what_is_no_port_is_left_to_mlflow(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    check_port(command(tmp_path, port))
    socket.create_server(("127.0.0.1", port)).close()  # the check holds it no longer
    no_port = command(tmp_path, "5001x")
    check_port(no_port)
    assert "5001x" in no_port.command


def test_pages_of_a_server_need_no_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_port(UiCommand(f"http://127.0.0.1:{port}"))
        with pytest.raises(ConfigError, match="is taken"):
            check_port(command(tmp_path, port))  # pages of our own do
