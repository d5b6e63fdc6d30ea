"""Where launchers put a process, by the variables they set, and the keys of runs on several hosts."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from plait.core.errors import ConfigError
from plait.core.settings import ClusterSettings
from plait.distributed.places import (
    Meeting,
    Place,
    announce,
    find_place,
    first_host,
    interface_of,
    meeting_file,
    read_meeting,
    retract,
    shared_key,
    tasks_per_host,
)

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500", "CROSS_RANK": "0", "CROSS_SIZE": "1",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "5", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "gpu[03-04,09]", "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9", "SLURM_NTASKS": "5",
}  # fmt: skip


def test_each_launcher_says_where_a_process_is() -> None:
    assert find_place(TORCHRUN) == Place(3, 4, 1, 2, "gpu1", "gpu1-29500-none")
    deepspeed = find_place(DEEPSPEED)
    assert deepspeed == Place(1, 2, 1, 2, "127.0.0.1", "127.0.0.1-29500-")
    assert deepspeed.one_host
    assert find_place(SRUN) == Place(4, 5, 0, 1, "gpu03", "slurm-77-0")


def test_one_process_has_no_place_in_a_launch() -> None:
    assert find_place({}) is None
    assert find_place({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a"}) is None
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77", "SLURM_NODEID": "0"}
    assert find_place(batch) is None  # the script of a job, in which srun starts the processes


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (TORCHRUN | {"RANK": "4"}, "process 4 of 4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "5"}, "5 of them on this host"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2x2"}, "SLURM_STEP_TASKS_PER_NODE=2x2"),
    ],
)
def test_variables_that_make_no_sense_are_named(variables: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        find_place(variables)


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[03-07,9],cpu1", "gpu03"),
        ("a[1,5]-ib,b", "a1-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_slurms_lists(names: str, first: str) -> None:
    assert first_host(names) == first


def test_slurms_tasks_per_host() -> None:
    assert tasks_per_host("4(x2),3") == [4, 4, 3]
    assert tasks_per_host("8") == [8]


def test_the_interface_that_has_an_address() -> None:
    assert interface_of("127.0.0.1") == {"linux": "lo", "darwin": "lo0"}[sys.platform]
    assert interface_of("192.0.2.1") is None


# ---- keys ----------------------------------------------------------------------------------------------


def test_a_key_comes_from_the_variable_or_from_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "plait.key"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    named = ClusterSettings(key_file=str(file))
    assert shared_key(named, {}) == b"0123456789abcdef"
    assert shared_key(named, {"PLAIT_KEY": "another key, a long one"}) == b"another key, a long one"
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 640") as caught:
        shared_key(named, {})
    assert "chmod 600" in caught.value.remedy


@pytest.mark.parametrize(
    ("variables", "named"), [({}, "without a key"), ({"PLAIT_KEY": "short"}, "PLAIT_KEY: 5 characters")]
)
def test_without_a_good_key_hosts_do_not_meet(variables: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        shared_key(ClusterSettings(), variables)
    assert "cluster.key_file" in caught.value.remedy


def test_a_key_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        shared_key(ClusterSettings(key_file=str(tmp_path / "missing")), {})
    assert "openssl rand" in caught.value.remedy


def test_a_key_file_may_be_below_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "plait.key"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert shared_key(ClusterSettings(key_file="~/plait.key"), {}) == b"0123456789abcdef"


def test_on_one_host_processes_meet_by_a_file_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = find_place(DEEPSPEED)
    assert place is not None
    assert read_meeting(place, ClusterSettings()) is None
    meeting = Meeting(("127.0.0.1", 4321), b"0123456789abcdef")
    assert announce(place, meeting).stat().st_mode & 0o777 == 0o600
    assert read_meeting(place, ClusterSettings()) == meeting
    meeting_file(place).parent.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        read_meeting(place, ClusterSettings())


def test_two_runs_that_a_launcher_calls_the_same_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = find_place(DEEPSPEED)
    assert place is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = Meeting(listener.getsockname(), b"0123456789abcdef")
        file = announce(place, first)
        second = Meeting(("127.0.0.1", 1), b"fedcba9876543210")
        with pytest.raises(ConfigError, match="a run listens"):
            announce(place, second)
    announce(place, second)  # what a killed one left
    retract(file, first)
    assert read_meeting(place, ClusterSettings()) == second
    retract(file, second)
    assert not file.exists()


def test_on_several_hosts_they_meet_where_launcher_or_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_KEY", "0123456789abcdef")
    place = find_place(SRUN)
    assert place is not None
    assert read_meeting(place, ClusterSettings(port=4000)) == Meeting(("gpu03", 4000), b"0123456789abcdef")
    own = ClusterSettings(address="10.1.1.1")
    assert read_meeting(place, own) == Meeting(("10.1.1.1", 29610), b"0123456789abcdef")
