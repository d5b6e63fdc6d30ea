"""Dropout by a counter-based random function, the same bits in every backend.

Philox4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): key (job seed, module),
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
_ROUNDS = 7  # the fewest that pass BigCrush
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
    """The factor of kept values: 1 / (1 − threshold / 65536)."""
    return 65536.0 / (65536 - threshold)


def _constants(key: tuple[int, int], word: Tensor) -> tuple[Tensor, ...]:
    """The multipliers of words 0 and 2, then each round's keys of words 2 and 0, for pairs of such words."""
    pairs = [_MULTIPLIERS]
    for turn in range(_ROUNDS):
        first, second = ((each + turn * weyl) & _MASK32 for each, weyl in zip(key, _WEYL, strict=True))
        pairs.append((second, first))
    made = torch.tensor(pairs, dtype=torch.int64, device=word.device)
    return made.view(len(pairs), 2, *[1] * word.dim()).unbind()


def philox(key: tuple[int, int], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-7 on int64 tensors that hold 32-bit words and broadcast; returns four such tensors.

    Two words go through each operation together. A product of two words may be 2**63 and more: int64 wraps
    around, which leaves its 64 bits as they are.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)  # type: ignore[no-untyped-call]
    factors, *keys = _constants(key, c0)
    even, odd = torch.stack((c0, c2)), torch.stack((c3, c1))
    for pair in keys:
        product = even * factors
        even = ((product >> 32 & _MASK32) ^ odd ^ pair).flip(0)
        odd = product & _MASK32
    return even[0], odd[1], even[1], odd[0]


def keep_mask(key: tuple[int, int], words: Tensor, features: int, threshold: int, first: int = 0) -> Tensor:
    """(rows, features) bool from (rows, 3) counter words, by eager int64 arithmetic.

    ``first``: of the features, of all of the layer; a multiple of 8.
    """
    calls = -(-features // 8)
    column = first // 8 + torch.arange(calls, dtype=torch.int64, device=words.device)
    four = torch.stack(philox(key, (words[:, 0:1], words[:, 1:2], words[:, 2:3], column)), dim=2)
    halves = torch.stack((four & 0xFFFF, four >> 16), dim=3)
    return halves.reshape(words.shape[0], 8 * calls)[:, :features] >= threshold


def dropout_mask(seed: int, module: int, counters: RowCounters, features: int, p: float) -> Tensor:
    """The mask as a tensor: which features of which rows are kept.

    Args:
        seed: the job's seed, taken modulo 2**32.
        module: the site's dropout key.
        counters: counters of the rows.
        features: columns of the mask, counted over the whole layer.
        p: probability of dropping, rounded to 1/65536.

    Returns:
        (rows, features) bool.
    """
    key = (seed % 2**32, module % 2**32)
    return keep_mask(key, counters.words(), features, dropout_threshold(p))


def drop_by(keep: Tensor, x: Tensor, threshold: int) -> Tensor:
    """D ∘ x by its mask: dropped values become zero, kept ones are multiplied by `keep_scale(threshold)`."""
    return torch.where(keep, x * keep_scale(threshold), 0.0)
