"""The run over all papers' figures: what is kept, what runs again, and what the pages say."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from forked import FORKS

from plait.core.errors import ConfigError
from plait.core.settings import EngineSettings, RunSettings
from plait_bench import papers
from plait_bench.figures import Figure, Report
from plait_bench.inputs import GPUS, lacks
from plait_bench.papers import PaperFile, every, metrics, paper_files, read_records
from plait_bench.papers_page import as_html, as_markdown, result_of, summary
from plait_bench.run import Paper, PublishedEntry, beside_published, compared


def figure(
    ours: float, result: str, *, why: str = "", headline: bool = True, others: tuple[float, ...] = ()
) -> dict[str, Any]:
    target = {"kind": "published", "value": 2.0, "source": "paper", "why": why, "others": others}
    return {
        "name": "⟨1,2⟩ | speed", "ours": ours, "unit": "s", "how": "simulated", "result": result,
        "headline": headline, "plait": None, "target": target,
    }  # fmt: skip


def record(name: str, *figures: dict[str, Any], state: str = "ran", needs: str = "") -> dict[str, Any]:
    paper = {"name": "P", "figures": [f"Figure {name}"], "leaves_open": ["lengths"]}
    report = {"figures": list(figures)} if state == "ran" else None
    found = {"name": name, "digest": "d", "paper": paper, "state": state, "report": report, "seconds": 1.0}
    return found | ({"needs": needs} if needs else {})


def test_kept_results_are_used_again_unless_something_changed_or_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run_file(file: PaperFile) -> dict[str, Any]:
        ran.append(file.name)
        state = "failed" if file.name == "c" and ran.count("c") == 1 else "ran"
        return record(file.name, state=state) | {"digest": file.digest}

    monkeypatch.setattr(papers, "run_file", run_file)
    log = tmp_path / "papers.jsonl"
    files = [PaperFile(name, Paper("P", ("1",)), "d") for name in "abc"]
    assert [each["name"] for each in every(files, log)] == ["a", "b", "c"]
    with log.open("a", encoding="utf-8") as out:
        out.write('{"name": "a", "dig')  # an interruption
    assert len(read_records(log)) == 3
    files[1] = PaperFile("b", Paper("P", ("1",)), "changed")
    list(every(files, log))
    assert ran == ["a", "b", "c", "b", "c"]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_a_file_that_needs_a_device_is_not_run_and_refuses_alone(tmp_path: Path) -> None:
    needing = [file for file in paper_files(papers.sweeps_dir()) if file.needs]
    records = list(every(needing, tmp_path / "papers.jsonl"))
    assert [(each["state"], each["report"]) for each in records] == [("needs", None)] * 6
    assert not read_records(tmp_path / "papers.jsonl")  # it may be run once there is a GPU
    command = Mock(settings=RunSettings())
    for file in needing:
        with pytest.raises(ConfigError, match=f"needs {file.needs}"):
            compared(command, {"bench": {"needs": file.needs}, "mode": "bench"})


def test_the_step_of_an_8b_model_is_refused_without_a_gpu() -> None:
    file = yaml.safe_load((papers.sweeps_dir() / "gpu" / "step.yaml").read_text())
    command = Mock(settings=RunSettings(engine=EngineSettings(device="cpu")))
    with pytest.raises(ConfigError, match="This benchmark needs a GPU"):
        compared(command, file)


def test_what_is_lacking_depends_on_the_device_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H100 80GB HBM3")
    assert {needs: lacks(needs, "auto") for needs in GPUS} == {"a GPU": False, "an L40S GPU": True}
    assert lacks("a GPU", "cpu")
    assert not lacks("", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA L40S")
    assert not lacks("an L40S GPU", "auto")
    with pytest.raises(ConfigError, match=r"bench\.needs must be one of a GPU, an L40S GPU"):
        lacks("a larger machine", "auto")


def test_the_pages_give_results_differences_and_reasons() -> None:
    records = [
        record("a", figure(2.1, "within"), figure(9.0, "fitted")),
        record("b", figure(2.1, "within"), figure(4.0, "outside, explained", why="it was tried")),
        record("c", figure(4.0, "outside, unexplained")),
        record("d", state="needs", needs="a GPU"),
        record("e"),
        record("f", state="failed") | {"error": "trace\nlast line"},
        record(
            "g", figure(2.0, "formula"), figure(2.0, "assumed", others=(3.5, 1.0)), figure(2.0, "one-sided")
        ),
        record("h", figure(2.1, "within"), figure(2.0, "other workload", headline=False)),
    ]
    assert [result_of(each) for each in records] == [
        "within", "outside, explained", "outside, unexplained", "needs a GPU", "no published number",
        "failed", "no evidence: assumed, formula, one-sided", "within",
    ]  # fmt: skip
    text = as_markdown(records)
    assert summary(records) in text
    assert "of 8 figures that have a file 6 are given and 1 need what this machine lacks, 1 failed; " in text
    assert "of 9 published numbers 5 are evidence: 1 outside, explained; " in text
    assert "; 1 outside, unexplained; 3 within; no evidence: " in text
    assert "1 assumed, 1 fitted, 1 formula, 1 one-sided" in text
    assert "⟨1,2⟩ / speed: 1 to 3.5 by assumption." in text
    assert "4 against 2 s (100.0 %) | it was tried Open: lengths." in text
    assert "last line" in text
    assert all(line.count("|") == 8 for line in text.splitlines() if line.startswith("| "))
    assert "⟨1,2⟩ | speed" in as_html(records)
    assert "1 to 3.5 by assumption" in as_html(records)


def test_kept_results_are_dropped_if_the_planner_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(papers, "PLAIT", tmp_path)
    planner = tmp_path / "planner" / "packing.py"
    planner.parent.mkdir()
    digests = []
    for code in ("a = 1", "a = 2", "a = 1"):
        planner.write_text(code)
        digests.append([each.digest for each in paper_files(papers.sweeps_dir())])
    assert digests[0] == digests[2]
    assert not set(digests[0]) & set(digests[1])


def test_an_assumption_that_was_chosen_needs_others_beside_it() -> None:
    with pytest.raises(ConfigError, match="alternatives"):
        PublishedEntry("time saved", "%", 30.0, "paper", weak="assumed")


def test_alternatives_are_found_by_pattern_and_those_that_find_nothing_are_named() -> None:
    figures = [Figure(name, ours, "%", "simulated") for name, ours in (("a", 20.0), ("a; b", 30.0))]
    entry = PublishedEntry("a", "%", 20.0, "paper", alternatives=("a*", "c*"))
    report, unmatched = beside_published(Report("r", tuple(figures)), [entry])
    assert unmatched == ["c*"]
    assert [each.result for each in report.figures] == ["assumed", None]
    assert report.figures[0].mapping()["target"]["others"] == (30.0,)


def test_alternatives_are_those_of_the_same_unit() -> None:
    figures = [Figure(name, ours, unit, "simulated") for name, ours, unit in (
        ("a", 20.0, "%"), ("a", 2.0, "s"), ("a, b", 30.0, "%"), ("a, c", 3.0, "s"),
    )]  # fmt: skip
    entries = [
        PublishedEntry("a", unit, value, "paper", alternatives=(name,))
        for unit, value, name in (("%", 20.0, "a, b"), ("s", 2.0, "a, c"))
    ]
    found, unmatched = beside_published(Report("r", tuple(figures)), entries)
    assert unmatched == []
    assert [each.mapping()["target"]["others"] for each in found.figures[:2]] == [(30.0,), (3.0,)]


def test_a_file_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(papers, "_processes", lambda: FORKS)
    found = papers.run_file(PaperFile("none/such", Paper("P", ("1",)), "d"))
    assert found["state"] == "failed"
    assert "none/such" in as_markdown([found])
    assert papers._last_words(tmp_path, -9) == "ended with -9"  # killed before it said anything


def test_a_figure_that_is_no_number_is_shown_as_such() -> None:
    none = figure(2.0, "outside, unexplained", others=(3.0,)) | {"ours": None}
    for page in (as_markdown, as_html):
        assert "no number" in page([record("a", none)])


def test_names_are_ones_that_mlflow_takes() -> None:
    assert metrics([figure(4.0, "within")]) == {"ours/_1_2_ _ speed": 4.0, "published/_1_2_ _ speed": 2.0}
