"""Which tiles each kernel runs with: sensible ones, or those measured on this device and kept in a file."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from plait_kernels.layer import LayerCall


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
    """The tiles of every kernel of a layer; without fused tiles the vendor's product has an epilogue."""

    down: Tiles = Tiles(rows=64, depth=64, splits=2)
    up: Tiles = Tiles(rows=64, columns=128)
    up_gradient: Tiles = Tiles(rows=128, columns=64, splits=4, warps=8)
    down_gradient: Tiles = Tiles(rows=64, columns=64, splits=16)
    dx: Tiles = Tiles(rows=64, columns=128)
    fused_forward: Tiles | None = None
    fused_backward: Tiles | None = None


def choice(call: LayerCall, x: Tensor, weight: Tensor) -> Choice:
    """The tiles for a layer's call."""
    del call, x, weight
    return Choice()
