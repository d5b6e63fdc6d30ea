"""Flash attention over packed samples: what it is asked for, its gradient, and where it is not used.

Without a GPU torch's flash kernels are stood in for by its plain attention, called as they are called.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from plait.models import flash
from plait.models.attention import AttentionRule, Heads, packed_attention
from plait.models.context import MicrobatchContext
from plait_kernels import passes
from plait_kernels.counting import counted

OFFSETS = (0, 5, 6, 17)
HEADS, SIZE = Heads(4, 2), 8
RULES = [AttentionRule(0.3), AttentionRule(0.5, window=1), AttentionRule(0.2, window=4)]


def plain_varlen(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, rule: AttentionRule) -> Tensor:
    """Attention of samples that end there, (tokens, heads, size), by torch's plain one."""
    assert ends.dtype == torch.int32
    enable_gqa = query.shape[1] != key.shape[1]
    parts = []
    for low, high in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        row = torch.arange(high - low)
        seen = row[:, None] >= row[None, :]
        if rule.window is not None:
            seen &= row[:, None] - row[None, :] < rule.window
        q, k, v = (part[low:high].transpose(0, 1) for part in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, seen, scale=rule.scale, enable_gqa=enable_gqa)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def plain_forward(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, most: int, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor]:
    assert most == max(ends.diff().tolist())
    return plain_varlen(query, key, value, ends, rule), torch.zeros(1), torch.zeros(2)


def plain_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, state: Tensor,
    ends: Tensor, most: int, rule: AttentionRule,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert most == max(ends.diff().tolist())
    assert (sums.shape, state.shape) == ((1,), (2,))
    leaves = [each.detach().requires_grad_() for each in (query, key, value)]
    with torch.enable_grad():
        again = plain_varlen(*leaves, ends, rule)
    torch.testing.assert_close(again.detach(), out)
    return torch.autograd.grad(again, leaves, grad)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "forward_kernel", plain_forward)
    monkeypatch.setattr(flash, "backward_kernel", plain_backward)
    monkeypatch.setattr(flash, "takes", lambda *_: True)
    monkeypatch.setattr(passes, "by_triton", lambda *_: True)


def packed(device: str = "cpu") -> MicrobatchContext:
    return MicrobatchContext.of(torch.zeros(OFFSETS[-1], dtype=torch.int64, device=device), OFFSETS)


def both(run: Any) -> tuple[Tensor, Tensor]:
    qkv = torch.randn(OFFSETS[-1], HEADS.total * SIZE, generator=torch.Generator().manual_seed(1))
    qkv.requires_grad_()
    out = run(qkv)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * weight).sum().backward()
    assert qkv.grad is not None
    return out.detach(), qkv.grad


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("rule", RULES)
def test_flash_is_asked_for_what_the_products_compute(rule: AttentionRule) -> None:
    context = packed()
    found = both(lambda qkv: flash.attend(qkv, HEADS, context, rule, "triton"))
    expected = both(lambda qkv: packed_attention(qkv, HEADS, context.layout, rule))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("stand_in")
def test_its_gradient_is_summed_in_a_fixed_order_and_the_setting_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []

    def noting(*given: Any) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return plain_backward(*given)

    monkeypatch.setattr(flash, "backward_kernel", noting)
    both(lambda qkv: flash.attend(qkv, HEADS, packed(), RULES[0], "triton"))
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("stand_in")
def test_checkpointing_lets_go_of_what_attention_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []

    def noting(*given: Any) -> Any:
        found = plain_forward(*given)
        made.append(weakref.ref(found[0]))
        return found

    monkeypatch.setattr(flash, "forward_kernel", noting)
    context = packed()

    def run(qkv: Tensor) -> Tensor:
        return flash.attend(2 * qkv, HEADS, context, RULES[0], "triton").sin()

    expected = both(run)
    made.clear()
    found = both(lambda qkv: kept(checkpoint(run, qkv, use_reentrant=False), made))
    assert len(made) == 2  # and again for backward
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def kept(out: Tensor, made: list[weakref.ref[Tensor]]) -> Tensor:
    """``out``, after a look at what forward left."""
    gc.collect()
    assert [each() for each in made] == [None]
    return out


