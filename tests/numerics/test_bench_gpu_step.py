"""The step of a GPU's first hour, at a small size on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plait.core.settings import EngineSettings, RunSettings
from plait_bench import gpu_step as subject

SETTINGS = RunSettings(engine=EngineSettings(device="cpu"))
OPTIONS: dict[str, Any] = {
    "layers": 1,
    "hidden": 32,
    "inner": 48,
    "heads": 4,
    "shared": 2,
    "vocabulary": 97,
    "adapters": 3,
    "length": 12,
    "rank": 4,
    "dropout": 0.1,
    "labelled": 0.5,
    "capacity": 24,
    "repeats": 1,
}


def test_parts_are_measured_once_and_kept(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "step.json"
    options = {**OPTIONS, "file": str(file)}
    report = subject.gpu_step(SETTINGS, [], options)
    kept = json.loads(file.read_text())
    assert set(kept["parts"]) == set(subject.PARTS)
    named = {figure.name: figure for figure in report.figures}
    assert named["joint: tokens a second"].ours == 36 / kept["parts"]["joint"]["device"]
    assert named["joint over PEFT"].ours == (
        kept["parts"]["peft"]["device"] / kept["parts"]["joint"]["device"]
    )
    assert named["joint step"].target.value == kept["parts"]["frozen"]["device"]

    del kept["parts"]["peft"]
    file.write_text(json.dumps(kept))
    monkeypatch.setattr(subject, "_PlaitSide", None)  # what the file has is not measured again
    again = subject.gpu_step(SETTINGS, [], options)
    assert json.loads(file.read_text())["parts"]["joint"] == kept["parts"]["joint"]
    assert [figure.name for figure in again.figures] == list(named)


def test_samples_of_adapters_are_packed_and_a_batch_may_be_split() -> None:
    asked = subject.StepOptions(**OPTIONS | {"samples": 3, "capacity": 48}, file="")
    side = subject._PlaitSide(asked, "auto", subject.torch.device("cpu"), subject.torch.float32)
    probes = [(first, [len(own.lengths) for own in probe.segments]) for probe, first in side._probes()]
    assert probes == [(0, [3, 1]), (1, [2, 2]), (2, [1])]
    side.joint_step()
    assert asked.tokens == 3 * 3 * 12


def test_a_step_trains_every_adapter_and_leaves_the_frozen_model_alone() -> None:
    asked = subject.StepOptions(**OPTIONS, file="")
    side = subject._PlaitSide(asked, "auto", subject.torch.device("cpu"), subject.torch.float32)
    before = {name: block.generation for name, block in side.bank.blocks.items()}
    side.frozen_step()
    assert {name: block.generation for name, block in side.bank.blocks.items()} == before
    side.joint_step()
    assert all(block.generation == before[name] + 1 for name, block in side.bank.blocks.items())
    assert [len(probe.segments) for probe, _ in side._probes()] == [2, 1]
