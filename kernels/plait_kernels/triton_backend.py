"""The Triton backend: one launcher per call, with the tiles chosen for its shape."""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import cache

import torch
from torch import Tensor

from plait_kernels.autotuning import choice
from plait_kernels.backends import Backend, register
from plait_kernels.launching import launch
from plait_kernels.layer import LayerCall
from plait_kernels.triton_launch import Launcher, launcher


def available(device: torch.device) -> bool:
    """Whether Triton can run on the device: a CUDA one, meta tensors, or any in Triton's interpreter."""
    kind = device.type
    return (kind in ("cuda", "meta") or interpreted()) and _installed()


def interpreted() -> bool:
    """Whether Triton's interpreter is on, which compiles nothing."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _runs(device: torch.device, dtype: torch.dtype) -> bool:
    if dtype == torch.float64 or (device.type == "cpu" and dtype == torch.bfloat16):
        return False  # the interpreter's bfloat16 is silently wrong
    return available(device)


def _launches(device: torch.device) -> bool:
    """Whether a kernel really runs on the device, which also takes a C compiler and Python's headers."""
    if device.type != "cuda" or not available(device):
        return False
    from plait_kernels.triton_forward import sum_splits

    parts, out = torch.ones(2, 16, device=device), torch.empty(16, device=device)
    try:
        launch(sum_splits, (1,), parts, out, 16, 16, SPLITS=2, BLOCK=16)
    except Exception as refusal:  # whatever a compiler, a linker or a driver says
        warnings.warn(f"backend 'triton' is left out: {refusal}", RuntimeWarning, stacklevel=2)
        return False
    return True


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, call: LayerCall) -> tuple[Tensor, list[Tensor]]:
    """Output (tokens, out); S, packed, and the bits of which features are dropped."""
    x = x if x.stride(1) == 1 else x.contiguous()
    run = launcher_of(call, x, weight)
    s, bits = run.down(call, x)
    return run.up(call, x, s, weight, None if bias is None else bias.contiguous()), [s, bits]


def backward(
    grad: Tensor, x: Tensor, saved: list[Tensor], weight: Tensor, call: LayerCall, *, need_dx: bool
) -> Tensor | None:
    """Add the gradients of A and B to the bank; return that of x if it is needed."""
    x = x if x.stride(1) == 1 else x.contiguous()
    grad = grad.contiguous()
    run = launcher_of(call, x, weight)
    s, bits = saved
    ds = run.up_gradient(call, grad, s)
    run.down_gradient(call, x, ds, bits)
    return run.dx(call, grad, ds, bits, weight) if need_dx else None


def launcher_of(call: LayerCall, x: Tensor, weight: Tensor) -> Launcher:
    """The launches of the call, of forward and backward."""
    run: Launcher | None = call.kept
    if run is None:
        run = call.kept = launcher(call, x, weight, choice(call, x))
    return run


TRITON = register(
    Backend(
        "triton",
        forward,
        backward,
        runs=_runs,
        needs="Triton needs its package, a CUDA device (or TRITON_INTERPRET=1, for tests, without bfloat16) "
        "and no float64",
        candidate=_launches,
    )
)
