"""A link between two network namespaces with a delay and a bandwidth limit, for kernels without netem: every
packet goes through this process. After SIGUSR1 only packets of some TCP ports do; after another all do again.

    python slow_link.py NAMESPACE=ADDRESS NAMESPACE=ADDRESS SECONDS BITS_PER_SECOND [PORT ...]
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress

DEVICE = "slow"  # its name in both namespaces
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
MOST = 1000  # packets under way in one direction; others are dropped, as by a router


def end(namespace: str, address: str) -> int:
    """An end of the link: what is written to it arrives in the namespace."""
    inside = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(inside, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(inside)
    link = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(link, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    for words in (["address", "add", f"{address}/24", "dev", DEVICE], ["link", "set", DEVICE, "up"]):
        subprocess.run(["ip", *words], check=True)
    return link


class Direction:
    """Packets on their way from one end to the other.

    Attributes:
        only: ports whose packets are taken alone; None: all are.
    """

    def __init__(self, source: int, target: int, delay: float, rate: float) -> None:
        self.only: frozenset[int] | None = None
        self.source, self._target, self._delay, self._rate = source, target, delay, rate
        self._packets: deque[tuple[float, bytes]] = deque()
        self._free = 0.0  # when the last packet is on the line

    def take(self) -> None:
        """Take a packet that waits at the source."""
        try:
            packet = os.read(self.source, 65536)
        except OSError:  # that end is down
            time.sleep(0.01)
            return
        if self.only is not None and self.only.isdisjoint(ports(packet)):
            return
        if len(self._packets) < MOST:
            self._free = max(self._free, time.monotonic()) + 8 * len(packet) / self._rate
            self._packets.append((self._free + self._delay, packet))

    def deliver(self) -> float:
        """Deliver what is due; seconds until more is."""
        while self._packets:
            due, packet = self._packets[0]
            if (wait := due - time.monotonic()) > 0:
                return wait
            self._packets.popleft()
            with suppress(OSError):  # that end is down
                os.write(self._target, packet)
        return 1.0


def ports(packet: bytes) -> tuple[int, ...]:
    """Both ports of a TCP packet over IPv4; none of another packet."""
    begin = (packet[0] & 15) * 4
    return struct.unpack_from("!HH", packet, begin) if packet[0] >> 4 == 4 and packet[9] == 6 else ()


def main(first: str, second: str, delay: str, rate: str, *kept: str) -> None:
    """Carry packets until this process is killed."""
    links = [end(*each.split("=")) for each in (first, second)]
    ways = [Direction(*pair, float(delay), float(rate)) for pair in (links, links[::-1])]

    def toggle(*_: object) -> None:
        for way in ways:
            way.only = frozenset(map(int, kept)) if way.only is None else None

    signal.signal(signal.SIGUSR1, toggle)
    print("open", flush=True)
    while True:
        wait = min(way.deliver() for way in ways)
        readable, *_ = select.select(links, [], [], wait)
        for way in ways:
            if way.source in readable:
                way.take()


if __name__ == "__main__":
    main(*sys.argv[1:])
