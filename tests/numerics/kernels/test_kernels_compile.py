"""Every Triton kernel compiles for GPUs, which the interpreter cannot show."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # bytes a program may have


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), [(80, "fp16"), (90, "bf16")])
def test_kernels_compile_for_a_gpu_without_one(capability, dtype, tmp_path):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": ":".join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("triton_compile_check.py")
    done = subprocess.run(
        [sys.executable, str(script), str(capability), dtype],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 9
    for kernel in found:
        assert kernel["shared"] <= SHARED_MEMORY[capability], kernel
        assert kernel["atomics"] == 0, kernel
        # Sums of parts have any length; all else moves 16 bytes at once on aligned sizes.
        assert kernel["wide"] > 0 or str(kernel["kernel"]).startswith("sum_"), kernel
