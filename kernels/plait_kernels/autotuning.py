"""Chooses the tiles of each kernel: sensible defaults, or those measured on this device and kept in a file.

They belong to a layer's shape, not to a microbatch, so the bits of an adapter's gradients do not depend on
what shares it. `prepare` measures them before training; a layer that was not among them is measured when it
is first called. PLAIT_KERNELS_TUNE=0 turns that off. `tuned.json` in the cache folder has what was measured,
by device, versions, a digest of the kernels' sources and shape; the same file gives the same choice again,
and so the same bits.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait_kernels.compiled import cache_folder
from plait_kernels.errors import KernelError
from plait_kernels.layer import LayerCall, layer_call
from plait_kernels.synthetic import Shape, problem
from plait_kernels.tables import WIDTHS
from plait_kernels.tiles import (
    CANDIDATES,
    DEFAULT,
    DEFAULT_MEMORY,
    EXACT,
    EXACT_CANDIDATES,
    HOPPER,
    HOPPER_CANDIDATES,
    SMALL,
    SMALL_CANDIDATES,
    Candidates,
    Choice,
    load,
    made_choice,
    power_of_two,
    save,
)
from plait_kernels.timing import median_seconds
from plait_kernels.triton_launch import Launcher

_log = logging.getLogger(__name__)
Measure = Callable[[Choice, str], float]
Widths = tuple[int, tuple[int, ...]]  # features of a layer's input, and outputs of each of its sites
_RANKS, _DROPOUT = (16,) * 8, 0.1  # of the microbatch that is measured: eight adapters
_USUAL_TOKENS = 8192
_FEW_TOKENS = 256  # of one with adapters of every width, whose kernels need more memory than those measured


def tune(
    measure: Measure,
    *,
    start: Choice = DEFAULT,
    candidates: Candidates = CANDIDATES,
    fits: Callable[[Choice, str], bool] = lambda *_: True,
) -> Choice:
    """The fastest choice, found by trying each stage's candidates in turn with the others as found so far.

    Args:
        measure: returns seconds of one stage with a choice; infinity if it cannot run.
        start: the choice to improve.
        candidates: candidates by stage.
        fits: whether a stage runs with a choice whatever the adapters' ranks. The fastest that does is taken;
            where none does, the fastest of all: on a small device narrow adapters may still run.

    Raises:
        KernelError: no candidate of a stage runs.
    """
    chosen = start
    for stage, others in candidates.items():
        changes: list[dict[str, Any]] = [{field: tiles} for field, tiles in others]
        options = [chosen, *(replace(chosen, **change) for change in changes)]
        running = _fastest_first(measure, stage, options)
        if not running:
            raise KernelError(
                f"stage {stage!r}: none of its {len(options)} tile sizes runs on this device",
                "a kernel runs with one of its tile sizes",
                "choose the backend grouped, or set PLAIT_KERNELS_TUNE=0 to see the first one's own error",
            )
        chosen = next((each for each in running if fits(each, stage)), running[0])
    return chosen


def _fastest_first(measure: Measure, stage: str, options: list[Choice]) -> list[Choice]:
    """The options that run, sorted by their seconds."""
    seconds = [measure(option, stage) for option in options]
    order = sorted(range(len(options)), key=seconds.__getitem__)
    return [options[index] for index in order if seconds[index] < math.inf]


_known: dict[tuple[Widths, torch.dtype], Choice] = {}  # of this process, whose device has one kind


_given: list[Choice] = []


@contextmanager
def taking(chosen: Choice) -> Iterator[None]:
    """Have every layer take these tiles, and measure none."""
    _given.append(chosen)
    try:
        yield
    finally:
        _given.pop()


def usual(device: torch.device, dtype: torch.dtype) -> tuple[Choice, Candidates]:
    """The tiles that are taken before any are measured, and their candidates.

    Meta tensors, with which memory is computed, stand for those of a large CUDA device.
    """
    if device.type not in ("cuda", "meta"):
        return DEFAULT, CANDIDATES
    if dtype == torch.float32:
        return EXACT, EXACT_CANDIDATES
    if device.type == "cuda" and _shared_memory(device) < DEFAULT_MEMORY:
        return SMALL, SMALL_CANDIDATES
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return (HOPPER, HOPPER_CANDIDATES) if hopper and dtype == torch.bfloat16 else (DEFAULT, CANDIDATES)


def with_fused(start: Choice, candidates: Candidates) -> Choice:
    """The same with the first fused products among the candidates, which only measuring chooses."""
    fused = {field: tiles for found in candidates.values() for field, tiles in reversed(found)}
    return replace(start, fused_forward=fused["fused_forward"], fused_backward=fused["fused_backward"])


def choice(call: LayerCall, x: Tensor) -> Choice:
    """The tiles for a layer's call."""
    if _given:
        return _given[-1]
    if x.device.type != "cuda":
        return usual(x.device, x.dtype)[0]
    widths = x.shape[1], call.layer.outputs
    found = _known.get((widths, x.dtype))
    if found is None:
        found = _known[widths, x.dtype] = _found(widths, x.device, x.dtype, _USUAL_TOKENS)
    return found


def prepare(
    layers: Iterable[Widths],
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: int,
    recorded: str = "",
    say: Callable[[str], None] = _log.info,
) -> str:
    """Have tiles for these layers before they are called.

    Args:
        tokens: rows of the microbatches that are to come.
        recorded: what an earlier call returned, for the same bits as then.

    Returns:
        All choices as JSON, for a plan.
    """
    take(recorded, dtype)
    names: dict[str, Choice] = {}
    for widths in dict.fromkeys(layers):
        key, name = (widths, dtype), _name(widths)
        if key not in _known:
            say(f"Tile sizes of the kernels for {name} ...")
            _known[key] = _found(widths, device, dtype, tokens)
        names[name] = _known[key]
    return json.dumps({name: asdict(each) for name, each in sorted(names.items())})


