"""Processes on this machine that are one group, each with a pipe to the process that started them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from plait.core.errors import LostProcessError

LIMIT = timedelta(minutes=5)  # a process that takes longer to answer hangs


@contextmanager
def gloo_processes(count: int, serve: Callable[..., None], *arguments: object) -> Iterator[list[Connection]]:
    """The links to so many processes with one thread each, which call ``serve(number, link, *arguments)``."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(count)]
        processes = [
            context.Process(target=_run, args=(number, count, folder, far, serve, arguments), daemon=True)
            for number, (_, far) in enumerate(pipes)
        ]
        for each in processes:
            each.start()
        for _, far in pipes:
            far.close()
        yield [near for near, _ in pipes]
        for each in processes:
            each.join()


def answers(links: Sequence[Connection], lost: str) -> list[Any]:
    """An answer of each process.

    Args:
        lost: what is said if one of them is lost.

    Raises:
        LostProcessError: a process died or hangs.
    """
    found = []
    for link in links:
        with suppress(EOFError):
            if link.poll(LIMIT.total_seconds()):
                found.append(link.recv())
    if len(found) < len(links):
        raise LostProcessError(lost, "Every process answers within 5 minutes.", "Run it again.")
    return found


def _run(
    number: int,
    count: int,
    folder: str,
    link: Connection,
    serve: Callable[..., None],
    arguments: Sequence[object],
) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), count)
    dist.init_process_group("gloo", store=store, rank=number, world_size=count, timeout=LIMIT)
    serve(number, link, *arguments)
    dist.barrier()
    dist.destroy_process_group()
