"""Two hosts as network namespaces of this machine, with latency and a bandwidth limit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import slow_link

from plait.cli.main import main

FIRST, SECOND = "10.77.0.1", "10.77.0.2"
CONTROL = ("29610", "29611")  # ports of the coordinator and its store
KEY = "a key that both hosts share"
HANGS = 300.0
DELAY, RATE = 0.002, 100e6  # seconds in each direction, bits a second
COMMAND = [
    "sweep", "model=tiny", "data.task=chain_sum", "data.size=24", "data.validation=4", "train.batch_size=2",
    "adapter.dropout=0.1", "adapter.rank=1,2", "search.sampler=grid", "search.name=mine", "engine.threads=1",
    "train.steps=150", "engine.checkpoint_steps=10", "engine.kernels=grouped",
]  # fmt: skip


def permitted() -> bool:
    tools = shutil.which("ip") and os.access("/dev/net/tun", os.W_OK)
    if "PLAIT_FAULTS" not in os.environ or not tools or os.geteuid() != 0:
        return False
    name = f"plait-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True)
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return made.returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not permitted(), reason="PLAIT_FAULTS=1 runs it, for minutes, as one who may make network namespaces"
    ),
]


class Hosts:
    """Two hosts and the link between them."""

    def __init__(self) -> None:
        self.names = [f"plait-{side}-{os.getpid()}" for side in "ab"]
        self._started: list[subprocess.Popen[str]] = []
        for name in self.names:
            self._ip("netns", "add", name)
            self._ip("-n", name, "link", "set", "lo", "up")
        ends = [f"{name}={address}" for name, address in zip(self.names, (FIRST, SECOND), strict=True)]
        words = [sys.executable, slow_link.__file__, *ends, str(DELAY), str(RATE), *CONTROL]
        self._link = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._link.stdout is not None
        assert self._link.stdout.readline() == "open\n"

    def _ip(self, *words: str) -> None:
        self._run("ip", *words)

    @staticmethod
    def _run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)

    def start(self, number: int, folder: Path, log: str, key: str, *more: str) -> subprocess.Popen[str]:
        """Start the search on one of them, as a launcher does."""
        own = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        own |= {"MASTER_ADDR": FIRST, "MASTER_PORT": "29500", "PLAIT_KEY": key}
        words = ["ip", "netns", "exec", self.names[number], sys.executable, "-m", "plait", *COMMAND, *more]
        with (folder / log).open("w") as output:
            self._started.append(
                subprocess.Popen(
                    words, cwd=folder, env=os.environ | own, stdout=output, stderr=output, text=True
                )
            )
        return self._started[-1]

    def cut(self) -> None:
        """Take the second host from the network: nothing says that it is gone."""
        self._ip("-n", self.names[1], "link", "set", slow_link.DEVICE, "down")

    def toggle_exchange(self) -> None:
        """Cut the processes off from each other, but not from the coordinator; the next call mends that."""
        self._link.send_signal(signal.SIGUSR1)

    def close(self) -> None:
        for each in (*self._started, self._link):
            each.kill()
            each.wait()
        for name in self.names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in found.stdout.split():
                subprocess.run(["kill", "-9", pid], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    yield made
    made.close()


def until(log: Path, text: str, running: Sequence[subprocess.Popen[str]] = ()) -> None:
    end = time.monotonic() + HANGS
    while text not in log.read_text():
        assert time.monotonic() < end, log.read_text()
        assert all(each.poll() is None for each in running), log.read_text()
        time.sleep(0.05)


def until_saved(folder: Path, running: Sequence[subprocess.Popen[str]]) -> None:
    """Until a job that trains on both has a checkpoint to go on from."""
    end = time.monotonic() + HANGS
    while not list(folder.glob("plait-runs/searches/mine/checkpoints/*/*/step-*/checkpoint.json")):
        assert time.monotonic() < end
        assert all(each.poll() is None for each in running)
        time.sleep(0.05)


def test_a_search_on_two_hosts_refuses_a_wrong_key_and_outlives_the_loss_of_one(
    hosts: Hosts,
    folder: Path,
    place: Callable[[str], Path],
    leaderboard: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = ["cluster.silence_seconds=5", "cluster.join_seconds=150"]  # imports of three beside other work
    first = hosts.start(0, folder, "first", KEY, *limits)
    wrong = hosts.start(1, folder, "wrong", "another key of another run", *limits)
    hosts.start(1, folder, "second", KEY, *limits)
    assert wrong.wait(HANGS) == 2
    assert f"the coordinator at {FIRST}:29610 has a different key" in (folder / "wrong").read_text()
    until(folder / "first", "2 processes", [first])
    until(folder / "first", "trial-0000 started", [first])
    until_saved(folder, [first])
    hosts.cut()
    until(folder / "first", "was silent for", [first])
    assert first.wait(HANGS) == 0, (folder / "first").read_text()
    assert "1 process trains again" in (folder / "first").read_text()
    found = {row["trial"]: row["objective"] for row in leaderboard()}
    monkeypatch.chdir(place("alone"))
    assert main(COMMAND) == 0
    assert found == pytest.approx({row["trial"]: row["objective"] for row in leaderboard()}, rel=1e-5)


def test_a_network_that_fails_between_processes_alone_is_noticed_within_the_limit(
    hosts: Hosts,
    folder: Path,
    place: Callable[[str], Path],
    leaderboard: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = ["cluster.silence_seconds=10", "cluster.join_seconds=150"]
    first = hosts.start(0, folder, "first", KEY, *limits)
    hosts.start(1, folder, "second", KEY, *limits)
    until(folder / "first", "trial-0000 started", [first])
    until_saved(folder, [first])
    hosts.toggle_exchange()
    cut = time.monotonic()
    until(folder / "first", "while training: the link to the other processes broke", [first])
    assert time.monotonic() - cut < 10.0 + 20.0  # what the kernel and this machine add
    hosts.toggle_exchange()
    assert first.wait(HANGS) == 0, (folder / "first").read_text()
    assert "2 processes train again" in (folder / "first").read_text()
    found = {row["trial"]: row["objective"] for row in leaderboard()}
    monkeypatch.chdir(place("alone"))
    assert main(COMMAND) == 0
    assert found == pytest.approx({row["trial"]: row["objective"] for row in leaderboard()}, rel=1e-5)
