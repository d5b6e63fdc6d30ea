"""S-LoRA's throughput on one GPU: requests that come one by one for few or many adapters of a model."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from plait.core.checks import at_least, check
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.engine.devices import choose_device, choose_kernels
from plait.models.base import BaseModel
from plait.serve import recorded
from plait.serve.engine import Engine
from plait.serve.folders import FolderAdapters
from plait.serve.requests import Request, Sampling
from plait_bench.benchmarks import OPTIONS, benchmark
from plait_bench.figures import Baseline, Figure, Report
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
        graph_rows: each server runs again with iterations of up to so many requests replayed; 0: it does not.
        seed: of requests and pauses.
    """

    cases: tuple[Case, ...]
    files: Count
    requests: Count
    rate: Positive
    shortest: Count
    longest: int
    pool_tokens: Count
    graph_rows: Annotated[int, at_least(0)]
    seed: int


@benchmark("slora/throughput", ThroughputOptions)
def throughput(settings: RunSettings, _jobs: Sequence[JobSpec], asked: ThroughputOptions) -> Report:
    """Requests a second of servers that differ in adapters, by the clock.

    Raises:
        ConfigError: a device that is not there.
    """
    device = choose_device(settings.engine.device)
    if asked.graph_rows:
        recorded.check_device(device, asked.graph_rows)
    part("making the model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = asked.base(2 * asked.longest, device, dtype_on(device))
    base.install(backend=choose_kernels(settings.engine.kernels, device, base.dtype))
    figures: list[Figure] = []
    for case in asked.cases:
        with random_folders(base, asked.files, case.ranks) as folders:
            launched = _served(base, folders, case, asked)
            figures += launched
            free(device)  # the pool of the next needs its room
            if asked.graph_rows:
                figures += _replayed(base, folders, case, asked, launched[0])
        free(device)
    assumed = (
        f"{described(device, base.dtype)}, {asked.requests} requests of {asked.shortest} to {asked.longest} "
        f"tokens and as many new ones, {asked.rate:g} a second arrive",
    )
    return Report("S-LoRA, throughput of one server", tuple(figures), assumed)


def _served(
    base: BaseModel, folders: Sequence[Path], case: Case, asked: ThroughputOptions
) -> tuple[Figure, Figure]:
    """Requests a second, and adapters read."""
    engine = _engine(base, folders, case, asked)
    ran = _run(engine, base, case, asked)
    note = f"{case.adapters} adapters of ranks {', '.join(map(str, case.ranks))}"
    return (
        Figure(case.name, ran.speed, "requests/s", "measured", note=note),
        Figure(f"{case.name}: read", float(ran.read), "adapters", "measured"),
    )


def _replayed(
    base: BaseModel, folders: Sequence[Path], case: Case, asked: ThroughputOptions, launched: Figure
) -> tuple[Figure, Figure]:
    """The same with iterations replayed, and sizes that the device does not record."""
    engine = _engine(base, folders, case, asked, graph_rows=asked.graph_rows)
    assert engine.recorded is not None  # as asked for
    why = engine.recorded.recordings.refusals
    ran = _run(engine, base, case, asked)
    dropped = "" if engine.recorded is not None else "; memory ran out, so that they were dropped"
    aim = Baseline(launched.ours, "launched", at_least=1.0)
    none = Baseline(0.0, "all are recorded", at_most=1.0)
    return (
        Figure(
            f"{case.name}: replayed",
            *(ran.speed, "requests/s", "measured"),
            aim,
            note=f"{ran.replays} of {ran.iterations} iterations replayed{dropped}",
        ),
        Figure(
            f"{case.name}: sizes refused",
            *(float(len(why)), "", "measured"),
            none,
            note="; ".join(f"{sizes}: {each}" for sizes, each in why.items()),
        ),
    )


def _engine(
    base: BaseModel, folders: Sequence[Path], case: Case, asked: ThroughputOptions, *, graph_rows: int = 0
) -> Engine:
    adapters = FolderAdapters(base, {f"a{n}": folders[n % len(folders)] for n in range(case.adapters)})
    return Engine(
        base, adapters, pool_tokens=asked.pool_tokens, host_bytes=case.host_bytes, graph_rows=graph_rows
    )


@dataclass(frozen=True, slots=True)
class _Ran:
    """What a server did: ``speed``, requests a second from the first one's arrival to the last one's end."""

    speed: float
    read: int
    iterations: int
    replays: int


def _run(engine: Engine, base: BaseModel, case: Case, asked: ThroughputOptions) -> _Ran:
    chance = random.Random(asked.seed)
    engine.complete(_request(base, case, asked, chance) for _ in range(min(8, asked.requests)))
    read, recordings = engine.store.loads, engine.recorded and engine.recorded.recordings
    replays, iterations = recordings.replays if recordings else 0, 0
    arrivals = list(_arrivals(base, case, asked, chance))
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
        iterations += 1
        for update in engine.step():
            if update.error is not None:
                raise update.error
    return _Ran(
        asked.requests / (time.monotonic() - begun - arrivals[0][0]),
        engine.store.loads - read,
        iterations,
        recordings.replays - replays if recordings else 0,
    )


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
