"""Uploads wait where the host's memory could be used again before it is copied."""

from __future__ import annotations

import pytest
import torch

from plait_kernels.uploads import upload


class Sent:
    """Stands for a tensor: notes how it is sent."""

    def __init__(self, device="cpu"):
        self.device = torch.device(device)
        self.pinned, self.queued = False, None

    def pin_memory(self):
        if self.device.type != "cpu":
            raise RuntimeError("only dense CPU tensors can be pinned")  # as torch does
        self.pinned = True
        return self

    def to(self, _device, *, non_blocking):
        self.queued = non_blocking
        return self


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta", "mps", "xpu"])
def test_only_pinned_memory_is_sent_without_waiting(device):
    sent = Sent()
    upload(sent, torch.device(device))
    assert sent.pinned == (device == "cuda")
    assert sent.queued == (sent.pinned or device == "meta")  # meta tensors stand for CUDA's


def test_what_is_on_the_device_already_is_not_pinned():
    """The rows of a problem that is timed are counted on the device that it is made on."""
    sent = Sent("cuda")
    upload(sent, torch.device("cuda"))
    assert not sent.pinned
