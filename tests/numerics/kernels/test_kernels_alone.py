"""The kernels need torch (and Triton) alone: they import and train where nothing else of Plait is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import plait_kernels

# Whatever torch and Triton import themselves is there before the block; afterwards only Python's own.
SCRIPT = """
import importlib.util, sys
import torch
import torch._dynamo, torch.utils.checkpoint
if importlib.util.find_spec("triton"):
    import triton, triton.language
BLOCKED = {"plait", "plait_dashboards", "numpy", "scipy", "transformers", "hydra", "optuna", "pytest"}
allowed = set(sys.stdlib_module_names) | {"plait_kernels", "torch", "triton"}


class Block:
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root not in allowed:
            raise ImportError(f"{name} is neither Python's, torch nor triton")


for name in [name for name in sys.modules if name.partition(".")[0] in BLOCKED]:
    del sys.modules[name]
sys.meta_path.insert(0, Block())
import plait_kernels
from plait_kernels import bench, check
from plait_kernels.synthetic import Shape, problem

for module in sorted(Path.glob(Path(plait_kernels.__file__).parent, "*.py")):
    if not (module.stem.startswith("triton_") and not importlib.util.find_spec("triton")):
        importlib.import_module(f"plait_kernels.{module.stem}")
for backend in ("reference", "grouped"):
    found = check.examine(Shape(20, 16, (8,), (3, 4), 0.1), backend, torch.device("cpu"), torch.float32)
    assert not found.wrong, found
""".replace("import importlib.util, sys", "import importlib, importlib.util, sys\nfrom pathlib import Path")


def test_the_kernels_run_with_torch_and_triton_alone():
    folder = Path(plait_kernels.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
