"""Counting without a device: what is a launch, what moves, when the host would wait."""

from __future__ import annotations

import torch

from plait_kernels.counting import counted
from plait_kernels.launching import launch


class Kernel:
    """As much of a Triton kernel as counting asks for."""

    arg_names = ("x", "out_", "rows")

    def __getitem__(self, grid):
        raise AssertionError("launched on meta tensors")


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_operators_that_are_views_or_allocate_ask_for_nothing():
    with counted() as counts:
        meta(4, 6).view(3, 8)[1:].t().detach()
    assert (counts.launches, counts.bytes, counts.waits) == (0, 0, 0)


def test_an_operator_reads_its_inputs_and_writes_its_outputs():
    x, row = meta(4, 6), meta(6)
    with counted() as counts:
        x * row.expand(4, 6)
    assert (counts.launches, counts.bytes) == (1, 2 * (24 + 6 + 24))


def test_picked_rows_are_read_and_the_others_are_not():
    with counted() as counts:
        meta(1000, 6).index_select(0, meta(3, dtype=torch.int64))
    assert counts.bytes == 2 * 2 * 18


def test_a_kernel_moves_its_tensors_once_and_those_in_place_twice():
    with counted() as counts:
        launch(Kernel(), (1,), meta(4), meta(10), 7)
    assert (counts.launches, counts.bytes) == (1, 2 * (4 + 20))


def test_the_host_waits_for_values_and_for_uploads_that_are_not_queued():
    with counted() as counts:
        torch.ones(3).to("meta")
        assert (counts.uploads, counts.waits) == (1, 1)
        torch.ones(3).to("meta", non_blocking=True)
        assert (counts.uploads, counts.waits) == (2, 1)
        assert meta(3).tolist() == [1.0] * 3
        assert int(meta(3).max()) == 1
    assert (counts.waits, counts.launches) == (3, 1)


def test_operations_on_the_host_are_not_counted():
    with counted() as counts:
        torch.ones(3).add_(1.0).tolist()
    assert (counts.launches, counts.waits, counts.bytes) == (0, 0, 0)


def test_a_product_of_batches_reshapes_nothing_in_memory() -> None:
    """Torch calls the shape that a product's result gets an operation of its own, and no view."""
    x, weight = torch.empty(2, 3, 4, device="meta"), torch.empty(5, 4, device="meta")
    with counted() as found:
        torch.nn.functional.linear(x, weight)
    assert (found.launches, found.bytes) == (1, 4 * (24 + 20 + 30))
