"""The compiled passes are the plain formulas, and their gradients; the torch way computes the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from plait.core.settings import ModelSettings
from plait.models import elementwise
from plait.models.elementwise import FrozenNorm, activated, gated
from plait.models.fuse import Activation, Norm, fuse_activations
from plait.models.load import load_model
from plait.models.lora import Binding
from plait_kernels.plain import GELU, GELU_TANH, SILU

EPS = 1e-5


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(elementwise, "_library", lambda: None)
    elif elementwise._library() is None:
        pytest.skip("no C compiler")


def compare(
    function: Callable[[Tensor], Tensor], formula: Callable[[Tensor], Tensor], x: Tensor, tolerance: float
) -> None:
    """Value and gradient against float64."""
    given, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    found, expected = function(given), formula(exact)
    assert found.dtype == x.dtype
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)).to(x.dtype)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    for one, other in ((found.detach(), expected.detach()), (given.grad, exact.grad)):
        assert one is not None
        assert other is not None
        assert float((one.double() - other).norm() / other.norm()) < tolerance


def noise(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)


DTYPES = [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, tolerance: float, offset: float) -> None:
    x = noise(5, 3, 67, dtype=dtype)
    weight = noise(67, dtype=dtype)

    def formula(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (offset + weight.double())

    compare(FrozenNorm(weight, EPS, offset), formula, x, tolerance)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("sums", [False, True])
def test_a_residual_that_passes_a_norm(dtype: torch.dtype, tolerance: float, sums: bool) -> None:
    """Norm and sum, each of which others read, with the bits of doing one after the other."""
    weight, more = noise(67, dtype=dtype), noise(5, 3, 67, dtype=dtype) * 0.5

    def together(x: Tensor) -> Tensor:
        normed, total = FrozenNorm(weight, EPS).of_sum(x, x.square() if sums else None)
        return normed + more * total

    def formula(x: Tensor) -> Tensor:
        total = x + x.square() if sums else x
        normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight.double()
        return normed + more.double() * total

    def apart(x: Tensor) -> Tensor:
        total = x + x.square() if sums else x
        return FrozenNorm(weight, EPS)(total) + more * total

    x = noise(5, 3, 67, dtype=dtype)
    compare(together, formula, x, 2 * tolerance)
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    one, other = together(found), apart(expected)
    assert torch.equal(one, other)
    assert torch.equal(*torch.autograd.grad(one.sum() + other.sum(), [found, expected]))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("kind", [SILU, GELU_TANH])
def test_gated(dtype: torch.dtype, tolerance: float, kind: int) -> None:
    x = noise(5, 7, 2 * 37, dtype=dtype)

    def formula(x: Tensor) -> Tensor:
        gate, up = x.split(37, dim=-1)
        act = functional.silu(gate) if kind == SILU else functional.gelu(gate, approximate="tanh")
        return act * up

    compare(lambda x: gated(x, kind), formula, x, tolerance)


@pytest.mark.usefixtures("way")
def test_extreme_values_stay_finite_and_nan_stays_nan() -> None:
    x = torch.tensor([[-1e4, 1e4, 0.0, -90.0, 1.0, 1.0, 1.0, 1.0]])
    out = gated(x, SILU)
    assert out[0].tolist() == pytest.approx([0.0, 1e4, 0.0, 0.0], abs=1e-30)
    x[0, 0] = torch.nan
    assert bool(gated(x, SILU)[0, 0].isnan())
    assert bool(FrozenNorm(torch.ones(8), EPS)(x).isnan().all())


def test_threads_change_no_bit() -> None:
    x = noise(64, 2 * 96, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append((gated(x, SILU), FrozenNorm(x[0].clone(), EPS)(x)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("added", "bias", "offset"), [(False, True, 0.0), (True, True, 0.0), (True, False, 1.0)]
)
def test_layer_norm(added: bool, bias: bool, offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, other, more = (torch.randn(size, generator=generator) for size in ((7, 33), 33, 33, (7, 33)))

    def formula(x: Tensor) -> Tensor:
        total = x + more.double() if added else x
        by = weight.double() + offset
        out = functional.layer_norm(total, (33,), by, other.double() if bias else None, EPS)
        return out + total if added else out

    def function(x: Tensor) -> Tensor:
        norm = FrozenNorm(weight, EPS, offset, other if bias else None, centred=True)
        out, total = norm.of_sum(x, more if added else None)
        return out + total if added else out

    compare(function, formula, x, 1e-6)


@pytest.mark.parametrize("kind", [SILU, GELU_TANH, GELU])
def test_activation(kind: int) -> None:
    x = 3 * torch.randn(7, 33, generator=torch.Generator().manual_seed(0))

    def formula(x: Tensor) -> Tensor:
        if kind == SILU:
            return functional.silu(x)
        return functional.gelu(x, approximate="tanh" if kind == GELU_TANH else "none")

    compare(lambda x: activated(x, kind), formula, x, 1e-6)


def test_an_activation_that_clips_large_values_is_left_alone() -> None:
    acts = nn.Sequential(ACT2FN["gelu_10"], ACT2FN["gelu"], ACT2FN["gelu_new"], ACT2FN["silu"])
    fuse_activations(acts, Binding())
    assert [isinstance(each.forward, Activation) for each in acts] == [False, True, True, True]
    assert float(acts[0](torch.tensor(20.0))) == 10.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("family", "norms", "acts"), [("gpt2", 2, 1), ("gpt_neox", 2, 1), ("cohere", 1, 1)])
def test_layer_norms_and_activations_of_a_model_are_replaced(
    family: str, norms: int, acts: int, dtype: str, tmp_path: Path
) -> None:
    """In every dtype: torch's LayerNorm takes no input of another dtype than its weight's."""
    base = load_model(ModelSettings(kind="tiny", family=family, dtype=dtype), cache=tmp_path)
    for layer in base.layers:
        forwards = [module.forward for module in layer.modules()]
        assert sum(isinstance(each, Norm) for each in forwards) == norms
        assert sum(isinstance(each, Activation) for each in forwards) == acts
