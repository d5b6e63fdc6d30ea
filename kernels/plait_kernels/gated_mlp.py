"""A gated MLP of frozen layers with many adapters, down(act(gate x) · (up x)), as one operation.

By Triton only: what adapters add to gate and up, and to the gradient of what the last layer reads, is added
by the passes between the products, which read both anyway (`triton_gated`). Written by a pass of its own and
added by the vendor's product, as a single layer does it, it is written once and read twice more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from plait_kernels import reference
from plait_kernels.autotuning import choice
from plait_kernels.bank import Bank
from plait_kernels.chain import apply
from plait_kernels.launching import GIVEN, Launch, product, room
from plait_kernels.layer import LayerCall, SiteColumns, layer_call
from plait_kernels.linear import check_backward, check_rows, checked_backend, no_autocast
from plait_kernels.quantised import Weight, dense
from plait_kernels.routing import Routing
from plait_kernels.tables import site_table, tile_table
from plait_kernels.tiles import Tiles
from plait_kernels.triton_backend import TRITON, launcher_of
from plait_kernels.triton_launch import Launcher

_TILES, _EXACT_TILES = Tiles(rows=64, columns=64), Tiles(rows=32, columns=32, stages=2)


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """A layer's frozen weight (out, in) and bias, and its sites as for `multi_lora_linear`."""

    weight: Weight
    bias: Tensor | None
    sites: Sequence[SiteColumns]


def multi_lora_gated_mlp(
    x: Tensor, pair: Frozen, down: Frozen, kind: int, bank: Bank, routing: Routing, *, backend: str
) -> Tensor | None:
    """down(act(gate x) · (up x)) with each row's own adapter at gate, up and down; their gradients as by
    `multi_lora_linear`.

    Args:
        x: (tokens, in), of the bank's compute dtype.
        pair: gate and up, a site each, side by side.
        kind: the activation, one of `plain`'s.

    Returns:
        (tokens, out); None if this cannot be one operation: without Triton or an adapter of plain LoRA, or
        if fused products were chosen for a layer.

    Raises:
        KernelError: as `multi_lora_linear`.
    """
    if backend != TRITON.name:
        return None
    check_rows(x, pair.weight, bank, routing)
    first = layer_call(bank, routing, pair.sites, pair.weight.shape[0])
    second = layer_call(bank, routing, down.sites, down.weight.shape[0])
    width = down.weight.shape[1]
    if not _fits(first, second, width):
        return None
    for call, layer in ((first, pair), (second, down)):
        checked_backend(layer.weight, layer.bias, call, backend)
    with no_autocast(x):
        x, hidden = x.contiguous(), room(x, (len(x), width))
        tiles = choice(first, x), choice(second, hidden)
        if tiles[0].fused_forward is not None or tiles[1].fused_backward is not None:
            return None
        mlp = _Mlp(pair, down, first, second, kind)
        return cast("Tensor", apply(_GatedMlp, x, bank.anchor, hidden, mlp, trains=True))


def _fits(first: LayerCall, second: LayerCall, width: int) -> bool:
    """Whether there is an adapter of plain LoRA, and the sites are those of a gated MLP.

    What shares the microbatch must not decide how an adapter at one of the layers is computed. Rows of other
    variants are computed the same either way.
    """
    sides = ((0, width), (width, 2 * width), 2 * width)
    return (first.owned or second.owned) and first.layer.kind == sides and len(second.placed) == 1


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One of both layers, on its way through forward or backward."""

    frozen: Frozen
    call: LayerCall
    weight: Tensor
    run: Launcher

    @classmethod
    def of(cls, frozen: Frozen, call: LayerCall, x: Tensor) -> _Layer:
        """The layer, which reads rows like x."""
        weight = dense(frozen.weight)
        return cls(frozen, call, weight, launcher_of(call, x, weight))

    def down(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """S, and the bits of what is dropped; of no size without an adapter."""
        if self.call.owned:
            return self.run.down(self.call, x)
        return room(x, (0,)), room(x, (0,), torch.uint8)

    def product(self, x: Tensor) -> Tensor:
        """The frozen layer's output."""
        return product(x, self.weight.T, self.frozen.bias)

    def add_others(self, out: Tensor, x: Tensor) -> list[Tensor]:
        """Add what other variants than plain LoRA make; what their backward needs."""
        call = self.call
        if not call.others:
            return []
        return reference.add_forward(out, x, self.weight, self.frozen.bias, call, call.others)

    def add_gradients(self, grad: Tensor, x: Tensor, s: Tensor, bits: Tensor) -> Tensor:
        """Add dA and dB to the bank; dS."""
        if not self.call.owned:
            return s
        ds = self.run.up_gradient(self.call, grad, s)
        self.run.down_gradient(self.call, x, ds, bits)
        return ds

    def add_others_back(self, dx: Tensor | None, grad: Tensor, x: Tensor, saved: Sequence[Tensor]) -> None:
        """Add the gradients of other variants' tensors to the bank, and theirs of x to ``dx``."""
        if self.call.others:
            call = self.call
            reference.add_backward(dx, grad, x, list(saved), self.weight, call, call.others)


