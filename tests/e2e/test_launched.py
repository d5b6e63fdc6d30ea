"""The same command in several processes that a launcher has started: torchrun, DeepSpeed's, srun by their
variables."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked import HANGS, Forked
from processes import ForkedSearch

from plait.cli.main import main

SEARCH = ("adapter.rank=1,2,3", "search.sampler=grid", "search.name=mine", "adapter.dropout=0.1")
KEY = "a key that both hosts share"


def objectives(leaderboard: Any) -> dict[str, float]:
    return {row["trial"]: row["objective"] for row in leaderboard()}


def alone(folder: Path, command: list[str], leaderboard: Any) -> dict[str, float]:
    """What one process trains; nothing of it stays."""
    assert main(command) == 0
    found = objectives(leaderboard)
    shutil.rmtree(folder / "plait-runs" / "searches")
    assert len(found) == 3
    return found


def hosts(number: int, port: int, **more: str) -> Mapping[str, str]:
    """Variables of one of two hosts, as DeepSpeed's launcher sets them."""
    own = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    return own | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PLAIT_KEY": KEY} | more


@pytest.fixture
def port() -> int:
    """The first of two ports that are free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, suppress(OSError, OverflowError):
            found = int(first.getsockname()[1])
            socket.create_server(("127.0.0.1", found + 1)).close()
            return found


@pytest.mark.slow
def test_torchrun_starts_processes_that_train_what_one_does(
    folder: Path, short: tuple[str, ...], leaderboard: Any
) -> None:
    command = ["sweep", *short, *SEARCH, "train.eval_every=1"]
    expected = alone(folder, command, leaderboard)
    words = ["--nproc-per-node", "2", "--max-restarts", "0", "-m", "plait", *command, "search.fresh=true"]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words], capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 processes" in run.stdout
    assert objectives(leaderboard) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_two_hosts_with_a_key_train_what_one_does(
    folder: Path, short: tuple[str, ...], leaderboard: Any, port: int
) -> None:
    command = ["sweep", *short, *SEARCH, "train.eval_every=1"]
    expected = alone(folder, command, leaderboard)
    command += ["search.fresh=true", f"cluster.port={port}", "cluster.join_seconds=240"]
    runs = [ForkedSearch(command, folder, f"host-{number}", hosts(number, port)) for number in range(2)]
    assert [run.end() for run in runs] == [0, 0], [run.output for run in runs]
    assert objectives(leaderboard) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_wrong_key_is_refused_and_one_who_waits_for_others_can_be_interrupted(
    short: tuple[str, ...], port: int
) -> None:
    command = ["sweep", *short, *SEARCH, f"cluster.port={port}", "cluster.join_seconds=250"]
    keys = (KEY, "another key of another run")
    first, second = (
        Forked(command, log=f"host-{number}", environment=hosts(number, port, PLAIT_KEY=key))
        for number, key in enumerate(keys)
    )
    assert second.end() == 2
    named = f"process 1 ({os.uname().nodename}): the coordinator at 127.0.0.1:{port} has a different key"
    assert named in second.output
    first.until("Loading the model")
    started = psutil.Process(first.pid).children(recursive=True)
    first.signal(signal.SIGINT)
    assert first.end() == 130, first.output
    psutil.wait_procs(started, timeout=HANGS)
    assert not any(each.is_running() for each in started)


@pytest.mark.usefixtures("folder")
def test_hosts_without_a_key_are_refused_before_anything_else(
    short: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], port: int
) -> None:
    for number in range(2):
        for name, value in hosts(number, port).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("PLAIT_KEY")
        assert main(["sweep", *short, *SEARCH]) == 2
        said = capsys.readouterr().err
        assert "processes on several hosts without a key" in said
        assert "openssl rand -hex 32" in said


@pytest.mark.usefixtures("folder")
def test_a_process_whose_coordinator_does_not_come_says_where_it_looked(
    short: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], port: int
) -> None:
    for name, value in hosts(1, port).items():
        monkeypatch.setenv(name, value)
    assert main(["sweep", *short, *SEARCH, "cluster.join_seconds=1", f"cluster.port={port}"]) == 2
    said = capsys.readouterr().err
    assert f"process 1 ({os.uname().nodename}): the coordinator at 127.0.0.1:{port} does not answer" in said
    assert main(["sweep", *short, *SEARCH, "cluster.processes=3"]) == 2
    assert "cluster.processes=3 in 2 launched processes" in capsys.readouterr().err
