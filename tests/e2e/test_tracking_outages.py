"""A tracking server, a database and a disk that fail during a real search: nothing waits, nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import optuna
import pytest
from forked import Forked, ImpatientSearch
from mlflow import MlflowClient
from mlflow_server import MlflowServer, free_port
from postgresql import postgresql_server

from plait.cli.main import main
from plait.search.storage import open_storage
from plait.tracking.event_log import free_logs
from plait.tracking.writer import FIRST_DELAY
from plait.utils.addresses import with_driver

STEPS, TRIALS = 20, 4


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, too, a store that does not answer is tried again sooner."""
    monkeypatch.setattr("plait.tracking.writer.FIRST_DELAY", FIRST_DELAY / 10)


@pytest.fixture
def begin() -> Iterator[Callable[..., Forked]]:
    """Begins a sweep, of which nothing is left after the test."""
    begun: list[Forked] = []

    def make(arguments: Sequence[str], **environment: str) -> Forked:
        log = f"sweep-{len(begun)}.log"
        begun.append(ImpatientSearch(["sweep", *arguments], log=log, environment=environment))
        return begun[-1]

    yield make
    for sweep in begun:
        sweep.kill()


def search(short: Sequence[str], address: str) -> list[str]:
    """Four trials, one after the other, with checkpoints every few steps."""
    return [
        *short, f"train.steps={STEPS}", "adapter.rank=1,2", "train.lr=1e-3,1e-2", "search.sampler=grid",
        f"search.trials={TRIALS}", "search.parallel=1", "search.name=mine", f"tracking.uri={address}",
        "tracking.flush_seconds=0.1", "engine.checkpoint_steps=10",
    ]  # fmt: skip


