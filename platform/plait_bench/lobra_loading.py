"""The steps that LobRA's artifact takes from a data set (PKU-DAIR/Hetu, lobra/data_utils/dataloader.py).

The paper says that steps are drawn at random. In the artifact each step has the same whole number of
sequences of every class of lengths, which end at powers of two. What this leaves over goes to the steps in
order, a sequence of each class in turn, the longest class first. So rare long ones come in the first steps.
"""

from __future__ import annotations

import numpy as np

from plait.core.errors import InputError
from plait.core.samples import Int64

SHORTEST = 256  # end of the first class


def loaded(lengths: Int64, size: int, steps: int, longest: int) -> Int64:
    """Lengths (steps, size) of the steps after the first, which is not measured; a data set that ends begins
    again.

    Args:
        lengths: of the data set's sequences, in order.
        size: sequences of a step.
        longest: end of the last class.

    Raises:
        InputError: the classes do not fill the steps; the artifact then trains nothing.
    """
    number = len(lengths) // size
    classes = np.clip(2 ** np.frexp(lengths)[1], SHORTEST, longest)
    ends = np.unique(classes)
    members = [lengths[classes == end] for end in ends]
    takes = [round(len(own) / len(lengths) * number * size) for own in members]
    largest = max(range(len(members)), key=lambda place: len(members[place]))
    takes[largest] += number * size - sum(takes)
    if number < 1 or takes[largest] > len(members[largest]):
        raise InputError(
            f"a data set of {len(lengths)} sequences in steps of {size}",
            "Its classes of lengths must fill whole steps: change its number of sequences.",
        )
    parts, rest = [], []
    for end, own, taken in zip(ends, members, takes, strict=True):
        whole = taken // number
        parts.append(own[: number * whole].reshape(number, whole))
        rest += [(turn, -end, length) for turn, length in enumerate(own[number * whole : taken])]
    left = np.array([length for _, _, length in sorted(rest)], dtype=np.int64).reshape(number, -1)
    every = np.concatenate([*parts, left], axis=1)
    return np.asarray(every[np.arange(1, steps + 1) % number])
