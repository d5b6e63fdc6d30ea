"""The steps that LobRA's artifact takes from a data set: by hand, and as its loader's own steps give them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from plait.core.errors import ConfigError, InputError
from plait_bench.lobra import Assumption, Task, loaded_steps
from plait_bench.lobra_loading import loaded

# Ten short ones, four of the class up to 512, two of that up to 1,024: four steps of four.
LENGTHS = np.array([9, 600, 300, 10, 11, 301, 12, 13, 14, 302, 15, 601, 16, 17, 303, 18])


def test_every_step_has_its_classes_and_the_longest_left_over_come_first() -> None:
    # Each step has two short ones and one of 512. Left over, in turn: 600, 17, 601, 18; the first (9, 10,
    # 300 and 600) is not measured, and comes again after the fourth.
    assert loaded(LENGTHS, 4, 4, 1024).tolist() == [
        [11, 12, 301, 17],
        [13, 14, 302, 601],
        [15, 16, 303, 18],
        [9, 10, 300, 600],
    ]


def test_steps_of_a_data_set_take_every_sequence_once() -> None:
    steps = loaded(LENGTHS, 4, 4, 1024)
    assert Counter(steps.ravel().tolist()) == Counter(LENGTHS.tolist())


def test_rare_long_sequences_come_in_the_first_steps() -> None:
    rng = np.random.default_rng(0)
    lengths = np.where(rng.random(64_000) < 0.001, 5000, 100 + rng.integers(0, 400, 64_000))
    steps = loaded(lengths, 64, 400, 16384)
    found = (steps == 5000).sum(axis=1)
    assert found[:60].mean() > 4 * (lengths == 5000).mean() * 64
    assert found[300:].sum() == 0


def test_a_task_needs_its_number_of_sequences_and_they_must_fill_steps() -> None:
    with pytest.raises(ConfigError, match="without samples"):
        loaded_steps([Task("t", 100, 1.0, 4)], Assumption(), 2)
    with pytest.raises(InputError, match="3 sequences in steps of 4"):
        loaded(np.array([1, 2, 3]), 4, 1, 1024)
    with pytest.raises(ConfigError, match="samples=0"):
        Task("t", 100, 1.0, 4, samples=0)
    assert loaded_steps([Task("t", 100, 1.0, 4, samples=50)], Assumption(), 3).shape == (3, 4)
