"""Dropout by a counter-based random function, the same bits in every backend.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): key (job seed, module),
counter (optimiser step, sample, draw mod 4096 << 20 | position, feature // 8). Word w of a call gives
features 8·(feature // 8) + 2·w by its low 16 bits and + 2·w + 1 by its high 16. A feature is kept if its
16 bits are at least round(p·65536).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class RowCounters:
    """The dropout counter of every row: four integer tensors of (tokens,).

    Args:
        step: the optimiser step of the row's job.
        sample: index of the row's sample in its job's data.
        draw: how often the sample has been drawn before, taken modulo 4096.
        position: the row's position in its sample, below 2**20.
    """

    step: Tensor
    sample: Tensor
    draw: Tensor
    position: Tensor

    def words(self) -> Tensor:
        """The first three counter words of every row: (tokens, 3) int64, each below 2**32."""
        step, sample = self.step.to(torch.int64), self.sample.to(torch.int64)
        third = (self.draw.to(torch.int64) % 4096) << 20 | self.position.to(torch.int64)
        return torch.stack((step, sample, third), dim=1) & 0xFFFFFFFF


def dropout_threshold(p: float) -> int:
    """round(p·65536), at most 65535: a feature whose 16 bits are below it is dropped."""
    return min(round(p * 65536), 65535)


def keep_scale(threshold: int) -> float:
    """What kept values are multiplied by: 1 / (1 − threshold / 65536)."""
    return 65536.0 / (65536 - threshold)


def _high_low(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a·b for 32-bit values held in int64, without overflowing int64."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | (low & 0xFFFF)


def philox(key: tuple[int, int], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words and broadcast; returns four such tensors."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        high0, low0 = _high_low(_MULTIPLIERS[0], c0)
        high1, low1 = _high_low(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def keep_mask(key: tuple[int, int], words: Tensor, features: int, threshold: int) -> Tensor:
    """(rows, features) bool from (rows, 3) counter words, by eager int64 arithmetic."""
    calls = -(-features // 8)
    column = torch.arange(calls, dtype=torch.int64, device=words.device)
    shape = (words.shape[0], calls)
    counter = (words[:, 0:1], words[:, 1:2], words[:, 2:3], column)
    four = [word.expand(shape) for word in philox(key, counter)]
    halves = torch.stack([half for word in four for half in (word & 0xFFFF, word >> 16)], dim=2)
    return halves.reshape(shape[0], 8 * calls)[:, :features] >= threshold


def dropout_mask(seed: int, module: int, counters: RowCounters, features: int, p: float) -> Tensor:
    """The mask as a tensor: which features of which rows are kept.

    Args:
        seed: the job's seed, taken modulo 2**32.
        module: the site's dropout key.
        counters: of the rows.
        features: columns of the mask, counted over the whole layer.
        p: probability of dropping, rounded to 1/65536.

    Returns:
        (rows, features) bool.
    """
    key = (seed % 2**32, module % 2**32)
    return keep_mask(key, counters.words(), features, dropout_threshold(p))


def apply_dropout(x: Tensor, seed: int, module: int, counters: Tensor, threshold: int) -> Tensor:
    """D ∘ x: dropped values become zero, kept values are multiplied by `keep_scale(threshold)`."""
    keep = keep_mask((seed % 2**32, module % 2**32), counters, x.shape[1], threshold)
    return torch.where(keep, x * keep_scale(threshold), 0.0)
