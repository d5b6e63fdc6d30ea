"""Every Triton kernel compiles for GPUs and fits them, with all tiles that the tuner may choose.

The interpreter cannot show that: it takes kernels that the compiler refuses.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait_kernels.tiles import DEFAULT_MEMORY, SMALL_MEMORY

HOPPER_MEMORY = 227 * 1024  # bytes of shared memory that a program may have
KERNELS = {
    *("down", "sum_splits", "up", "linear_up", "up_gradient", "wide_ds", "wide_db", "down_gradient"),
    *("sum_partials", "dx_low_rank", "dx_linear"),
}
FEW_BYTES = 64  # of a thread's registers may go to memory with the untuned tiles of an older or newer device


pytestmark = pytest.mark.timeout(1200)  # where nothing is kept that was compiled before


def _compiled(*cases):
    """What the compiler made, now or before: Triton keeps binaries, named after all that they depend on."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        pytest.skip("Triton is not installed")
    tools = Path(spec.origin).parent / "backends" / "nvidia" / "bin"
    if not (tools / "ptxas").exists() or not (tools / "cuobjdump").exists():
        pytest.skip(f"this Triton has no ptxas and cuobjdump in {tools}")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = Path(__file__).with_name("triton_compile_check.py")
    done = subprocess.run(
        [sys.executable, str(script), *cases],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled():
    """What the compiler made of each set of cases: one process for all, whose imports take seconds."""
    every = [f"{name}=80,90,100" for name in ("passes", "gated", "paged", "pooled", "attention")]
    found = _compiled("sample=90", *every)
    return lambda name: [each for each in found if each["of"] == name]


def _check(found, capability):
    assert {binary["kernel"] for binary in found} == KERNELS
    for binary in found:
        case, sums = binary["case"], binary["kernel"].startswith("sum_")
        exact = case["dtype"] == "torch.float32"
        assert binary["atomics"] == [], binary
        assert (binary["tensor_cores"] > 0) == (not sums and not exact), binary
        aligned = all(int(width) % 16 == 0 for width in case["outputs"].strip("(),").split(","))
        if aligned and not sums:
            assert binary["wide"] > 0, binary
        if case["tiles"] == "untuned" and not exact:
            assert binary["shared"] <= DEFAULT_MEMORY, binary
            assert binary["spilled"] <= (0 if capability == 90 else FEW_BYTES), binary
        elif case["tiles"] != "tuned":
            assert binary["shared"] <= SMALL_MEMORY, binary
        elif capability == 90:
            assert binary["shared"] <= HOPPER_MEMORY, binary
            # Columns that begin anywhere are moved one by one, for which the tuner picks smaller tiles.
            assert exact or not aligned or binary["spilled"] == 0, binary


def test_kernels_compile_for_a_gpu_without_one(compiled):
    _check(compiled("sample"), 90)


def test_the_passes_compile_and_fit_every_generation(compiled):
    found = compiled("passes")
    kernels = {
        "rms",
        "rms_back",
        "gated",
        "gated_back",
        "activate",
        "activate_back",
        "rotate",
        "cross_entropy",
    }
    kernels |= {"squares", "norms", "adamw"}
    for capability in (80, 90, 100):
        assert {each["kernel"] for each in found if each["capability"] == capability} == kernels
    for binary in found:
        assert binary["atomics"] == [], binary
        assert binary["spilled"] == 0, binary
        assert binary["shared"] <= 4096, binary  # what sums of a row meet in
        assert binary["wide"] > 0 or binary["kernel"] == "norms", binary  # whose rows begin anywhere
        assert binary["narrow"] == 0, binary


def test_a_gated_mlp_with_adapters_compiles_and_fits_every_generation(compiled):
    found = compiled("gated")
    for capability in (80, 90, 100):
        own = [each for each in found if each["capability"] == capability]
        assert {each["kernel"] for each in own} == {"gated_up", "gated_up_back"}
        assert {each["case"]["dtype"] for each in own} == {"torch.bfloat16", "torch.float16", "torch.float32"}
    for binary in found:
        exact = binary["case"]["dtype"] == "torch.float32"
        assert binary["atomics"] == [], binary
        assert (binary["tensor_cores"] > 0) == (not exact), binary
        assert binary["spilled"] == 0, binary
        assert binary["shared"] <= SMALL_MEMORY, binary
        assert binary["wide"] > 0, binary
        assert binary["narrow"] == 0 or exact or "3" in binary["case"]["ranks"], (
            binary
        )  # rows of B begin anywhere


def test_attention_over_pages_compiles_and_fits_every_generation(compiled):
    found = compiled("paged")
    for capability in (80, 90, 100):
        own = [each for each in found if each["capability"] == capability]
        kinds = {(each["kernel"], each["case"]["dtype"], each["case"]["size"]) for each in own}
        assert len([kind for kind in kinds if kind[0] == "attend"]) == 5
        assert {each["kernel"] for each in own} == {"attend", "join", "store"}
    for binary in found:
        exact = binary["case"]["dtype"] == "torch.float32"
        assert binary["atomics"] == [], binary
        assert (binary["tensor_cores"] > 0) == (binary["kernel"] == "attend" and not exact), binary
        allowed = 0 if binary["capability"] == 90 and not exact else FEW_BYTES
        assert binary["spilled"] <= allowed, binary
        assert binary["shared"] <= SMALL_MEMORY, binary
        assert binary["wide"] > 0 or binary["kernel"] == "store", binary  # a head's few features, by a warp
        assert binary["narrow"] == 0, binary


def test_rows_of_pooled_adapters_compile_and_fit_every_generation(compiled):
    """Where vectors begin comes from a table: unless told that it is aligned, Triton loads two bytes at a
    time."""
    found = compiled("pooled")
    for capability in (80, 90, 100):
        own = [each for each in found if each["capability"] == capability]
        assert {each["kernel"] for each in own} == {"down", "up"}
        assert {each["case"]["dtype"] for each in own} == {"torch.bfloat16", "torch.float16", "torch.float32"}
    for binary in found:
        assert binary["atomics"] == [], binary
        assert binary["spilled"] <= (FEW_BYTES if binary["capability"] == 100 else 0), binary
        assert binary["shared"] <= 4096, binary  # what sums of a row meet in
        assert binary["wide"] > 0, binary
        assert binary["narrow"] == 0, binary


def test_attention_with_a_softcap_compiles_and_fits_every_generation(compiled):
    """Up to 9.0 on the smallest devices, too, whose programs have 99 KiB of shared memory."""
    found = compiled("attention")
    kernels = {"attend", "query_gradient", "key_gradient"}
    for capability in (80, 90, 100):
        assert {each["kernel"] for each in found if each["capability"] == capability} == kernels
    for binary in found:
        exact = binary["case"]["dtype"] == "torch.float32"
        assert binary["atomics"] == [], binary
        assert exact or binary["spilled"] <= (0 if binary["capability"] == 90 else FEW_BYTES), binary
        assert binary["registers"] > 32, binary  # the compiler gives up on products of too many terms
        assert binary["shared"] <= (HOPPER_MEMORY if binary["capability"] == 100 else SMALL_MEMORY), binary
        assert (binary["tensor_cores"] > 0) == (not exact), binary
        assert binary["wide"] > 0, binary
        assert binary["narrow"] == 0, binary


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_that_may_be_launched_compiles(capability):
    if "PLAIT_COMPILE_ALL" not in os.environ:
        pytest.skip("compiles some 600 kernels, ten minutes: set PLAIT_COMPILE_ALL=1")
    _check(_compiled(f"all={capability}"), capability)
