"""Benchmark tables: what ours is compared with, whether it holds and why not, and the same for programs."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from plait.core.errors import ConfigError
from plait_bench.figures import Baseline, Figure, Published, Report
from plait_bench.table import SCREEN, show, to_json

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
        (Published(20.0, PAPER, why="not run"), 22.1, "outside, unexplained"),
        (Published(20.0, PAPER, why="run", others=(25.0, 22.1)), 22.1, "outside, unexplained"),
        (Published(20.0, PAPER, why="run", others=(25.0, 21.9)), 22.1, "outside, explained"),
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
        (Baseline(20.0, "PEFT", at_least=1.0, why="cold"), 10.0, "outside, unexplained"),
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
            Figure(
                "two",
                30.0,
                "%",
                "simulated",
                Published(20.0, PAPER, why="other data", others=(21.0,)),
                plait=12.0,
            ),
            Figure("two, other lengths", 31.0, "%", "simulated", Published(20.0, PAPER), detail=True),
            Figure("floor", 1.5, "%", "computed", note="layers 3 3"),
        ),
        ("Lengths are assumed.",),
    )
    lines = shown(report)
    assert lines[0].rstrip() == "bench (simulated)"
    assert " ".join(lines[1].split()) == "figure published ours off result Plait's"
    assert " ".join(lines[2].split()) == "one 20 % (1) 22 +10.0 % within"
    assert " ".join(lines[3].split()) == "two 20 % (1) 30 +50.0 % explained 12"
    assert lines[4:6] == [f"(1) {PAPER}", "1 within; 1 outside, explained"]
    text = "\n".join(lines)
    assert "floor" not in text
    assert "Lengths are assumed." not in text
    assert "--details shows 2 more figures and what was tried" in text
    every = shown(report, details=True)
    assert every[:6] == lines[:6]
    assert every[-1] == "two: 21 to 30 by assumption. other data"
    for words in ("floor", "two, other lengths", "layers 3 3", "Lengths are assumed."):
        assert words in "\n".join(every)


def test_a_table_fits_on_a_screen_and_leaves_out_what_is_within_first() -> None:
    every = [figure(20.0, Published(20.0, f"table {at}"), f"row {at}") for at in range(40)]
    every[30] = figure(30.0, Published(20.0, "table 30"), "a row whose name is as long as half of the screen")
    beside = figure(1.0, Baseline(2.0, "PEFT"), "beside")
    lines = shown(Report("bench", (*every, beside)), width=60)
    assert len(lines) <= SCREEN
    text = "\n".join(lines)
    assert "a row whose name is as" in text
    assert "unexplained" in text
    assert "more: --details shows them." in text
    assert "39 within; 1 outside, unexplained" in text
    assert "beside" in text
    assert all(f"row {at}" in "\n".join(shown(Report("bench", tuple(every)), details=True)) for at in (0, 39))


def test_figures_that_are_no_evidence_are_counted_apart_and_show_what_assumptions_do() -> None:
    report = Report(
        "bench",
        (
            figure(20.5, Published(20.0, PAPER), "one"),
            figure(20.0, Published(20.0, PAPER, weak="formula"), "two"),
            figure(20.0, Published(20.0, PAPER, why="chosen", weak="assumed", others=(31.0, 12.5)), "three"),
        ),
    )
    lines = shown(report, details=True)
    assert [line.split()[-1] for line in lines[2:5]] == ["within", "formula", "assumed"]
    assert lines[6] == "1 within; no evidence: 1 formula, 1 assumed"
    assert lines[-1] == "three: 12.5 to 31 by assumption. chosen"


def test_a_baseline_is_named_and_has_a_ratio_and_its_limits() -> None:
    beside = Baseline(278.5, "PEFT, one after another", at_most=1.0)
    lines = shown(Report("bench", (Figure("training", 107.3, "s", "measured", beside),)))
    assert lines[1].split() == ["figure", "baseline", "ours", "ratio", "allowed", "result"]
    assert " ".join(lines[2].split()) == "training 278.5 s (1) 107.3 0.385× ≤ 1× within"
    assert lines[3] == "(1) PEFT, one after another"


@pytest.mark.parametrize("beside", [None, Published(20.0, PAPER, weak="fitted")])
def test_a_benchmark_that_compares_nothing_shows_all_it_has(beside: Published | None) -> None:
    """What the model was fitted to is no comparison, either: it is a detail."""
    fitted = replace(figure(21.0, beside, "beside"), detail=True)
    text = "\n".join(shown(Report("bench", (fitted, figure(1.0, name="alone")))))
    assert "beside" in text
    assert "alone" in text


def test_a_benchmark_without_a_figure_says_so_little() -> None:
    assert shown(Report("bench", ()))[0].startswith("bench")


def test_programs_get_every_figure_as_json() -> None:
    compared = figure(22.1, Published(20.0, PAPER, others=(float("inf"),)))
    text = to_json(Report("bench", (compared, figure(float("nan"))), ("assumed",)))
    assert "Infinity" not in text
    read = json.loads(text)
    first, second = read["figures"]
    assert first["target"]["kind"] == "published"
    assert first["target"]["difference"] == pytest.approx(0.105)
    assert (first["result"], first["headline"]) == ("outside, unexplained", True)
    assert (second["ours"], second["target"], second["result"]) == (None, None, None)
    assert read["assumptions"] == ["assumed"]
