"""What a container allows its processes, where that is less than the machine has."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def free_under_limit(root: Path = CGROUP) -> int | None:
    """Bytes that the processes of this container may still take; None where nothing limits them.

    Pages of files that were read count as free: the kernel gives them back. Control groups of version 2, as
    the container sees its own; others are taken as no limit.

    Args:
        root: of the control groups.
    """
    with suppress(OSError, ValueError):
        limit = int((root / "memory.max").read_text())  # "max" where there is none
        used = int((root / "memory.current").read_text())
        facts = dict(line.split(maxsplit=1) for line in (root / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(facts.get("inactive_file", 0)))
    return None


def allowed_cores(root: Path = CGROUP) -> int | None:
    """Whole processor cores that the container's quota comes to, at least one; None where there is none."""
    with suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    return None
