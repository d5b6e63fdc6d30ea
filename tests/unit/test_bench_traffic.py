"""Bytes of a layer with adapters: what products read again beside a cache, and what operators count."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from plait.core.errors import ConfigError
from plait_bench.products import Cached, read_again
from plait_bench.traffic import DTYPE, TrafficOptions, _fused, _moved, _plain
from plait_kernels.launching import noted
from plait_kernels.synthetic import Shape, problem

TILE, GROUP = (2, 4), 2
CACHE = Cached(mebibytes=1e-4, processors=4, tile=TILE, group=GROUP, replacement="oldest")  # 105 bytes
ROWS, COLUMNS, INNER = 8, 8, 8  # 4 × 2 tiles


def test_a_product_whose_tiles_all_run_at_once_reads_each_tensor_once() -> None:
    wide = Cached(mebibytes=1e-4, processors=8, tile=TILE, group=GROUP)
    assert wide.reads(ROWS, COLUMNS, INNER) == 2 * INNER * (ROWS + COLUMNS)
    assert read_again(wide, ROWS, COLUMNS, INNER) == 0


@pytest.mark.parametrize("replacement", ["oldest", "random"])
def test_a_cache_that_holds_everything_reads_nothing_again(replacement: str) -> None:
    large = Cached(mebibytes=1e9, processors=4, tile=TILE, group=GROUP, replacement=replacement)  # type: ignore[arg-type]
    assert read_again(large, ROWS, COLUMNS, INNER) == pytest.approx(0, abs=1e-3)


def test_a_cache_too_small_reads_what_waves_share_again() -> None:
    """The first wave has all columns and half of the rows, the second all columns again."""
    assert read_again(CACHE, ROWS, COLUMNS, INNER) == 2 * INNER * COLUMNS


def test_what_is_let_go_of_at_random_is_between() -> None:
    found = Cached(mebibytes=1e-4, processors=4, tile=TILE, group=GROUP)
    assert 0 < read_again(found, ROWS, COLUMNS, INNER) < 2 * INNER * COLUMNS


def test_a_cache_without_room_and_empty_tiles_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mebibytes=0.*\n.*above 0"):
        Cached(mebibytes=0, processors=1, tile=TILE, group=1)
    with pytest.raises(ConfigError, match=r"tile=\[2,0\].*\n.*at least 1"):
        Cached(mebibytes=1, processors=1, tile=(2, 0), group=1)


def test_another_replacement_is_refused() -> None:
    with pytest.raises(ConfigError, match="replacement='newest'"):
        Cached(mebibytes=1, processors=1, tile=TILE, group=1, replacement="newest")  # type: ignore[arg-type]


def test_dropout_of_plain_operators_is_one_operator_with_a_mask_of_bytes() -> None:
    tokens, inputs, outputs, rank = 64, 32, 48, 4
    x, y, weight = 2 * tokens * inputs, 2 * tokens * outputs, 2 * inputs * outputs
    a, b, s, mask = 2 * rank * inputs, 2 * rank * outputs, 2 * tokens * rank, tokens * inputs
    forward = (x + weight + y) + (2 * x + mask) + (x + a + s) + (s + b + y) + 2 * y + 3 * y
    backward = 2 * y + (y + s + b) + (y + b + s) + (x + s + a) + (s + a + x) + (2 * x + mask)
    backward += (y + weight + x) + 3 * x
    assert _moved(_plain(tokens, inputs, outputs, rank, 0.1)) == forward + backward


def test_fused_adapters_count_no_sum_with_an_older_gradient() -> None:
    asked = TrafficOptions(layers=(), rank=4, adapters=(1,), dropout=0.1, cache=CACHE)
    made = problem(Shape(128, 32, (48,), (4,), 0.1), device="meta", dtype=DTYPE)
    made.train("triton")
    added = _moved(partial(made.train, "triton"))  # to the gradient of the input that is there
    assert added - _fused(128, 32, 48, 1, asked) == 3 * 2 * 128 * 32


def test_only_both_products_are_given_the_weight() -> None:
    """What a pass is given counts as moved."""
    made, readers = problem(Shape(128, 32, (48,), (4,), 0.1), device="meta", dtype=DTYPE), []
    storage = made.weight.untyped_storage()._cdata

    def note(kernel: Any, given: tuple[object, ...]) -> None:
        tensors = (each for each in given if isinstance(each, torch.Tensor))
        readers.extend(kernel for each in tensors if each.untyped_storage()._cdata == storage)

    with noted(note):
        made.train("triton")
    assert [reader.__name__ for reader in readers] == ["_AddProduct"] * 2
