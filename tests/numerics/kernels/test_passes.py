"""The passes between the products: values and gradients by Triton against float64, bits that repeat."""

from __future__ import annotations

import pytest
import torch

from plait_kernels import passes, plain, triton_backend
from plait_kernels.check import poisoned_memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.skipif(not triton_backend.available(DEVICE), reason="Triton does not run here"),
    pytest.mark.filterwarnings(
        "ignore:overflow encountered in exp"
    ),  # of the interpreter: exp(x) = inf is meant
]
EPS = 1e-5
# The error of plain torch in the dtype is the measure; the floor, for where that is nearly exact, is eight
# roundings of float32, in which the kernels compute, and one of the output.
FLOOR = {torch.float32: 8 * 2**-24, torch.float16: 2**-11}
ROWS = [(1, 1), (3, 67), (7, 133), (130, 64), (2, 4096), (1, 10000)]
DTYPES = [torch.float32, torch.float16]


def noise(*shape, dtype, seed=0, scale=3.0):
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return drawn.to(DEVICE, dtype)


def check(found, rough, truth):
    """No worse than twice plain torch in the same dtype, and finite."""
    for one, other, exact in zip(found, rough, truth, strict=True):
        size = float(exact.double().norm()) or 1.0
        error = float((one.double() - exact.double()).norm()) / size
        allowed = 2 * float((other.double() - exact.double()).norm()) / size
        assert error <= max(allowed, FLOOR[one.dtype])  # false also if it is NaN


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "features"), ROWS)
@pytest.mark.parametrize(
    ("biased", "offset"), [(None, 0.0), (None, 1.0), (True, 0.0), (False, 0.0), (True, 1.0)]
)
def test_norms(dtype, biased, offset, rows, features):
    """RMSNorm, and LayerNorm with and without a bias of rows whose mean is far from 0; alone and of a sum."""
    for residual in (False, True):
        check_norm(dtype, biased, offset, rows, features, residual)


def check_norm(dtype, biased, offset, rows, features, residual):
    centred = biased is not None
    x = noise(rows, features, dtype=dtype) + 5 * centred
    weight = noise(features, dtype=dtype, seed=1, scale=1.0)
    bias = noise(features, dtype=dtype, seed=5) if biased else None
    other = noise(rows, features, dtype=dtype, seed=2) if residual else None
    grad, more = noise(rows, features, dtype=dtype, seed=3), noise(rows, features, dtype=dtype, seed=4)
    kind = {"bias": bias, "centred": centred}
    with poisoned_memory():
        out, *found, total = passes.rms(x, weight, EPS, offset, other, **kind)
        again = passes.rms(x, weight, EPS, offset, other, **kind)
        dx = passes.rms_back(grad, total, weight, *found, offset, more if residual else None, centred=centred)
    assert all(torch.equal(one, two) for one, two in zip((out, *found, total), again, strict=True))
    expected = x if other is None else x + other
    assert torch.equal(total, expected)

    def by_torch(kind):
        value, w, g = (tensor.to(kind) for tensor in (expected, weight, grad))
        if centred:
            b = None if bias is None else bias.to(kind)
            made, mean, scale = plain.layer_norm(value, w, b, EPS, offset)
            back = plain.layer_norm_back(g, value, w, offset, mean, scale)
        else:
            made, scale = plain_rms(value, w, offset)
            back = plain_rms_back(g, value, w, scale, offset)
        return made, back + more.to(kind) if residual else back

    check((out, dx), by_torch(dtype), by_torch(torch.float64))


def plain_rms(value, weight, offset):
    """`plain`, and in float64 what it stands for."""
    if value.dtype != torch.float64:
        return plain.rms(value, weight, EPS, offset)
    scale = torch.rsqrt(value.square().mean(-1, keepdim=True) + EPS)
    return value * scale * (offset + weight), scale


def plain_rms_back(grad, value, weight, scale, offset):
    if value.dtype != torch.float64:
        return plain.rms_back(grad, value, weight, scale, offset)
    leaf = value.clone().requires_grad_()
    (plain_rms(leaf, weight, offset)[0] * grad).sum().backward()
    return leaf.grad


def test_a_bias_of_another_dtype_has_a_launch_of_its_own():
    """Which is asked directly from its second call on, with the addresses alone."""
    x = noise(3, 17, dtype=torch.float16)
    before = passes._rms.cache_info().misses
    for dtype in (torch.float16, torch.float32):
        passes.rms(x, x[0].clone(), EPS, 0.0, bias=x[1].to(dtype), centred=True)
    assert passes._rms.cache_info().misses == before + 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [plain.SILU, plain.GELU_TANH, plain.GELU])
