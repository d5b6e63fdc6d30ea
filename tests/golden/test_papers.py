"""The files for papers' figures: headlines as recorded, what moves them, and that nothing published is ours.

To record a headline again after an intended change: PLAIT_RECORD=1, and say in the commit what changed it.
Files that take long run with PLAIT_PAPERS=1, too.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from math import isclose
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import fit_lobra_profile
import pytest
import scale_lobra_profile
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict
from rich.console import Console

import plait_bench.register  # noqa: F401
from plait.config.build import job_of, plain, settings_of
from plait.config.fields import build
from plait.engine.build import settle_dtype
from plait.utils.paths import conf_dir, sweeps_dir
from plait_bench import mlora_pipelines
from plait_bench.figures import Published, Report
from plait_bench.inputs import DATA, shipped
from plait_bench.lobra_tables import PROFILE_LACKS, THIRDS
from plait_bench.mlora_pipelines import PipelineOptions, Rates
from plait_bench.papers import paper_files
from plait_bench.pipelines import read_trace
from plait_bench.run import Paper, PublishedEntry, beside_published, find_benchmark
from plait_bench.table import SCREEN, show, to_json

RECORDED = Path(__file__).with_name("papers.json")
SHORT = "SHORT"  # stands for a trace of two steps
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
TINY |= {"num_hidden_layers": 2, "vocab_size": 128, "max_position_embeddings": 1024}
LOG = "bench.options.assumptions", [{"family": "lognormal"}]
CHOOSING = {"bench.options.choosing": 2}
SHORTER = {"bench.options.tasks.*.longest": 512}
# Devices of half as large a replica take the longest sequence, too, so that plans may be others.
ROOMY = {"cluster.options.max_tokens_tables.scaled.3.2": 16384}
# The same, with half as many configurations: planning takes half as long.
HALF = [[2, 4, 2048], [4, 2, 4096], [8, 1, 16384], [16, 1, 16384]]
FEW = {"cluster.options.max_tokens_tables.scaled": HALF}
ROOMY_32B = {"cluster.options.max_tokens_tables.scaled.5.2": 16384}
ROOMY_7B = {"cluster.options.max_tokens_tables.appendix.3.2": 16384}
# For each file: what makes it cheap, and coefficients of a profile or parameters that move what is compared.
MOVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lobra/critical_path": ({}, {"bench.options.sequences": 64}),
    "lobra/homogeneous": ({}, {"cluster.options.time.layers": 40}),
    "lobra/case_study": ({}, {"cluster.options.time.layer.0.token": 6e-6}),
    "lobra/sequential_plans": ({}, SHORTER),
    "lobra/sequential_plans_32b": (
        {"bench.options.alternatives": []},
        SHORTER,
    ),
    "lobra/sequential_plans_70b": (
        {"bench.options.alternatives": []},
        SHORTER | {"bench.options.tasks.7.longest": 16384},  # PubMedQA
    ),
    "lobra/worked_example": (
        {},
        ROOMY_7B | {"cluster.options.time.layer.*.token": 6e-6, "cluster.options.time.layer.2.token": 1e-7},
    ),
    "lobra/throughput": ({}, {"cluster.options.time.layers": 40}),
    "lobra/time_model": ({}, {"bench.options.held_out": list(range(0, 250, 5))}),
    "lobra/lengths": ({"bench.options.samples": 2000}, {"bench.options.sets.*.skewness": 2}),
    "lobra/buckets": (
        {"bench.options.steps": 1, "bench.options.buckets": [12, 32]},
        {"cluster.options.time.layer.0.token": 6e-6},
    ),
    "lorafusion/bubble_ratio": (
        {"bench.options.trace": SHORT, "bench.options.alternatives": []},
        {"cluster.options.time.layer.0.token": 1e-5},
    ),
    "lorafusion/packing_gain": ({"bench.options.trace": SHORT}, {"bench.options.capacity": 8192}),
    "lorafusion/breakdown": ({"bench.options.trace": SHORT}, {"cluster.options.time.layer.0.fixed": 5e-3}),
    "lorafusion/padding": ({"bench.options.trace": SHORT}, {"bench.options.samples": 8}),
    "lorafusion/lengths": ({"bench.options.samples": 2000}, {"bench.options.clip": 2048}),
    "lorafusion/traffic": ({}, {"bench.options.rank": 64}),
    "lorafusion/end_to_end": (
        {
            "bench.options.steps": 2,
            "bench.options.capacities": {"het": 6144},
            "bench.options.alternatives": [],
        },
        {"cluster.options.time.layer.0.fixed": 5e-3},
    ),
    "lorafusion/end_to_end_32b": (
        {
            "bench.options.steps": 2,
            "bench.options.capacities": {"mixed": 7168},
            "bench.options.alternatives": [],
        },
        {"cluster.options.time.layer.0.fixed": 5e-3},
    ),
    "lorafusion/scaling": ({"bench.options.steps": 2}, {"cluster.options.time.layer.0.fixed": 5e-3}),
    "lorafusion/profiler": (
        {"bench.options.steps": 2, "bench.options.capacities": {"xsum": 4096}, "bench.options.tried": [8192]},
        {"cluster.options.time.layer.0.fixed": 5e-2},
    ),
    "mlora/adapters_scaling": (
        {"bench.options.splits": [4], "bench.options.jobs": [1, 2]},
        {"bench.options.gigabytes_per_s": 1},
    ),
    "mlora/bubble_ratio": (
        {f"bench.options.{key}": [2, 3] for key in ("stages", "jobs", "splits")},
        {"bench.options.shown": [[3, 2, 2]]},
    ),
    "mlora/communication": ({}, {"bench.options.tokens": 2048}),
    "mlora/completion_4gpu": (
        {"bench.options.splits": [4, 8], "bench.options.jobs": [1, 4, 6]},
        {"bench.options.gigabytes_per_s": 1},
    ),
    "mlora/gpu_scaling": (
        {"bench.options.devices": [2, 4, 6], "bench.options.models.Llama-2-13B": None},
        {"bench.options.gigabytes_per_s": 4, "bench.options.teraflops": 12},
    ),
    "mlora/slow_network": (
        {"bench.options.splits": [8], "bench.options.jobs": [1, 2, 4]},
        {"bench.options.teraflops": 28, "bench.options.gigabytes_per_s": 0.25},
    ),
    "mlora/throughput": ({"bench.options.splits": [4]}, {"bench.options.teraflops": 28}),
    "mlora/launches": ({"bench.options.shapes": {"TinyLlama-1.1B": TINY}}, {"bench.options.teraflops": 10}),
    "mlora/memory_points": (
        {"bench.options.shapes": {"TinyLlama-1.1B": TINY}, "bench.options.points": [3]}
        | {"bench.options.samples": [1, 2], "bench.options.lengths": [128, 256, 512]},
        {"bench.options.seed": 3},
    ),
    "replay/stopping": ({"bench.options.orders": 3}, {"bench.options.orders": 2}),
    "slora/admission": ({}, {"bench.options.patience": 30}),
    "slora/communication": ({}, {"bench.options.tokens": 2048}),
    "slora/pool": ({}, {"bench.options.tokens": 8192}),
}
# Those that take longer: run if PLAIT_PAPERS=1 is set. Measured figures are not recorded.
LONG: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lobra/ablation_7b": (
        {"bench.options.steps": 2, LOG[0]: LOG[1]},
        {"cluster.options.time.layer.0.token": 6e-6},
    ),
    "lobra/deploy_7b": ({LOG[0]: LOG[1]}, {"cluster.options.time.layer.0.token": 6e-6}),
    "lobra/end_to_end_7b": (
        {"bench.options.steps": 5, "bench.options.tried": 2, **CHOOSING, LOG[0]: LOG[1]},
        {"cluster.options.time.layer.0.token": 6e-6} | ROOMY_7B,
    ),
    "lobra/end_to_end_32b": (
        {"bench.options.steps": 4, "bench.options.tried": 2, **CHOOSING, LOG[0]: LOG[1]},
        {"cluster.options.time.layer.3.token": 4e-6} | ROOMY_32B,
    ),
    "lobra/end_to_end_70b": (
        {"bench.options.steps": 4, "bench.options.tried": 2, **CHOOSING, LOG[0]: LOG[1]},
        {"cluster.options.time.layer.4.token": 4e-6} | ROOMY,
    ),
    "lobra/planning_70b": ({}, {"cluster.options.time.layer.4.token": 4e-6} | ROOMY),
    "lobra/gpu_scaling": (
        {
            "bench.options.steps": 1,
            LOG[0]: LOG[1],
            "bench.options.crossing": [1],
            "bench.options.cases.2": None,
        },
        {"cluster.options.time.layer.4.token": 8e-6} | FEW,
    ),
    "lobra/task_scaling": (
        {
            "bench.options.steps": 1,
            LOG[0]: LOG[1],
            "bench.options.crossing": [1],
            "bench.options.cases.0.devices": 32,
        }
        | {
            "bench.options.cases.0.fused": [[16, 1, 2]],
            "bench.options.cases.0.deployment": [[2, 4, 1], [16, 1, 1]],
        }
        | {f"bench.options.cases.{place}": None for place in (4, 3, 2, 1)},
        {"cluster.options.time.layer.4.token": 8e-6} | FEW,
    ),
    "lobra/two_stage": ({"bench.options.steps": 2}, {"cluster.options.time.layer.0.token": 6e-6}),
    "lorafusion/scheduler_time": ({"bench.options.batches": [10, 400]}, {"bench.options.capacity": 8192}),
    "mlora/pipeline_orders": (
        {"bench.options.stages": [2, 4], "bench.options.adapters": [1, 4], "bench.options.steps": 1}
        | {"bench.options.forward": 4, "bench.options.backward": 8},
        {"bench.options.forward": 6},
    ),
    "slora/adapters": (
        {"bench.options.files": 4, "bench.options.many": 40, "bench.options.alone": 8}
        | {"bench.options.requests": 8, "bench.options.new_tokens": 4, "bench.options.timed_alone": 1},
        {"bench.options.many": 20},
    ),
    "slora/kernels": ({}, {"bench.options.ranks": [8, 64]}),
    "slora/merged": ({}, {"bench.options.features": 512}),
    "slora/vs_peft": ({}, {"bench.options.prompt_tokens": 8}),
}
# These train the jobs of a search, here on the tiny model; all their figures but one are measured.
WITH_JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mlora/batch_lora": ({"bench.options.counts": [1, 2]}, {"bench.options.counts": [1]}),
    "mlora/graph_pruning": (
        {"bench.options.shapes": {"TinyLlama-1.1B": TINY, "Llama-2-7B": TINY}},
        {"bench.options.counts": [1, 4]},
    ),
    "mlora/loss_curves": ({"train.steps": 2}, {"train.steps": 3}),
    "mlora/single_gpu": ({"train.batch_size": 2}, {"bench.options.counts": [1, 4]}),
    "mlora/tensor_measured": ({"bench.options.slices": 2}, {"bench.options.tokens": 64}),
}
LONG |= WITH_JOBS
# These need a GPU; here their benchmarks run at small sizes on the CPU, and each change moves what they do.
SIZES = {"layers": 1, "hidden": 32, "inner": 48, "heads": 4, "shared": 2, "vocabulary": 97}
STEP = SIZES | {"length": 12, "rank": 4, "capacity": 24, "repeats": 1, "file": "step.json"}
CALL = {"adapters": [1, 4], "repeats": 1, "file": "kernels.json"}
SERVED = SIZES | {"files": 4, "requests": 8, "rate": 1000.0, "longest": 12, "pool_tokens": 512}
NEEDS_GPU: dict[str, dict[str, Any]] = {
    "lorafusion/end_to_end_8b": STEP,
    "lorafusion/l40s": STEP,
    "lorafusion/kernels": CALL,
    "lorafusion/motivation": CALL | {"adapters": [1]},
    "slora/prefetch": SERVED,
    "slora/throughput": SERVED,
}
JOBS = 4
EVERY = MOVED | (LONG if os.environ.get("PLAIT_PAPERS") == "1" else {})
NAMES = [pytest.param(each, marks=pytest.mark.timeout(3600) if each in LONG else ()) for each in EVERY]


@cache
def composed(name: str) -> dict[str, Any]:
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        config = compose("config", [f"+sweeps={name}", *(["model=tiny"] if name in WITH_JOBS else ())])
    OmegaConf.set_struct(config, False)
    with open_dict(config):
        config.pop("sweeps", None)
    return plain(config)


@cache
def short_trace() -> str:
    """A file with two steps of LoRAFusion's trace."""
    jobs = read_trace(shipped("lorafusion_mixed.json"))
    path = Path(mkdtemp()) / "short.json"
    path.write_text(json.dumps({"jobs": {job: own[:2] for job, own in jobs.items()}}))
    return str(path)