def test_a_rule_that_flash_does_not_compute_goes_elsewhere() -> None:
    half = torch.empty(3, HEADS.total * SIZE, dtype=torch.bfloat16, device="meta")
    assert flash.takes(half, HEADS, RULES[2])
    assert not flash.takes(half, HEADS, AttentionRule(0.3, softcap=2.0))
    assert not flash.takes(half.float(), HEADS, RULES[0])
    for size, taken in ((12, False), (192, True), (200, False), (224, False), (256, True), (264, False)):
        assert flash.takes(torch.empty(3, HEADS.total * size, device="meta").half(), HEADS, RULES[0]) == taken
    assert not flash.takes(torch.empty_like(half, device="cpu"), HEADS, RULES[0])


def test_torch_s_own_operator_takes_the_call_and_its_gradient() -> None:
    """Over meta tensors, which check names, shapes and dtypes; nothing is gathered or scored."""
    qkv = torch.empty(OFFSETS[-1], HEADS.total * SIZE, dtype=torch.bfloat16, device="meta")
    qkv.requires_grad_()
    context = packed("meta")
    with counted() as counts:
        out = flash.attend(qkv, HEADS, context, RULES[2], "triton")
        assert out.shape == (OFFSETS[-1], HEADS.query * SIZE)
        out.backward(torch.empty_like(out))
    assert qkv.grad is not None
    assert qkv.grad.shape == qkv.shape
    assert counts.launches <= 5  # flash, its gradient, and what puts the gradient's three parts together


class Asked(TorchDispatchMode):
    """Notes what operators below torch's own functions are asked for, tensors by their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "flash_attention" in str(func):
            self.calls.append((func, *map(told, args), {key: told(each) for key, each in kwargs.items()}))
        return func(*args, **(kwargs or {}))


def told(value: Any) -> Any:
    return (tuple(value.shape), value.stride()) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("rule", RULES)
def test_the_operators_are_asked_as_torch_s_varlen_attn_asks_them(rule: AttentionRule) -> None:
    """By whose documentation the left window counts the keys before the own, and a causal one is (-1, 0)."""
    q, k, v = torch.empty(17, HEADS.total, 8, dtype=torch.bfloat16, device="meta").split([4, 2, 2], dim=1)
    ends, out = torch.empty(4, dtype=torch.int32, device="meta"), torch.empty_like(q)
    with Asked() as own:
        _, sums, state = flash.forward_kernel(q, k, v, ends, 11, rule)
        flash.backward_kernel(out, q, k, v, out, sums, state, ends, 11, rule)
    samples, window = (ends, ends, 11, 11), [-1 if rule.window is None else rule.window - 1, 0]
    causal = window == [-1, 0]
    with Asked() as torchs:
        forward, backward = varlen._varlen_attn._init_fn, varlen._varlen_attn_backward._init_fn
        forward(q, k, v, *samples, causal, rule.scale, window, True, None, None, 1)
        backward(out, q, k, v, out, sums, *samples, causal, state, rule.scale, window)
    assert len(own.calls) == len(torchs.calls) == 2
    assert own.calls[0] == torchs.calls[0]
    (*mine, mine_last, options), (*theirs, _unused, others) = own.calls[1], torchs.calls[1]
    assert (mine, options) == (theirs, others)
    assert mine_last == mine[-1]  # where torch gives a tensor that it calls unused


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", RULES)
def test_flash_on_a_device_equals_the_products(rule: AttentionRule) -> None:
    results = []
    for backend, dtype in (("triton", torch.bfloat16), ("triton", torch.bfloat16), ("", torch.float32)):
        qkv = torch.randn(OFFSETS[-1], HEADS.total * 64, generator=torch.Generator().manual_seed(1))
        qkv = qkv.to("cuda", torch.bfloat16).to(dtype).requires_grad_()
        out = flash.attend(qkv, HEADS, packed("cuda"), rule, backend)
        out.backward(torch.ones_like(out))
        assert qkv.grad is not None
        results.append((out.detach(), qkv.grad))
    for first, second, exact in zip(*results, strict=True):
        assert torch.equal(first, second)
        assert float((first.float() - exact).norm() / exact.norm()) < 2e-2
