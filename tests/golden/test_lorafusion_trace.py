"""Idle shares on the committed trace: what is claimed of Plait's schedule, and every figure as recorded."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from plait.config.fields import build
from plait.core.settings import ClusterSettings, RunSettings
from plait.utils.paths import conf_dir, sweeps_dir
from plait_bench.benchmarks import OPTIONS
from plait_bench.figures import Report
from plait_bench.lorafusion import WHOLE, Options, bubble_ratio
from plait_bench.progress import shown

RECORDED = Path(__file__).with_name("lorafusion_bubble_ratio.json")
PUBLISHED = Path(__file__).with_name("lorafusion_h100.json")


def file() -> dict[str, Any]:
    loaded = yaml.safe_load((sweeps_dir() / "lorafusion" / "bubble_ratio.yaml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture(scope="module")
def options() -> Options:
    return build(Options, file()["bench"]["options"], OPTIONS)


@pytest.fixture(scope="module")
def report() -> Report:
    cluster = yaml.safe_load((conf_dir() / "cluster" / "h100_llama31_70b.yaml").read_text(encoding="utf-8"))
    settings = RunSettings(cluster=ClusterSettings(**cluster))
    with shown("bubble_ratio", out := StringIO(), heartbeat=3600):
        report = bubble_ratio(settings, (), file()["bench"]["options"] | {"alternatives": []})
    last = out.getvalue().splitlines()[-1]
    assert "under other assumptions: 4 of 4 (LoRAFusion, 4 adapters, without merging)" in last, (
        "it takes longest"
    )
    return report


def test_the_trace_is_what_its_assumptions_draw(options: Options) -> None:
    trace = options.lengths()
    assert trace == options.drawn()
    assert len(trace) == 4
    assert all(len(own) >= 60 and all(len(batch) == 16 for batch in own) for own in trace.values())


@pytest.mark.slow
def test_plait_is_within_a_point_of_the_floor_and_gains_by_its_split(report: Report) -> None:
    share = {figure.name: figure.ours for figure in report.figures}
    floor = share["floor of whole layers per stage"]
    assert floor == pytest.approx(0.77, abs=0.1)
    assert floor <= share[WHOLE] <= floor + 1
    assert share["Plait"] < share["Plait, equal layers"]
    assert share["Plait"] < share["LoRAFusion, 4 adapters"] < share["mLoRA, packed"]


@pytest.mark.slow
def test_figures_are_as_recorded(report: Report) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert {figure.name: round(figure.ours, 2) for figure in report.figures} == pytest.approx(
        recorded, abs=0.02
    )


def test_published_figures_are_the_papers() -> None:
    paper = json.loads(PUBLISHED.read_text(encoding="utf-8"))["idle_percent_70b_4_gpus"]
    assert [item["value"] for item in file()["published"]] == paper
