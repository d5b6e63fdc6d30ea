"""Compile every Triton kernel for a GPU that need not be there; prints one JSON object per kernel.

Run by test_kernels_compile.py in a process of its own, since Triton's interpreter is on in the tests'.
"""

from __future__ import annotations

import inspect
import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from plait_kernels import triton_backward, triton_forward
from plait_kernels.tuning import CANDIDATES, DEFAULT

TABLES = {"tiles", "spans", "sites", "addresses", "gradients", "counters", "blocks", "chunks", "adapters"}
FLOATS = {"scales", "partial", "gradient_origin"}
COMPUTE = {"x", "w", "bias", "out", "s", "origin", "dx", "grad", "ds"}
COUNTS = {
    "packed",
    "split_stride",
    "site_count",
    "bank_sites",
    "tile_count",
    "block_count",
    "slots",
    "elements",
}
FUSED = {field: tiles for stage in CANDIDATES.values() for field, tiles in stage if "fused" in field}
KERNELS = {
    "down": (DEFAULT.down, {"BM": "rows", "BK": "depth"}),
    "sum_splits": (DEFAULT.down, {}),
    "up": (DEFAULT.up, {"BM": "rows", "BN": "columns"}),
    "linear_up": (FUSED["fused_forward"], {"BM": "rows", "BN": "columns", "BK": "depth"}),
    "up_gradient": (DEFAULT.up_gradient, {"BM": "rows", "BN": "columns"}),
    "down_gradient": (DEFAULT.down_gradient, {"BM": "rows", "BK": "columns"}),
    "sum_partials": (DEFAULT.up_gradient, {}),
    "dx_low_rank": (DEFAULT.dx, {"BM": "rows", "BK": "columns"}),
    "dx_linear": (FUSED["fused_backward"], {"BM": "rows", "BN": "columns", "BK": "depth"}),
}
FIXED = {
    **{"DROPOUT": True, "BIAS": True, "ALIGN": 16, "BR": 16, "PRECISION": "tf32", "SPLITS": 4, "BLOCK": 1024},
    **{"GROUP": 8, "ROWS": 1024, "IS_B": 1},
}


def compile_kernel(name: str, capability: int, dtype: str) -> dict[str, object]:
    """Compile one kernel as the backend would launch it on aligned sizes."""
    tiles, sizes = KERNELS[name]
    values = {**FIXED, **{key: getattr(tiles, field) for key, field in sizes.items()}}
    function = getattr(triton_forward, name, None) or getattr(triton_backward, name)
    signature, constants, hints = {}, {}, {}
    for index, argument in enumerate(inspect.signature(function.fn).parameters):
        if argument in values:
            signature[argument], constants[index,] = "constexpr", values[argument]
            continue
        floats = argument in FLOATS
        if argument in TABLES:
            signature[argument] = "*i64"
        elif floats or argument in COMPUTE:
            signature[argument] = "*fp32" if floats else f"*{dtype}"
        else:
            signature[argument] = "i32"
        if argument not in COUNTS:
            hints[index,] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(function, signature, constants, hints),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tiles.warps, "num_stages": tiles.stages},
    )
    wide = re.findall(r"ld\.global\.v4|cp\.async\.cg|cp\.async\.bulk", compiled.asm["ptx"])
    return {
        "kernel": name,
        "capability": capability,
        "shared": compiled.metadata.shared,
        "wide": len(wide),
        "atomics": len(re.findall(r"\b(?:atom|red)\.", compiled.asm["ptx"])),
    }


if __name__ == "__main__":
    for kernel in KERNELS:
        print(json.dumps(compile_kernel(kernel, int(sys.argv[1]), sys.argv[2])))
