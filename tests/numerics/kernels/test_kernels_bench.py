"""The benchmark runs, writes what it measured, and its check can fail."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from plait_kernels import bench
from plait_kernels.backends import BACKENDS
from plait_kernels.bench_check import check
from plait_kernels.synthetic import Shape, problem


def test_figures_and_environment_are_written(tmp_path, capsys):
    path = tmp_path / "result.json"
    arguments = [
        "--device",
        "cpu",
        "--layers",
        "smollm2-135m o",
        "--tokens",
        "24",
        "--adapters",
        "2",
        "--dtype",
        "float32",
    ]
    options = ["--repeats", "1", "--backends", "grouped", "--json", str(path)]
    assert bench.main([*arguments, *options]) == 0
    result = json.loads(path.read_text())
    assert result["environment"]["kind"] == "cpu"
    assert result["environment"]["torch"] == torch.__version__
    assert result["peak"]["operations"] > 0
    cases = [(row["ranks"], row["dropout"]) for row in result["rows"]]
    assert cases == [("16", 0.0), ("16", 0.1), ("mixed", 0.0), ("mixed", 0.1)]
    for row in result["rows"]:
        assert row["checks"]["grouped"]["right"]
        times = row["seconds"]
        assert set(times) == {"frozen", "torch-lora", "grouped"}
        assert all(set(phases) == {"forward", "backward", "both"} for phases in times.values())
        ratio = times["grouped"]["both"] / times["frozen"]["both"]
        assert row["to_frozen"]["grouped"] == pytest.approx(ratio)
        assert row["roofline"] > 1
    assert "times torch LoRA's speed" in capsys.readouterr().out


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_the_check_finds_a_wrong_backend(monkeypatch, dropout):
    made = problem(Shape(40, 24, (16, 8), (3, 5), dropout), device="cpu", dtype=torch.float32)
    assert check(made, "grouped").right
    assert check(made, "reference").right

    exact = BACKENDS["grouped"]

    def slightly_off(*arguments, need_dx):
        return exact.backward(*arguments, need_dx=need_dx) * 1.001

    monkeypatch.setitem(BACKENDS, "grouped", replace(exact, backward=slightly_off))
    assert not check(made, "grouped").right


def test_a_run_out_of_time_resumes_from_its_file_and_a_failure_stays_alone(tmp_path, monkeypatch, capsys):
    path = tmp_path / "result.json"
    arguments = ["--device", "cpu", "--layers", "smollm2-135m o", "--tokens", "24", "--dropout", "0"]
    arguments += ["--repeats", "1", "--backends", "grouped", "--json", str(path), "--ranks", "16"]
    arguments += ["--dtype", "float32"]
    measure = bench.measure

    def too_large(case, *others):
        if len(case.shape.ranks) == 4:
            raise torch.OutOfMemoryError("no room")
        return measure(case, *others)

    monkeypatch.setattr(bench, "measure", too_large)
    assert bench.main([*arguments, "--seconds", "0"]) == 0
    assert json.loads(path.read_text())["rows"] == []
    assert "2 of 2 shapes are left" in capsys.readouterr().out
    assert bench.main([*arguments, "--adapters", "4", "1"]) == 1
    first = json.loads(path.read_text())
    assert [row["adapters"] for row in first["rows"]] == [1]
    assert first["failures"][0]["adapters"] == 4
    assert "no room" in first["failures"][0]["reason"]
    monkeypatch.setattr(bench, "measure", None)  # nothing is left to measure
    monkeypatch.setattr(bench, "measure_peak", None)
    assert bench.main(arguments) == 1
    assert json.loads(path.read_text()) == first


def test_a_file_of_other_backends_is_begun_anew(tmp_path):
    path = tmp_path / "result.json"
    arguments = ["--device", "cpu", "--layers", "smollm2-135m o", "--tokens", "24", "--dropout", "0"]
    arguments += ["--repeats", "1", "--json", str(path), "--ranks", "16", "--adapters", "1", "--dtype"]
    for backend in ("grouped", "reference"):
        assert bench.main([*arguments, "float32", "--backends", backend]) == 0
        assert [list(row["checks"]) for row in json.loads(path.read_text())["rows"]] == [[backend]]


def test_the_usual_shapes_come_first():
    cases = bench.grid(["square 4096", "llama-3.1-8b o"], [2048, 8192], [1, 4])
    assert len(cases) == 2 * 2 * 2 * 2 * 2
    assert [case.key for case in cases[:2]] == [
        ["square 4096", 8192, 4, "16", 0.0],
        ["llama-3.1-8b o", 8192, 4, "16", 0.0],
    ]


def test_the_roofline_counts_what_is_extra():
    peak = bench.Peak(operations=1e12, bytes=1e9)
    one = Shape(1000, 100, (100,), (10,))
    frozen = 4 * 1000 * 100 * 100 / 1e12
    extra_operations = 6 * 1000 * 10 * 200 / 1e12
    extra_bytes = (1000 * 300 * 2 + 2000 * (4 + 8)) / 1e9
    expected = 1 + (extra_operations + extra_bytes) / frozen
    assert bench.roofline(one, peak, 2) == pytest.approx(expected)


def test_a_machine_without_git_is_known_by_the_sources(monkeypatch):
    monkeypatch.setenv("PATH", "")
    found = bench.environment(torch.device("cpu"))
    assert found["commit"] is None
    assert len(found["sources"]) == 12
