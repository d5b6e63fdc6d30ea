"""A search, and its plan, continue with the capacity and kernels that it was begun with."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from memory_models import one_phase

from plait.cli.main import main
from plait.cost.profile_store import Profile, ProfileKey, profile_path, save_profile
from plait.engine import build as engine
from plait.engine.coordinator import Coordinator
from plait.utils.paths import cache_dir

Short = tuple[str, ...]


def recorded(folder: Path) -> dict[str, Any]:
    choices = json.loads((folder / "plait-runs" / "searches" / "mine" / "plan.json").read_text())["choices"]
    assert isinstance(choices, dict)
    return choices


def largest_microbatch(folder: Path) -> int:
    lines = (folder / "plait-runs" / "searches" / "mine" / "group_steps.jsonl").read_text().splitlines()
    return max(json.loads(line)["capacity"] for line in lines)


def test_an_interrupted_search_keeps_its_capacity(
    folder: Path,
    short: Short,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path_factory.mktemp("cache")))
    keys: list[ProfileKey] = []
    asked = engine.load_profile

    def remembered(key: ProfileKey, *, cache: Path) -> Profile | None:
        keys.append(key)
        return asked(key, cache=cache)

    monkeypatch.setattr(engine, "load_profile", remembered)
    advance, rounds = Coordinator.advance, iter(range(1000))

    def interrupted(self: Coordinator) -> Any:
        if next(rounds) == 2:
            signal.raise_signal(signal.SIGINT)
        return advance(self)

    command = [
        "sweep",
        *short,
        "train.steps=8",
        "adapter.rank=1,2",
        "search.sampler=grid",
        "search.name=mine",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "advance", interrupted)
        assert main(command) == 130
    begun = recorded(folder)
    assert begun["capacity"] == 2048  # the usual one: nothing was profiled

    memory = one_phase(token=1.0)
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    profile = Profile(keys[-1], "tiny", memory, None, 640, (), targets, "measured", 0.0, None)
    save_profile(profile, cache=cache_dir())
    capsys.readouterr()
    assert main(["plan", *command[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replicas"][0]["capacity"] == 2048
    assert main(command) == 0
    assert profile_path(keys[-1], cache_dir()).exists()
    assert {name: recorded(folder)[name] for name in ("capacity", "kernels")} == {
        name: begun[name] for name in ("capacity", "kernels")
    }
    assert largest_microbatch(folder) == 2048
    # Another search takes what is profiled by now, and says so.
    assert "by the profile of" not in capsys.readouterr().out
    assert main([*command[:-1], "search.name=other", "train.steps=1"]) == 0
    assert (
        json.loads((folder / "plait-runs" / "searches" / "other" / "plan.json").read_text())["choices"][
            "capacity"
        ]
        == 640
    )
    assert "Microbatches have up to 640 tokens, by the profile of `plait profile`" in capsys.readouterr().out