@dataclass(frozen=True, slots=True, eq=False)
class _Mlp:
    """Both layers and their calls."""

    pair: Frozen
    down: Frozen
    first: LayerCall
    second: LayerCall
    kind: int


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor, hidden: Tensor, mlp: _Mlp) -> Tensor:
        own = _Layer.of(mlp.pair, mlp.first, x)
        s, bits = own.down(x)
        y = own.product(x)
        others = own.add_others(y, x)
        del own  # a quantised weight is made for its layer alone
        after = _Layer.of(mlp.down, mlp.second, hidden)
        _passes(mlp).forward(y, hidden, s, site_table(mlp.first))
        after_s, after_bits = after.down(hidden)
        if mlp.second.owned:
            bias = None if mlp.down.bias is None else mlp.down.bias.contiguous()
            out = after.run.up(mlp.second, hidden, after_s, after.weight, bias)
        else:
            out = after.product(hidden)
        ctx.others = len(others)
        others += after.add_others(out, hidden)
        ctx.save_for_backward(x, s, bits, y, hidden, after_s, after_bits, *others)
        ctx.mlp, ctx.generations = mlp, mlp.first.routing.generations()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        mlp: _Mlp = ctx.mlp
        check_backward("multi_lora_gated_mlp", ctx.generations, mlp.first, mlp.second)
        x, s, bits, y, hidden, after_s, after_bits, *others = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # each is let go of as soon as it has been read
        with no_autocast(x):
            grad, after = grad.contiguous(), _Layer.of(mlp.down, mlp.second, hidden)
            ds = after.add_gradients(grad, hidden, after_s, after_bits)
            back = product(grad, after.weight)
            after.add_others_back(back, grad, hidden, others[ctx.others :])
            del after, hidden, after_s, others[ctx.others :]
            dy, sites = room(y, y.shape), (site_table(mlp.first), site_table(mlp.second))
            _passes(mlp).backward(back, y, dy, s, sites[0], ds, after_bits, sites[1])
            del back, y, after_bits
            own = _Layer.of(mlp.pair, mlp.first, x)
            ds, dx = own.add_gradients(dy, x, s, bits), None
            if ctx.needs_input_grad[0]:
                owned = mlp.first.owned
                dx = own.run.dx(mlp.first, dy, ds, bits, own.weight) if owned else product(dy, own.weight)
            own.add_others_back(dx, dy, x, others)
        return dx, None, None, None


@dataclass(frozen=True, slots=True)
class _Passes:
    """The launches of a microbatch's gated MLPs of one kind."""

    forward: Launch
    backward: Launch


def _passes(mlp: _Mlp) -> _Passes:
    """They, of the launchers that both calls keep from forward on."""
    own, after, tables = mlp.first.kept, mlp.second.kept, mlp.first.routing.tables
    key = (_Passes, id(own), id(after), mlp.kind)  # the tables keep both launchers
    found = tables.get(key)
    if found is None:
        found = tables[key] = _made(mlp, own, after)
    return cast("_Passes", found)


@cache
def _kernels() -> Any:
    from plait_kernels import triton_gated

    return triton_gated


def _made(mlp: _Mlp, own: Launcher, after: Launcher) -> _Passes:
    tiles = _EXACT_TILES if own.like.dtype == torch.float32 else _TILES
    table, width = own.table, after.features
    rows = tile_table(mlp.first.routing, tiles.rows)
    grid = (-(-width // tiles.columns), rows.count)
    shared = (
        *(width, GIVEN, table.packed, table.origin, rows.tiles, table.spans, table.scales, GIVEN),
        *(table.addresses, own.bank_sites),
    )
    constants = {"KIND": mlp.kind, "BM": tiles.rows, "BN": tiles.columns, **own.all_ranks()}
    constants |= own.common(tiles)
    return _Passes(
        Launch(_kernels().gated_up, grid, GIVEN, GIVEN, *shared, **constants),
        Launch(
            _kernels().gated_up_back,
            grid,
            *(GIVEN, GIVEN, GIVEN, *shared, GIVEN, *after.bits_at(), GIVEN),
            **{"DROPOUT": table.dropout, **constants},
        ),
    )
