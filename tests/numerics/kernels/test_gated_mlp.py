"""A gated MLP as one operation against float64: odd shapes, absent sites, dropout; when it is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from frozen_a_kernel import FrozenA
from torch import Tensor
from torch.nn.functional import linear

from plait.cost.peaks import StorageCounter
from plait.models.elementwise import gated
from plait_kernels import (
    Bank,
    KernelError,
    RoutedSegment,
    Routing,
    RowCounters,
    Site,
    dropout_mask,
    multi_lora_linear,
    plain,
    triton_backend,
)
from plait_kernels.autotuning import taking
from plait_kernels.check import poisoned_memory
from plait_kernels.gated_mlp import Frozen, multi_lora_gated_mlp
from plait_kernels.quantised import Quantised, dense
from plait_kernels.tiles import CANDIDATES, DEFAULT

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.skipif(not triton_backend.available(DEVICE), reason="Triton does not run here"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # of rows beyond a tile
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
EVERY = ("gate", "up", "down")


@dataclass
class Mlp:
    """Frozen layers of 37 features and ``width`` between, and adapters of these ranks."""

    ranks: tuple[int, ...] = (3, 16, 17)
    lengths: tuple[int, ...] = (33, 1, 40)
    targets: tuple[tuple[str, ...], ...] = (EVERY, ("up", "down"), ("gate",))
    width: int = 71
    dropout: float = 0.3
    dtype: torch.dtype = torch.float32
    kind: int = plain.SILU
    biased: bool = True

    def __post_init__(self) -> None:
        generator, width = torch.Generator().manual_seed(0), self.width

        def noise(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(DEVICE)

        sites = [Site("gate", 5, 37, width), Site("up", 1, 37, width), Site("down", 9, width, 37)]
        self.bank = Bank(sites, device=DEVICE, compute_dtype=self.dtype)
        self.segments, end = [], 2  # the rows before and behind have no adapter
        for index, (rank, length, own) in enumerate(zip(self.ranks, self.lengths, self.targets, strict=True)):
            name = str(index)
            self.bank.attach(
                name, rank=rank, scale=1.5 / (index + 1), dropout=self.dropout, seed=index, sites=list(own)
            )
            for a, b in self.bank.weights(name).values():
                a.copy_(noise(*a.shape) * a.shape[1] ** -0.5)
                b.copy_(noise(*b.shape) * rank**-0.5)
            self.segments.append(RoutedSegment(name, end, end + length))
            end += length
        self.bank.refresh()
        self.tokens = end + 3
        row = torch.arange(self.tokens, device=DEVICE)
        self.counters = RowCounters(row // 50 + 1, row // 9, row % 3, row % 9)
        self.x, self.grad = noise(self.tokens, 37).to(self.dtype), noise(self.tokens, 37).to(self.dtype)
        self.pair = (noise(2 * width, 37) / 6).to(self.dtype)
        self.down = (noise(37, width) / 8).to(self.dtype)
        self.biases = (
            [noise(2 * width).to(self.dtype), noise(37).to(self.dtype)] if self.biased else [None] * 2
        )

    def routing(self) -> Routing:
        return Routing.build(self.bank, self.segments, self.counters, training=True)

    def layers(self) -> tuple[Frozen, Frozen]:
        return Frozen(self.pair, self.biases[0], EVERY[:2]), Frozen(self.down, self.biases[1], EVERY[2:])

    def run(self) -> dict[str, Tensor]:
        """Output and gradients, as one operation."""
        x = self.x.clone().requires_grad_()
        self.bank.zero_gradients()
        given = (x, *self.layers(), self.kind, self.bank, self.routing())
        out = multi_lora_gated_mlp(*given, backend="triton")
        assert out is not None
        out.backward(self.grad)
        return self.found(out, x)

    def two_layers(self, backend: str) -> dict[str, Tensor]:
        """The same by a call for each layer."""
        x, routing = self.x.clone().requires_grad_(), self.routing()
        self.bank.zero_gradients()
        first, second = self.layers()
        y = multi_lora_linear(x, first.weight, first.bias, first.sites, self.bank, routing, backend=backend)
        gate, up = y.chunk(2, dim=1)
        hidden = plain.activation(gate, self.kind) * up
        given = (hidden, second.weight, second.bias, second.sites, self.bank, routing)
        out = multi_lora_linear(*given, backend=backend)
        out.backward(self.grad)
        return self.found(out, x)

    def found(self, out: Tensor, x: Tensor) -> dict[str, Tensor]:
        assert x.grad is not None
        named = {"out": out.detach(), "dx": x.grad}
        for name in self.bank.blocks:
            for site, pair in self.bank.gradients(name).items():
                named |= {
                    f"d{kind} {name} {site}": each.clone() for kind, each in zip("AB", pair, strict=False)
                }
        return named

    def by_torch(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The same by plain operations and autograd in a dtype."""
        x = self.x.to(dtype, copy=True).requires_grad_()
        leaves = {
            (name, site): tuple(each.to(self.dtype).to(dtype, copy=True).requires_grad_() for each in pair)
            for name in self.bank.blocks
            for site, pair in self.bank.weights(name).items()
        }
        biases = [None if bias is None else bias.to(dtype) for bias in self.biases]
        y = linear(x, dense(self.pair).to(dtype), biases[0])
        gate = y[:, : self.width] + self.low_rank(x, "gate", leaves)
        up = y[:, self.width :] + self.low_rank(x, "up", leaves)
        hidden = (torch.nn.functional.silu(gate) if self.kind == plain.SILU else gelu(gate)) * up
        out = linear(hidden, self.down.to(dtype), biases[1]) + self.low_rank(hidden, "down", leaves)
        out.backward(self.grad.to(dtype))
        named = {"out": out.detach(), "dx": x.grad}
        for (name, site), pair in leaves.items():
            named |= {f"d{kind} {name} {site}": each.grad for kind, each in zip("AB", pair, strict=True)}
        return named

    def low_rank(self, x: Tensor, site: str, leaves: dict[tuple[str, str], tuple[Tensor, ...]]) -> Tensor:
        """s (D ∘ x) Aᵀ Bᵀ of every row that has an adapter there."""
        module = next(each.module for each in self.bank.sites if each.name == site)
        parts, end = [], 0
        widths = {"gate": self.width, "up": self.width, "down": 37}
        for segment in self.segments:
            parts.append(x.new_zeros(segment.start - end, widths[site]))
            end = segment.stop
            block, rows = self.bank.block(segment.adapter), slice(segment.start, segment.stop)
            if (segment.adapter, site) not in leaves:
                parts.append(x.new_zeros(segment.stop - segment.start, widths[site]))
                continue
            a, b = leaves[segment.adapter, site]
            own = RowCounters(
                *(getattr(self.counters, name)[rows] for name in ("step", "sample", "draw", "position"))
            )
            p = round(block.dropout * 65536) / 65536
            mask = dropout_mask(block.seed, module, own, x.shape[1], block.dropout)
            kept = torch.where(mask, x[rows] / (1 - p), 0.0)
            parts.append(block.scale * (kept @ a.T @ b.T))
        return torch.cat([*parts, x.new_zeros(self.tokens - end, widths[site])])


