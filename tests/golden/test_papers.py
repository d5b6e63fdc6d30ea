"""The files for papers' figures: headlines as recorded, what moves them, and that nothing published is ours.

To record a headline again after an intended change: PLAIT_RECORD=1, and say in the commit what changed it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import fit_lobra_profile
import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

import plait_bench.register  # noqa: F401
from plait.config.build import plain, settings_of
from plait.config.fields import build
from plait.utils.paths import conf_dir, sweeps_dir
from plait_bench.figures import Published, Report
from plait_bench.run import Paper, PublishedEntry, beside_published, find_benchmark

RECORDED = Path(__file__).with_name("papers.json")
# Files that are cheap to run, with a coefficient of a profile or a parameter that moves their figures.
MOVED: dict[str, tuple[str, Any]] = {
    "lobra/critical_path": ("bench.options.sequences", 64),
    "lobra/homogeneous": ("cluster.options.time.layer.0.fixed", 5e-3),
    "lobra/case_study": ("cluster.options.time.layer.0.token", 6e-6),
    "lobra/sequential_plans": ("bench.options.assumption.clip", 4096),
    "lobra/worked_example": ("cluster.options.time.layer.0.token", 6e-6),
    "mlora/adapters_scaling": ("bench.options.gigabytes_per_s", 1),
    "mlora/communication": ("bench.options.tokens", 2048),
    "mlora/completion_4gpu": ("bench.options.gigabytes_per_s", 1),
    "mlora/gpu_scaling": ("bench.options.gigabytes_per_s", 4),
    "mlora/slow_network": ("bench.options.teraflops", 28),
    "slora/communication": ("bench.options.tokens", 2048),
    "mlora/throughput": ("bench.options.teraflops", 28),
    "lobra/throughput": ("cluster.options.time.head.1.labelled", 5e-6),
}


@cache
def composed(name: str) -> dict[str, Any]:
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        config = compose("config", [f"+sweeps={name}"])
    OmegaConf.set_struct(config, False)
    with open_dict(config):
        config.pop("sweeps", None)
    return plain(config)


def run(config: Mapping[str, Any]) -> Report:
    benchmark = find_benchmark(config["bench"]["run"], config["mode"])
    report = benchmark(settings_of(dict(config)), (), config["bench"]["options"])
    report, unmatched = beside_published(
        report, [build(PublishedEntry, item, "published") for item in config["published"]]
    )
    assert not unmatched
    return report


@cache
def as_it_is(name: str) -> Report:
    return run(composed(name))


def changed(config: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(config))
    *owners, last = path.split(".")
    place: Any = copy
    for key in owners:
        place = place[int(key)] if isinstance(place, list) else place[key]
    key = int(last) if isinstance(place, list) else last
    assert isinstance(place, list) or place.get(key) != value
    place[key] = value
    return copy


@pytest.mark.parametrize("name", MOVED)
def test_headlines_are_as_recorded(name: str) -> None:
    figures = as_it_is(name).figures
    ours = {figure.name: figure.ours for figure in figures if figure.headline}
    ours = ours or {figure.name: figure.ours for figure in figures}  # where the paper prints no number
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if os.environ.get("PLAIT_RECORD") == "1":
        recorded[name] = {key: float(f"{value:.6g}") for key, value in ours.items()}
        RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    assert ours == pytest.approx(recorded[name], rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("name", MOVED)
def test_a_coefficient_or_a_parameter_moves_ours_and_nothing_published(name: str) -> None:
    before, after = as_it_is(name), run(changed(composed(name), *MOVED[name]))
    moved = {figure.name: figure for figure in after.figures}
    both = [(figure, moved[figure.name]) for figure in before.figures if figure.name in moved]
    assert any(one.ours != other.ours for one, other in both)
    for one, other in both:
        if isinstance(one.target, Published):
            assert isinstance(other.target, Published)
            assert replace(one.target, others=()) == replace(other.target, others=())


# Values that the paper leaves to an assumption which was chosen knowing them, and its own formulas.
WEAK = {
    "mlora/adapters_scaling": {"formula"},
    "mlora/communication": {"formula"},
    "mlora/completion_4gpu": {"assumed"},
    "mlora/gpu_scaling": {"assumed"},
}


@pytest.mark.parametrize("name", WEAK)
def test_what_is_no_evidence_is_not_counted_as_such(name: str) -> None:
    found = [figure for figure in as_it_is(name).figures if figure.headline]
    assert {figure.result for figure in found} == WEAK[name]
    for figure in found:
        assert isinstance(figure.target, Published)
        if WEAK[name] == {"assumed"}:  # the other assumptions really give something else
            assert all(each != figure.ours for each in figure.target.others)


def test_every_figure_of_a_paper_has_one_file() -> None:
    seen: dict[tuple[str, str], str] = {}
    for path in sorted(sweeps_dir().rglob("*.yaml")):
        paper = build(Paper, yaml.safe_load(path.read_text(encoding="utf-8")).get("paper") or {}, "paper")
        assert bool(paper.name) == bool(paper.figures), path
        for figure in paper.figures:
            assert (paper.name, figure) not in seen, f"{path} and {seen[paper.name, figure]}: {figure}"
            seen[paper.name, figure] = path.name


def test_lobras_profile_is_fitted_without_the_held_out_rows() -> None:
    time = composed("lobra/homogeneous")["cluster"]["options"]["time"]
    for tp, (*layer, fixed, labelled) in fit_lobra_profile.coefficients().items():
        row = next(each for each in time["layer"] if each["tp"] == tp)
        assert [row["fixed"], row["token"], row["square"]] == pytest.approx(layer, rel=1e-5)
        row = next(each for each in time["head"] if each["tp"] == tp)
        assert [row["fixed"], row["labelled"]] == pytest.approx([fixed, labelled], rel=1e-5, abs=1e-12)
    reports = [as_it_is(name) for name in ("lobra/homogeneous", "lobra/throughput")]
    off = [
        abs(figure.target.difference(figure.ours))
        for report in reports
        for figure in report.figures
        if figure.target is not None and figure.result != "fitted"
    ]
    assert len(off) == 17
    assert sum(off) / len(off) == pytest.approx(time["error"], abs=5e-4)
    assert max(off) < 0.032
