"""Profiles in the cache folder: kept by key, refused where they are another model's or altered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.core.errors import ConfigError, StorageError
from plait.core.settings import ClusterSettings, EngineSettings, ModelSettings, RunSettings
from plait.cost.memory import MemoryModel, MemoryObservation, MemoryShape
from plait.cost.profile_store import (
    CapacityChoice,
    Profile,
    ProfileKey,
    load_profile,
    profile_path,
    save_profile,
)
from plait.cost.time import HeadTime, LayerTime, TimeModel
from plait.engine import build, devices

KEY = ProfileKey("0123abcd", "some processor", "bfloat16", "auto", False, 2)


def _profile(key: ProfileKey = KEY) -> Profile:
    shapes = [MemoryShape.of([length] * 3, labelled=length, ranks=8) for length in (10, 50, 200, 340)]
    observed = [
        MemoryObservation(s, {"forward": 5.0 + 3 * s.tokens + s.squares, "loss": 1.0 + 9 * s.tokens}, 0.0)
        for s in shapes
    ]
    return Profile(
        key,
        "a model",
        MemoryModel.fitted(observed, logit_rows=100),
        TimeModel(4, {1: LayerTime(0.1, 0.2, 0.3)}, {1: HeadTime(0.0, 0.5)}, 0.4, 0.3),
        512,
        (CapacityChoice(256, 900.0, 10**9, True), CapacityChoice(512, 950.5, 2 * 10**9, True)),
        ("q_proj", "v_proj"),
        "measured",
        0.0001,
        0.04,
    )


def test_a_stored_profile_is_read_back(tmp_path: Path) -> None:
    save_profile(_profile(), cache=tmp_path)
    found = load_profile(KEY, cache=tmp_path)
    assert found is not None
    expected = _profile()
    assert found.time == expected.time
    assert found.capacities == expected.capacities
    assert found.covers(["model.layers.0.self_attn.q_proj"])
    assert not found.covers(["q_proj", "up_proj"])
    assert found.memory.observations == expected.memory.observations
    shape = MemoryShape.of([77, 13], ranks=4)
    assert found.memory.safe_peak(shape, static=3.0) == expected.memory.safe_peak(shape, static=3.0)
    assert found.memory.phases.keys() == {"forward", "loss"}


def test_every_part_of_the_key_distinguishes_profiles(tmp_path: Path) -> None:
    save_profile(_profile(), cache=tmp_path)
    others: list[dict[str, Any]] = [
        {"model": "ffff"},
        {"device": "another"},
        {"dtype": "float32"},
        {"kernels": "grouped"},
        {"checkpointing": True},
        {"threads": 1},
    ]
    for other in others:
        assert load_profile(replace(KEY, **other), cache=tmp_path) is None


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    other = replace(KEY, model="ffff")
    path = save_profile(_profile(), cache=tmp_path)
    path.rename(profile_path(other, tmp_path))
    with pytest.raises(ConfigError, match=r"(?s)model='0123abcd'.*model='ffff'"):
        load_profile(other, cache=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": 513}, "altered"),
        ({"memory": 3}, "altered"),
        ({"targets": []}, "altered"),
        ({"more": 1}, "altered"),
        ({"version": 99}, "version 99"),
    ],
)
def test_an_altered_file_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = save_profile(_profile(), cache=tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message) as caught:
        load_profile(KEY, cache=tmp_path)
    assert "plait profile" in caught.value.remedy


def test_a_file_that_is_no_profile(tmp_path: Path) -> None:
    path = save_profile(_profile(), cache=tmp_path)
    for content in (b"{", b"[1]", b"null", b"\xff\xfe{", b""):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"plait profile"):
            load_profile(KEY, cache=tmp_path)


def test_a_file_that_cannot_be_read_is_not_taken_for_none(tmp_path: Path) -> None:
    profile_path(KEY, tmp_path).mkdir(parents=True)
    with pytest.raises(StorageError, match="PLAIT_CACHE"):
        load_profile(KEY, cache=tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("a file")
    with pytest.raises(StorageError):
        save_profile(_profile(), cache=tmp_path)


def test_threads_count_on_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert ProfileKey.of("x", "float32", "cpu", EngineSettings(), on_cpu=True).threads == 3
    assert ProfileKey.of("x", "float32", "cpu", EngineSettings(threads=2), on_cpu=True).threads == 2
    assert ProfileKey.of("x", "float32", "a GPU", EngineSettings(threads=2), on_cpu=False).threads == 0


def test_processes_that_share_a_processor_need_a_profile_with_their_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(devices, "usual_threads", lambda: 6)
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    engine, model = EngineSettings(device="cpu"), ModelSettings(dtype="float32")

    def settings(processes: int, threads: int | None = None) -> RunSettings:
        cluster = ClusterSettings(processes=processes)
        return RunSettings(model=model, engine=replace(engine, threads=threads), cluster=cluster)

    kind = devices.device_kind("cpu")
    whole = ProfileKey.of("0123abcd", "float32", kind, engine, on_cpu=True)
    save_profile(_profile(whole), cache=tmp_path)
    alone, shared = (build.stored_profile(settings(number), "0123abcd") for number in (1, 3))
    assert alone is not None
    assert alone.time is not None
    assert shared is not None
    assert (shared.time, shared.time_error) == (None, None)
    assert shared.memory.observations == alone.memory.observations
    assert build.stored_profile(settings(3, threads=4), "0123abcd") is None
    save_profile(_profile(replace(whole, threads=2)), cache=tmp_path)
    own = build.stored_profile(settings(3), "0123abcd")
    assert own is not None
    assert own.time is not None
    assert own.key.threads == 2
    elsewhere = replace(settings(3), cluster=ClusterSettings(processes=3, per_host=1))
    assert build.threads_each(elsewhere) == 6
