"""Chooses the tiles of each kernel: sensible defaults, or those measured on this device and kept in a file.

On a CUDA device the first call with a shape measures (PLAIT_KERNELS_TUNE=0 turns that off) and writes the
result to `tuned.json` in the cache folder, by device, versions and shape. The same file gives the same choice
again, and so the same bits.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait_kernels import grouped
from plait_kernels.compiled import cache_folder
from plait_kernels.errors import KernelError
from plait_kernels.layer import LayerCall, layer_call
from plait_kernels.synthetic import Shape, problem
from plait_kernels.tiles import (
    CANDIDATES,
    DEFAULT,
    DEFAULT_MEMORY,
    SMALL,
    SMALL_CANDIDATES,
    Candidates,
    Choice,
    load,
    save,
)
from plait_kernels.timing import median_seconds
from plait_kernels.triton_launch import Launcher

_log = logging.getLogger(__name__)
Measure = Callable[[Choice, str], float]


def tune(
    measure: Measure,
    *,
    start: Choice = DEFAULT,
    candidates: Candidates = CANDIDATES,
    single: bool = False,
) -> Choice:
    """The fastest choice, found by trying each stage's candidates in turn with the others as found so far.

    Args:
        measure: returns seconds of one stage, or of "layer" as a whole, with a choice; infinity if it cannot
            run.
        start: the choice to improve.
        candidates: candidates by stage.
        single: whether there is only one adapter, for which the vendor's products may do everything.

    Raises:
        KernelError: no candidate of a stage runs.
    """
    chosen = start
    for stage, found in candidates.items():
        changes: list[dict[str, Any]] = [{field: tiles} for field, tiles in found]
        chosen = _fastest(measure, stage, [chosen, *(replace(chosen, **change) for change in changes)])
    if single:
        chosen = _fastest(measure, "layer", [chosen, replace(chosen, vendor=True)])
    return chosen


def _fastest(measure: Measure, stage: str, options: list[Choice]) -> Choice:
    seconds = [measure(option, stage) for option in options]
    if min(seconds) == math.inf:
        raise KernelError(
            f"stage {stage!r}: none of its {len(options)} tile sizes runs on this device",
            "a kernel runs with one of its tile sizes",
            "choose the backend grouped, or set PLAIT_KERNELS_TUNE=0 to see the first one's own error",
        )
    return options[seconds.index(min(seconds))]


_known: dict[str, Choice] = {}


def choice(call: LayerCall, x: Tensor) -> Choice:
    """The tiles for a layer's call: known already, from the file, or measured now."""
    if x.device.type != "cuda":
        return DEFAULT
    small = x.dtype == torch.float32 or _shared_memory(x.device) < DEFAULT_MEMORY
    start = SMALL if small else DEFAULT
    if os.environ.get("PLAIT_KERNELS_TUNE") == "0":
        return start
    key = _key(call, x)
    if key not in _known:
        path = cache_folder() / "tuned.json"
        found = load(path).get(key)
        if found is None:
            found = _measured(call, x, start, SMALL_CANDIDATES if small else CANDIDATES)
            if found is not None:
                save(path, key, found)
        _known[key] = found or start
    return _known[key]


def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory available to one program."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def _measured(call: LayerCall, x: Tensor, start: Choice, candidates: Candidates) -> Choice | None:
    """The fastest choice; None if the model leaves no memory on the device to measure in."""
    single = len(call.routing.fused) == 1
    try:
        return tune(_on_device(call, x), start=start, candidates=candidates, single=single)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        warnings.warn(
            "no device memory is left to measure tile sizes in: this run takes the usual ones",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _bucket(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()


def _key(call: LayerCall, x: Tensor) -> str:
    import triton

    spans = call.routing.fused
    widths = "+".join(str(site.out_features) for site, _ in call.placed)
    shape = (
        f"{x.shape[1]}>{widths} tokens<={_bucket(x.shape[0])} spans<={_bucket(len(spans))}"
        f" rank<={_bucket(max(span.block.rank for span in spans))}"
        f" dropout={any(span.threshold for span in spans)}"
    )
    return f"{torch.cuda.get_device_name(x.device)} | triton {triton.__version__} | {x.dtype} | {shape}"


def _on_device(call: LayerCall, x: Tensor) -> Measure:
    """Seconds of a stage on a copy of the call's sizes, so that no gradient of the bank is touched."""
    spans = call.routing.fused
    shape = Shape(
        *(x.shape[0], x.shape[1], tuple(site.out_features for site, _ in call.placed)),
        *(tuple(span.block.rank for span in spans), 0.1 if any(span.threshold for span in spans) else 0.0),
    )
    made = problem(shape, device=x.device, dtype=x.dtype)
    own = layer_call(made.bank, made.routing, made.sites, made.weight.shape[0])
    plain = made.x.detach()

    def measure(chosen: Choice, stage: str) -> float:
        try:
            launcher = Launcher(own, plain, made.weight, chosen)
            if stage == "layer":
                return median_seconds(partial(_layer, launcher, made.grad), x.device)
            s = launcher.down()
            ds = s if stage in ("down", "up") else launcher.up_gradient(made.grad, s)
            stages: dict[str, Callable[[], object]] = {
                "down": launcher.down,
                "up": lambda: launcher.up(s, None),
                "up_gradient": lambda: launcher.up_gradient(made.grad, s),
                "down_gradient": lambda: launcher.down_gradient(ds),
                "dx": lambda: launcher.dx(made.grad, ds),
            }
            return median_seconds(stages[stage], x.device)
        except torch.OutOfMemoryError:
            raise
        except _refusals() as refusal:
            if isinstance(refusal, RuntimeError) and not refused(refusal):
                raise
            _log.debug("%s without %s: %s", stage, chosen, refusal)
            return math.inf

    return measure


def _layer(launcher: Launcher, grad: Tensor) -> None:
    """Forward and backward with a launcher's choice."""
    x, weight, call = launcher.x, launcher.weight, launcher.call
    if launcher.chosen.vendor:
        _, saved = grouped.forward(x, weight, None, call)
        grouped.backward(grad, x, saved, weight, call, need_dx=True)
        return
    s = launcher.down()
    launcher.up(s, None)
    ds = launcher.up_gradient(grad, s)
    launcher.down_gradient(ds)
    launcher.dx(grad, ds)


def _refusals() -> tuple[type[Exception], ...]:
    """The errors of Triton if tiles need too many resources, or its compiler refuses them."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, PTXASError, CompilationError, RuntimeError


_BROKEN = ("illegal", "misaligned", "unspecified launch failure", "device-side assert")


def refused(error: RuntimeError) -> bool:
    """Whether the driver or the compiler refuses a launch. A kernel that read or wrote where it must not is a
    fault, after which the device cannot be used."""
    text = str(error).lower()
    return not isinstance(error, _accelerator_error()) and not any(word in text for word in _BROKEN)


def _accelerator_error() -> type[RuntimeError]:
    found: type[RuntimeError] = torch.AcceleratorError
    return found
