"""The check that runs without pytest finds nothing wrong here, and finds what is made wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from triton.errors import TritonError

from plait_kernels import autotuning, check
from plait_kernels.backends import BACKENDS
from plait_kernels.synthetic import Shape

SMALL = Shape(40, 24, (16, 8), (3, 20), 0.25)


@pytest.fixture(autouse=True)
def _one_small_shape(monkeypatch):
    monkeypatch.setattr(check, "shapes", lambda: iter([SMALL]))


def test_a_right_backend_passes_and_is_written_down(tmp_path, capsys):
    path = tmp_path / "found.json"
    options = ["--device", "cpu", "--backends", "reference", "grouped", "--dtypes", "float32", "bfloat16"]
    assert check.main([*options, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert len(found["findings"]) == 4
    assert all(finding["errors"]["dA"] > 0 and not finding["wrong"] for finding in found["findings"])
    assert "4 cases, 0 wrong" in capsys.readouterr().out
    del found["findings"][1:]  # as if the run had been interrupted
    path.write_text(json.dumps(found))
    assert check.main([*options, "--json", str(path), "--seconds", "-1"]) == 0
    assert "3 cases are left" in capsys.readouterr().out
    assert check.main([*options, "--json", str(path)]) == 0
    assert len(json.loads(path.read_text())["findings"]) == 4


def test_triton_passes_in_its_interpreter_and_no_tiles_are_measured_for_a_pass(monkeypatch):
    """Measuring takes minutes, and may choose fused products, with which an MLP is not one operation."""
    if not BACKENDS["triton"].runs(torch.device("cpu"), torch.float32):
        pytest.skip("Triton runs on a CPU only in its interpreter, which is off where there is a GPU")
    device, asked = torch.device("cpu"), []
    assert check.examine(SMALL, "triton", device, torch.float32).wrong == ()
    monkeypatch.setattr(autotuning, "usual", lambda *given: asked.append(given) or check.usual(*given))
    for name in check._PASSES:
        found = check.examine_pass(Shape(37, 1000, (), ()), name, device, torch.float16)
        assert found.errors["dx"] > 0
        assert found.wrong == (), found
    assert asked == []


def test_a_wrong_pass_is_reported(monkeypatch):
    if not BACKENDS["triton"].runs(torch.device("cpu"), torch.float32):
        pytest.skip("Triton runs on a CPU only in its interpreter, which is off where there is a GPU")
    monkeypatch.setattr(check.passes, "gated_back", lambda _, x, __: torch.zeros_like(x))
    found = check.examine_pass(Shape(37, 1000, (), ()), "gated MLP", torch.device("cpu"), torch.float16)
    assert found.wrong == ("error above twice torch's",)


def _unwritten(_, run):
    out, saved = run
    return torch.where(torch.arange(len(out))[:, None] == 0, torch.empty_like(out), out), saved


def _noisy(_, run):
    return run[0] + torch.rand(()) * 1e-5, run[1]


def _undropped(x, run):
    return run[0] + 0.3 * x.sum(dim=1, keepdim=True), run[1]


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [(_unwritten, "error"), (_noisy, "two runs differ"), (_undropped, "mask")],
    ids=["memory not written", "not repeatable", "mask"],
)
def test_a_wrong_backend_is_reported(monkeypatch, spoil, expected):
    exact = BACKENDS["grouped"]
    spoilt = replace(exact, forward=lambda x, *others: spoil(x, exact.forward(x, *others)))
    monkeypatch.setitem(BACKENDS, "grouped", spoilt)
    found = check.examine(SMALL, "grouped", torch.device("cpu"), torch.float32)
    assert any(expected in wrong for wrong in found.wrong), found.wrong


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), TritonError("out of shared memory")])
def test_an_error_is_a_finding_and_the_rest_continues(monkeypatch, error):
    """Triton's own errors, of tiles too large or code that its compiler refuses, are no RuntimeErrors."""

    def fail(*_):
        raise error

    monkeypatch.setitem(BACKENDS, "grouped", replace(BACKENDS["grouped"], forward=fail))
    assert check.main(["--device", "cpu", "--backends", "grouped", "reference", "--dtypes", "float32"]) == 1


def test_after_a_fault_nothing_else_is_examined_until_the_next_run(monkeypatch, tmp_path, capsys):
    """A device with an illegal access fails everything after it, which would all be found wrong."""

    def fault(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    path = tmp_path / "check.json"
    options = ["--device", "cpu", "--backends", "grouped", "--dtypes", "float32", "--json", str(path)]
    with monkeypatch.context() as patched:
        patched.setitem(BACKENDS, "grouped", replace(BACKENDS["grouped"], forward=fault))
        assert check.main(options) == 1
    assert "1 cases, 1 wrong" in capsys.readouterr().out
    assert check.main(options) == 1
    assert [bool(each["wrong"]) for each in json.loads(path.read_text())["findings"]].count(True) == 1


def test_both_kinds_of_products_are_examined_and_no_tiles_measured(monkeypatch):
    """Measuring tiles takes a minute or two for each of the check's shapes."""
    taken = []

    def forward(x, *others):
        taken.append(autotuning.choice(None, x))
        return BACKENDS["grouped"].forward(x, *others)

    monkeypatch.setattr(autotuning, "_found", None)
    spied = replace(BACKENDS["grouped"], name="triton", forward=forward, runs=lambda *_: True)
    monkeypatch.setitem(BACKENDS, "triton", spied)
    assert check.examine(SMALL, "triton", torch.device("cpu"), torch.float32).wrong == ()
    assert {each.fused_forward is None for each in taken} == {True, False}
    assert {each.fused_backward is None for each in taken} == {True, False}


def test_what_is_known_least_comes_first():
    cases = [
        (Shape(9, 8, (8,), (1,), dropout), backend, dtype)
        for backend, dropout in (("grouped", 0.1), ("triton", 0.0), ("triton", 0.1), ("norm", 0.0))
        for dtype in (torch.float16, torch.bfloat16)
    ]
    found = [(name, shape.dropout) for shape, name, _ in sorted(cases, key=check._known)]
    assert found[:3] == [("norm", 0.0), ("triton", 0.1), ("triton", 0.0)]
    assert found[-1][0] == "grouped"