def check_complete(address: str) -> None:
    """Every trial is there once, finished, with every step once, its evaluation and its adapter."""
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("plait")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert {run.data.tags["plait.state"] for run in runs} == {"finished"}
    children = {run.data.tags["plait.job"]: run for run in runs if "plait.trial" in run.data.tags}
    assert sorted(children) == [f"trial-{trial:04d}" for trial in range(TRIALS)]
    assert len(runs) == TRIALS + 1
    (parent,) = (run for run in runs if "plait.trial" not in run.data.tags)
    board = Path(client.download_artifacts(parent.info.run_id, "leaderboard.json"))
    table = json.loads(board.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert sorted(row["trial"] for row in rows) == list(range(TRIALS))
    assert all(row["tokens"] and row["objective"] for row in rows)
    assert parent.data.metrics["search/ended"] == TRIALS
    for run in children.values():
        for key in ("train/loss", "train/lr", "train/tokens"):
            points = client.get_metric_history(run.info.run_id, key)
            assert sorted(point.step for point in points) == list(range(1, STEPS + 1))
        for key in ("eval/loss", "objective"):
            assert len(client.get_metric_history(run.info.run_id, key)) == 1
        files = [item.path for item in client.list_artifacts(run.info.run_id, "adapter")]
        assert "adapter/adapter_model.safetensors" in files


def waiting(folder: Path) -> int:
    """Records that no store has, in all event logs that nobody has open."""
    logs = list(free_logs(folder / "plait-runs" / "searches" / "mine" / "events"))
    for log in logs:
        log.close()
    return sum(log.waiting for log in logs)


@pytest.mark.slow
def test_a_server_that_comes_and_goes_and_a_search_that_is_killed(
    folder: Path,
    short: tuple[str, ...],
    begin: Callable[..., Forked],
    server: MlflowServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = search(short, server.url)
    first = begin(arguments)
    first.until("trial-0000 finished")
    server.kill()
    first.until("trial-0001 finished")  # the search continues without it
    first.signal(signal.SIGKILL)
    assert first.end() == -signal.SIGKILL
    assert waiting(folder) > STEPS

    second = begin(arguments)  # and begins without it
    second.until("sent when it answers")
    second.until("trial-0002 started")
    second.signal(signal.SIGSTOP)  # a tiny search would be over before the server is back
    server.start()
    second.signal(signal.SIGCONT)
    second.until("trial-0003 started")
    server.kill()
    assert second.end() == 0, second.output
    assert f"have not been sent to {server.url} yet" in second.output
    assert "run the same command again to send them when the store answers" in second.output
    assert "urllib3" not in first.output + second.output
    left = waiting(folder)
    assert left > STEPS

    assert main(["sweep", *arguments]) == 0  # what it came to is known without the server
    said = capsys.readouterr().out
    assert f"have not been sent to {server.url} yet" in said
    assert "mine is finished" in said
    assert waiting(folder) == left
    address = ("--uri", server.url)
    assert main(["leaderboard", "mine", "--format", "json", *address]) == 0
    printed = capsys.readouterr()
    assert "no answer" in printed.err
    without = {row["trial"]: (row["objective"], row["adapter.rank"]) for row in json.loads(printed.out)}
    for words in (["leaderboard", "other"], ["leaderboard"], ["report", "mine"]):
        assert main([*words, *address]) == 2
        told = capsys.readouterr().err
        assert "Start it (mlflow server)" in told
        assert ("`plait leaderboard mine` shows" in told) == ("report" in words)
    server.start()
    assert main(["sweep", *arguments]) == 0
    assert "not in" not in capsys.readouterr().out
    assert waiting(folder) == 0
    check_complete(server.url)
    assert main(["leaderboard", "mine", "--format", "json", *address]) == 0
    printed = capsys.readouterr()
    assert "no answer" not in printed.err
    rows = json.loads(printed.out)
    assert {row["trial"]: (row["objective"], row["adapter.rank"]) for row in rows} == without
    server.stop()
    assert main(["sweep", *arguments]) == 0  # nothing is left to be sent
    assert "answer" not in capsys.readouterr().out


@pytest.mark.slow
def test_an_outage_and_its_end_are_each_one_short_line(
    folder: Path, short: tuple[str, ...], begin: Callable[..., Forked], server: MlflowServer
) -> None:
    """Also where training ends before the next attempt."""
    sweep = begin([*search(short, server.url), "train.steps=20000"], MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    sweep.until("trial-0000 started")
    server.kill()
    sweep.until("does not answer")
    sweep.signal(signal.SIGSTOP)
    server.start()
    sweep.signal(signal.SIGCONT)
    sweep.signal(signal.SIGINT)
    assert sweep.end() == 130, sweep.output
    (line,) = (line for line in sweep.output.splitlines() if "does not answer" in line)
    refused = f"{server.url} does not answer ({server.url.removeprefix('http://')}: Connection refused)."
    assert refused in line
    assert sweep.output.count(f"{server.url} answers again") == 1
    assert waiting(folder) == 0


def test_a_first_start_without_its_server_is_refused_and_begins_nothing(
    folder: Path, short: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    for _ in range(2):
        assert main(["sweep", *search(short, address)]) == 2
        assert f"tracking.uri={address}: no answer" in capsys.readouterr().err
    assert not (folder / "plait-runs" / "searches" / "mine").exists()
    assert optuna.get_all_study_names(open_storage(None, folder / "plait-runs")) == []


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once_though_the_server_died_in_mid_request(
    folder: Path, short: tuple[str, ...], begin: Callable[..., Forked], server: MlflowServer
) -> None:
    """A request that nobody answers would be waited for, and tried again, for hours."""
    patient = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10000", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "9"}
    sweep = begin([*search(short, server.url), "train.steps=20000"], **patient)
    sweep.until("trial-0000 started")
    server.hang()
    sweep.signal(signal.SIGINT)
    sweep.until("trial-0000 paused (interrupted)")
    time.sleep(1)  # until it waits for the server
    server.kill()
    sweep.signal(signal.SIGINT)
    assert sweep.end() == 130, sweep.output
    assert sweep.output.splitlines()[-1].startswith("Interrupted."), sweep.output
    assert waiting(folder) > 0


@pytest.mark.slow
@pytest.mark.postgres
def test_a_database_that_is_stopped_and_started_holds_up_nothing_and_misses_nothing(
    folder: Path, short: tuple[str, ...], begin: Callable[..., Forked], capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the runs. Training continues without it; what it did not get, it gets from the same command."""
    with postgresql_server() as server:
        address = server.new_database()
        arguments = search(short, address)
        sweep = begin(arguments)
        sweep.until("trial-0001 started")
        server.stop()
        sweep.until("trial-0002 started")
        sweep.signal(signal.SIGSTOP)
        server.start()
        sweep.signal(signal.SIGCONT)
        sweep.until("trial-0003 started")
        server.stop()
        assert sweep.end() == 0, sweep.output
        assert "secret" not in sweep.output
        assert "records have not been sent to postgresql" in sweep.output
        assert waiting(folder) > STEPS
        server.start()
        assert main(["sweep", *arguments]) == 0
        assert "not in" not in capsys.readouterr().out
        assert waiting(folder) == 0
        check_complete(with_driver(address))


@pytest.mark.slow
@pytest.mark.postgres
def test_a_study_in_a_database_that_is_stopped_and_started_waits_for_it(
    folder: Path, short: tuple[str, ...], begin: Callable[..., Forked]
) -> None:
    """With rungs it is asked between any two iterations."""
    rungs = ("search/stopping=threshold", "search.stopping.metric=train/loss", "search.stopping.upper=100")
    with postgresql_server() as server:
        local = f"sqlite:///{folder / 'plait-runs' / 'mlflow.db'}"
        database = f"search.storage={server.new_database()}"
        sweep = begin([*search(short, local), database, *rungs, "search.parallel=2"])
        sweep.until("trial-0001 started")
        server.stop()
        sweep.until("storage is unavailable")
        server.start()
        assert sweep.end() == 0, sweep.output
        check_complete(local)


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 96 MiB at the folder of the runs."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system to fill it")
    runs = folder / "plait-runs"
    shutil.move(runs / "mlflow.db", folder)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(runs)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    shutil.copy(folder / "mlflow.db", runs)
    yield runs
    subprocess.run(["umount", "--lazy", str(runs)], check=True)  # this process has the database open


def fill(folder: Path) -> Path:
    """Leave no room on the disk of a folder."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


@pytest.mark.slow
def test_a_full_disk_is_reported_and_the_search_continues_when_there_is_space(
    short: tuple[str, ...], small_disk: Path, begin: Callable[..., Forked]
) -> None:
    local = f"sqlite:///{small_disk / 'mlflow.db'}"
    arguments = search(short, local)
    sweep = begin(arguments)
    sweep.until("trial-0001 started")
    sweep.signal(signal.SIGSTOP)
    ballast = fill(small_disk)
    sweep.signal(signal.SIGCONT)
    assert sweep.end() == 2, sweep.output
    assert "No space left on device" in sweep.output
    assert "run the same command again" in sweep.output
    assert "Traceback" not in sweep.output
    ballast.unlink()
    assert main(["sweep", *arguments]) == 0
    check_complete(local)
