"""The batch script of `plait launch slurm`, run with a stand-in for srun, whose tasks are forked here."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import ForkedSearch

from plait.cli.main import main

# Notes what it is given, for the test to start as tasks, and ends well.
SRUN = """#!{python}
import json, os, sys
with open("given", "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
"""
SEARCH = ("adapter.rank=1,2,3", "search.sampler=grid", "search.name=mine")


def tasks(folder: Path, number: int) -> list[ForkedSearch]:
    """The tasks that srun would start of what it was given, with the variables that Slurm sets."""
    given, environment = json.loads((folder / "given").read_text())
    command = [word for word in given if not word.startswith("--")]
    assert command[:3] == [sys.executable, "-m", "plait"]
    own = {
        "SLURM_STEP_NUM_TASKS": str(number),
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "here[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": str(number),
    }
    each = [{"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(number)]
    return [
        ForkedSearch(command[3:], folder, f"task-{at}", environment | own | it) for at, it in enumerate(each)
    ]


def stand_in(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.mark.slow
def test_the_script_runs_the_search_in_the_tasks_of_srun(
    folder: Path, short: tuple[str, ...], leaderboard: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--tasks-per-node", "3", "--gpus-per-task", "0", "--time", "1:00:00", "--partition", "cpu"]
    options += ["--cpus-per-task", "3"]
    assert main(["launch", "slurm", *options, *short, *SEARCH]) == 0
    said = capsys.readouterr().out
    assert "Submit it with: sbatch mine.sbatch" in said
    assert "Without --time" not in said
    subprocess.run(["bash", "-n", "mine.sbatch"], check=True)
    script = (folder / "mine.sbatch").read_text()
    asked = {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert {"nodes=1", "ntasks-per-node=3", "time=1:00:00", "partition=cpu", "requeue"} <= asked
    assert not any("gpus" in each for each in asked)
    assert "\nsrun --kill-on-bad-exit=0 --wait=0 --cpus-per-task=3 " in script
    stand_in(folder, "srun", SRUN.format(python=sys.executable))
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash", "mine.sbatch"], env=environment, check=True)
    started = tasks(folder, 3)
    assert [task.end() for task in started] == [0, 0, 0], [task.output for task in started]
    assert "3 processes" in started[0].output
    assert len(leaderboard()) == 3


def test_an_interrupted_search_is_queued_again(
    folder: Path, short: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "slurm", *short, *SEARCH, "--to", "again.sbatch"]) == 0
    said = capsys.readouterr().out
    assert "Without --time, the job gets the partition's default limit" in said
    assert "120 s before its time limit, the search saves everything" in said
    assert "Its output goes to mine-JOB.log in the folder in which you submit it" in said
    again = "requeue 77\n"
    cases = [(130, 9, again), (3, 0, None), (137, 0, again), (137, 2, again), (137, 3, None)]
    for status, restarts, queued in cases:
        stand_in(folder, "srun", f"#!/bin/sh\nexit {status}\n")
        stand_in(folder, "scontrol", '#!/bin/sh\necho "$@" > queued\n')
        environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
        if restarts:  # Slurm does not set it the first time
            environment["SLURM_RESTART_COUNT"] = str(restarts)
        run = subprocess.run(["bash", "again.sbatch"], env=environment, check=False)
        assert run.returncode == (0 if queued else status)
        assert (Path("queued").read_text() if queued else None) == queued
        Path("queued").unlink(missing_ok=True)


@pytest.mark.parametrize(
    "limit", ["5", "5:00", "0:05:00", "1-0", "0-0:05", "1-00:00:00", "UNLIMITED", "INFINITE"]
)
def test_limits_that_slurm_reads_are_written_as_they_are(
    limit: str, folder: Path, short: tuple[str, ...]
) -> None:
    assert main(["launch", "slurm", "--time", limit, *short, *SEARCH]) == 0
    assert f"#SBATCH --time={limit}\n" in (folder / "mine.sbatch").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slrum"], "Did you mean plait launch slurm?"),
        (["slurm", "nothing"], "search 'nothing' is not in"),
        (["slurm", "one", "two"], "A script runs one search"),
        (["slurm", "cluster.processes=4"], "--nodes and --tasks-per-node"),
        (["slurm", "adapter.rnak=3"], "adapter.rnak"),
        (["slurm", "--time", "abc"], "'abc' is no limit of Slurm's: write [DAYS-]HOURS:MINUTES:SECONDS"),
        (["slurm", "--time", "1-2:3:4:5"], "no limit of Slurm's"),
        (["slurm", "--time", "0:04:59"], "0:04:59 is less than 5 minutes"),
        (["slurm", "--time", "4:30"], "less than 5 minutes"),
        (["slurm", "--time", "0"], "less than 5 minutes"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_bad_arguments_are_refused_before_a_script_is_written(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(Path.cwd().glob("*.sbatch"))
