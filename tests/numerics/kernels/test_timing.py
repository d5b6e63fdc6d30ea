"""What is timed on a device is the device's time, however slow the host is; checked on a made-up device."""

from __future__ import annotations

import pytest
import torch

from plait_kernels.timing import LONGEST_SPIN, queued, taken


class Device:
    """Works through a queue while its host goes on; a run costs both something."""

    def __init__(self, host: float, device: float, *, waits: bool = False) -> None:
        self.cost, self.work, self.waits = host, device, waits
        self.now = self.free = 0.0
        self.spins: list[float] = []

    def clock(self):
        return self.now

    def spin(self, seconds):
        self.spins.append(seconds)
        self.free = max(self.free, self.now) + seconds

    def mark(self):
        return Point(self, max(self.free, self.now))

    def finish(self):
        self.now = max(self.now, self.free)

    def run(self):
        if self.waits:
            self.finish()
        for _ in range(10):
            self.now += self.cost / 10
            self.free = max(self.free, self.now) + self.work / 10


class Point:
    def __init__(self, device, at):
        self.device, self.at = device, at

    def query(self):
        return self.device.now >= self.at

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


@pytest.mark.parametrize("host", [1e-5, 4e-4, 5e-2])
def test_a_slow_host_is_not_in_the_device_s_time(host):
    device = Device(host, 2e-4)
    found = queued(device.run, device, 5)
    assert len(found) == 5
    for each in found:
        assert each.queued
        assert each.device == pytest.approx(2e-4)
        assert each.host == pytest.approx(host)


def test_the_spin_grows_with_the_host_and_no_further():
    device = Device(5e-2, 2e-4)
    queued(device.run, device, 5)
    assert max(device.spins) < 0.2


def test_work_that_waits_for_the_device_is_said_not_to_be_queued():
    device = Device(1e-3, 2e-4, waits=True)
    found = queued(device.run, device, 2)
    assert [each.queued for each in found] == [False, False]
    assert max(device.spins) == LONGEST_SPIN
    for each in found:  # the spin, for which the host waited, is not in its time
        assert each.host == pytest.approx(1e-3)


def test_a_cpu_is_its_own_device():
    calls = []
    found = taken(lambda: calls.append(1), torch.device("cpu"), warmup=2, repeats=3)
    assert len(calls) == 5
    assert all(each.device == each.host for each in found)
