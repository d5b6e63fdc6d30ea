"""S-LoRA's throughput on one GPU: requests that come one by one for few or many adapters of a model."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from plait.core.checks import check
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.engine.devices import choose_device, choose_kernels
from plait.models.base import BaseModel
from plait.serve.engine import Engine
from plait.serve.folders import FolderAdapters
from plait.serve.requests import Request, Sampling
from plait_bench.benchmarks import OPTIONS, benchmark
from plait_bench.figures import Figure, Report
from plait_bench.gpu_step import free
from plait_bench.inputs import Count, Counts, Positive
from plait_bench.progress import part
from plait_bench.random_model import LlamaSizes, described, dtype_on
from plait_bench.slora_adapters import random_folders


@dataclass(frozen=True, slots=True)
class Case:
    """One server: its name, adapters that requests name, and their ranks in turn.

    Attributes:
        host_bytes: of adapters that are kept beside the pool, and read before they are needed; 0: each is
            read when it is needed.
    """

    name: str
    adapters: Count
    ranks: Counts
    host_bytes: int

    def __post_init__(self) -> None:
        check(self, f"{OPTIONS}.cases")


@dataclass(frozen=True, slots=True)
class ThroughputOptions(LlamaSizes):
    """Options of ``slora/throughput``.

    Attributes:
        cases: servers, one after another.
        files: different adapters on disk; the others are the same files under other names.
        requests: of each server.
        rate: of requests a second, with random pauses.
        shortest, longest: tokens of prompts and of answers.
        pool_tokens: of the pool.
        seed: of requests and pauses.
    """

    cases: tuple[Case, ...]
    files: Count
    requests: Count
    rate: Positive
    shortest: Count
    longest: int
    pool_tokens: Count
    seed: int


@benchmark("slora/throughput", ThroughputOptions)
def throughput(settings: RunSettings, _jobs: Sequence[JobSpec], asked: ThroughputOptions) -> Report:
    """Requests a second of servers that differ in adapters, by the clock.

    Raises:
        ConfigError: a device that is not there.
    """
    device = choose_device(settings.engine.device)
    part("making the model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = asked.base(2 * asked.longest, device, dtype_on(device))
    base.install(backend=choose_kernels(settings.engine.kernels, device, base.dtype))
    figures: list[Figure] = []
    for case in asked.cases:
        with random_folders(base, asked.files, case.ranks) as folders:
            figures += _served(base, folders, case, asked)
        free(device)  # the pool of the next needs its room
    assumed = (
        f"{described(device, base.dtype)}, {asked.requests} requests of {asked.shortest} to {asked.longest} "
        f"tokens and as many new ones, {asked.rate:g} a second arrive",
    )
    return Report("S-LoRA, throughput of one server", tuple(figures), assumed)


def _served(
    base: BaseModel, folders: Sequence[Path], case: Case, asked: ThroughputOptions
) -> tuple[Figure, Figure]:
    """Requests a second, and adapters read."""
    adapters = FolderAdapters(base, {f"a{n}": folders[n % len(folders)] for n in range(case.adapters)})
    engine = Engine(base, adapters, pool_tokens=asked.pool_tokens, host_bytes=case.host_bytes)
    speed, read = _run(engine, base, case, asked)
    note = f"{case.adapters} adapters of ranks {', '.join(map(str, case.ranks))}"
    return (
        Figure(case.name, speed, "requests/s", "measured", note=note),
        Figure(f"{case.name}: read", float(read), "adapters", "measured"),
    )


def _run(engine: Engine, base: BaseModel, case: Case, asked: ThroughputOptions) -> tuple[float, int]:
    """Requests a second from the first one's arrival to the last one's end, and adapters read."""
    chance = random.Random(asked.seed)
    engine.complete(_request(base, case, asked, chance) for _ in range(min(8, asked.requests)))
    read, arrivals = engine.store.loads, list(_arrivals(base, case, asked, chance))
    piece = part(case.name, len(arrivals))
    begun, left = time.monotonic(), iter(arrivals)
    due = next(left, None)
    while due is not None or not engine.idle:
        now = time.monotonic() - begun
        while due is not None and due[0] <= now:
            piece(f"{now:.0f} s")
            engine.add(due[1])
            due = next(left, None)
        if engine.idle and due is not None:
            time.sleep(due[0] - now)
            continue
        for update in engine.step():
            if update.error is not None:
                raise update.error
    speed = asked.requests / (time.monotonic() - begun - arrivals[0][0])
    return speed, engine.store.loads - read


def _arrivals(
    base: BaseModel, case: Case, asked: ThroughputOptions, chance: random.Random
) -> Iterator[tuple[float, Request]]:
    """Each request, and the second at which it arrives."""
    at = 0.0
    for _ in range(asked.requests):
        at += chance.expovariate(asked.rate)
        yield at, _request(base, case, asked, chance)


def _request(base: BaseModel, case: Case, asked: ThroughputOptions, chance: random.Random) -> Request:
    length, new = (chance.randint(asked.shortest, asked.longest) for _ in range(2))
    tokens = tuple(chance.randrange(base.vocabulary) for _ in range(length))
    free = Sampling(new, stop_tokens=frozenset())
    return Request(tokens, f"a{chance.randrange(case.adapters)}", free)
