"""Benchmark tables: what ours is compared with, whether it holds and why not, and the same for programs."""

import io
import json

import pytest
from rich.console import Console

from plait.core.errors import ConfigError
from plait_bench.figures import Baseline, Figure, Published, Report
from plait_bench.table import show, to_json

PAPER = "a paper, figure 1"


def shown(report: Report, *, details: bool = False, width: int = 100) -> list[str]:
    out = io.StringIO()
    show(report, Console(file=out, width=width), details=details)
    return out.getvalue().splitlines()


def figure(ours: float, beside: Published | Baseline | None = None, name: str = "idle") -> Figure:
    return Figure(name, ours, "%", "simulated", beside)


@pytest.mark.parametrize(
    ("beside", "ours", "result"),
    [
        (Published(20.0, PAPER), 21.9, "within"),
        (Published(20.0, PAPER), 17.9, "outside, unexplained"),
        (Published(20.0, PAPER, why="other data"), 22.1, "outside, explained"),
        (Published(20.0, PAPER, why="in part", explained=False), 22.1, "outside, unexplained"),
        (Published(20.0, PAPER, tolerance=3.0), 17.0, "within"),
        (Published(0.0, PAPER, tolerance=0.0), 0.0, "within"),
        (Published(20.0, PAPER, sense="at most"), 1.0, "within"),
        (Published(20.0, PAPER, sense="at most"), 22.1, "outside, unexplained"),
        (Published(20.0, PAPER, sense="at least"), 40.0, "within"),
        (Published(20.0, PAPER, sense="at least"), 17.9, "outside, unexplained"),
        (Published(20.0, PAPER, weak="formula"), 20.0, "formula"),
        (Published(20.0, PAPER, weak="one-sided"), 40.0, "one-sided"),
        (Published(20.0, PAPER, others=(18.5, 21.0)), 20.0, "within"),
        (Published(20.0, PAPER, others=(18.5, 27.0)), 20.0, "assumed"),
        (Published(20.0, PAPER, others=(20.0,)), 27.0, "outside, unexplained"),
        (Baseline(20.0, "PEFT"), 40.0, None),
        (Baseline(20.0, "PEFT", at_most=0.5), 10.0, "within"),
        (Baseline(20.0, "PEFT", at_most=0.5), 10.1, "outside, unexplained"),
        (Baseline(20.0, "PEFT", at_least=1.0, why="cold"), 10.0, "outside, explained"),
        (Baseline(20.0, "PEFT", ratio=0.4, at_most=0.5), 12.0, "within"),
        (Baseline(0.0, "PEFT", at_most=1.0), 0.0, "within"),
        (None, 1.0, None),
    ],
)
def test_ours_is_within_or_outside_and_explained_or_not(
    beside: Published | Baseline | None, ours: float, result: str | None
) -> None:
    assert figure(ours, beside).result == result


def test_a_published_zero_needs_a_tolerance() -> None:
    with pytest.raises(ConfigError, match="tolerance"):
        Published(0.0, PAPER)


def test_the_table_has_what_is_compared_first_and_the_rest_on_request() -> None:
    report = Report(
        "bench",
        (
            Figure("one", 22.0, "%", "simulated", Published(20.0, PAPER)),
            Figure("two", 30.0, "%", "simulated", Published(20.0, PAPER, why="other data"), plait=12.0),
            Figure("two, other lengths", 31.0, "%", "simulated", Published(20.0, PAPER), detail=True),
            Figure("floor", 1.5, "%", "computed", note="layers 3 3"),
        ),
        ("Lengths are assumed.",),
    )
    lines = shown(report)
    assert " ".join(lines[1].split()) == "figure published ours how difference allowed result Plait's plan"
    assert " ".join(lines[2].split()) == "one 20 % (1) 22 % simulated +10.0 % ±10 % within"
    assert "+50.0 %" in lines[3]
    assert lines[3].rstrip().endswith("outside, explained (2)         12 %")
    assert lines[4:7] == [f"(1) {PAPER}", "(2) other data", "1 within; 1 outside, explained"]
    text = "\n".join(lines)
    assert "floor" not in text
    assert "Lengths are assumed." not in text
    assert "--details shows 2 more figures" in text
    all_lines = "\n".join(shown(report, details=True))
    assert all_lines.startswith("\n".join(lines[:7]))
    for words in ("floor", "two, other lengths", "layers 3 3", "Lengths are assumed."):
        assert words in all_lines


def test_figures_that_are_no_evidence_are_counted_apart_and_show_what_assumptions_do() -> None:
    report = Report(
        "bench",
        (
            figure(20.5, Published(20.0, PAPER), "one"),
            figure(20.0, Published(20.0, PAPER, weak="formula"), "two"),
            figure(20.0, Published(20.0, PAPER, why="chosen", weak="assumed", others=(31.0, 12.5)), "three"),
        ),
    )
    lines = shown(report, width=140)
    assert lines[2].rstrip().endswith("within")
    assert lines[3].rstrip().endswith("formula")
    assert lines[4].rstrip().endswith("assumed (2); 12.5 to 31 by assumption")
    assert lines[7] == "1 within; no evidence: 1 formula, 1 assumed"


def test_a_baseline_is_named_and_has_a_ratio_and_its_limits() -> None:
    beside = Baseline(278.5, "PEFT, one after another", at_most=1.0)
    lines = shown(Report("bench", (Figure("training", 107.3, "s", "measured", beside),)))
    assert lines[1].split() == ["figure", "baseline", "ours", "how", "ratio", "allowed", "result"]
    assert " ".join(lines[2].split()) == "training 278.5 s (1) 107.3 s measured 0.385× ≤ 1× within"
    assert lines[3] == "(1) PEFT, one after another"


def test_a_benchmark_that_compares_nothing_shows_all_it_has() -> None:
    assert "alone" in "\n".join(shown(Report("bench", (figure(1.0, name="alone"),))))


def test_programs_get_every_figure_as_json() -> None:
    report = Report("bench", (figure(22.1, Published(20.0, PAPER)), figure(float("nan"))), ("assumed",))
    read = json.loads(to_json(report))
    first, second = read["figures"]
    assert first["target"]["kind"] == "published"
    assert first["target"]["difference"] == pytest.approx(0.105)
    assert (first["result"], first["headline"]) == ("outside, unexplained", True)
    assert (second["ours"], second["target"], second["result"]) == (None, None, None)
    assert read["assumptions"] == ["assumed"]
