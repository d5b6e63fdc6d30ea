"""LobRA's benchmarks run, and their steps come in the published order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from plait.core.errors import ConfigError, DataError, InputError
from plait.core.settings import ClusterSettings, RunSettings
from plait_bench.figures import Benchmark
from plait_bench.inputs import read_profile
from plait_bench.lobra import ablation, deployment, fit_by_degree, read_layer_times, time_model
from plait_bench.lobra_plans import plan_figures
from plait_bench.lobra_steps import bucket_numbers, end_to_end
from plait_bench.mlora import memory_model
from plait_bench.planning_time import planning_time
from plait_bench.slora import communication, pool

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
    figures = ablation(settings, [], options).figures
    saved = [figure.ours for figure in figures]
    assert len(saved) == 4
    assert 0.0 < saved[0] < saved[1] < saved[2] < saved[3] < 100.0
    assert [figure.plait for figure in figures] == [None, None, saved[3], None]
    assert {figure.how for figure in figures} == {"simulated"}


def test_planning_time_shows_plan_and_bound(settings: RunSettings) -> None:
    options = _options("lobra/planning_time") | {"devices": {16: None}, "steps": 1}
    options["assumptions"] = options["assumptions"][:2]
    figures = {figure.name: figure for figure in planning_time(settings, [], options).figures}
    plan, gap = (
        figures["deployment, 16 devices, one batch"],
        figures["deployment, 16 devices, one batch: above the bound"],
    )
    assert plan.how == "measured"
    assert "bound" in plan.note
    assert 0.0 <= gap.ours <= 1.0
    assert "worst" in gap.note
    assert figures["dispatch, a step waits: planned ahead"].ours >= 0.0
    assert figures["deployment, 16 devices, batch by devices: above the bound"].ours == gap.ours
    assert figures["dispatch, 5 kinds of replica: search"].unit == "ms"


def test_a_plan_without_a_configuration_is_compared_beside_the_best(settings: RunSettings) -> None:
    profile = read_profile(settings)
    profile = replace(profile, devices=replace(profile.devices, count=8))
    known, published = np.array([[200, 200, 900, 1800]] * 2), [(2, 1, 2), (4, 1, 1)]
    best = plan_figures(profile, known, published, "case", gap=0.2)
    assert "Plait ⟨2,1⟩×2, ⟨4,1⟩×1" in best[0].note
    *same, unlike, ratio = plan_figures(profile, known, published, "case", gap=0.2, lacking=[(2, 1)])
    assert same == best
    assert (best[0].ours, unlike.name) == (0, "case without ⟨2,1⟩: replicas unlike")
    assert "⟨2,1⟩" not in unlike.note
    assert unlike.ours >= 2
    assert (best[2].ours, ratio.name) == (1, "case without ⟨2,1⟩: published plan over Plait's")
    assert ratio.ours < 1


def test_a_task_that_shares_the_devices_with_nothing_takes_what_it_takes_alone(settings: RunSettings) -> None:
    options = _options("lobra/end_to_end_7b")
    (task,) = (each for each in options["tasks"] if each["name"] == "CommitPackFT")
    options |= {"tasks": [task], "sequential": {"CommitPackFT": [[4, 1, 4]]}, "steps": 2, "gap": 0.5}
    options |= {"assumptions": [{"family": "lognormal"}], "sequential_devices": 16, "choosing": 1}
    figures = {each.name: each.ours for each in end_to_end(settings, [], options).figures}
    alone = figures["LobRA over LobRA-Sequential"]
    assert figures["each task on 16 devices: LobRA over LobRA-Sequential"] == pytest.approx(alone)


def test_the_time_model_is_tested_on_held_out_rows(settings: RunSettings) -> None:
    figures = {
        figure.name: figure for figure in time_model(settings, [], _options("lobra/time_model")).figures
    }
    assert figures["all, 75 of 250 rows"].ours == pytest.approx(3.7, abs=0.05)
    assert figures["steps, pp=8"].ours == pytest.approx(-14.0, abs=0.5)
    assert figures["steps, all 32"].ours == pytest.approx(5.5, abs=0.1)


def test_an_absent_table_is_reported(settings: RunSettings, tmp_path: Path) -> None:
    options = _options("lobra/time_model") | {"table": str(tmp_path / "none.csv")}
    with pytest.raises(DataError, match=r"none\.csv"):
        time_model(settings, [], options)


@pytest.mark.parametrize(
    ("name", "benchmark", "wrong"),
    [
        ("lobra/deploy_7b", deployment, {"tasks": [{"name": "x"}]}),
        ("lobra/deploy_7b", deployment, {"typo": 1}),
        ("lobra/deploy_7b", deployment, {"deployment": [[1, 1]]}),
        ("lobra/ablation_7b", ablation, {"steps": "x"}),
        ("lobra/ablation_7b", ablation, {"saved_percent": [18.94, 36.65, 45.03]}),
        ("lobra/ablation_7b", ablation, {"boundaries": {"falling": [512, 256]}}),
        ("lobra/planning_time", planning_time, {"steps": "x"}),
        ("lobra/planning_time", planning_time, {"assumptions": []}),
        ("lobra/planning_time", planning_time, {"devices": {"many": None}}),
        ("lobra/planning_time", planning_time, {"devices": {0: None}}),
        ("mlora/memory_model", memory_model, {"shapes": {"none": {"hidden_size": 0}}}),
        ("mlora/memory_model", memory_model, {"held_out": 0}),
        ("slora/communication", communication, {"devices": 1}),
        ("slora/pool", pool, {"traffic": {"requests": 0, "prompt": [1, 2], "answer": [1, 2]}}),
        ("slora/pool", pool, {"traffic": {"requests": 1, "prompt": [2, 1], "answer": [1, 2]}}),
    ],
)
def test_wrong_options_are_named_before_any_work(
    settings: RunSettings, name: str, benchmark: Benchmark, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"bench\.options"):
        benchmark(settings, [], _options(name) | wrong)


def test_numbers_of_buckets_are_compared_whether_or_not_twelve_are_among_them(settings: RunSettings) -> None:
    options = _options("lobra/buckets") | {"steps": 1, "buckets": [4, 8]}
    names = {figure.name for figure in bucket_numbers(settings, [], options).figures}
    assert names == {f"{each} buckets: {what}" for each in (4, 8) for what in ("padding", "seconds over 4's")}


def test_a_cluster_that_is_not_described_is_refused() -> None:
    with pytest.raises(ConfigError, match="described"):
        deployment(RunSettings(), [], _options("lobra/deploy_7b"))


def test_rows_that_a_table_does_not_have_cannot_be_held_out(settings: RunSettings, tmp_path: Path) -> None:
    table = tmp_path / "times.csv"
    rows = [f"{tp},{length},1,{tp + length / 100}" for tp in (1, 2) for length in (64, 128, 256)]
    table.write_text("\n".join(["tp,seq_len,mbs,time", *rows]), encoding="utf-8")
    for held, said in (([99], "from 0 to 5"), ([], "from 0 to 5"), ([0, 1, 2], "tp=1")):
        with pytest.raises(ConfigError, match=said):
            time_model(settings, [], {"table": str(table), "held_out": held})


def test_a_table_of_bytes_or_of_nothing_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "times.csv"
    table.write_bytes(b"tp,seq_len,mbs,time\n\xff")
    with pytest.raises(DataError, match="UTF-8"):
        read_layer_times(table)
    with pytest.raises(InputError):
        fit_by_degree([])
