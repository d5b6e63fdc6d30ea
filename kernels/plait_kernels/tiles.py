"""Tile sizes of the Triton kernels: the usual ones, their candidates, and the file of those measured."""

from __future__ import annotations

import fcntl
import json
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of one kernel.

    Args:
        rows: rows of a tile.
        columns: columns of a tile of the output.
        depth: step of the loop over the summed dimension.
        splits: parts into which the summed dimension is cut, so that few rows still fill the device; for dA,
            the tiles that one program sums.
        warps, stages: as in Triton.
    """

    rows: int
    columns: int = 64
    depth: int = 64
    splits: int = 1
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Choice:
    """The tiles of every kernel of a layer; without fused ones the vendor's product is added."""

    down: Tiles = Tiles(rows=64, depth=64, splits=4)
    up: Tiles = Tiles(rows=64, columns=128)
    up_gradient: Tiles = Tiles(rows=128, columns=64, splits=4, warps=8)
    down_gradient: Tiles = Tiles(rows=64, columns=64, splits=16)
    dx: Tiles = Tiles(rows=64, columns=64)
    fused_forward: Tiles | None = None
    fused_backward: Tiles | None = None


DEFAULT = Choice()
# Faster on an H100 for layers of Llama 3.1 8B in bfloat16, and used in no other dtype: in float16 registers
# spill where columns begin anywhere.
HOPPER = Choice(
    up_gradient=Tiles(rows=256, columns=64, splits=4, warps=8),
    down_gradient=Tiles(rows=64, columns=128, splits=16),
)
# For small devices, and for float32, whose exact products need no tensor cores but twice the memory.
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
# For each stage of a layer, the alternatives to the default; stages are measured one after the other. On
# compute capability 9.0 all have enough registers; those that need too much shared memory are left out.
CANDIDATES: Candidates = {
    "down": (
        *(("down", Tiles(rows=64, depth=64, splits=splits)) for splits in (1, 8)),
        *(("down", Tiles(rows=32, depth=64, splits=splits)) for splits in (1, 4)),
        ("down", Tiles(rows=128, depth=64, splits=4, warps=8)),
    ),
    "up": (
        ("up", Tiles(rows=128, columns=128, warps=8)),
        ("up", Tiles(rows=32, columns=256)),
        ("fused_forward", Tiles(rows=128, columns=128, depth=64, warps=8)),
        ("fused_forward", Tiles(rows=128, columns=256, depth=64, warps=8)),
    ),
    "up_gradient": tuple(
        ("up_gradient", Tiles(rows=rows, columns=columns, splits=splits, warps=warps))
        for rows, columns, splits, warps in (
            *((64, 64, 4, 4), (64, 64, 8, 4), (128, 64, 8, 8), (128, 128, 4, 8)),
            *((256, 64, 4, 8), (256, 64, 8, 8), (256, 128, 4, 8)),
        )
    ),
    "down_gradient": (
        *(("down_gradient", Tiles(rows=64, columns=64, splits=splits)) for splits in (8, 32)),
        *(("down_gradient", Tiles(rows=64, columns=128, splits=splits)) for splits in (8, 16, 32)),
    ),
    "dx": (
        ("dx", Tiles(rows=64, columns=64, warps=8)),
        ("dx", Tiles(rows=64, columns=128)),
        ("dx", Tiles(rows=64, columns=128, warps=8)),
        ("dx", Tiles(rows=128, columns=64, warps=8)),
        ("dx", Tiles(rows=32, columns=256, warps=8)),
        ("fused_backward", Tiles(rows=128, columns=32, depth=128, warps=8)),
        ("fused_backward", Tiles(rows=128, columns=64, depth=64, warps=8)),
        ("fused_backward", Tiles(rows=256, columns=64, depth=64, warps=8)),
    ),
}
HOPPER_CANDIDATES: Candidates = CANDIDATES | {
    field: ((field, getattr(DEFAULT, field)), *(each for each in found if each[1] != getattr(HOPPER, field)))
    for field, found in CANDIDATES.items()
    if field in ("up_gradient", "down_gradient")
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
# In float32 one program sums 32 rows for dA, as for dB: a longer sum is less exact than torch's.
EXACT = replace(SMALL, down_gradient=Tiles(rows=32, columns=32, splits=1, stages=2))
EXACT_CANDIDATES = {stage: found for stage, found in SMALL_CANDIDATES.items() if stage != "down_gradient"}


def load(path: Path) -> dict[str, Choice]:
    """The choices in a file, but for those of a release with other tiles; none if it cannot be read."""
    found = {}
    for key, value in _stored(path).items():
        with suppress(TypeError, AttributeError):
            found[key] = made_choice(value)
    return found


def _stored(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def made_choice(value: dict[str, Any]) -> Choice:
    """A choice from its fields as JSON has them."""
    fields: dict[str, Any] = {
        field: Tiles(**tiles) if isinstance(tiles, dict) else tiles for field, tiles in value.items()
    }
    return Choice(**fields)


def save(path: Path, key: str, chosen: Choice) -> None:
    """Add a choice to the file, which is replaced atomically; writers wait for each other.

    What another release wrote stays as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, or the process ends
        known = _stored(path) | {key: asdict(chosen)}
        text = json.dumps(known, indent=1, sort_keys=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as scratch:
            scratch.write(text)
        Path(scratch.name).replace(path)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()
