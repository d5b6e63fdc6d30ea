"""Limits of a container, read from its control group, and the cores that processes share."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.engine import devices
from plait.engine.devices import Cores, allowed_cores, free_under_limit, thread_shares, usual_threads


def _group(root: Path, **files: str) -> Path:
    for name, text in files.items():
        (root / name.replace("_", ".", 1)).write_text(text)
    return root


def test_free_memory_under_a_limit_includes_reclaimable_pages(tmp_path: Path) -> None:
    root = _group(
        tmp_path, memory_max="1000\n", memory_current="700\n", memory_stat="anon 500\ninactive_file 150\n"
    )
    assert free_under_limit(root) == 450


@pytest.mark.parametrize("limit", ["max\n", "nonsense"])
def test_free_memory_is_unknown_without_a_limit(tmp_path: Path, limit: str) -> None:
    assert free_under_limit(_group(tmp_path, memory_max=limit, memory_current="7", memory_stat="")) is None
    assert free_under_limit(tmp_path / "none") is None


def test_free_memory_under_a_limit_is_never_negative(tmp_path: Path) -> None:
    assert (
        free_under_limit(_group(tmp_path, memory_max="10", memory_current="20", memory_stat="anon 20\n")) == 0
    )


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("250000 100000", 2), ("50000 100000", 1), ("x", None)]
)
def test_a_processor_quota_is_rounded_to_whole_cores(tmp_path: Path, text: str, cores: int | None) -> None:
    assert allowed_cores(_group(tmp_path, cpu_max=text)) == cores


def cores(*own: int, threads: int | None = None, quota: int | None = None) -> Cores:
    return Cores(frozenset(own), threads or len(own), quota)


@pytest.mark.parametrize(
    ("processes", "shares"),
    [
        ([cores(*range(16))] * 3, (5, 5, 5)),
        ([cores(0), cores(1)], (1, 1)),  # each bound to a core of its own
        ([cores(0, 1, 2, 3), cores(4, 5, 6, 7)], (4, 4)),
        ([cores(0, 1, 2, 3), cores(0, 1, 2, 3), cores(4, 5)], (2, 2, 2)),
        ([cores(*range(16), threads=8)] * 2, (4, 4)),  # two threads of a core count as one
        ([cores(*range(16), quota=6)] * 2, (3, 3)),
        ([cores(*range(6))] * 3, (2, 2, 2)),
        ([cores(0, 1)] * 5, (1,) * 5),
    ],
)
def test_processes_of_a_host_share_the_cores_that_they_may_run_on(
    processes: list[Cores], shares: tuple[int, ...]
) -> None:
    assert thread_shares(processes) == shares


def test_under_torchrun_the_cores_count_and_not_its_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: {1, 3, 5})
    monkeypatch.setattr(devices.psutil, "cpu_count", lambda **_: 8)
    monkeypatch.setattr(devices, "allowed_cores", lambda: None)
    monkeypatch.setattr(devices.torch, "get_num_threads", lambda: 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert usual_threads() == 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    assert usual_threads() == 3
    assert Cores.here() == Cores(frozenset({1, 3, 5}), 3)
    monkeypatch.setattr(devices.torch, "get_num_threads", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # the user's
    assert usual_threads() == 2
