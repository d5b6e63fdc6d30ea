"""Packed attention is attention of each sample alone, forward and backward, in every variant."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from plait.models import attention
from plait.models.attention import AttentionLayout, AttentionRule, Heads, packed_attention

LENGTHS = (9, 1, 40, 17, 40, 38, 3)
RULES = {
    "plain": AttentionRule(0.3),
    "window": AttentionRule(0.3, window=5),
    "softcap": AttentionRule(1.5, softcap=2.0),
    "both": AttentionRule(1.5, window=7, softcap=2.0),
}


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE from its definition: pairs (i, i + half) turned by their angle; what is left stays."""
    size = cos.shape[-1]
    first, second, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
    c, s = cos[: x.shape[-2], : size // 2], sin[: x.shape[-2], : size // 2]
    return torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1)


def one_sample(
    qkv: Tensor, heads: Heads, rule: AttentionRule, rotation: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Attention of one sample from the definition: (length, total · size) to (length, query · size)."""
    x = qkv.view(len(qkv), heads.total, -1).transpose(0, 1)
    q, k, v = x.split([heads.query, heads.shared, heads.shared])
    if rotation is not None:
        q, k = rotated(q, *rotation), rotated(k, *rotation)
    k, v = (part.repeat_interleave(heads.group, dim=0) for part in (k, v))
    scores = q @ k.transpose(1, 2) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    row = torch.arange(len(qkv)).unsqueeze(1)
    key = torch.arange(len(qkv))
    hidden = (key > row) | (key <= row - (rule.window or len(qkv)))
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)


def compare(
    lengths: tuple[int, ...],
    rule: AttentionRule,
    heads: Heads,
    dtype: torch.dtype,
    tolerance: float,
    size: int = 16,
) -> None:
    generator = torch.Generator().manual_seed(4)
    tokens = sum(lengths)
    qkv = torch.randn(tokens, heads.total * size, generator=generator).to(dtype)
    weight = torch.randn(tokens, heads.query * size, generator=generator).to(dtype)
    angles = torch.arange(max(lengths)).unsqueeze(1) * torch.logspace(0, -3, size // 4)
    table = torch.cat((angles, angles), dim=-1)
    for rotation in (None, (table.cos().to(dtype), table.sin().to(dtype))):
        packed = qkv.clone().requires_grad_()
        out = packed_attention(packed, heads, AttentionLayout.of(lengths), rule, rotation)
        (out * weight).sum().backward()
        exact = qkv.double().requires_grad_()
        wide = None if rotation is None else (rotation[0].double(), rotation[1].double())
        ends = torch.tensor((0, *lengths)).cumsum(0).tolist()
        parts = [one_sample(exact[low:high], heads, rule, wide) for low, high in pairwise(ends)]
        (torch.cat(parts) * weight).sum().backward()
        for found, expected in ((out.detach(), torch.cat(parts).detach()), (packed.grad, exact.grad)):
            assert found is not None
            assert expected is not None
            assert float((found.double() - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("heads", [Heads(4, 4), Heads(6, 2), Heads(3, 1)], ids=["own", "grouped", "one"])
def test_equals_each_sample_alone(rule: str, heads: Heads) -> None:
    compare(LENGTHS, RULES[rule], heads, torch.float32, 2e-6)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_in_bfloat16_only_rounding_differs(rule: str) -> None:
    compare(LENGTHS, RULES[rule], Heads(6, 2), torch.bfloat16, 2e-2)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize(("keep", "rows"), [(256, 16), (0, 512), (0, 7)])
def test_long_samples_recompute_in_blocks(
    rule: str, keep: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "KEEP_UP_TO", keep)
    monkeypatch.setattr(attention, "ROWS", rows)
    compare(LENGTHS, RULES[rule], Heads(6, 2), torch.float32, 2e-6)


def test_long_samples_are_accurate() -> None:
    compare((700, 5), AttentionRule(0.25), Heads(2, 1), torch.float32, 2e-6)
    compare((700,), AttentionRule(0.25, window=100), Heads(2, 1), torch.float32, 2e-6)


def test_without_a_compiler_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.models.elementwise._library", lambda: None)
    for rule in RULES.values():
        compare(LENGTHS, rule, Heads(6, 2), torch.float32, 2e-6)


def test_other_samples_change_nothing() -> None:
    """Bit-equal whatever a sample is packed with, as long as its bucket has its own length."""
    heads, rule = Heads(4, 2), AttentionRule(0.3)
    generator = torch.Generator().manual_seed(6)
    mine, other = (torch.randn(length, heads.total * 16, generator=generator) for length in (20, 50))
    alone = packed_attention(mine, heads, AttentionLayout.of([20]), rule)
    both = packed_attention(torch.cat((other, mine)), heads, AttentionLayout.of([50, 20]), rule)
    torch.testing.assert_close(both[50:], alone, rtol=1e-6, atol=1e-6)