def gelu(gate: Tensor) -> Tensor:
    return torch.nn.functional.gelu(gate, approximate="tanh")


def rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def kinds(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output, dx, and the gradients of each site's A and B, all adapters' together."""
    flat: dict[str, list[Tensor]] = {}
    for name, tensor in found.items():
        kind, *rest = name.split()
        flat.setdefault(" ".join([kind, *rest[1:]]), []).append(tensor.double().flatten())
    return {kind: torch.cat(each) for kind, each in flat.items()}


def assert_accurate(mlp: Mlp) -> None:
    with poisoned_memory():
        found = kinds(mlp.run())
    rough, truth = kinds(mlp.by_torch(mlp.dtype)), kinds(mlp.by_torch(torch.float64))
    assert found.keys() == truth.keys()
    for kind, values in found.items():
        assert torch.isfinite(values).all(), kind
        error, allowed = rms(values - truth[kind]), 2 * rms(rough[kind] - truth[kind])
        assert error <= allowed, f"{kind}: error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("kind", [plain.SILU, plain.GELU_TANH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_values_and_gradients(dtype: torch.dtype, kind: int) -> None:
    assert_accurate(Mlp(dtype=dtype, kind=kind))


def test_many_ranks_without_dropout_and_biases() -> None:
    """A rank that takes several products, one that is alone in its tile, and columns that vectors fit."""
    ranks, lengths = (70, 1, 32), (70, 1, 5)
    assert_accurate(
        Mlp(ranks, lengths, targets=(EVERY,) * 3, width=64, dropout=0.0, dtype=torch.float16, biased=False)
    )


@pytest.mark.parametrize("number", range(3))
def test_an_adapters_numbers_do_not_depend_on_its_company(number: int) -> None:
    """To the bit: alone and beside others that have more sites, at all sites, at two and at one."""
    together, alone = Mlp(dtype=torch.float16), Mlp(dtype=torch.float16)
    alone.segments = [alone.segments[number]]
    both = [mlp.run() for mlp in (together, alone)]
    rows = slice(together.segments[number].start, together.segments[number].stop)
    for name in ("out", "dx"):
        torch.testing.assert_close(both[0][name][rows], both[1][name][rows], rtol=0.0, atol=0.0)
    own = [name for name in both[0] if name.split()[1:2] == [str(number)]]
    assert len(own) == 2 * len(together.targets[number])
    for name in own:
        torch.testing.assert_close(both[0][name], both[1][name], rtol=0.0, atol=0.0, msg=name)


@pytest.mark.parametrize("site", ["up", "down"])
def test_adapters_at_one_layer_alone(site: str) -> None:
    assert_accurate(Mlp(targets=((site,),) * 3))


def test_autocast_and_where_rows_lie_change_no_bit() -> None:
    usual, other = Mlp(), Mlp()
    other.x, other.grad = other.x.t().contiguous().t(), other.grad.t().contiguous().t()
    before = usual.run()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        after = other.run()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_mlps_of_two_activations_share_a_microbatch() -> None:
    mlp = Mlp()
    shared = mlp.routing()
    outputs = [
        multi_lora_gated_mlp(mlp.x, *mlp.layers(), kind, mlp.bank, routing, backend="triton")
        for kind in (plain.SILU, plain.GELU_TANH)
        for routing in (shared, mlp.routing())
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2], outputs[3])
    assert not torch.equal(outputs[0], outputs[2])


def test_two_layers_give_the_same() -> None:
    mlp = Mlp()
    one, two = mlp.run(), mlp.two_layers("reference")
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_quantised_layer_is_one_operation_too() -> None:
    mlp = Mlp()
    mlp.pair = Quantised(torch.split(mlp.pair, [mlp.width] * 2), "int8")
    assert_accurate(mlp)


def freeze_a(mlp: Mlp, name: str) -> None:
    """Make an adapter one of another variant, with the same numbers."""
    block, weights = mlp.bank.block(name), mlp.bank.weights(name)
    mlp.bank.detach(name)
    options = {"rank": block.rank, "scale": block.scale, "dropout": block.dropout, "seed": block.seed}
    mlp.bank.attach(name, **options, sites=list(weights), variant=FrozenA())
    for site, tensors in mlp.bank.weights(name).items():
        for tensor, own in zip(tensors, weights[site], strict=True):
            tensor.copy_(own)
    mlp.bank.refresh([name])


def test_another_variant_beside_plain_lora_is_exact_and_changes_no_bit_of_it() -> None:
    """In which A is frozen: its own gradients but dA, and the neighbours' bits."""
    plain_mlp, mixed = Mlp(), Mlp()
    before = plain_mlp.run()
    freeze_a(mixed, "0")
    after = mixed.run()
    assert len(after) < len(before)  # without dA of "0"
    for name, tensor in after.items():
        if "0" in name.split()[1:2]:
            kept = "dB" + name[2:]  # its only gradient
            torch.testing.assert_close(tensor, before[kept], rtol=1e-5, atol=1e-5, msg=name)
        elif name in ("out", "dx"):
            torch.testing.assert_close(tensor, before[name], rtol=1e-5, atol=1e-5, msg=name)
            rows = slice(mixed.segments[1].start, None)
            assert torch.equal(tensor[rows], before[name][rows])
        else:
            assert torch.equal(tensor, before[name]), name


FUSED = {name: {name: tiles} for name, tiles in (*CANDIDATES["up"], *CANDIDATES["dx"]) if "fused" in name}
REASONS = ("backend", "no adapter there", "other variants", "other columns", "more columns", *FUSED)


@pytest.mark.parametrize("why", REASONS)
def test_what_is_no_one_operation_is_left_to_two(why: str) -> None:
    mlp = Mlp()
    if why == "no adapter there":
        mlp.segments = []
    if why == "other variants":
        for name in tuple(mlp.bank.blocks):
            freeze_a(mlp, name)
    first, second = mlp.layers()
    if why == "more columns":
        wider = torch.cat([mlp.pair, mlp.pair[:5]])
        first = Frozen(wider, None, (*first.sites, 5))
    if why == "other columns":
        first = replace(first, sites=("gate", mlp.width))
    tiles = replace(DEFAULT, **FUSED.get(why, {}))
    backend = "grouped" if why == "backend" else "triton"
    with taking(tiles):
        given = (mlp.x, first, second, mlp.kind, mlp.bank, mlp.routing())
        assert multi_lora_gated_mlp(*given, backend=backend) is None


@pytest.mark.parametrize("name", ["0", "1"])
def test_a_backward_that_would_be_wrong_is_refused(name: str) -> None:
    """After a change of an adapter at the first of both layers alone, or at the second."""
    mlp = Mlp(targets=(("gate",), ("down",), EVERY))
    x = mlp.x.clone().requires_grad_()
    given = (x, *mlp.layers(), mlp.kind, mlp.bank, mlp.routing())
    out = multi_lora_gated_mlp(*given, backend="triton")
    assert out is not None
    mlp.bank.refresh([name])
    with pytest.raises(KernelError, match=rf"weights of \['{name}'\] changed"):
        out.backward(mlp.grad)
    again = multi_lora_gated_mlp(*given, backend="triton")
    assert again is not None
    with pytest.raises(KernelError, match="second derivative of multi_lora_gated_mlp"):
        torch.autograd.grad(again, x, mlp.grad, create_graph=True)


@pytest.mark.parametrize("mode", ["none", "int8"])
def test_it_needs_no_more_memory_than_two_layers(mode: str) -> None:
    """Counted on meta tensors: what has been read is let go of, and quantised weights are made one by one."""
    pair, down = (torch.empty(size, device="meta", dtype=torch.float16) for size in ((4096, 64), (64, 2048)))
    weights = [pair, down] if mode == "none" else [Quantised([pair], mode), Quantised([down], mode)]
    sites = [Site("gate", 0, 64, 2048), Site("up", 1, 64, 2048), Site("down", 2, 2048, 64)]
    bank = Bank(sites, device="meta", compute_dtype=torch.float16)
    bank.attach("one", rank=8, scale=1.0, dropout=0.1, seed=0, sites=EVERY)
    row = torch.arange(512, device="meta")
    routing = Routing.build(
        bank, [RoutedSegment("one", 0, 512)], RowCounters(row, row, row, row), training=True
    )
    layers = [Frozen(weight, None, own) for weight, own in zip(weights, (EVERY[:2], EVERY[2:]), strict=True)]

    def two(x: Tensor) -> Tensor:
        y = multi_lora_linear(x, layers[0].weight, None, EVERY[:2], bank, routing, backend="triton")
        hidden = gated(y, plain.SILU, backend="triton")
        return multi_lora_linear(hidden, layers[1].weight, None, EVERY[2:], bank, routing, backend="triton")

    def one(x: Tensor) -> Tensor:
        found = multi_lora_gated_mlp(x, *layers, plain.SILU, bank, routing, backend="triton")
        assert found is not None
        return found

    forward, backward = zip(_peaks(one), _peaks(two), strict=True)
    bits = 512 * 2048 // 8  # of what down's adapter drops, which the pass reads
    assert forward[0] <= forward[1]
    assert backward[0] <= backward[1] + bits


def _peaks(mlp: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """Most bytes in forward and in backward."""
    x = torch.empty(512, 64, device="meta", dtype=torch.float16, requires_grad=True)
    for _ in range(2):  # makes what is made once, and finds the largest room for sums
        torch.autograd.backward(mlp(x), torch.empty_like(x))
    with StorageCounter() as counter:
        out = mlp(x)
        forward = counter.peak
        counter.restart()
        torch.autograd.backward(out, torch.empty_like(out))
        return forward, counter.peak
