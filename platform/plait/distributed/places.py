"""Where a launcher has put this process, and where the processes of a run meet: variables and small files.

A seam: torchrun, DeepSpeed's launcher and srun are known here alone. Imports no torch: a process that only
keeps another one alive reads it, too.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from plait.core.errors import ConfigError
from plait.core.settings import ClusterSettings
from plait.utils.files import OWNER_ONLY, write_text
from plait.utils.paths import user_path

ADDRESS, KEY, NUMBER, LOCAL = "PLAIT_COORDINATOR", "PLAIT_KEY", "PLAIT_PROCESS", "PLAIT_LOCAL"
LEAST_KEY = 16  # characters
ANSWER_SECONDS = 2.0  # that another run of this host may take to accept
MAKE_KEY = "(umask 077; openssl rand -hex 32 > plait.key), then set cluster.key_file=plait.key on every host."
Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Place:
    """One of several processes that a launcher has started with the same command; number 0 coordinates.

    Attributes:
        number: from 0 to ``processes`` - 1.
        local: its number on its own host.
        here: how many of them are on its host.
        host: name or address of the host of number 0.
        run: tells this run from others on its host.
    """

    number: int
    processes: int
    local: int
    here: int
    host: str
    run: str

    @property
    def one_host(self) -> bool:
        """Whether all are on one host."""
        return self.here == self.processes


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place that a launcher's variables name; None if nothing, or a single process, was launched.

    torchrun and DeepSpeed's launcher set RANK and WORLD_SIZE, srun SLURM_PROCID and SLURM_STEP_NUM_TASKS. A
    batch script of Slurm has only the variables of its job: it is no step and joins none.

    Raises:
        ConfigError: a variable has no sensible value.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        found = _by_rank(environment)
    elif "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        found = _by_slurm(environment)
    else:
        return None
    if not 0 <= found.number < found.processes or not 1 <= found.here <= found.processes:
        raise ConfigError(
            f"process {found.number} of {found.processes}, {found.here} of them on this host",
            "The launcher's variables say so (RANK and WORLD_SIZE, or SLURM_PROCID).",
            "Unset them to run without a launcher.",
        )
    return found if found.processes > 1 else None


def _by_rank(environment: Mapping[str, str]) -> Place:
    processes = _number(environment, "WORLD_SIZE")
    here = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in environment), None)
    host = environment.get("MASTER_ADDR", "127.0.0.1")
    words = (environment.get(name, "") for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID"))
    return Place(
        _number(environment, "RANK"),
        processes,
        _number(environment, "LOCAL_RANK", 0),
        1 if here is None else _number(environment, here),
        host,
        "-".join([host, *words]),
    )


def _by_slurm(environment: Mapping[str, str]) -> Place:
    processes = _number(environment, "SLURM_STEP_NUM_TASKS")
    host = first_host(environment.get("SLURM_STEP_NODELIST", ""))
    host = host or environment.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    each = tasks_per_host(environment.get("SLURM_STEP_TASKS_PER_NODE", str(processes)))
    node = _number(environment, "SLURM_NODEID", 0)
    words = (environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return Place(
        _number(environment, "SLURM_PROCID"),
        processes,
        _number(environment, "SLURM_LOCALID", 0),
        each[min(node, len(each) - 1)],
        host,
        "-".join(["slurm", *words]),
    )


def _number(environment: Mapping[str, str], name: str, usual: int | None = None) -> int:
    text = environment.get(name, str(usual))
    if not text.isdecimal():
        raise ConfigError(
            f"{name}={text}", "It must be a whole number, as a launcher sets it.", f"Unset {name}."
        )
    return int(text)


def first_host(names: str) -> str:
    """The first host of Slurm's list: ``gpu[03-07,9],cpu1`` begins with gpu03."""
    found = re.match(r"([^,\[]*)(?:\[([^],-]+)[^]]*\]([^,\[]*))?", names)
    return "" if found is None else "".join(part or "" for part in found.groups())


