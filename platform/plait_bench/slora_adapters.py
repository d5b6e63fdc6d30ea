"""S-LoRA's main question: does it matter how many adapters a server has, and how much is batching worth?"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from peft import PeftModel

from plait.adapters.facts import WEIGHTS
from plait.adapters.peft_folder import export_adapter
from plait.core.errors import PlaitError
from plait.core.jobs import AdapterSpec, JobSpec
from plait.core.settings import RunSettings
from plait.engine.devices import free_bytes
from plait.models.base import BaseModel
from plait.models.load import load_model, transformers_model
from plait.models.quiet import quiet
from plait.models.targets import resolve_targets
from plait.serve.engine import Engine
from plait.serve.folders import HOST_BYTES, FolderAdapters
from plait.serve.requests import Completion, Request, Sampling
from plait.utils.paths import cache_dir
from plait_bench.benchmarks import benchmark
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import Count, Counts, require_processor
from plait_bench.progress import part

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")  # as S-LoRA's adapters


@dataclass(frozen=True, slots=True)
class AdaptersOptions:
    """Options of ``slora/adapters``.

    Attributes:
        few, many: adapters that requests name, in the two sides that take turns.
        files: different adapters on disk; the others are the same files under other names.
        ranks: of the files, in turn: the paper's setting S2.
        one_rank: of all files in a second comparison: its setting S1; None: there is none.
        requests, prompt_tokens, new_tokens: of one run.
        pool_tokens: of the pool.
        rounds: runs of each side.
        alone: adapters of the comparison with PEFT, each with one request.
        timed_alone: of them, those that PEFT generates with; its speed does not depend on their number.
    """

    few: Count
    many: Count
    files: Count
    ranks: Counts
    requests: Count
    prompt_tokens: Count
    new_tokens: Count
    pool_tokens: Count
    rounds: Count
    alone: Count
    timed_alone: Count
    one_rank: Count | None = None


class _Side:
    """One server with so many adapters, whose pool stays warm from run to run."""

    def __init__(self, base: BaseModel, folders: Sequence[Path], count: int, asked: AdaptersOptions) -> None:
        self._asked = asked
        self._vocabulary = base.vocabulary
        self._chance = random.Random(count)
        self.count = count
        adapters = FolderAdapters(base, {f"a{n}": folders[n % len(folders)] for n in range(count)})
        self.engine = Engine(
            base, adapters, pool_tokens=asked.pool_tokens, host_bytes=HOST_BYTES, reserve=free_bytes()
        )  # as ``plait serve``
        self.seconds: list[float] = []
        self.used: list[int] = []

    def requests(self, names: Sequence[str]) -> list[Request]:
        """One request for each name, with prompts of their own."""
        free = Sampling(self._asked.new_tokens, stop_tokens=frozenset())
        draw = self._chance.randrange
        return [
            Request(tuple(draw(self._vocabulary) for _ in range(self._asked.prompt_tokens)), name, free)
            for name in names
        ]

    def run(self) -> None:
        """One run of requests for adapters drawn uniformly, and its processor seconds."""
        names = [f"a{self._chance.randrange(self.count)}" for _ in range(self._asked.requests)]
        self.used.append(len(set(names)))
        seconds, _ = self.timed(self.requests(names))
        self.seconds.append(seconds)

    def timed(self, requests: Sequence[Request]) -> tuple[float, list[Completion]]:
        """Processor seconds of requests, and their completions."""
        started = process_time()
        numbers = [self.engine.add(request) for request in requests]
        ended = {update.request: update.ended for update in self.engine.run() if update.ended is not None}
        return process_time() - started, [ended[number] for number in numbers]


@benchmark("slora/adapters", AdaptersOptions)
def adapters(settings: RunSettings, _jobs: Sequence[JobSpec], asked: AdaptersOptions) -> Report:
    """Requests a processor second with few and with many adapters, and beside PEFT one after another.

    Raises:
        ConfigError: another device than the CPU.
        PlaitError: Plait and PEFT generate different texts.
    """
    require_processor(settings)
    part("loading the model")
    base = load_model(settings.model, cache=cache_dir(), device=torch.device("cpu"))
    base.install(backend="grouped")
    with random_folders(base, asked.files, asked.ranks) as folders:
        mixed = _few_and_many(base, folders, asked, f"{asked.many} adapters")
        peft = _beside_peft(settings, base, folders, asked)
    figures = [*mixed, peft]
    if asked.one_rank is not None:
        with random_folders(base, asked.files, (asked.one_rank,)) as folders:
            figures += _few_and_many(base, folders, asked, f"{asked.many} adapters of rank {asked.one_rank}")
    return Report("S-LoRA, adapters of one server", tuple(figures))


def _few_and_many(
    base: BaseModel, folders: Sequence[Path], asked: AdaptersOptions, name: str
) -> tuple[Figure, ...]:
    """Requests a processor second with many adapters beside few, what memory would allow, and adapters
    read."""
    sides = [_Side(base, folders, count, asked) for count in (asked.few, asked.many)]
    piece = part("rounds", 2 * asked.rounds + 2)
    for number in range(asked.rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            piece(f"{side.count} adapters")
            side.run()
    for side in sides:
        del side.seconds[0]  # the first run of each warms the pool
    few, many = (asked.requests / median(side.seconds) for side in sides)
    spread = " and ".join(f"{min(each.seconds):.2f} to {max(each.seconds):.2f}" for each in sides)
    figure = Figure(
        name,
        many,
        "requests/s (processor)",
        "measured",
        Baseline(few, f"{asked.few} of them", at_least=0.95),
        note=f"medians of {asked.rounds} interleaved runs, {spread} s; "
        f"{min(sides[1].used)} to {max(sides[1].used)} adapters used in one",
    )
    least = _least_seconds(base, sides, asked, [Path(folder) / WEIGHTS for folder in folders])
    bound = Figure(
        f"{name}: most by memory",
        median(sides[0].seconds) / (median(sides[0].seconds) + least),
        "of the few's",
        "computed",
        note="from bytes that only many adapters move, at the speed of a copy; all else as with few",
    )
    return figure, bound, Figure(f"{name}: read", float(sides[1].engine.store.loads), "adapters", "measured")


def _least_seconds(
    base: BaseModel, sides: Sequence[_Side], asked: AdaptersOptions, files: Sequence[Path]
) -> float:
    """Processor seconds of a run that the adapters beyond those of few take at least, if nothing but memory
    counts: each is read and written into its pages once, and read in every later iteration."""
    beyond = median(sides[1].used) - median(sides[0].used)
    stored = sum(file.stat().st_size for file in files) / len(files)
    pooled = stored * base.dtype.itemsize / torch.float32.itemsize  # files are in float32
    moved = stored + pooled + (asked.new_tokens - 1) * pooled
    return float(beyond * moved / _moved_bytes())


def _moved_bytes() -> float:
    """Bytes that a copy of more than any cache holds reads and writes in a processor second."""
    source = torch.ones(1 << 26)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(4):
        started = process_time()
        target.copy_(source)
        seconds.append(process_time() - started)
    return 2 * source.nbytes / min(seconds)


@contextmanager
def random_folders(base: BaseModel, files: int, ranks: Sequence[int]) -> Iterator[list[Path]]:
    """Folders of random adapters, with these ranks in turn, removed afterwards."""
    sites = resolve_targets(TARGETS, base.linears)
    sizes = {linear.name: (linear.in_features, linear.out_features) for linear in base.linears}
    with tempfile.TemporaryDirectory(prefix="plait-adapters-") as name:
        made = []
        for number in range(files):
            rank = ranks[number % len(ranks)]
            noise = torch.Generator().manual_seed(number)
            weights = {
                site: (
                    torch.randn(rank, sizes[site][0], generator=noise) * sizes[site][0] ** -0.5,
                    torch.randn(sizes[site][1], rank, generator=noise) * 0.02,
                )
                for site in sites
            }
            made.append(Path(name) / f"a{number}")
            spec = AdapterSpec(rank, target_modules=TARGETS)
            export_adapter(made[-1], spec, weights, base="", linears=base.linears)
        yield made


def _beside_peft(
    settings: RunSettings, base: BaseModel, folders: Sequence[Path], asked: AdaptersOptions
) -> Figure:
    """New tokens a processor second of Plait for all adapters together, and of PEFT for one after another."""
    side = _Side(base, folders, asked.alone, asked)
    requests = side.requests([f"a{number}" for number in range(asked.alone)])
    part("all adapters together")
    side.timed(requests)
    seconds, _ = side.timed(side.requests([f"a{number}" for number in range(asked.alone)]))
    _, together = side.timed(requests[: asked.timed_alone])
    texts, alone = _peft_texts(settings, folders, requests[: asked.timed_alone])
    same = sum(one.tokens[0] == two[0] for one, two in zip(together, texts, strict=True))
    if same < 0.9 * len(texts):
        raise PlaitError(
            f"{same} of {len(texts)} answers begin as PEFT's",
            "Both sides must generate the same texts before they are timed.",
        )
    whole = sum(one.tokens == two for one, two in zip(together, texts, strict=True))
    ours = asked.alone * asked.new_tokens / seconds
    theirs = len(texts) * asked.new_tokens / alone
    note = f"{whole} of {len(texts)} answers are PEFT's to the last token; PEFT's loading is not timed"
    unit = "new tokens/s (processor)"
    return Figure(
        f"{asked.alone} adapters together",
        ours,
        unit,
        "measured",
        Baseline(theirs, "PEFT, one after another", at_least=6.0),
        note=note,
    )


def _peft_texts(
    settings: RunSettings, folders: Sequence[Path], requests: Sequence[Request]
) -> tuple[list[tuple[int, ...]], float]:
    """PEFT's greedy tokens, one adapter after another, and the processor seconds of generation."""
    texts, seconds = [], 0.0
    piece = part("PEFT, one adapter after another", len(requests))
    plain: Any = transformers_model(settings.model, cache=cache_dir())
    plain.eval()
    for number, request in enumerate(requests):
        piece(f"a{number}")
        with quiet():
            model: Any = PeftModel.from_pretrained(plain, folders[number % len(folders)])
        model.eval()
        prompt = torch.tensor([request.tokens])
        new = request.sampling.max_new_tokens
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            started = process_time()
            found = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
            seconds += process_time() - started
        texts.append(tuple(found[0, len(request.tokens) :].tolist()))
        model.unload()
    return texts, seconds
