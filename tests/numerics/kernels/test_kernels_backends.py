"""The registry of backends: one that is added from outside is used, chosen and refused by what it can do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plait_kernels import KernelError, check_backend, choose_backend, register, selection
from plait_kernels.backends import BACKENDS


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    for name, backend in list(BACKENDS.items()):
        monkeypatch.setitem(BACKENDS, name, backend)
    yield
    BACKENDS.pop("mine", None)


def test_an_added_backend_computes_what_its_name_is_asked_for(make_layer):
    layer = make_layer(ranks=[3, 5], lengths=[7, 9])
    calls = []

    def forward(x, weight, bias, call, /):
        calls.append(len(call.owners))
        return BACKENDS["reference"].forward(x, weight, bias, call)

    register(replace(BACKENDS["reference"], name="mine", forward=forward))
    layer.run("mine").assert_equal(layer.run("reference"))
    assert calls == [2]


def test_only_deterministic_backends_that_run_on_the_device_are_candidates(monkeypatch):
    monkeypatch.setattr(selection, "median_seconds", lambda made, _device: times[made.args[0]])
    times = {"grouped": 2.0, "mine": 1.0}
    mine = replace(BACKENDS["grouped"], name="mine")
    register(mine)
    chosen = choose_backend("cpu", dtype=torch.float32, features=16, tokens=8)
    assert (chosen.backend, chosen.seconds) == ("mine", times)
    for unfit in ({"deterministic": False}, {"runs": lambda *_: False}, {"candidate": lambda _: False}):
        register(replace(mine, **unfit))
        assert choose_backend("cpu", dtype=torch.float32).backend == "grouped"


def test_the_needs_of_a_backend_are_named_if_it_does_not_run():
    register(
        replace(BACKENDS["grouped"], name="mine", runs=lambda _, dtype: dtype == torch.float16, needs="half")
    )
    assert check_backend("mine", torch.device("cpu"), torch.float16).name == "mine"
    with pytest.raises(KernelError, match="half"):
        check_backend("mine", torch.device("cpu"), torch.float32)
    with pytest.raises(KernelError, match="mine"):
        check_backend("yours", torch.device("cpu"), torch.float32)


def test_the_interpreter_s_bfloat16_is_refused(monkeypatch):
    """It is silently wrong there."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not BACKENDS["triton"].runs(torch.device("cpu"), torch.bfloat16)
