"""Launch a layer and the passes, also at odd addresses, for a GPU that is not there, each in two ways.

Every `Launch` that has its binary is asked directly and through Triton, and what the driver would be called
with must be the same. Run by test_launching.py in a process of its own, since Triton's interpreter is on in
the tests'. Prints how many launches were compared, and how many calls Triton saw beside them.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from plait_kernels import attention, passes
from plait_kernels.absent import AbsentDevice
from plait_kernels.attention import Capped
from plait_kernels.autotuning import with_fused
from plait_kernels.launching import Launch
from plait_kernels.layer import layer_call
from plait_kernels.plain import GELU, SILU
from plait_kernels.synthetic import Shape, problem
from plait_kernels.tiles import CANDIDATES, DEFAULT
from plait_kernels.triton_launch import launcher

seen: list[tuple[Any, ...]] = []
counts = {"compared": 0, "first": 0}


def note(*call: Any) -> None:
    """What the driver would be called with but hooks, tensors as their addresses."""
    known = (*call[:6], *call[9:])
    seen.append(tuple(each.data_ptr() if isinstance(each, torch.Tensor) else each for each in known))


def in_both_ways(self: Launch, *given: torch.Tensor) -> None:
    """Ask through Triton, and directly if the binary is known."""
    if self._run is None:
        counts["first"] += 1
        asked_directly(self, *given)
        return
    seen.clear()
    self._through_triton(given)
    asked_directly(self, *given)
    first, second = seen
    assert first == second, [pair for pair in zip(first, second, strict=True) if pair[0] != pair[1]]
    counts["compared"] += 1


def layers(dtype: torch.dtype, ranks: tuple[int, ...], dropout: float) -> None:
    """Forward and backward of a layer, twice; with products of its own and with the vendor's."""
    for chosen in (DEFAULT, with_fused(DEFAULT, CANDIDATES)):
        made = problem(Shape(300, 64, (64, 32), ranks, dropout), device="cpu", dtype=dtype)
        call = layer_call(made.bank, made.routing, made.sites, made.weight.shape[0])
        for bias in (None, torch.zeros(made.weight.shape[0], dtype=dtype)) * 2:
            x = made.x.detach().clone()
            run = launcher(call, x, made.weight, chosen)
            s, kept = run.down(call, x)
            run.up(call, x, s, made.weight, bias)
            ds = run.up_gradient(call, made.grad, s)
            run.down_gradient(call, x, ds, kept)
            run.dx(call, made.grad, ds, kept, made.weight)


def capped(rows: int, shift: int) -> None:
    """Attention with a softcap over one sample."""
    rule, whole = Capped(2, 1, 16, 0.25, 50.0), torch.zeros(rows * 64 + 16, dtype=torch.bfloat16)
    qkv, ends = whole[shift : shift + rows * 64].view(rows, 64), torch.zeros(2, dtype=torch.int32)
    out, sums = attention.forward(qkv, ends, rows, rule)
    attention.backward(out, qkv, ends, rows, rule, out, sums)


def every_pass(rows: int, shift: int) -> None:
    """The passes between the products on memory that begins ``shift`` elements after a multiple of 16."""
    size = 64
    whole = torch.zeros(rows * 2 * size + 16, dtype=torch.bfloat16)
    x = whole[shift : shift + rows * size].view(rows, size)
    pair = whole[shift : shift + rows * 2 * size].view(rows, 2 * size)
    weight = torch.zeros(size, dtype=torch.bfloat16)
    for other in (None, x):
        _, scales, total = passes.rms(x, weight, 1e-5, 0.0, other)
        passes.rms_back(x, total, weight, scales, 0.0, other)
        _, scales, total = passes.rms(x, weight, 1e-5, 0.0, other, bias=weight, centred=True)
        passes.rms_back(x, total, weight, scales, 0.0, other, centred=True)
    passes.activated_back(x, passes.activated(x, GELU), GELU)
    capped(rows, shift)
    passes.gated_back(passes.gated(pair, SILU), pair, SILU)
    table = torch.zeros(rows, 16, dtype=torch.bfloat16)
    passes.rotate_(x.view(rows, 4, 16), table, table)


asked_directly = Launch.__call__
Launch.__call__ = in_both_ways
driver.set_active(AbsentDevice(90, note))
through_triton = JITFunction.run


def counted(self: JITFunction, *args: Any, **options: Any) -> Any:
    counts["triton"] = counts.get("triton", 0) + 1
    return through_triton(self, *args, **options)


JITFunction.run = counted
for ranks in ((16, 16), (3, 100)):
    layers(torch.bfloat16, ranks, 0.1)
for rows in (5, 16):
    for shift in (0, 0, 1, 0):
        every_pass(rows, shift)
print(counts["compared"], counts["triton"] - counts["compared"] - counts["first"])
