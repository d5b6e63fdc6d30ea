"""Which samples of a microbatch attention pads to one length: for the model and for memory prediction."""

from __future__ import annotations

from collections.abc import Sequence

MAX_WASTE = 1.25  # padded over real area of a bucket, at most


def bucket_samples(lengths: Sequence[int]) -> list[list[int]]:
    """Samples by falling length, cut wherever padding to the longest would waste too much.

    Returns:
        Indices of each bucket's samples, longest first; ties keep the samples' order.
    """
    buckets: list[list[int]] = []
    real = 0
    for sample in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        area = lengths[sample] ** 2
        if buckets:
            longest = lengths[buckets[-1][0]]
            if longest**2 * (len(buckets[-1]) + 1) <= MAX_WASTE * (real + area):
                buckets[-1].append(sample)
                real += area
                continue
        buckets.append([sample])
        real = area
    return buckets
