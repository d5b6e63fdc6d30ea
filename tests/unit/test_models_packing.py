"""Buckets hold every sample once and waste little; the indices lead there and back."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.samples import MAX_WASTE, bucket_samples
from plait.models.attention import AttentionLayout

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@given(LENGTHS)
def test_buckets_hold_each_sample_once_and_waste_little(lengths: list[int]) -> None:
    buckets = bucket_samples(lengths)
    assert sorted(sample for bucket in buckets for sample in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        inside = [lengths[sample] for sample in bucket]
        assert inside[0] == max(inside)
        assert inside[0] ** 2 * len(inside) <= MAX_WASTE * sum(length**2 for length in inside)


def test_equal_lengths_are_one_bucket() -> None:
    assert bucket_samples([7] * 9) == [list(range(9))]


@settings(max_examples=30)
@given(LENGTHS, st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]))
def test_packing_indices_can_be_inverted(lengths: list[int], heads: tuple[int, int]) -> None:
    query, shared = heads
    layout = AttentionLayout.of(lengths)
    index = layout.index(query, shared)
    total = query + 2 * shared
    packed = torch.arange(sum(lengths) * total)
    assert torch.equal(packed[index.gather][index.scatter], packed)
    out = torch.arange(sum(lengths) * query)
    there = out[index.gather_out]
    assert torch.equal(there[index.scatter_out], out)
    real = set(index.scatter_out.tolist())
    assert set(index.padding.tolist()) == set(range(len(there))) - real
    sample_of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for bucket in layout.buckets:  # attention's order: sample, head, position, each of one sample and head
        start = bucket.start * query
        block = there[start : start + bucket.rows * query].view(bucket.samples, query, bucket.length)
        assert bool((block % query == torch.arange(query).view(1, -1, 1)).all())
        assert bool((sample_of[block // query] == sample_of[block // query][:, :1, :1]).all())