def take(recorded: str, dtype: torch.dtype) -> None:
    """Have layers take these tiles, which :func:`prepare` returned here or elsewhere."""
    for name, chosen in _recorded(recorded).items():
        features, _, outputs = name.partition(">")
        _known[(int(features), tuple(map(int, outputs.split("+")))), dtype] = chosen


def _recorded(text: str) -> dict[str, Choice]:
    """Choices by layer, but for those of a release with other tiles."""
    found: dict[str, Choice] = {}
    with suppress(ValueError, AttributeError):
        for name, value in json.loads(text or "{}").items():
            with suppress(TypeError, AttributeError):
                found[name] = made_choice(value)
    return found


def _found(widths: Widths, device: torch.device, dtype: torch.dtype, tokens: int) -> Choice:
    """From the file, or measured now."""
    start, candidates = usual(device, dtype)
    if os.environ.get("PLAIT_KERNELS_TUNE") == "0":
        return start
    rows = power_of_two(tokens)
    kind = torch.cuda.get_device_name(device)
    key = f"{kind} | {_versions()} | {dtype} | {_name(widths)} tokens<={rows}"
    path = cache_folder() / "tuned.json"
    found = load(path).get(key)
    if found is None:
        shape = Shape(rows, *widths, _RANKS, _DROPOUT)
        found = _measured(shape, device, dtype, start, _promising(candidates, device))
        if found is None:
            return start
        save(path, key, found)
    return found


def _promising(candidates: Candidates, device: torch.device) -> Candidates:
    """Candidates that are worth compiling.

    On an H100, in bfloat16, every fused product took 1.3 to 2.1 times as long as the vendor's with the
    low-rank part.
    """
    if torch.cuda.get_device_capability(device) != (9, 0):
        return candidates
    return {
        stage: tuple(each for each in found if not each[0].startswith("fused"))
        for stage, found in candidates.items()
    }


def _name(widths: Widths) -> str:
    return f"{widths[0]}>{'+'.join(map(str, widths[1]))}"


@functools.cache
def _versions() -> str:
    """Versions and a digest of what a kernel's speed depends on."""
    import triton

    folder = Path(__file__).parent
    sources = sorted((*folder.glob("triton_*.py"), folder / "tables.py", folder / "tiles.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    return f"triton {triton.__version__}, torch {torch.__version__}, kernels {digest[:12]}"


def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory available to one program."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def _measured(
    shape: Shape, device: torch.device, dtype: torch.dtype, start: Choice, candidates: Candidates
) -> Choice | None:
    """The fastest choice; None if the model leaves no memory on the device to measure in."""
    try:
        wide = _on_device(replace(shape, tokens=_FEW_TOKENS, ranks=WIDTHS), device, dtype)
        return tune(
            _on_device(shape, device, dtype),
            start=start,
            candidates=candidates,
            fits=lambda chosen, stage: wide(chosen, stage) < math.inf,
        )
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        warnings.warn(
            "no device memory is left to measure tile sizes in: this run takes the usual ones",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _on_device(shape: Shape, device: torch.device, dtype: torch.dtype) -> Measure:
    """Seconds of a stage on a layer of its own, so that no gradient of a bank is touched."""
    made = problem(shape, device=device, dtype=dtype)
    own = layer_call(made.bank, made.routing, made.sites, made.weight.shape[0])
    plain = made.x.detach()

    def measure(chosen: Choice, stage: str) -> float:
        try:
            run = Launcher(own, plain, made.weight, chosen)
            s, bits = run.down(own, plain)
            ds = s if stage in ("down", "up") else run.up_gradient(own, made.grad, s)
            stages: dict[str, Callable[[], object]] = {
                "down": lambda: run.down(own, plain),
                "up": lambda: run.up(own, plain, s, made.weight, None),
                "up_gradient": lambda: run.up_gradient(own, made.grad, s),
                "down_gradient": lambda: run.down_gradient(own, plain, ds, bits),
                "dx": lambda: run.dx(own, made.grad, ds, bits, made.weight),
            }
            return median_seconds(stages[stage], device)
        except torch.OutOfMemoryError:
            raise
        except _refusals() as refusal:
            if isinstance(refusal, RuntimeError) and not refused(refusal):
                raise
            _log.debug("%s without %s: %s", stage, chosen, refusal)
            return math.inf

    return measure


def _refusals() -> tuple[type[Exception], ...]:
    """The errors of Triton if tiles need too many resources, or its compiler refuses them."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, PTXASError, CompilationError, RuntimeError


def kernel_errors() -> tuple[type[Exception], ...]:
    """What a kernel that cannot run here may raise; Triton's errors are no RuntimeErrors."""
    if importlib.util.find_spec("triton") is None:
        return RuntimeError, KernelError
    from triton.errors import TritonError

    return RuntimeError, KernelError, TritonError


# What a driver reports if it did not launch. After its other errors, such as the illegal access of an earlier
# kernel, which the next launch reports, the device cannot be used.
_REFUSALS = ("invalid argument", "too many resources", "out of memory", "alloc_failed", "kernel image", "ptx")
_BY_DEVICE = ("triton error [", "cuda error")


def refused(error: RuntimeError) -> bool:
    """Whether the driver or the compiler refuses a launch. A kernel that read or wrote where it must not is a
    fault, after which the device cannot be used."""
    text = str(error).lower()
    by_device = any(word in text for word in _BY_DEVICE)
    refuses = not by_device or any(word in text for word in _REFUSALS)
    return refuses and not isinstance(error, torch.AcceleratorError)
