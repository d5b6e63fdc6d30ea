"""The footprint of one side of a comparison, with another side at work in between."""

import pytest
import torch

from plait_bench.joint_vs_peft import Footprint

MIB = 2**20


def tensor(mebibytes):
    return torch.ones(mebibytes * MIB // 4)


def test_kept_and_temporary_tensors_count_but_earlier_ones_do_not():
    footprint = Footprint()
    with footprint:
        kept = tensor(40)
        passing = tensor(60)
        footprint.read()
        del passing
    first = footprint.peak_bytes / MIB
    assert footprint.held_bytes / MIB == pytest.approx(40, abs=8)
    assert first == pytest.approx(100, abs=8)
    other = tensor(200)
    with footprint:
        passing = tensor(90)
        footprint.read()
        del passing
    del other
    assert footprint.peak_bytes / MIB == pytest.approx(130, abs=8)
    assert footprint.held_bytes / MIB == pytest.approx(40, abs=8)
    with footprint:
        passing = tensor(10)
        footprint.read()
        del passing
    assert footprint.peak_bytes / MIB == pytest.approx(130, abs=8)
    assert kept.numel() == 40 * MIB // 4