@pytest.mark.parametrize("shape", [(1, 1), (7, 133), (3, 2500)])
def test_activation(dtype, kind, shape):
    x, grad = noise(*shape, dtype=dtype), noise(*shape, dtype=dtype, seed=1)
    with poisoned_memory():
        found = passes.activated(x, kind), passes.activated_back(grad, x, kind)
        again = passes.activated(x, kind), passes.activated_back(grad, x, kind)
    assert all(torch.equal(one, two) for one, two in zip(found, again, strict=True))
    rough = plain.activation(x, kind), plain.activation_back(grad, x, kind)
    truth = plain.activation(x.double(), kind), plain.activation_back(grad.double(), x.double(), kind)
    check(found, rough, truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [plain.SILU, plain.GELU_TANH])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 37), (130, 16), (3, 2500)])
def test_gated_mlp(dtype, kind, rows, width):
    x, grad = noise(rows, 2 * width, dtype=dtype), noise(rows, width, dtype=dtype, seed=1)
    with poisoned_memory():
        out, dx = passes.gated(x, kind), passes.gated_back(grad, x, kind)
        assert torch.equal(out, passes.gated(x, kind))
        assert torch.equal(dx, passes.gated_back(grad, x, kind))
    rough = plain.gated(x, kind), plain.gated_back(grad, x, kind)
    truth = plain.gated(x.double(), kind), plain.gated_back(grad.double(), x.double(), kind)
    check((out, dx), rough, truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "kept", "size", "rotated"), [
    (1, 1, 0, 2, 2), (5, 3, 2, 10, 6), (67, 9, 3, 16, 16), (3, 40, 8, 64, 64),
])  # fmt: skip
def test_rotation_in_place(dtype, rows, heads, kept, size, rotated):
    """Queries and keys of a merged product are rotated, its values and what is not rotated stay."""
    merged = noise(rows, (heads + kept) * size, dtype=dtype)
    angle = noise(rows, rotated, dtype=torch.float32, seed=1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def by_torch(kind, back):
        made = merged.to(kind)
        plain.rotate_(made.view(rows, -1, size)[:, :heads], cos.to(kind), sin.to(kind), back=back)
        return made

    for back in (False, True):
        found = merged.clone()
        passes.rotate_(found.view(rows, -1, size)[:, :heads], cos, sin, back=back)
        check((found,), (by_torch(dtype, back),), (by_torch(torch.float64, back),))
        own, before = found.view(rows, -1, size), merged.view(rows, -1, size)
        assert torch.equal(own[:, heads:], before[:, heads:])
        assert torch.equal(own[..., rotated:], before[..., rotated:])


def test_no_kernel_is_launched_for_zero_rows():
    empty = torch.empty(0, 8, device=DEVICE)
    assert passes.gated(empty, plain.SILU).shape == (0, 4)
    assert passes.rms(empty, empty.new_ones(8), EPS, 0.0)[0].shape == (0, 8)
    assert passes.activated(empty, plain.GELU).shape == passes.activated_back(empty, empty, plain.GELU).shape
    passes.rotate_(empty.view(0, 2, 4), empty[:, :4], empty[:, :4])


def test_extreme_values_stay_finite_and_nan_stays_in_its_row():
    x = torch.tensor([[-1e4, 1e4, -90.0, 90.0, 1.0, 1.0, 1.0, 1.0]] * 3, device=DEVICE)
    assert passes.gated(x, plain.SILU)[0].tolist() == pytest.approx([0.0, 1e4, 0.0, 90.0], abs=1e-30)
    assert passes.gated_back(x[:, :4] * 0 + 1, x, plain.GELU_TANH).isfinite().all()
    assert passes.activated(x, plain.GELU)[0, :4].tolist() == pytest.approx([0.0, 1e4, 0.0, 90.0], abs=1e-30)
    assert passes.activated_back(x * 0 + 1, x, plain.GELU).isfinite().all()
    x[1, 0] = torch.nan
    for out in (passes.gated(x, plain.SILU), passes.rms(x, torch.ones(8, device=DEVICE), EPS, 0.0)[0]):
        assert out[1].isnan().any()
        assert not out[[0, 2]].isnan().any()
