"""The LoRAFusion and mLoRA benchmarks: their files compose with what the functions give."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from plait.config.fields import build
from plait.core.errors import ConfigError
from plait.core.settings import ClusterSettings, RunSettings
from plait.cost.time import StageTime
from plait.simulate.events import OneFOneB, Pipeline, Work, simulate
from plait.utils.paths import conf_dir, sweeps_dir
from plait_bench.benchmarks import OPTIONS
from plait_bench.blocking import blocking_seconds
from plait_bench.lorafusion import (
    Options,
    bubble_ratio,
    lorafusion,
    opened,
    packing_gain,
    scheduler_time,
)
from plait_bench.lorafusion_runs import rate_in_runs
from plait_bench.lorafusion_steps import end_to_end, profiler
from plait_bench.mlora import bubble_ratio as mlora_bubble_ratio

SMALL = {"adapters": 2, "steps": 4, "workers": 1}


def content(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((sweeps_dir() / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def h100() -> RunSettings:
    cluster = yaml.safe_load((conf_dir() / "cluster" / "h100_llama31_70b.yaml").read_text(encoding="utf-8"))
    return replace(RunSettings(), cluster=ClusterSettings(**cluster))


def short_trace(tmp_path: Path) -> dict[str, str]:
    trace = build(Options, content("lorafusion/bubble_ratio")["bench"]["options"], OPTIONS).lengths()
    short = {job: own[:6] for job, own in trace.items()}
    (tmp_path / "short.json").write_text(json.dumps({"jobs": short}))
    return {"trace": str(tmp_path / "short.json")}


def test_every_published_idle_share_has_its_figure(tmp_path: Path) -> None:
    file = content("lorafusion/bubble_ratio")
    options = file["bench"]["options"] | SMALL | short_trace(tmp_path)
    options["alternatives"] = options["alternatives"][-1:]
    report = bubble_ratio(h100(), (), options)
    names = [figure.name for figure in report.figures]
    assert len(set(names)) == len(names)
    assert {(item["name"], item["unit"]) for item in file["published"]} <= {
        (figure.name, figure.unit) for figure in report.figures
    }
    assert {figure.how for figure in report.figures} == {"simulated", "computed"}
    assert all(0 < figure.ours < 100 for figure in report.figures)
    assert any(options["alternatives"][0]["label"] in name for name in names)
    assert any("assumed, not published" in line for line in report.assumptions)


def test_every_published_gain_has_its_figure(tmp_path: Path) -> None:
    file = content("lorafusion/packing_gain")
    report = packing_gain(h100(), (), file["bench"]["options"] | SMALL | short_trace(tmp_path))
    assert {item["name"] for item in file["published"]} <= {figure.name for figure in report.figures}


def test_head_and_loss_take_the_given_factor_longer() -> None:
    options = content("lorafusion/bubble_ratio")["bench"]["options"]
    once, more = (
        opened(h100(), build(Options, options | {"head": head}, OPTIONS)).profile.time for head in (1.0, 3.0)
    )
    assert more.layer == once.layer
    assert more.head[1].labelled == pytest.approx(3 * once.head[1].labelled)


@pytest.mark.parametrize("head", [0.0, -1.0])
def test_head_and_loss_take_time(head: float) -> None:
    options = content("lorafusion/bubble_ratio")["bench"]["options"]
    with pytest.raises(ConfigError, match=rf"head={head}.*\n.*must be above 0"):
        bubble_ratio(h100(), (), options | {"head": head})


@pytest.mark.parametrize("path", sorted((sweeps_dir() / "lorafusion").glob("*.yaml")), ids=lambda at: at.stem)
def test_a_file_whose_head_and_loss_are_fitted_says_so(path: Path) -> None:
    file = content(f"lorafusion/{path.stem}")
    said = any(
        "how much longer head and loss take" in each for each in file.get("paper", {}).get("leaves_open", ())
    )
    assert said == ("head" in file["bench"]["options"])


def test_capacities_are_compared_by_lorafusions_own_schedule(tmp_path: Path) -> None:
    options = content("lorafusion/profiler")["bench"]["options"] | SMALL | short_trace(tmp_path)
    options |= {"capacities": {"mixed": 6144}, "tried": []}
    (figure,) = profiler(h100(), (), options).figures
    begun = opened(h100(), build(Options, options, OPTIONS))
    pipeline = lorafusion(begun.asked.workload("mixed"), begun.even, begun.asked)
    assert figure.note.endswith(f" {rate_in_runs(pipeline):,.0f} tokens/s")


def test_other_assumptions_move_every_system_that_they_concern(tmp_path: Path) -> None:
    options = content("lorafusion/end_to_end")["bench"]["options"] | SMALL | short_trace(tmp_path)
    moving = {"head": 9.0, "square": 1e-8, "plaits": True, "capacity": 4096}
    options |= {
        "capacities": {"mixed": 6144},
        "alternatives": [{"label": name, "means": {}, name: value} for name, value in moving.items()],
    }
    rates = {figure.name: figure.ours for figure in end_to_end(h100(), (), options).figures}
    systems = ("1F1B", "mLoRA", "FSDP", "LoRAFusion")
    moved = {
        name: {each for each in systems if rates[f"mixed: {each}; {name}"] != rates[f"mixed: {each}"]}
        for name in moving
    }
    every = set(systems)
    assert moved == {"head": every, "square": every, "plaits": {"LoRAFusion"}, "capacity": {"LoRAFusion"}}
    assert all(rates[f"mixed: {each}; head"] < rates[f"mixed: {each}"] for each in systems)


def test_other_numbers_of_samples_are_tried_for_mlora(tmp_path: Path) -> None:
    options = content("lorafusion/bubble_ratio")["bench"]["options"] | SMALL | short_trace(tmp_path)
    options |= {"alternatives": [], "other_samples": [8]}
    idle = {figure.name: figure.ours for figure in bubble_ratio(h100(), (), options).figures}
    eight = bubble_ratio(h100(), (), options | {"samples": 8, "other_samples": []}).figures
    expected = next(figure.ours for figure in eight if figure.name == "mLoRA, packed")
    assert idle["mLoRA, packed; 8 samples a microbatch"] == expected != idle["mLoRA, packed"]
    with pytest.raises(ConfigError, match=r"other_samples=\[0\].*\n.*at least 1"):
        bubble_ratio(h100(), (), options | {"other_samples": [0]})


def test_planning_time_is_measured_by_samples() -> None:
    options = content("lorafusion/scheduler_time")["bench"]["options"] | SMALL | {"batches": [2]}
    report = scheduler_time(RunSettings(), (), options)
    assert [(figure.name, figure.unit, figure.how) for figure in report.figures] == [
        ("64 samples", "s", "measured")
    ]


def test_mlora_formulas_are_met() -> None:
    options = {"stages": [2, 4], "jobs": [1, 3], "splits": [1, 2], "shown": [[4, 1, 2], [4, 3, 1]]}
    report = mlora_bubble_ratio(RunSettings(), (), options)
    assert [figure.ours for figure in report.figures[:2]] == [100, 100]
    assert all(figure.within for figure in report.figures[2:])
    assert [figure.note for figure in report.figures[:2]] == ["8 of 8", "4 of 4"]
    assert content("mlora/bubble_ratio")["bench"]["options"]["shown"]


def test_wrong_options_and_clusters_are_refused() -> None:
    options = content("lorafusion/bubble_ratio")["bench"]["options"]
    with pytest.raises(ConfigError, match=r"bench\.options\.tiles"):
        bubble_ratio(h100(), (), {**options, "tiles": 3})
    with pytest.raises(ConfigError, match=r"bench\.options\.capacity=0"):
        bubble_ratio(h100(), (), {**options, "capacity": 0})
    with pytest.raises(ConfigError, match=r"bench\.options\.data_sets\[0\]"):
        build(
            Options,
            {**options, "data_sets": [{"name": "x", "family": "normal", "mean": 1, "sigma": 1}]},
            OPTIONS,
        )
    with pytest.raises(ConfigError, match=r"cluster\.kind=local"):
        bubble_ratio(RunSettings(), (), options)


def replica(stages: int, *seconds: int, jobs: str) -> Pipeline:
    """One microbatch for each letter of ``jobs``, a step of that job; forward takes a third."""
    works = [Work(((job, jobs[:place].count(job)),)) for place, job in enumerate(jobs)]
    taken = [StageTime(each, 2 * each) for each in seconds]
    return Pipeline(works, [taken] * stages, OneFOneB([len(works)]))


def test_stages_that_wait_for_sums_take_as_long_as_simulated_if_nobody_is_late() -> None:
    one = replica(3, 4, 1, 2, 5, 3, 1, jobs="abcabc")
    alone = simulate({0: one}).makespan
    groups = {job: job for job in "abc"}
    assert blocking_seconds({0: one}, groups) == alone
    assert blocking_seconds({0: one, 1: one}, groups) == alone


def test_stages_that_wait_for_sums_wait_for_the_slowest_at_every_step() -> None:
    unlike = {0: replica(1, 3, 1, jobs="ab"), 1: replica(1, 1, 3, jobs="ab")}
    assert simulate(unlike).makespan == 3 * (3 + 1)
    assert blocking_seconds(unlike, {"a": "a", "b": "b"}) == 3 * (3 + 3)
    assert blocking_seconds(unlike, {"a": "a", "b": "a"}) == 3 * (3 + 1)  # one sum at the end of both
