"""S-LoRA's arithmetic and queues: bytes of tensor parallelism, the pool of pages, and requests that are too
late."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from plait.core.checks import Rule, at_least, check
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.serve.scheduler import Demand, Scheduler
from plait_bench.benchmarks import OPTIONS, benchmark
from plait_bench.figures import Figure, Report
from plait_bench.inputs import Count

GATHERS, REDUCES = 3, 1  # of low-rank values in a block, beside one all-reduce of the base's
RISING = Rule("the fewest tokens and the most, of at least 1", lambda ends: 1 <= ends[0] <= ends[1])
CELLS = 4  # cells of the pool that a rank of an adapter takes: q, k, v and o


@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """Options of ``slora/communication``: features of the model, ranks, devices and tokens."""

    hidden: tuple[int, ...]
    ranks: tuple[int, ...]
    devices: Annotated[int, at_least(2)]  # one alone sends nothing
    tokens: Count


def gathered(values: int, devices: int) -> float:
    """Values that a device sends in an all-gather, by a ring."""
    return values * (devices - 1) / devices


@benchmark("slora/communication", CommunicationOptions)
def communication(_settings: RunSettings, _jobs: Sequence[JobSpec], asked: CommunicationOptions) -> Report:
    """What an adapter sends over what the base sends; an all-reduce sends twice what an all-gather does."""
    figures = []
    for hidden in asked.hidden:
        base = 2 * gathered(asked.tokens * hidden, asked.devices)
        for rank in asked.ranks:
            adapter = (GATHERS + 2 * REDUCES) * gathered(asked.tokens * rank, asked.devices)
            name = f"{hidden} features, rank {rank}"
            note = f"the base sends {2 * base / 2**20:.1f} MiB; values of 16 bits"
            figures.append(Figure(name, 100 * adapter / base, "%", "computed"))
            figures.append(Figure(f"{name}: sent", 2 * adapter / 2**20, "MiB", "computed", note=note))
    return Report("S-LoRA, bytes of adapters compared with the base model's", tuple(figures))


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests: lengths of prompts and answers, drawn evenly, and how many arrive in an iteration."""

    requests: Count
    prompt: Annotated[tuple[int, int], RISING]
    answer: Annotated[tuple[int, int], RISING]
    rate: Annotated[float, at_least(0)] = 0.0
    seed: Annotated[int, at_least(0)] = 0

    def __post_init__(self) -> None:
        check(self, f"{OPTIONS}.traffic")

    def draw(self) -> list[tuple[int, int, float]]:
        """Tokens of prompt and answer of each request, and the iteration at which it arrives."""
        rng = np.random.default_rng(self.seed)
        prompts, answers = (
            rng.integers(low, high + 1, self.requests) for low, high in (self.prompt, self.answer)
        )
        gaps = rng.exponential(1 / self.rate, self.requests) if self.rate else np.zeros(self.requests)
        return list(zip(prompts.tolist(), answers.tolist(), np.cumsum(gaps).tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options of ``slora/pool``.

    Attributes:
        tokens: whose keys and values the pool holds.
        most_tokens: of a request, as a system without pages reserves them.
        pages: tokens of a page; Plait's is the first.
        adapters: of each number, with these ranks in turn, the share of the pool is shown.
    """

    traffic: Traffic
    tokens: Count
    most_tokens: Count
    pages: tuple[int, ...]
    adapters: tuple[int, ...]
    ranks: tuple[int, ...]


@benchmark("slora/pool", PoolOptions)
def pool(_settings: RunSettings, _jobs: Sequence[JobSpec], asked: PoolOptions) -> Report:
    """How much of the pool holds tokens, requests that run at once, and what adapters would take of it."""
    figures = []
    for page in (*asked.pages, asked.most_tokens):
        whole = page == asked.most_tokens
        used, running, waste = _replayed(asked, page)
        name = f"reserved whole, {page} tokens" if whole else f"pages of {page} tokens"
        figures += [
            Figure(f"{name}: pool that holds tokens", 100 * used, "%", "simulated"),
            Figure(f"{name}: requests at once", running, "", "simulated"),
            Figure(f"{name}: reserved and never used", 100 * waste, "%", "simulated"),
        ]
    for count in asked.adapters:
        cells = sum(CELLS * asked.ranks[at % len(asked.ranks)] for at in range(count))
        share = 100 * cells / asked.tokens
        figures.append(Figure(f"{count} adapters: share of the pool", share, "%", "computed"))
    notes = (f"{asked.traffic}; a pool of {asked.tokens} tokens; all requests wait at the start.",)
    return Report("S-LoRA, one pool of pages", tuple(figures), notes)


def _replayed(asked: PoolOptions, page: int) -> tuple[float, float, float]:
    """Means over the iterations while requests wait: share of the pool with tokens, requests, and share of
    what is reserved that its request never uses."""
    drawn = asked.traffic.draw()
    scheduler = Scheduler(asked.tokens // page, most_prompt_tokens=asked.tokens, most=len(drawn))
    for number, (prompt, answer, _) in enumerate(drawn):
        scheduler.add(Demand(number, prompt, -(-(prompt + answer) // page)))
    age: dict[int, int] = {}
    rows = []
    while scheduler.waiting:
        age |= dict.fromkeys(scheduler.admit(), 0)
        held = sum(drawn[number][0] + age[number] for number in scheduler.running)
        needed = sum(sum(drawn[number][:2]) for number in scheduler.running)
        reserved = page * sum(map(len, scheduler.pool.owned.values()))
        rows.append((held / asked.tokens, len(scheduler.running), 1 - needed / reserved))
        for number in list(scheduler.running):
            age[number] += 1
            if age[number] >= drawn[number][1]:
                scheduler.remove(number)
    used, running, waste = np.mean(rows, axis=0).tolist()
    return used, running, waste


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    """Options of ``slora/admission``.

    Attributes:
        rates: of arrival, in requests an iteration, each by itself.
        most: requests that run at once.
        patience: iterations within which the first token must come.
    """

    traffic: Traffic
    rates: tuple[float, ...]
    most: Count
    patience: Count


@benchmark("slora/admission", AdmissionOptions)
def admission(_settings: RunSettings, _jobs: Sequence[JobSpec], asked: AdmissionOptions) -> Report:
    """Requests whose first token comes in time: in order of arrival, and without those that are too late."""
    figures = [
        Figure(
            f"{rate:g} requests an iteration, {how}: in time",
            100 * _in_time(asked, rate, abort),
            "%",
            "simulated",
        )
        for rate in asked.rates
        for abort, how in ((False, "in order"), (True, "early abort"))
    ]
    notes = (f"{asked.traffic}; {asked.most} at once; first token within {asked.patience} iterations.",)
    return Report("S-LoRA, requests in time", tuple(figures), notes)


def _in_time(asked: AdmissionOptions, rate: float, abort: bool) -> float:
    """Share of the requests whose first token came in time."""
    drawn = replace(asked.traffic, rate=rate).draw()
    queue, running, served, now, place = deque[int](), list[int](), 0, 0, 0
    while place < len(drawn) or queue:
        while place < len(drawn) and drawn[place][2] <= now:
            queue.append(place)
            place += 1
        while abort and queue and now - drawn[queue[0]][2] > asked.patience:
            queue.popleft()
        while queue and len(running) < asked.most:
            number = queue.popleft()
            running.append(now + drawn[number][1])
            served += now - drawn[number][2] <= asked.patience
        now += 1
        running = [end for end in running if end > now]
    return served / len(drawn)
