"""mLoRA's pipelines: what stages hold, and options that are refused."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from plait.core.errors import ConfigError
from plait.core.settings import RunSettings
from plait_bench.mlora_pipelines import Model, PipelineOptions, lorapp_rate, pipelines, rates

SMALL = Model(weights=8e6, hidden=100, layers=8, vocabulary=20_000)  # the head is as two layers


def test_the_last_stage_has_fewer_layers_as_it_has_the_head() -> None:
    assert SMALL.shares(2) == [5.0, 3.0]
    assert Model(weights=8e6, hidden=100, layers=8).shares(2) == [4.0, 4.0]


@pytest.mark.parametrize("logits", [False, True])
def test_one_device_has_all_layers_and_the_head(logits: bool) -> None:
    asked = PipelineOptions(models={"small": SMALL}, devices=(1,), jobs=(1,), teraflops=1.0, logits=logits)
    assert SMALL.shares(1) == [8.0]
    # forward and backward, two operations of each of 8e6 weights and 2e6 of the head
    assert lorapp_rate(SMALL, 1, 1, 1, asked) == pytest.approx(1e12 / (2 * 2 * 10e6))


def test_one_adapter_of_lorapp_is_1f1b_when_batches_are_split_alike() -> None:
    even = Model(weights=8e6, hidden=100, layers=8)
    asked = PipelineOptions(models={"even": even}, devices=(4,), jobs=(1,), splits=(4, 1))
    found = rates(even, 4, 1, asked, compared=False)
    assert found.lorapp == pytest.approx(found.alone)
    assert found.lorapp[4] > 2 * found.lorapp[1]


def test_a_model_can_have_a_split_of_its_own() -> None:
    options = OPTIONS | {"models": {"small": asdict(SMALL) | {"split": 2}}, "splits": [4, 2], "tokens": 64}
    found = {each.name: each.note for each in pipelines(RunSettings(), [], options).figures}
    assert "batches in 2" in found["small, 2 devices, 1 jobs: time saved"]
    assert "batches in 4" in found["small, 2 devices, 1 jobs: time saved, in 4"]


@pytest.mark.parametrize(("logits", "stage"), [(True, 0), (False, 1)])
def test_the_device_that_computes_the_loss_is_busy_with_it(logits: bool, stage: int) -> None:
    asked = PipelineOptions(models={"small": SMALL}, devices=(2,), jobs=(1,), tokens=100, logits=logits)
    without = asked.stages(SMALL, 2, 1)
    found = replace(asked, memory_gigabytes_per_s=1.0).stages(SMALL, 2, 1)
    # ten passes of 20,000 values of 4 bytes a token
    expected = [100 * 8e5 / 1e9 if number == stage else 0.0 for number in range(2)]
    more = [one.forward - other.forward for one, other in zip(found, without, strict=True)]
    assert more == pytest.approx(expected)


def test_another_assumption_is_tried_for_the_split_that_is_compared() -> None:
    tried = {"acknowledged": {"gigabytes_per_s": 5e-4, "splits": []}, "logits sent": {"logits": True}}
    options = OPTIONS | {"splits": [4, 2], "tokens": 64, "gigabytes_per_s": 1e-3, "tried": tried}
    found = {each.name: each.ours for each in pipelines(RunSettings(), [], options).figures}
    assert {each for each in found if each.endswith("acknowledged")} == {
        f"small, 2 devices{what}, acknowledged" for what in TRIED
    }
    # messages take nearly all of the time
    faster = found["small, 2 devices: 1F1B"] / found["small, 2 devices: 1F1B, acknowledged"]
    assert faster == pytest.approx(2, rel=0.01)
    assert found["small, 2 devices: 1F1B, in 2"] > found["small, 2 devices: 1F1B, in 2, logits sent"]


TRIED = (": 1F1B", ", 1 jobs: LoRAPP", ", 1 jobs: time saved")
OPTIONS: dict[str, Any] = {"models": {"small": asdict(SMALL)}, "devices": [2], "jobs": [1]}


@pytest.mark.parametrize(
    "name", ["teraflops", "backward", "gigabytes_per_s", "memory_gigabytes_per_s", "tried.teraflops"]
)
def test_speeds_are_above_zero(name: str) -> None:
    last = name.removeprefix("tried.")
    wrong = {"tried": {"slower": {last: 0.0}}} if last != name else {last: 0.0}
    with pytest.raises(ConfigError, match=f"{name}=0.*\n.*above 0"):
        pipelines(RunSettings(), [], OPTIONS | wrong)
