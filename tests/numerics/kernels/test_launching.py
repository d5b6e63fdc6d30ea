"""Launches whose binaries are kept: the same calls of the driver, the right device, no memory kept."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plait_kernels.absent import absent
from plait_kernels.launching import GIVEN, Launch, launch
from plait_kernels.synthetic import Shape, problem


def test_a_binary_that_is_kept_is_called_as_triton_calls_it():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = Path(__file__).with_name("triton_launch_check.py")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    compared, others = map(int, done.stdout.split())
    assert compared > 100
    assert others == 2 * 16  # the passes and attention at odd addresses, which have binaries of their own


class Kernel:
    """A kernel that notes the current device."""

    arg_names = ("x", "size")

    def __init__(self):
        self.devices = []

    def __getitem__(self, grid):
        return lambda *_arguments, **_constants: self.devices.append(torch.cuda.current_device())


@pytest.mark.parametrize("prepared", [False, True])
def test_a_kernel_runs_on_the_device_of_its_tensors_whatever_the_current_one_is(prepared, monkeypatch):
    current, kernel = [0], Kernel()

    class Guard:
        def __init__(self, device):
            self.device = torch.device(device).index

        def __enter__(self):
            self.before, current[0] = current[0], self.device

        def __exit__(self, *_error):
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    with FakeTensorMode():
        here, there = (torch.empty(4, device=f"cuda:{index}") for index in (0, 1))
    run = Launch(kernel, (1,), GIVEN, 4) if prepared else lambda x: launch(kernel, (1,), x, 4)
    for each in (here, there, here):
        run(each)
    assert kernel.devices == [0, 1, 0]
    assert current == [0]


class Compiled:
    """What Triton compiled, and unloads from the device when it is let go."""

    metadata = SimpleNamespace(target=SimpleNamespace(backend="cuda"))
    function, packed_metadata, run = 1, None, staticmethod(lambda *_arguments: None)


class Compiling(Kernel):
    """A kernel that keeps nothing of what it compiles."""

    def __getitem__(self, grid):
        compiled = Compiled()
        self.made = weakref.ref(compiled)
        return lambda *_arguments, **_constants: compiled


def test_a_binary_that_is_asked_directly_stays_loaded():
    pytest.importorskip("triton")
    kernel = Compiling()
    run = Launch(kernel, (1,), GIVEN, 4)
    with absent(90):
        run(torch.empty(4))
    gc.collect()
    assert run._run is not None
    assert kernel.made() is not None


@pytest.mark.parametrize("hook", [None, print], ids=["none", "a function"])
def test_hooks_that_are_no_list(hook, monkeypatch):
    """Beside Triton's own lists; only where there is a call Triton is asked."""
    runtime = pytest.importorskip("triton").knobs.runtime
    kernel, asked = Compiling(), []
    run = Launch(kernel, (1,), GIVEN, 4)
    with absent(90):
        run(torch.empty(4))
        monkeypatch.setattr(runtime, "launch_enter_hook", hook)
        monkeypatch.setattr(Launch, "_through_triton", lambda _run, given: asked.append(given))
        run(torch.empty(4))
    assert bool(asked) == (hook is not None)


def test_a_microbatch_is_freed_without_looking_for_circles():
    made = problem(Shape(40, 32, (32,), (4, 40), 0.1), device="cpu", dtype=torch.float32)
    made.train("triton")
    routing = weakref.ref(made.routing)
    memory = [weakref.ref(each) for each in made.routing.tables[("memory", 0)].values()]
    assert len(memory) == 3
    gc.disable()
    try:
        del made
        assert routing() is None
        assert all(each() is None for each in memory)
    finally:
        gc.enable()


def test_scratch_memory_is_used_by_all_calls_of_a_microbatch():
    made = problem(Shape(40, 32, (32,), (4, 40), 0.1), device="cpu", dtype=torch.float32)
    made.train("triton")
    before = dict(made.routing.tables[("memory", 0)])
    made.train("triton")
    after = made.routing.tables[("memory", 0)]
    assert before.keys() == after.keys() == {"parts", "partial", "ds"}
    assert all(after[name] is each for name, each in before.items())
