"""What a run's result depends on beside its settings: source, packages, hardware."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

LONGEST_DIFF = 1_000_000  # characters


@dataclass(frozen=True, slots=True)
class GitState:
    """Commit of the folder's repository, and what is changed since; empty strings outside of one."""

    commit: str
    branch: str
    dirty: bool
    diff: str


def git_state(folder: Path) -> GitState:
    """The state of the repository around a folder."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return GitState("", "", False, "")
    diff = _git(folder, "diff", "HEAD")
    changed = bool(_git(folder, "status", "--porcelain"))
    return GitState(commit, _git(folder, "rev-parse", "--abbrev-ref", "HEAD"), changed, diff[:LONGEST_DIFF])


def _git(folder: Path, *arguments: str) -> str:
    """What git prints, or nothing where there is no git or no repository."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace").strip()


def packages() -> str:
    """Installed distributions, one ``name==version`` a line, sorted."""
    names = {f"{item.metadata['Name']}=={item.version}" for item in metadata.distributions()}
    return "\n".join(sorted(names, key=str.lower)) + "\n"


def hardware() -> dict[str, Any]:
    """The machine. Devices are asked of torch only where it is loaded already."""
    facts: dict[str, Any] = {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())]
        facts["devices"] = [{"name": item.name, "memory_bytes": item.total_memory} for item in devices]
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