def tasks_per_host(counts: str) -> list[int]:
    """How many tasks each host has, of Slurm's ``4(x2),3``: 4, 4 and 3.

    Raises:
        ConfigError: it is no such list.
    """
    found: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={counts}", "It must be a list such as 4(x2),3.")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def interface_of(address: str) -> str | None:
    """The network interface of this host that has an address; None if none has."""
    every = psutil.net_if_addrs().items()
    return next((name for name, own in every if any(each.address == address for each in own)), None)


# ---- where they meet -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the coordinator listens, as the others reach it, and the key that lets them in."""

    address: Address
    key: bytes


def shared_key(cluster: ClusterSettings, environment: Mapping[str, str] = os.environ) -> bytes:
    """The key that processes on several hosts share: the variable PLAIT_KEY, else the file that the settings
    name.

    Raises:
        ConfigError: there is none, it is too short, or others may read the file.
    """
    if KEY in environment:
        named, text = KEY, environment[KEY].strip()
    elif cluster.key_file is not None:
        named, text = cluster.key_file, _read_key(user_path(cluster.key_file))
    else:
        raise ConfigError(
            "processes on several hosts without a key",
            f"A key that all hosts share keeps others out: the variable {KEY}, or a file (cluster.key_file).",
            f"For example {MAKE_KEY}",
        )
    if len(text) < LEAST_KEY:
        raise ConfigError(
            f"{named}: {len(text)} characters",
            f"A key must have at least {LEAST_KEY}.",
            f"Make one: {MAKE_KEY}",
        )
    return text.encode()


def _read_key(path: Path) -> str:
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"cluster.key_file={path}: {error}",
            "Every process reads its key from this file.",
            f"Make one: {MAKE_KEY}",
        ) from None
    if mode & 0o077:
        raise ConfigError(
            f"cluster.key_file={path}: mode {mode & 0o777:o}",
            "Only you may have access to the key.",
            f"chmod 600 {path}",
        )
    return text


def meeting_file(place: Place) -> Path:
    """Where the coordinator of a run on one host says how it is reached: a file of the user's own.

    Raises:
        ConfigError: the folder is another user's.
    """
    folder = Path(tempfile.gettempdir()) / f"plait-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o077 or folder.is_symlink():
        raise ConfigError(
            f"{folder}: others may write to it", "Keys are kept in this folder.", f"Remove {folder}."
        )
    return folder / re.sub(r"[^\w.-]", "_", f"{place.run}.meeting")


def announce(place: Place, meeting: Meeting) -> Path:
    """Write how the coordinator is reached, for the other processes of its host; the file.

    Raises:
        ConfigError: a run that the launcher calls the same is there.
    """
    file = meeting_file(place)
    if (other := _met(file)) is not None:
        with suppress(OSError):
            socket.create_connection(other.address, timeout=ANSWER_SECONDS).close()
            raise ConfigError(
                f"{file}: a run listens at port {other.address[1]}",
                "Both runs have the same MASTER_ADDR and MASTER_PORT, so their processes would mix.",
                "Set another port for this run in the launcher, or end the other run.",
            )
    host, port = meeting.address
    write_text(file, f"{host} {port} {meeting.key.decode()}", mode=OWNER_ONLY, durable=False)
    return file


def retract(file: Path, meeting: Meeting) -> None:
    """Remove the file, if it says how this coordinator is reached."""
    if _met(file) == meeting:
        file.unlink(missing_ok=True)


def _met(file: Path) -> Meeting | None:
    try:
        host, port, key = file.read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return None
    return Meeting((host, int(port)), key.encode())


def read_meeting(place: Place, cluster: ClusterSettings) -> Meeting | None:
    """How the coordinator is reached; None if it has not said so yet.

    Raises:
        ConfigError: hosts differ and there is no key.
    """
    if not place.one_host:
        return Meeting((cluster.address or place.host, cluster.port), shared_key(cluster))
    return _met(meeting_file(place))
