"""A multi-adapter layer in float64 by plain autograd, and what the kernels' results are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from plait_kernels import (
    Bank,
    RoutedSegment,
    Routing,
    RowCounters,
    Site,
    check,
    dropout_mask,
    multi_lora_linear,
)
from plait_kernels.backends import BACKENDS

torch.set_num_threads(1)
Gradients = dict[tuple[str, str], tuple[Tensor, Tensor]]


@dataclass
class Layer:
    """One call of a layer: its bank, rows and frozen weights, drawn from a seed."""

    bank: Bank
    segments: list[RoutedSegment]
    counters: RowCounters
    sites: tuple[str, ...]
    x: Tensor
    weight: Tensor
    bias: Tensor
    grad: Tensor
    training: bool = True
    parts: list[slice] = field(default_factory=list)

    def routing(self) -> Routing:
        return Routing.build(self.bank, self.segments, self.counters, training=self.training)

    def run(self, backend: str) -> Outcome:
        """Forward and backward by a backend, from zeroed gradients."""
        self.bank.zero_gradients()
        x = self.x.detach().requires_grad_()
        out = multi_lora_linear(
            x, self.weight, self.bias, self.sites, self.bank, self.routing(), backend=backend
        )
        out.backward(self.grad)
        assert x.grad is not None
        gradients = {
            (adapter, site): (pair[0].clone(), pair[1].clone())
            for adapter in self.bank.blocks
            for site, pair in self.bank.gradients(adapter).items()
        }
        return Outcome(out.detach(), x.grad, gradients)

    def unfused(self, dtype: torch.dtype) -> Outcome:
        """The same by torch's plain operations and autograd, in a dtype; float64 is the truth."""
        device = self.x.device
        x = self.x.detach().to(dtype).requires_grad_()
        out = torch.nn.functional.linear(x, self.weight.to(dtype), self.bias.to(dtype))
        leaves = {
            (adapter, site): tuple(w.to(self.x.dtype).to(dtype, copy=True).requires_grad_() for w in pair)
            for adapter in self.bank.blocks
            for site, pair in self.bank.weights(adapter).items()
        }
        for segment in self.segments:
            if segment.adapter is None:
                continue
            block, rows = self.bank.block(segment.adapter), slice(segment.start, segment.stop)
            for site, columns in zip(self.bank.sites, self.parts, strict=True):
                if (segment.adapter, site.name) not in leaves:
                    continue
                a, b = leaves[segment.adapter, site.name]
                own = RowCounters(*(getattr(self.counters, name)[rows] for name in _COUNTERS))
                kept = x[rows]
                if self.training and block.dropout:
                    p = round(block.dropout * 65536) / 65536
                    stop = site.first_feature + x.shape[1]
                    mask = dropout_mask(block.seed, site.module, own, stop, block.dropout)
                    kept = torch.where(mask[:, site.first_feature :], kept / (1 - p), 0.0)
                low = block.scale * (kept @ a.T @ b.T)
                out = out + torch.nn.functional.pad(
                    low, (columns.start, out.shape[1] - columns.stop, rows.start, out.shape[0] - rows.stop)
                )
        out.backward(self.grad.to(dtype))
        assert x.grad is not None
        zero = torch.zeros((), device=device, dtype=dtype)
        gradients = {
            key: tuple(w.grad if w.grad is not None else zero.expand(w.shape) for w in pair)
            for key, pair in leaves.items()
        }
        return Outcome(out.detach(), x.grad, gradients)  # type: ignore[arg-type]

    def assert_accurate(self, got: Outcome) -> None:
        """The RMS error is at most twice that of torch's unfused operations in the same dtype.

        Of the output, dx, all dA and all dB: an adapter's gradients in units of its scale, those of one kind
        together, since of a tensor of few numbers either error may happen to be next to nothing. There is no
        other allowance.
        """
        scales = {name: block.scale for name, block in self.bank.blocks.items()}
        truth = self.unfused(torch.float64).kinds(scales)
        plain = self.unfused(self.x.dtype).kinds(scales)
        for kind, values in got.kinds(scales).items():
            assert torch.isfinite(values).all(), kind
            error, unfused = _rms(values - truth[kind]), _rms(plain[kind] - truth[kind])
            assert error <= 2 * unfused, f"{kind}: error {error:.2e}, allowed {2 * unfused:.2e}"

    def assert_close(self, got: Outcome) -> None:
        """Every number within 1e-5 of the largest of its kind: for cases that are searched for bad luck."""
        truth = self.unfused(torch.float64).tensors()
        for name, tensor in got.tensors().items():
            largest = float(truth[name].abs().max()) if tensor.numel() else 0.0
            torch.testing.assert_close(
                tensor.double(), truth[name], rtol=0.0, atol=1e-5 * max(1.0, largest), msg=name
            )


