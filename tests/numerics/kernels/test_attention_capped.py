"""Attention with a softcap by Triton against float64: odd shapes, bits that are a sample's own."""

from __future__ import annotations

import pytest
import torch

from plait_kernels import attention, plain, triton_backend
from plait_kernels.attention import Capped
from plait_kernels.check import poisoned_memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.skipif(not triton_backend.available(DEVICE), reason="Triton does not run here"),
    # Of the interpreter: rows beyond a sample see no key, and are not written.
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
LENGTHS = (1, 70, 5, 33, 1)
LONGER = (1, 130, 5, 67, 1)  # where a window is longer than a tile
RULES = {
    "16, one key for each query": Capped(2, 2, 16, 0.5, 2.0),
    "64, groups of 5": Capped(5, 1, 64, 0.125, 50.0),
    "80, groups of 3, a short window": Capped(6, 2, 80, 0.1, 30.0, 7),
    "96, groups of 2, a window of one": Capped(2, 1, 96, 0.1, 30.0, 1),
    "128, groups of 4, a window of a tile and one": Capped(4, 1, 128, 0.083, 50.0, 65),
    "256, groups of 2, a window beyond all": Capped(2, 1, 256, 0.0625, 50.0, 4096),
}
# Of scores, in units of their softcap, torch rounds the product to the dtype; these kernels do not. The floor
# is that of the passes.
FLOOR = {torch.float32: 8 * 2**-24, torch.float16: 2**-11}


def noise(*shape, dtype, seed):
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(DEVICE, dtype)


def ends_of(lengths):
    return torch.tensor((0, *lengths)).cumsum(0).to(DEVICE, torch.int32)


def run(qkv, grad, lengths, rule, longest=None):
    ends, most = ends_of(lengths), longest or max(lengths)
    out, sums = attention.forward(qkv, ends, most, rule)
    return out, attention.backward(grad, qkv, ends, most, rule, out, sums)


def drawn(lengths, rule, dtype):
    tokens, heads = sum(lengths), rule.query + 2 * rule.shared
    qkv = 1.5 * noise(tokens, heads * rule.size, dtype=dtype, seed=1)
    return qkv, noise(tokens, rule.query * rule.size, dtype=dtype, seed=2)


def by_torch(qkv, grad, lengths, rule, dtype):
    leaf = qkv.to(dtype, copy=True).requires_grad_()
    out = plain.attention(leaf, ends_of(lengths).tolist(), rule)
    out.backward(grad.to(dtype))
    return out.detach(), leaf.grad


def parts(found, rule):
    """The output and the gradients of queries, keys and values."""
    out, dqkv = found
    widths = [rule.query * rule.size, rule.shared * rule.size, rule.shared * rule.size]
    return dict(zip(("out", "dq", "dk", "dv"), (out, *dqkv.split(widths, dim=1)), strict=True))


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [(rule, torch.float32) for rule in RULES]
    + [(rule, torch.float16) for rule in ("64, groups of 5", "80, groups of 3, a short window")],
)
def test_values_and_gradients(rule, dtype):
    rule = RULES[rule]
    lengths = LONGER if rule.window == 65 else LENGTHS
    qkv, grad = drawn(lengths, rule, dtype)
    with poisoned_memory():
        found = run(qkv, grad, lengths, rule)
    rough, truth = (parts(by_torch(qkv, grad, lengths, rule, kind), rule) for kind in (dtype, torch.float64))
    for name, tensor in parts(found, rule).items():
        size = float(truth[name].norm())
        if size == 0.0:  # a window of one: no score matters
            assert float(tensor.double().norm()) < 1e-3
            continue
        error = float((tensor.double() - truth[name]).norm()) / size
        allowed = 2 * float((rough[name].double() - truth[name]).norm()) / size
        assert error <= max(allowed, FLOOR[dtype]), name  # false also if it is NaN


def test_in_float16_sums_may_be_larger_than_its_numbers():
    """Of products of outputs and gradients, and of gradients before they are scaled."""
    rule, lengths = Capped(2, 1, 64, 1e-5, 5.0), (40,)
    qkv, grad = drawn(lengths, rule, torch.float16)
    qkv[:, : 2 * 64] *= 600  # queries
    grad *= 20
    qkv[:, 3 * 64] = grad[:, 0] = grad[:, 64] = 400  # a feature of all values, and of both heads' gradients
    found = parts(run(qkv, grad, lengths, rule), rule)
    for name, truth in parts(by_torch(qkv, grad, lengths, rule, torch.float64), rule).items():
        error = float((found[name].double() - truth).norm() / truth.norm())
        assert error <= 2 * FLOOR[torch.float16], name  # false also if it is NaN


def test_a_sample_s_bits_do_not_depend_on_what_lies_beside_it():
    rule = Capped(4, 2, 64, 0.125, 20.0, 40)
    qkv, grad = drawn((3, 75, 140), rule, torch.float32)
    together = run(qkv, grad, (3, 75, 140), rule)
    own = slice(3, 78)
    for longest in (75, 700):
        alone = run(qkv[own].clone(), grad[own].clone(), (75,), rule, longest)
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one, other[own])


def test_nan_stays_in_its_sample():
    rule = Capped(2, 1, 16, 0.5, 20.0)
    qkv, grad = drawn((9, 30, 9), rule, torch.float32)
    exact = run(qkv, grad, (9, 30, 9), rule)
    qkv[20] = torch.nan
    for found, expected in zip(run(qkv, grad, (9, 30, 9), rule), exact, strict=True):
        assert torch.equal(found[:9], expected[:9])
        assert torch.equal(found[39:], expected[39:])
        assert found[20].isnan().any()


def test_scores_far_beyond_the_softcap_stay_finite():
    rule = Capped(1, 1, 16, 1.0, 50.0)
    qkv = 100 * noise(40, 48, dtype=torch.float32, seed=3)
    grad = noise(40, 16, dtype=torch.float32, seed=4)
    found, truth = (run(qkv, grad, (40,), rule), by_torch(qkv, grad, (40,), rule, torch.float64))
    torch.testing.assert_close(found[0].double(), truth[0], rtol=1e-5, atol=1e-4)
    assert found[1].isfinite().all()
