"""Which tiles each kernel runs with: sensible ones, or those measured on this device and kept in a file.

On a CUDA device the first call of a shape measures (PLAIT_KERNELS_TUNE=0 turns that off) and writes what
it found to `tuned.json` in the cache folder, by device, versions and shape. The same file gives the same
choice again, and so the same bits.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait_kernels.compiled import cache_folder
from plait_kernels.errors import KernelError
from plait_kernels.layer import LayerCall

if TYPE_CHECKING:
    from plait_kernels.triton_backend import Launcher

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of one kernel.

    Args:
        rows: rows of a tile.
        columns: columns of a tile of the output.
        depth: step of the loop over the summed dimension.
        splits: parts into which the summed dimension is cut, so that few rows still fill the device; for
            dA the tiles that one program sums up.
        warps, stages: as Triton means them.
    """

    rows: int
    columns: int = 64
    depth: int = 64
    splits: int = 1
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Choice:
    """The tiles of every kernel of a layer; without fused tiles the vendor's product has an epilogue.

    `vendor`: the vendor's products do all of it (`grouped`), which may be fastest for a single adapter.
    """

    down: Tiles = Tiles(rows=64, depth=64, splits=2)
    up: Tiles = Tiles(rows=64, columns=128)
    up_gradient: Tiles = Tiles(rows=128, columns=64, splits=4, warps=8)
    down_gradient: Tiles = Tiles(rows=64, columns=64, splits=16)
    dx: Tiles = Tiles(rows=64, columns=128, warps=8)
    fused_forward: Tiles | None = None
    fused_backward: Tiles | None = None
    vendor: bool = False


DEFAULT = Choice()
# For float32, whose exact products need no tensor cores but twice the memory, and for small devices.
SMALL = Choice(
    down=Tiles(rows=32, depth=32, splits=2, stages=2),
    up=Tiles(rows=32, columns=64, stages=2),
    up_gradient=Tiles(rows=32, columns=32, splits=4, stages=2),
    down_gradient=Tiles(rows=32, columns=32, splits=16, stages=2),
    dx=Tiles(rows=32, columns=64, stages=2),
)
SMALL_MEMORY = 99 * 1024  # bytes of shared memory that SMALL stays below; DEFAULT needs up to 160 KiB
DEFAULT_MEMORY = 160 * 1024
Candidates = dict[str, tuple[tuple[str, Tiles], ...]]
# For each stage of a layer what may replace the default; stages are measured one after the other. On compute
# capability 9.0 all have the registers that they need; what a device has no shared memory for is left out.
CANDIDATES: Candidates = {
    "down": tuple(
        ("down", Tiles(rows=rows, depth=depth, splits=splits, warps=8 if rows == 128 else 4))
        for rows in (32, 64, 128)
        for depth in (64, 128)
        for splits in (1, 4)
    ),
    "up": (
        ("up", Tiles(rows=128, columns=128, warps=8)),
        ("up", Tiles(rows=32, columns=256)),
        ("fused_forward", Tiles(rows=128, columns=128, depth=64, warps=8)),
        ("fused_forward", Tiles(rows=128, columns=256, depth=64, warps=8)),
    ),
    "up_gradient": tuple(
        ("up_gradient", Tiles(rows=rows, columns=columns, splits=splits, warps=warps))
        for rows, columns, warps in ((64, 64, 4), (128, 64, 8), (256, 64, 8), (128, 128, 8))
        for splits in (4, 8)
    ),
    "down_gradient": tuple(
        ("down_gradient", Tiles(rows=64, columns=columns, splits=splits))
        for columns in (64, 128)
        for splits in (8, 32)
    ),
    "dx": (
        ("dx", Tiles(rows=64, columns=64)),
        ("dx", Tiles(rows=128, columns=64, warps=8)),
        ("dx", Tiles(rows=32, columns=256, warps=8)),
        ("fused_backward", Tiles(rows=128, columns=32, depth=128, warps=8)),
        ("fused_backward", Tiles(rows=128, columns=64, depth=64, warps=8)),
        ("fused_backward", Tiles(rows=256, columns=64, depth=64, warps=8)),
    ),
}
SMALL_CANDIDATES: Candidates = {
    "down": tuple(("down", Tiles(rows=32, depth=32, splits=splits, stages=2)) for splits in (1, 4)),
    "up": (
        ("up", Tiles(rows=64, columns=32, stages=2)),
        ("fused_forward", Tiles(rows=64, columns=64, depth=32, stages=2)),
    ),
    "up_gradient": (("up_gradient", Tiles(rows=32, columns=32, splits=8, stages=2)),),
    "down_gradient": (("down_gradient", Tiles(rows=32, columns=32, splits=32, stages=2)),),
    "dx": (("fused_backward", Tiles(rows=64, columns=32, depth=64, stages=2)),),
}
Measure = Callable[[Choice, str], float]


