"""Uploads wait where the host's memory could be used again before it is copied."""

from __future__ import annotations

import pytest
import torch

from plait_kernels.uploads import upload


class Sent:
    """Stands for a tensor of the host: notes how it is sent."""

    def __init__(self):
        self.pinned, self.queued = False, None

    def pin_memory(self):
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
