"""The batch script of `plait launch slurm` under a real Slurm: its daemons run here, with one node.

Nothing of Slurm's has to be installed: without its programs the test is skipped. On Debian they are in
slurm-wlm and munge.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from plait.cli.main import main

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
MISSING = [each for each in PROGRAMS if shutil.which(each, path=PATH) is None]
SECONDS = 180.0  # for whatever is waited for
CONF = """ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName=node NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=node Default=YES MaxTime=INFINITE State=UP
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Slurm of one node; its daemons end with the test."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # the path of a socket must be short
    folder.chmod(0o755)  # else munged refuses it
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "state").mkdir()
    ports = {"port": free_port(), "node_port": free_port()}
    text = CONF.format(
        folder=folder, host=socket.gethostname().split(".")[0], user=getpass.getuser(), **ports
    )
    (folder / "slurm.conf").write_text(text)
    monkeypatch.setenv("PATH", PATH)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    files = {"key-file": "munge.key", "seed-file": "seed", "log-file": "munged.log", "socket": "munge.socket"}
    munged = ["munged", "--foreground", *(f"--{name}={folder / file}" for name, file in files.items())]
    munged += [f"--pid-file={folder / 'munged.pid'}"]
    daemons = []
    try:
        for command in (munged, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "node"]):
            with (folder / f"{command[0]}.out").open("wb") as out:
                daemons.append(subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True))
            time.sleep(1)
        wait_for("idle", "sinfo", "--noheader", "--format=%T")
        yield
    finally:
        subprocess.run(["scancel", "--full", "--user", getpass.getuser()], check=False, timeout=10)
        for each in reversed(daemons):
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGTERM)
            each.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


def said(*command: str) -> str:
    """What a command of Slurm's prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


def wait_for(text: str, *command: str) -> None:
    """Ask again and again, until a text is in the answer."""
    end = time.monotonic() + SECONDS
    while text not in (answer := said(*command)):
        assert time.monotonic() < end, f"{text} is not in {answer}"
        time.sleep(0.3)


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: {', '.join(MISSING)}")
@pytest.mark.usefixtures("slurm")
def test_a_job_that_is_queued_again_resumes_and_ends(
    folder: Path, short: tuple[str, ...], leaderboard: Any
) -> None:
    options = ["--tasks-per-node", "2", "--gpus-per-task", "0", "--time", "1:00:00"]
    search = ["adapter.rank=1,2", "search.sampler=grid", "search.name=mine", "train.steps=200"]
    assert main(["launch", "slurm", *options, *short, *search]) == 0
    job = said("sbatch", "--parsable", "mine.sbatch").strip()
    log = folder / f"mine-{job}.log"
    log.touch()
    wait_for("% done", "cat", str(log))
    said("scontrol", "requeue", job)
    wait_for("PENDING", "squeue", "--noheader", "--jobs", job, "--format=%T")
    said("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm would wait for two minutes
    wait_for("JobState=COMPLETED", "scontrol", "show", "job", job)
    printed = log.read_text()
    assert printed.count("2 processes, engine.threads=1 each") == 2, printed
    assert "resuming 2" in printed
    assert "from step 0 " not in printed
    assert [(each["state"], each["steps"]) for each in leaderboard()] == [("finished", 200)] * 2