def tune(
    measure: Measure,
    *,
    start: Choice = DEFAULT,
    candidates: Candidates = CANDIDATES,
    single: bool = False,
) -> Choice:
    """The fastest choice: each stage's candidates in turn, the others as found so far.

    Args:
        measure: seconds of one stage under a choice, or of "layer", the whole; infinity where it cannot run.
        start: what the candidates may replace.
        candidates: by stage.
        single: whether there is one adapter only, for which the vendor's products may do all.

    Raises:
        KernelError: nothing that a stage may choose runs.
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


def load(path: Path) -> dict[str, Choice]:
    """The choices that a file holds; none where it is missing or not readable as such."""
    try:
        stored = json.loads(path.read_text())
        return {key: _choice(value) for key, value in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _choice(value: dict[str, Any]) -> Choice:
    fields: dict[str, Any] = {
        field: Tiles(**tiles) if isinstance(tiles, dict) else tiles for field, tiles in value.items()
    }
    return Choice(**fields)


def save(path: Path, key: str, chosen: Choice) -> None:
    """Add a choice to the file; a reader sees the file before or after, never half of it."""
    known = load(path)
    known[key] = chosen
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = json.dumps({name: asdict(found) for name, found in sorted(known.items())}, indent=1)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as scratch:
        scratch.write(text)
    Path(scratch.name).replace(path)


_known: dict[str, Choice] = {}


def choice(call: LayerCall, x: Tensor) -> Choice:
    """The tiles for a layer's call: known, from the file, or measured now."""
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
    """Bytes of shared memory that one program may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def _measured(call: LayerCall, x: Tensor, start: Choice, candidates: Candidates) -> Choice | None:
    """What is fastest; None where the device's memory has no room beside the model to measure in."""
    single = len(call.routing.spans) == 1
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
    """The power of two at or above."""
    return 1 << max(0, number - 1).bit_length()


def _key(call: LayerCall, x: Tensor) -> str:
    import triton

    spans = call.routing.spans
    widths = "+".join(str(site.out_features) for site, _ in call.placed)
    shape = (
        f"{x.shape[1]}>{widths} tokens<={_bucket(x.shape[0])} spans<={_bucket(len(spans))}"
        f" rank<={_bucket(max(span.block.rank for span in spans))}"
        f" dropout={any(span.threshold for span in spans)}"
    )
    return f"{torch.cuda.get_device_name(x.device)} | triton {triton.__version__} | {x.dtype} | {shape}"


def _on_device(call: LayerCall, x: Tensor) -> Measure:
    """Seconds of a stage on a copy of the call's sizes, so that no gradient of the bank is touched."""
    from plait_kernels.layer import layer_call
    from plait_kernels.synthetic import Shape, problem
    from plait_kernels.timing import median_seconds
    from plait_kernels.triton_backend import Launcher

    spans = call.routing.spans
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
            _log.debug("%s without %s: %s", stage, chosen, refusal)
            return math.inf

    return measure


def _layer(launcher: Launcher, grad: Tensor) -> None:
    """Forward and backward with a launcher's choice."""
    from plait_kernels import grouped

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
    """What Triton raises where tiles need more than there is, or a compiler or the driver refuses them."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, PTXASError, CompilationError, RuntimeError
