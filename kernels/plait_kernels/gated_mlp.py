"""A gated MLP of frozen layers with many adapters, down(act(gate x) · (up x)), as one operation.

By Triton only: what adapters add to gate and up, and to the gradient of what the last layer reads, is added
by the passes between the products, which read both anyway (`triton_gated`). Written by a pass of its own and
added by the vendor's product, as a single layer does it, it is written once and read twice more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

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
from plait_kernels.tiles import Choice, Tiles
from plait_kernels.triton_backend import TRITON
from plait_kernels.triton_launch import Launcher, launcher

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
        x, hidden = x.contiguous(), room(x, (x.shape[0], width))
        own, after = _Layer(pair, first, choice(first, x)), _Layer(down, second, choice(second, hidden))
        if own.chosen.fused_forward is not None or after.chosen.fused_backward is not None:
            return None
        out: Tensor = apply(_GatedMlp, x, bank.anchor, hidden, own, after, kind, trains=True)
        return out


def _fits(first: LayerCall, second: LayerCall, width: int) -> bool:
    """Whether there is an adapter of plain LoRA, and the sites are those of a gated MLP.

    What shares the microbatch must not decide how an adapter at one of the layers is computed. Rows of other
    variants are computed the same either way.
    """
    sides = ((0, width), (width, 2 * width), 2 * width)
    return (first.owned or second.owned) and first.layer.kind == sides and len(second.placed) == 1


@dataclass(slots=True, eq=False)
class _Layer:
    """One of both layers; its weight, which may be made for a product alone, is given to what reads it."""

    frozen: Frozen
    call: LayerCall
    chosen: Choice
    run: Launcher = field(init=False)

    def enter(self, x: Tensor) -> Tensor:
        """Its weight, in forward, where it finds its launches for rows like x."""
        weight = dense(self.frozen.weight)
        self.run = launcher(self.call, x, weight, self.chosen)
        return weight

    def down(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """S, and the bits of what is dropped; of no size without an adapter."""
        if self.call.owned:
            return self.run.down(self.call, x)
        return room(x, (0,)), room(x, (0,), torch.uint8)

    def add_others(self, out: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        """Add what other variants than plain LoRA make; what their backward needs."""
        call = self.call
        if not call.others:
            return []
        return reference.add_forward(out, x, weight, self.frozen.bias, call, call.others)

    def add_gradients(self, grad: Tensor, x: Tensor, s: Tensor, bits: Tensor) -> Tensor:
        """Add dA and dB to the bank; dS."""
        if not self.call.owned:
            return s
        ds = self.run.up_gradient(self.call, grad, s)
        self.run.down_gradient(self.call, x, ds, bits)
        return ds

    def add_others_back(
        self, dx: Tensor | None, grad: Tensor, x: Tensor, saved: Sequence[Tensor], weight: Tensor
    ) -> None:
        """Add the gradients of other variants' tensors to the bank, and theirs of x to ``dx``."""
        if self.call.others:
            call = self.call
            reference.add_backward(dx, grad, x, list(saved), weight, call, call.others)


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _anchor: Tensor, hidden: Tensor, own: _Layer, after: _Layer, kind: int
    ) -> Tensor:
        weight = own.enter(x)
        s, bits = own.down(x)
        y = product(x, weight.T, own.frozen.bias)
        others = own.add_others(y, x, weight)
        del weight  # a quantised one is made for its layer alone
        weight, bias = after.enter(hidden), after.frozen.bias
        passes = _passes(own, after, kind)
        passes.forward(y, hidden, s, site_table(own.call))
        after_s, after_bits = after.down(hidden)
        if after.call.owned:
            bias = None if bias is None else bias.contiguous()
            out = after.run.up(after.call, hidden, after_s, weight, bias)
        else:
            out = product(hidden, weight.T, bias)
        ctx.others = len(others)
        others += after.add_others(out, hidden, weight)
        ctx.save_for_backward(x, s, bits, y, hidden, after_s, after_bits, *others)
        ctx.layers, ctx.passes, ctx.generations = (own, after), passes, own.call.routing.generations()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        layers: tuple[_Layer, _Layer] = ctx.layers
        own, after = layers
        check_backward("multi_lora_gated_mlp", ctx.generations, own.call, after.call)
        x, s, bits, y, hidden, after_s, after_bits, *others = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # each is let go of as soon as it has been read
        with no_autocast(x):
            grad = grad.contiguous()
            ds = after.add_gradients(grad, hidden, after_s, after_bits)
            weight = dense(after.frozen.weight)
            back = product(grad, weight)
            after.add_others_back(back, grad, hidden, others[ctx.others :], weight)
            del weight, hidden, after_s, others[ctx.others :]
            dy, sites = room(y, y.shape), (site_table(own.call), site_table(after.call))
            ctx.passes.backward(back, y, dy, s, sites[0], ds, after_bits, sites[1])
            del back, y, after_bits
            ds, dx, weight = own.add_gradients(dy, x, s, bits), None, dense(own.frozen.weight)
            if ctx.needs_input_grad[0]:
                owned = own.call.owned
                dx = own.run.dx(own.call, dy, ds, bits, weight) if owned else product(dy, weight)
            own.add_others_back(dx, dy, x, others, weight)
        return dx, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Passes:
    """The launches of a microbatch's gated MLPs of one kind."""

    forward: Launch
    backward: Launch


def _passes(first: _Layer, second: _Layer, kind: int) -> _Passes:
    """They, of the launchers that both calls keep."""
    own, after, routing = first.run, second.run, first.call.routing
    key = (_Passes, id(own), id(after), kind)  # the tables keep both launchers
    found: _Passes | None = routing.tables.get(key)
    if found is None:
        found = routing.tables[key] = _made(own, after, routing, kind)
    return found


@cache
def _kernels() -> Any:
    from plait_kernels import triton_gated

    return triton_gated


def _made(own: Launcher, after: Launcher, routing: Routing, kind: int) -> _Passes:
    tiles = _EXACT_TILES if own.like.dtype == torch.float32 else _TILES
    table, width = own.table, after.features
    rows = tile_table(routing, tiles.rows)
    grid = (-(-width // tiles.columns), rows.count)
    shared = (
        *(width, GIVEN, table.packed, table.origin, rows.tiles, table.spans, table.scales, GIVEN),
        *(table.addresses, own.bank_sites),
    )
    constants = {"KIND": kind, "BM": tiles.rows, "BN": tiles.columns, **own.all_ranks()}
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
