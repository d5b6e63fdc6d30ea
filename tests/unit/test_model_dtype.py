"""model.dtype=auto: the type that the device is fast with, and the same one to a search's end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait.core.plans import Group, Plan, Replica
from plait.core.settings import ModelSettings, RunSettings, SearchSettings
from plait.engine import devices
from plait.engine.build import settle_dtype, write_plan

CPU = torch.device("cpu")


def run(dtype: str) -> RunSettings:
    return replace(RunSettings(), model=ModelSettings(kind="tiny", dtype=dtype))


@pytest.mark.parametrize(("fast", "chosen"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_what_the_device_computes_with(
    monkeypatch: pytest.MonkeyPatch, fast: bool, chosen: str
) -> None:
    monkeypatch.setattr(devices, "computes_bfloat16", lambda _: fast)
    assert settle_dtype(run("auto")).model.dtype == chosen
    assert settle_dtype(run("float16")).model.dtype == "float16"


def test_a_search_keeps_the_type_that_it_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "computes_bfloat16", lambda _: False)
    write_plan(tmp_path, Plan((Replica(),), (Group((), 64),), choices={"dtype": "bfloat16"}))
    assert settle_dtype(run("auto"), tmp_path).model.dtype == "bfloat16"
    assert settle_dtype(run("float32"), tmp_path).model.dtype == "float32"
    afresh = replace(run("auto"), search=SearchSettings(fresh=True))
    assert settle_dtype(afresh, tmp_path).model.dtype == "float32"


def test_the_type_of_this_processor_is_the_faster_one() -> None:
    """By the processor's own flags, if Linux lists them."""
    flags = Path("/proc/cpuinfo")
    if not flags.exists() or "avx2" not in flags.read_text():
        pytest.skip("not an x86 processor that says what it has")
    if "avx512bw" not in flags.read_text():
        assert devices.choose_dtype(CPU) == "float32"
    if "avx512_bf16" in flags.read_text():
        assert devices.choose_dtype(CPU) == "bfloat16"