_COUNTERS = ("step", "sample", "draw", "position")


@dataclass
class Outcome:
    """Output, gradient of x and gradients of every A and B."""

    out: Tensor
    dx: Tensor
    gradients: Gradients

    def tensors(self) -> dict[str, Tensor]:
        named = {"out": self.out, "dx": self.dx}
        for (adapter, site), (a, b) in self.gradients.items():
            named[f"dA {adapter} {site}"], named[f"dB {adapter} {site}"] = a, b
        return named

    def kinds(self, scales: dict[str, float]) -> dict[str, Tensor]:
        """Output, dx, all dA and all dB as flat float64; gradients in units of their adapter's scale."""
        flat: dict[str, list[Tensor]] = {"out": [self.out], "dx": [self.dx], "dA": [], "dB": []}
        for (adapter, _), pair in self.gradients.items():
            for kind, gradient in zip(("dA", "dB"), pair, strict=True):
                flat[kind].append(gradient.double() / scales[adapter])
        return {
            kind: torch.cat([tensor.double().flatten() for tensor in tensors])
            for kind, tensors in flat.items()
        }

    def assert_equal(self, other: Outcome) -> None:
        """Bit for bit."""
        theirs = other.tensors()
        for name, tensor in self.tensors().items():
            assert torch.equal(tensor, theirs[name]), name


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


MakeLayer = Callable[..., Layer]


@pytest.fixture
def make_layer() -> MakeLayer:
    return _make_layer


def _make_layer(
    *,
    ranks: Sequence[int],
    lengths: Sequence[int],
    in_features: int = 40,
    widths: Sequence[int] = (24, 9, 17),
    dropout: float | Sequence[float] = 0.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    gap: int = 2,
    seed: int = 0,
    absent: bool = True,
    first_feature: int = 0,
) -> Layer:
    """Segments of `lengths` in turn for each adapter, every third followed by `gap` rows of the base.

    With `absent`, each adapter misses one of several sites.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device)

    sites = [Site(f"site{i}", 3 * i + 1, in_features, width, first_feature) for i, width in enumerate(widths)]
    bank = Bank(sites, device=device, compute_dtype=dtype)
    drops = [dropout] * len(ranks) if isinstance(dropout, float) else dropout
    for index, rank in enumerate(ranks):
        own = [s.name for s in sites if not absent or len(sites) == 1 or (s.module + index) % 4]
        bank.attach(
            *(f"a{index}",),
            rank=rank,
            scale=1.5 / (index + 1),
            dropout=drops[index],
            seed=index - 1,
            sites=own,
        )
        for a, b in bank.weights(f"a{index}").values():
            a.copy_(normal(*a.shape) * in_features**-0.5)
            b.copy_(normal(*b.shape) * rank**-0.5)
    bank.refresh()
    segments, end = [], 0
    for index, length in enumerate(lengths):
        segments.append(RoutedSegment(f"a{index % len(ranks)}", end, end + length))
        end += length + (gap if index % 3 == 0 else 0)
    row = torch.arange(end, device=device)
    counters = RowCounters(row // 50 + 1, row // 9, row % 3, row % 9)
    parts, start = [], 0
    for width in widths:
        parts.append(slice(start, start + width))
        start += width
    return Layer(
        bank=bank,
        segments=segments,
        counters=counters,
        sites=tuple(site.name for site in sites),
        x=normal(end, in_features).to(dtype),
        weight=(normal(start, in_features) * in_features**-0.5).to(dtype),
        bias=normal(start).to(dtype),
        grad=normal(end, start).to(dtype),
        parts=parts,
    )


def _places() -> Iterator[object]:
    for backend in BACKENDS:
        lacking = not BACKENDS[backend].runs(torch.device("cpu"), torch.float32)
        reason = "Triton runs on a CPU only in its interpreter, which is off where there is a GPU"
        yield pytest.param(
            ("cpu", backend), id=f"cpu-{backend}", marks=pytest.mark.skipif(lacking, reason=reason)
        )
    for backend in BACKENDS:
        yield pytest.param(("cuda", backend), id=f"cuda-{backend}", marks=pytest.mark.gpu)


@pytest.fixture(params=_places())
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A device and a backend that can run there."""
    device, backend = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return device, backend


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Every new tensor that is not filled holds NaN."""
    with check.poisoned_memory():
        assert torch.empty(3).isnan().all()
        yield