def run(config: Mapping[str, Any], *, whole: bool) -> Report:
    benchmark = find_benchmark(config["bench"]["run"], config["mode"])
    jobs = (
        [job_of(f"job-{number}", dict(config)) for number in range(JOBS)]
        if config["model"]["kind"] == "tiny"
        else ()
    )
    report = benchmark(settle_dtype(settings_of(dict(config))), jobs, config["bench"]["options"])
    report, unmatched = beside_published(
        report, [build(PublishedEntry, item, "published") for item in config.get("published") or ()]
    )
    assert not (whole and unmatched)
    return report


@cache
def cheap(name: str) -> dict[str, Any]:
    config = composed(name)
    for path, value in (MOVED | LONG)[name][0].items():
        config = changed(config, path, short_trace() if value == SHORT else value)
    return config


@cache
def as_it_is(name: str) -> Report:
    return run(cheap(name), whole=not (MOVED | LONG)[name][0])


def changed(config: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value; None takes an entry of a list away. ``*`` stands for every entry."""
    if "*" in path.split("."):
        before, _, after = path.partition(".*.")
        for number in range(len(_at(config, before.split(".")))):
            config = changed(config, f"{before}.{number}.{after}", value)
        return dict(config)
    copy: dict[str, Any] = json.loads(json.dumps(config))
    *owners, last = path.split(".")
    place = _at(copy, owners)
    key: Any = int(last) if isinstance(place, list) else last
    if value is None:
        del place[key]
        return copy
    assert isinstance(place, list) or place.get(key) != value
    place[key] = value
    return copy


def _at(config: Any, owners: Sequence[str]) -> Any:
    """What stands at a path."""
    for owner in owners:
        config = config[int(owner)] if isinstance(config, list) else config[owner]
    return config


@pytest.mark.parametrize("name", NAMES)
def test_headlines_are_as_recorded_and_fit_on_a_screen(name: str) -> None:
    report = as_it_is(name)
    headlines = [figure for figure in report.figures if figure.headline]
    out = io.StringIO()
    show(report, Console(file=out, width=80), details=False)
    assert len(out.getvalue().splitlines()) <= SCREEN
    assert json.loads(to_json(report))["figures"]
    shown = headlines or report.figures  # all where the paper prints no number
    ours = {figure.name: None if figure.how == "measured" else figure.ours for figure in shown}
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if os.environ.get("PLAIT_RECORD") == "1":
        recorded[name] = {key: value and float(f"{value:.6g}") for key, value in ours.items()}
        RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    assert ours.keys() == recorded[name].keys()
    for key, value in ours.items():
        assert value == (value if value is None else pytest.approx(recorded[name][key], rel=1e-4, abs=1e-9))


def test_mloras_slow_network_says_where_the_loss_is_computed_and_fsdps_batch() -> None:
    found = {each.name: each.ours for each in as_it_is("mlora/slow_network").figures}
    tiny, seven, thirteen = (
        f"{model}, 8 devices" for model in ("TinyLlama-1.1B", "Llama-2-7B", "Llama-2-13B")
    )
    for model, hours in ((seven, 14.847), (thirteen, 15.307)):  # of its Figures 7e and 7f, most tasks
        jobs = 4 if model == seven else 2
        drawn = 7473 * 512 * 10 / (3600 * hours)
        assert found[f"{model}, {jobs} jobs: LoRAPP"] == pytest.approx(drawn, rel=0.1)
        assert found[f"{model}, {jobs} jobs: LoRAPP, loss on the last device"] > 2 * drawn
    drawn = 7473 * 512 * 10 / (3600 * 15.833)  # two tasks of its Figure 7e
    two = f"{seven}, 2 jobs: LoRAPP"
    assert found[two] > 1.1 * drawn
    assert found[f"{two}, acknowledged"] == pytest.approx(drawn, rel=0.1)
    # 171 hours of its Figure 7d: a step, which is mostly weights, trains one batch, not one for each machine
    drawn = 7473 * 512 * 10 / (170.9 * 3600)
    assert found[f"{tiny}: FSDP"] == pytest.approx(drawn, rel=0.1)


def test_mloras_tensor_parallelism_is_that_of_its_benchmark_on_both_clusters() -> None:
    figures = {each.name: each.ours for each in as_it_is("mlora/slow_network").figures}
    tiny = "TinyLlama-1.1B, 8 devices: TP"
    assert figures[tiny] == pytest.approx(35.3, rel=0.1)
    assert figures[f"{tiny}, Megatron-LM's sums"] > 2 * 35.3
    found = {each.name: each.ours for each in as_it_is("mlora/throughput").figures}
    options = composed("mlora/throughput")["bench"]["options"]
    assert options["gigabytes_per_s"] < 32  # of PCIe 4.0 x16
    # its Figure 11: LoRAPP's tokens a second over the printed ratios
    for model, drawn in (
        ("TinyLlama-1.1B", 10748 / 1.86),
        ("Llama-2-7B", 1500),
        ("Llama-2-13B", 1280 / 1.46),
    ):
        assert found[f"{model}, 4 devices: TP"] == pytest.approx(drawn, rel=0.1)


# Hours of a task in mLoRA's Figures 7a to c, by number of tasks.
HOURS = {
    "TinyLlama-1.1B": (2.3103, 1.2266, 1.0504),
    "Llama-2-7B": (8.337, 4.723, 4.499),
    "Llama-2-13B": (14.695, 8.300),
}


def test_mloras_tokens_by_adapters_are_those_of_its_hours() -> None:
    published = {each["name"]: each["value"] for each in composed("mlora/adapters_scaling")["published"]}
    for model, hours in HOURS.items():
        for jobs, each in enumerate(hours, start=1):
            drawn = published[f"{model}, 4 devices, {jobs} jobs: LoRAPP"]
            assert drawn == pytest.approx(7473 * 512 * 10 / (3600 * each), rel=1e-3)


PIPELINES = [
    f"mlora/{name}"
    for name in ("adapters_scaling", "completion_4gpu", "gpu_scaling", "slow_network", "throughput")
]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_whole_file_of_mlora_has_a_figure_for_each_published_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``run`` asserts; the other tests cut these files. What is simulated decides no name, so that rates
    that cost nothing do."""

    def alike(_model: object, _devices: int, _jobs: int, asked: PipelineOptions, **_: bool) -> Rates:
        every = dict.fromkeys(asked.splits, 1.0)
        return Rates(every, every, None)

    monkeypatch.setattr(mlora_pipelines, "rates", alike)
    run(composed(name), whole=True)


def test_mloras_tokens_a_second_on_more_devices_are_not_what_was_fitted() -> None:
    figures = [each for each in as_it_is("mlora/gpu_scaling").figures if each.headline]
    assert {each.result for each in figures} == {"within"}
    for each in figures:
        assert isinstance(each.target, Published)
        assert each.target.weak is None


def test_every_file_that_can_be_run_is_tested() -> None:
    needs = {each.name for each in paper_files(sweeps_dir()) if each.needs}
    assert {each.name for each in paper_files(sweeps_dir())} == {*MOVED, *LONG, *needs}
    assert needs == NEEDS_GPU.keys()


@pytest.mark.parametrize("name", NEEDS_GPU)
def test_what_needs_a_gpu_measures_ours_beside_what_is_published(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config: dict[str, Any] = json.loads(json.dumps(composed(name)))
    options = config["bench"]["options"]
    options |= NEEDS_GPU[name]
    for group in options.get("groups", ()):
        group |= {"layers": ["smollm2-135m o"], "tokens": [24]}
    for case in options.get("cases", ()):
        case["adapters"] = min(case["adapters"], 12)  # more than files, and than requests
    config["engine"] |= {"device": "cpu", "kernels": "grouped"}
    report = run(config, whole=True)  # each published value has its figure
    assert {figure.how for figure in report.figures} == {"measured"}
    kept = {file.name: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    for entry in config.get("published") or ():
        entry["value"] *= 2
    moved = run(config, whole=True)
    assert _targets(moved) == [2 * value for value in _targets(report)]
    if kept:  # resumed from what was measured, so ours are the same
        assert [figure.ours for figure in moved.figures] == [figure.ours for figure in report.figures]
    if name == "lorafusion/kernels":
        rows = {each["adapters"]: each["seconds"] for each in kept["kernels.json"]["rows"]}
        named = {figure.name: figure.ours for figure in report.figures}
        found = named["Figure 18, 4 adapters: mean speed over torch's LoRA"]
        assert found == rows[1]["torch-lora"]["both"] / rows[4]["grouped"]["both"]


def _targets(report: Report) -> list[float]:
    return [figure.target.value for figure in report.figures if isinstance(figure.target, Published)]


# Compared numbers that nothing may move, each with its reason. A pattern may stand for several.
FIXED = {
    "lobra/gpu_scaling": {"16 GPUs: LobRA": "one replica, the same as Task-Fused's, over which it is taken"},
    "mlora/graph_pruning": {
        "Llama-2-7B, 4 adapters: peak saved": "0: plain operators keep no more than fused ones at any size"
    },
    "mlora/bubble_ratio": {
        "* D=*": "an idle share that its name alone decides: devices, adapters, microbatches"
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_coefficients_or_parameters_move_each_compared_number_and_nothing_published(name: str) -> None:
    """Each that a cheap run has; what it leaves out is of other cases of the same kind."""
    before, config = as_it_is(name), cheap(name)
    for path, value in EVERY[name][1].items():
        config = changed(config, path, value)
    after = run(config, whole=False)
    # names have parameters in them
    assert {(each.name, each.ours) for each in before.figures} != {
        (each.name, each.ours) for each in after.figures
    }
    moved = {figure.name: figure for figure in after.figures}
    still = set()
    for one in before.figures:
        if not isinstance(one.target, Published):
            continue
        other = moved.get(one.name, one)
        assert isinstance(other.target, Published)
        assert replace(one.target, others=()) == replace(other.target, others=())
        if isclose(other.ours, one.ours, rel_tol=1e-9):  # what rounding alone moves is not moved
            still.add(one.name)
    fixed = FIXED.get(name, {})
    assert {each for each in still if not any(fnmatchcase(each, pattern) for pattern in fixed)} == set()
    assert all(any(fnmatchcase(each, pattern) for each in still) for pattern in fixed)


# Values that the paper leaves to an assumption which was chosen knowing them, and its own formulas.
WEAK = {
    "mlora/communication": {"formula"},
    "mlora/completion_4gpu": {"assumed"},
}


@pytest.mark.parametrize("name", WEAK)
def test_what_is_no_evidence_is_not_counted_as_such(name: str) -> None:
    found = [figure for figure in as_it_is(name).figures if figure.headline]
    assert {figure.result for figure in found} == WEAK[name]
    for figure in found:
        assert isinstance(figure.target, Published)
        if WEAK[name] == {"assumed"}:  # the other assumptions really give something else
            assert all(each != figure.ours for each in figure.target.others)


@pytest.mark.parametrize("name", ["", "_32b", "_70b"])
def test_a_plan_that_could_not_be_another_is_no_evidence(name: str) -> None:
    """Where one configuration alone takes the longest sequence, whatever the planner does gives it."""
    found = [figure for figure in as_it_is(f"lobra/sequential_plans{name}").figures if figure.headline]
    one = {figure.name for figure in found if figure.note.endswith("for 1 configuration")}
    assert one == {figure.name for figure in found if figure.result == "formula"}
    assert len(one) == (5 if name else 4)


def test_every_figure_of_a_paper_has_one_file() -> None:
    seen: dict[tuple[str, str], str] = {}
    for path in sorted(sweeps_dir().rglob("*.yaml")):
        paper = build(Paper, yaml.safe_load(path.read_text(encoding="utf-8")).get("paper") or {}, "paper")
        assert bool(paper.name) == bool(paper.figures), path
        for figure in paper.figures:
            assert (paper.name, figure) not in seen, f"{path} and {seen[paper.name, figure]}: {figure}"
            seen[paper.name, figure] = path.name


def bars(name: str) -> dict[str, dict[str, float]]:
    """The published tokens a second of a file, by system and workload."""
    found: dict[str, dict[str, float]] = {}
    for entry in composed(name)["published"]:
        if entry["unit"] == "tokens/s":
            workload, system = entry["name"].split(": ")
            found.setdefault(system, {})[workload] = entry["value"]
    return found


@pytest.mark.parametrize(
    ("name", "most", "mean"),
    [("lorafusion/end_to_end", 1.81, 1.64), ("lorafusion/end_to_end_32b", 1.64, 1.42)],
)
def test_the_bars_of_lorafusions_artifact_are_those_of_its_text(name: str, most: float, mean: float) -> None:
    found = bars(name)
    others = found["FSDP"] | {"het": sum(found["FSDP"].values()) / 4}  # its mean there, not a run
    factors = [rate / others[workload] for workload, rate in found["LoRAFusion"].items()]
    assert max(factors) == pytest.approx(most, abs=0.006)
    assert sum(factors) / 5 == pytest.approx(mean, abs=0.006)


def test_a_gain_that_no_effect_at_all_would_meet_is_no_evidence() -> None:
    """LoRAFusion's own bars of Figure 16 are less than a tenth above 1."""
    found = [figure for figure in as_it_is("lorafusion/scaling").figures if figure.headline]
    kinds = {figure.result for figure in found if figure.target and figure.target.within(1.0)}
    assert "small effect" in kinds
    assert "within" not in kinds


def test_the_text_of_lorafusions_figure_16_is_compared_with_all_systems() -> None:
    """Its 1.18 is the mean of its artifact's bars; its 1.25 is not, but that without its own."""
    bars: dict[str, dict[str, float]] = {}
    for entry in composed("lorafusion/scaling")["published"]:
        devices, _, rest = entry["name"].partition(": ")
        if "over data parallelism" in rest:
            bars.setdefault(devices, {})[rest.partition(",")[0]] = entry["value"]
    text = {devices: own.pop("mean of systems") for devices, own in bars.items()}
    assert text == {"8 devices": 1.18, "16 devices": 1.25}
    means = {devices: sum(own.values()) / 4 for devices, own in bars.items()}
    assert means == pytest.approx({"8 devices": 1.18, "16 devices": 1.21}, abs=0.006)
    others = sum(value for name, value in bars["16 devices"].items() if name != "LoRAFusion") / 3
    assert others == pytest.approx(1.25, abs=0.006)
    ours = {figure.name: figure.ours for figure in as_it_is("lorafusion/scaling").figures}
    for devices in bars:
        title = f"{devices}: {{}}, jobs over data parallelism"
        each = [ours[title.format(name)] for name in bars[devices]]
        assert ours[title.format("mean of systems")] == pytest.approx(sum(each) / 4)


def test_lorafusions_gains_with_data_parallelism_are_those_of_its_artifacts_bars() -> None:
    """The text's means, from each system's own gain by jobs and its bar on four devices."""
    gains = {entry["name"]: entry["value"] for entry in composed("lorafusion/scaling")["published"]}
    four = {system: own["mixed"] for system, own in bars("lorafusion/end_to_end").items()}
    for other, text in (("FSDP", 1.78), ("mLoRA", 1.50)):
        ratios = [
            four["LoRAFusion"] / gains[title.format("LoRAFusion")] * gains[title.format(other)] / four[other]
            for title in (f"{each} devices: {{}}, jobs over data parallelism" for each in (8, 16))
        ]
        assert sum(ratios) / 2 == pytest.approx(text, abs=0.006)
        assert gains[f"data parallelism: LoRAFusion over {other}, mean"] == text


def test_tensor_parallelism_is_slower_by_its_sums_and_fsdp_by_late_weights() -> None:
    name = "mlora/throughput"
    ours = {figure.name: figure.ours for figure in as_it_is(name).figures}
    case = "Llama-2-7B, 4 devices, 4 jobs: LoRAPP over {}"
    options = composed(name)["bench"]["options"]
    link, speed, memory = (
        options[key] * unit
        for key, unit in (("gigabytes_per_s", 1e9), ("teraflops", 1e12), ("memory_gigabytes_per_s", 1e9))
    )
    head, batch = 4096 * 32000, 4096  # weights; tokens
    # two operations a weight; two products of attention over 512 tokens
    products = batch * (2 * 6.48e9 + 32 * 4 * 4096 * 512) / speed
    last, loss = batch * 2 * head / speed, 10 * batch * 32000 * 4 / memory
    # 32 layers' hidden states, 4,096 tokens of 4,096 values of 4 bytes: each device sends three quarters
    passed = 32 * 0.75 * 4096 * 4096 * 4 / link
    forward = products / 4 + last + batch * 32 * 2.65e6 / 2 / memory  # the whole head on every device
    lorapp = ours["Llama-2-7B, 4 devices, 4 jobs: LoRAPP"]
    seconds = loss + forward + 7 * passed + max(forward, 14 * passed)
    assert ours[case.format("TP")] == pytest.approx(lorapp / (batch / seconds))
    seconds = loss + 2 * forward + 8 * passed
    assert ours[case.format("TP, Megatron-LM's sums")] == pytest.approx(lorapp / (batch / seconds))
    # a batch over the devices, whose forward and backward take as long; embedding and head are gathered, too
    work = (products + last + batch * 32 * 4.76e6 / 2 / memory) / 4
    gathered = 0.75 * (6.48e9 + 2 * head) * 4 / link
    for late, seconds in (
        ("", max(work, gathered) + work + gathered),
        (", weights in time", 2 * max(work, gathered)),
        (", weights late", 2 * (work + gathered)),
    ):
        expected = lorapp / (batch / (seconds + loss / 4))
        assert ours[case.format(f"FSDP{late}")] == pytest.approx(expected)


def test_what_lorafusions_artifact_says_of_its_runs_moves_its_systems() -> None:
    name = "lorafusion/end_to_end"
    before = {figure.name: figure.ours for figure in as_it_is(name).figures}
    other = changed(cheap(name), "bench.options.sizes.mLoRA", {"het": 4})
    moved = {each.name for each in run(other, whole=False).figures if each.ours != before[each.name]}
    assert {"het: mLoRA"} == {each for each in moved if each.startswith("het")}
    once = run(changed(cheap(name), "engine.checkpointing", False), whole=False)
    rates = {figure.name: figure.ours for figure in once.figures}
    slower = rates["het: FSDP, weights in time"] / before["het: FSDP, weights in time"]
    assert 1.45 < slower < 1.4866  # a forward is 0.4865 of a layer's time, and the head's stays
    assert all(
        rates[f"het: {system}"] > before[f"het: {system}"] for system in ("1F1B", "mLoRA", "LoRAFusion")
    )


def test_plans_alone_are_compared_under_a_further_assumption_about_lengths() -> None:
    figures = as_it_is("lobra/task_scaling").figures
    names = {each.name for each in figures if "; lognormal, sigma 0.8, clip 16384, seed 0" in each.name}
    assert "4 tasks: replicas unlike the published ones; lognormal, sigma 0.8, clip 16384, seed 0" in names
    assert all("replicas unlike" in each or "published plan over" in each for each in names)


def test_lobras_rows_are_compared_with_fits_that_leave_them_out() -> None:
    time = composed("lobra/homogeneous")["cluster"]["options"]["time"]
    for tp, (*layer, fixed, labelled) in fit_lobra_profile.coefficients().items():
        row = next(each for each in time["layer"] if each["tp"] == tp)
        assert [row["fixed"], row["token"], row["square"]] == pytest.approx(layer, rel=1e-5)
        row = next(each for each in time["head"] if each["tp"] == tp)
        assert [row["fixed"], row["labelled"]] == pytest.approx([fixed, labelled], rel=1e-5, abs=1e-12)
    assert fit_lobra_profile.thirds()[:2] == json.loads((DATA / THIRDS).read_text())
    off = [
        [
            abs(figure.target.difference(figure.ours))
            for figure in as_it_is(name).figures
            if isinstance(figure.target, Published)
        ]
        for name in ("lobra/homogeneous", "lobra/throughput")
    ]
    assert [len(each) for each in off] == [32, 23]
    assert max(map(max, off)) < 0.051
    held_out = [each for own in off for each in own[PROFILE_LACKS::3]]
    assert sum(held_out) / len(held_out) == pytest.approx(time["error"], abs=5e-4)
    assert max(held_out) < 0.032


@pytest.mark.parametrize("name", scale_lobra_profile.SCALED)
def test_profiles_of_lobras_larger_models_are_its_7b_profile_scaled(name: str) -> None:
    time = scale_lobra_profile.options_of(name)["time"]
    for rows, scaled in zip((time["layer"], time["head"]), scale_lobra_profile.scaled(name), strict=True):
        for row, expected in zip(rows, scaled, strict=True):
            assert row == pytest.approx(expected, rel=1e-5, abs=1e-12)
