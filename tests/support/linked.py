"""What links a process of a run has, once it has joined another and both have made groups."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from plait.distributed.channel import Join
from plait.distributed.launch import HERE
from plait.distributed.process import Replica
from plait.engine.span_recorder import SpanRecorder


def join_and_tell(number: int, port: int, unreached: float, end: Any) -> None:
    """Send the limits of all links, in milliseconds: before more groups are made, and after."""
    replica: Any = object.__new__(Replica)
    replica._made_exchange, replica._unreached = None, 0.0
    replica._device, replica._recorder = torch.device("cpu"), SpanRecorder()
    replica._channel = SimpleNamespace(far=HERE, near=HERE)
    replica.answer(Join(number, port, 1, 2, 60.0, unreached=unreached))
    before = _limits()
    replica._exchange.groups([(0, 1)])
    end.send((before, _limits()))
    end.recv()  # the other one has told, too
    replica.close()


def _limits() -> list[int]:
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(each.name))) as link:
            if link.family == socket.AF_INET and link.type == socket.SOCK_STREAM:
                link.getpeername()  # who listens has none
                found.append(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return found
