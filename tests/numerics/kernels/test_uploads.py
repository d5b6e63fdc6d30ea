"""Uploads wait where the host's memory could be used again before it is copied."""

from __future__ import annotations

import pytest
import torch

from plait_kernels import uploads
from plait_kernels.uploads import Places, upload


class Sent:
    """Stands for a tensor: notes how it is sent."""

    def __init__(self, device="cpu"):
        self.device = torch.device(device)
        self.pinned, self.queued = False, None

    def to(self, _device, *, non_blocking):
        self.queued = non_blocking
        return self


@pytest.fixture(autouse=True)
def pinning(monkeypatch):
    def pinned(sent):
        assert sent.device.type == "cpu"  # torch pins nothing else
        sent.pinned = True
        return sent

    monkeypatch.setattr(uploads, "pinned", pinned)


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


def test_places_take_what_is_sent_to_a_device_without_a_number():
    """Torch gives tensors of ``cuda`` the device ``cuda:0``, as those of ``meta:0`` the device ``meta``."""
    places, device = Places(), torch.device("meta:0")
    assert torch.empty(1, device=device).device != device
    for _ in range(2):
        with places.filled():
            upload(torch.zeros(3), device)
