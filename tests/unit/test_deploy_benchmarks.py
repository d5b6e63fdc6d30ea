"""LobRA's benchmarks run, and their steps come in the published order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from plait.bench import lobra_ablation, planning_time, time_model
from plait.errors import DataError
from plait.settings import ClusterSettings, RunSettings

ROOT = Path(__file__).resolve().parents[2]


def _options(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / f"sweeps/{name}.yaml").read_text(encoding="utf-8"))
    options: dict[str, Any] = loaded["bench"]["options"]
    return options


@pytest.fixture
def settings() -> RunSettings:
    cluster = yaml.safe_load((ROOT / "conf/cluster/a100_40g_llama2_7b.yaml").read_text(encoding="utf-8"))
    return replace(RunSettings(), cluster=ClusterSettings(**cluster))


def test_each_step_of_the_ablation_saves_more(settings: RunSettings) -> None:
    options = _options("lobra/ablation_7b") | {
        "steps": 2,
        "boundaries": {"doubling": [512, 1024, 2048, 4096, 8192, 16384]},
        "assumptions": [{"family": "lognormal"}],
    }
    figures = lobra_ablation.run(settings, [], options).figures
    saved = [figure.ours for figure in figures]
    assert len(saved) == 4
    assert 0.0 < saved[0] < saved[1] < saved[2] < saved[3] < 100.0
    assert [figure.published for figure in figures] == [18.94, 36.65, 45.03, None]
    assert {figure.how for figure in figures} == {"simulated"}


def test_planning_time_shows_plan_and_bound(settings: RunSettings) -> None:
    options = _options("lobra/planning_time") | {"devices": {16: None}, "steps": 1}
    figures = {figure.name: figure for figure in planning_time.run(settings, [], options).figures}
    plan, gap = (
        figures["deployment, 16 devices, one batch"],
        figures["deployment, 16 devices, one batch: above the bound"],
    )
    assert plan.how == "measured"
    assert "bound" in plan.note
    assert 0.0 <= gap.ours <= 5.0
    assert figures["deployment, 16 devices, batch by devices: above the bound"].ours == gap.ours
    assert figures["dispatch, 5 kinds of replica: search"].unit == "ms"


def test_absent_table_is_said(settings: RunSettings, tmp_path: Path) -> None:
    options = _options("lobra/time_model") | {"table": str(tmp_path / "none.csv")}
    with pytest.raises(DataError, match=r"none\.csv"):
        time_model.run(settings, [], options)
