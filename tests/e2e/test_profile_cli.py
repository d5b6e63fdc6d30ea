"""`plait profile` on the command line: measured, computed without weights, kept, and read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.cli.main import main
from plait.cost.memory import MemoryShape
from plait.cost.profile_store import ProfileKey, load_profile

TINY = ["model=tiny", "model.dtype=float32", "engine.capacity=256", "engine.device=cpu", "engine.threads=1"]
TASK = ["data.task=chain_sum", "data.size=24", "data.validation=4", "train.steps=3", "search.trials=2"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def _profile(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["profile", *TINY, "--json", *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def _planned(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", *TINY, *TASK, "--json", *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_measured_profile_is_kept_and_predicts(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = _profile(capsys, "adapter.target_modules=choice([q_proj],[q_proj,up_proj])")
    assert shown["how"] == "measured"
    assert shown["targets"] == ["q_proj", "up_proj"]
    assert [row["capacity"] for row in shown["capacities"]] == [128, 256]
    assert shown["capacity"] in (128, 256)
    assert all(row["tokens_per_second"] > 0 and row["fits"] for row in shown["capacities"])
    assert len(shown["held_out"]["time"]) == len(shown["held_out"]["memory"]) == 4
    assert {"memory forward", "memory loss", "memory backward", "layers", "head"} == set(shown["fits"])
    stored = load_profile(ProfileKey(**shown["key"]), cache=cache)
    assert stored is not None
    assert stored.time is not None
    shape = MemoryShape.of([100, 30], ranks=16)
    assert stored.memory.safe_peak(shape, static=0.0) > 0
    plan = _planned(capsys, "adapter.target_modules=[q_proj,up_proj]")
    assert "measured by `plait profile`" in plan["profile"]
    assert 0 < plan["device_seconds"] == plan["predicted_seconds"] <= plan["device_seconds_alone"]
    assert plan["replicas"][0]["bytes_source"] == "from the stored profile"
    # Without weights the same key keeps what was measured.
    computed = _profile(capsys, "--without-weights")
    assert (computed["how"], computed["time"], computed["path"]) == ("computed", None, None)
    assert shown["depth_error"] is None
    assert abs(computed["depth_error"]) < 1e-3
    assert computed["key"] == shown["key"]
    again = load_profile(ProfileKey(**shown["key"]), cache=cache)
    assert again is not None
    assert again.how == "measured"


def test_memory_without_weights_is_at_least_the_measured(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["engine.checkpointing=true", "adapter.target_modules=[q_proj,v_proj]"]
    computed = _profile(capsys, "--without-weights", *options)
    key = ProfileKey(**computed["key"])
    without = load_profile(key, cache=cache)
    _profile(capsys, *options)
    measured = load_profile(key, cache=cache)
    assert without is not None
    assert measured is not None
    assert (without.how, measured.how) == ("computed", "measured")
    for lengths in ([60, 70, 50], [30] * 8, [128, 100, 20]):
        shape = MemoryShape.of(lengths, ranks=16, labelled=len(lengths) * 10)
        # Single passes on the CPU do without temporaries that plain torch makes; much in so small a model.
        more = without.memory.dynamic(shape) / measured.memory.dynamic(shape)
        assert 1.0 <= more <= 1.4


def test_a_described_cluster_is_not_profiled(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "cluster=h100_llama31_8b"]) == 2
    assert "Run `plait plan` with the same arguments" in capsys.readouterr().err
    assert not list(cache.glob("profiles/*"))


def test_profiling_is_refused_if_no_capacity_fits(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *TINY, "--without-weights", "planner.memory_share=1e-9"]) == 2
    assert "may be used" in capsys.readouterr().err
    assert main(["profile", *TINY, "planner.memory_share=1e-9"]) == 2
    assert "weights of" in capsys.readouterr().err
    assert not (cache / "profiles").exists()
