"""model.dtype=auto: the type that the device is fast with, and the same one to a search's end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.core.jobs import JobSpec
from plait.core.settings import ModelSettings, RunSettings
from plait.core.space import Space
from plait.engine import devices
from plait.engine.build import settle_dtype
from plait.search.launch import Launch
from plait.search.trials import SearchCommand

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


@pytest.mark.parametrize(("asked", "kept"), [("auto", "bfloat16"), ("float32", "float32")])
def test_a_search_keeps_the_type_that_it_was_started_with(tmp_path: Path, asked: str, kept: str) -> None:
    """On any host, whatever that is fast with; it is in the study."""
    nothing: Any = None
    command = SearchCommand(
        run(asked), Space(), JobSpec("base"), nothing, (), "", ("plait", "sweep"), (), tmp_path
    )
    source: Any = SimpleNamespace(material={"model.dtype": "bfloat16"})
    launch = Launch(command, source, nothing, nothing, None)
    assert launch._as_begun().settings.model.dtype == kept


def test_the_type_of_this_processor_is_the_faster_one() -> None:
    """By the processor's own flags, if Linux lists them."""
    listed = Path("/proc/cpuinfo")
    flags = set(listed.read_text().split()) if listed.exists() else set()
    if "avx2" not in flags:
        pytest.skip("not an x86 processor that says what it has")
    fast = {"avx512bw", "avx512dq", "avx512vl"} <= flags
    assert devices.choose_dtype(CPU) == ("bfloat16" if fast else "float32")
