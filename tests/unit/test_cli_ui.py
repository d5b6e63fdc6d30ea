"""`plait ui`: what is checked before it starts a server, and how it waits for it."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from plait.cli.results import ui
from plait.core.errors import ConfigError
from plait.core.settings import TrackingSettings
from plait.tracking.ui import UiCommand, check_port, run_ui, serving, ui_command

ROOT = Path(__file__).resolve().parents[2]


def command(folder: Path, port: object) -> UiCommand:
    return ui_command(TrackingSettings(root=folder), ["--port", str(port)])


def test_a_port_in_use_names_another(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            ui(["--root", str(tmp_path), "--port", str(port)])
    assert caught.value.value == f"http://127.0.0.1:{port} is taken"
    assert f"plait ui --port {port + 1}" in caught.value.remedy


def test_a_file_of_the_current_folder_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlflow.py").write_text("print('not MLflow')")
    served = command(tmp_path, 5000)
    program = "import importlib.util as u; print(u.find_spec('mlflow').origin)"
    done = subprocess.run(
        [served.command[0], "-c", program],
        env=os.environ | served.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(tmp_path) not in done.stdout


def test_nor_does_the_installer_run_one(tmp_path: Path) -> None:
    (tmp_path / "pip.py").write_text("open('ran', 'w')")
    python = tmp_path / "own" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["sh", str(ROOT / "scripts" / "install.sh")],
        cwd=tmp_path,
        env=os.environ | {"VENV": "own", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Installing Plait" in done.stdout
    assert "ERROR" in done.stderr, "pip has found no project here"
    assert not (tmp_path / "ran").exists()


def test_a_free_port_passes(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    check_port(command(tmp_path, port))
    socket.create_server(("127.0.0.1", port)).close()  # the check holds it no longer


@pytest.mark.parametrize(
    ("host", "shown"),
    [("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]"), ("localhost", "localhost")],
)
def test_the_address_of_a_host_can_be_opened(tmp_path: Path, host: str, shown: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    served = ui_command(TrackingSettings(root=tmp_path), ["--host", host, "--port", str(port)])
    assert served.url == f"http://{shown}:{port}"
    check_port(served)


@pytest.mark.parametrize("port", ["5001x", -1, 70000])
def test_an_invalid_port_is_refused_before_a_server_starts(tmp_path: Path, port: object) -> None:
    with pytest.raises(ConfigError, match="from 1 to 65535"):
        check_port(command(tmp_path, port))


def test_pages_of_a_server_need_no_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_port(UiCommand(f"http://127.0.0.1:{port}"))
        with pytest.raises(ConfigError, match="is taken"):
            check_port(command(tmp_path, port))  # pages of our own do


def test_the_address_is_shown_when_the_server_answers_and_its_output_only_if_it_fails(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    url, answers = f"http://127.0.0.1:{port}", []

    def ready() -> None:
        with urlopen(url) as answer:
            answers.append(answer.status)
        raise KeyboardInterrupt

    assert run_ui(UiCommand(url, (sys.executable, "-m", "http.server", str(port))), ready) == 0
    assert answers == [200]
    assert capfd.readouterr() == ("", "")
    failing = (sys.executable, "-c", "print('no such store'); raise SystemExit(3)")
    assert run_ui(UiCommand(url, failing), lambda: answers.append(0)) == 3
    assert answers == [200]
    assert capfd.readouterr().err == "no such store\n"


def test_a_server_that_has_answered_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, True])  # a third question would be an error
    monkeypatch.setattr("plait.tracking.ui._answers", lambda _: next(answers))
    asleep = UiCommand("http://127.0.0.1:9", (sys.executable, "-c", "import time; time.sleep(60)"))
    with (tmp_path / "log").open("wb") as log, serving(asleep, log) as (server, answered):
        assert answered
    assert server.returncode
