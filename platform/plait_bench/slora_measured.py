"""S-LoRA's comparisons on this machine: mixed ranks, merged weights, and answers beside PEFT's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from peft import LoraConfig, get_peft_model

from plait.config.fields import build
from plait.core.jobs import AdapterSpec, JobSpec
from plait.core.settings import RunSettings
from plait.models.base import BaseModel
from plait.models.load import load_model, transformers_model
from plait.models.quiet import quiet
from plait.serve.engine import complete
from plait.serve.requests import Request, Sampling
from plait.utils.paths import cache_dir
from plait_bench.benchmarks import BENCHMARKS
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import OPTIONS, at_least_one, require_processor
from plait_bench.progress import part
from plait_kernels import Bank
from plait_kernels.synthetic import Shape, problem


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """Options of ``slora/kernels`` and ``slora/merged``: a layer's call.

    Attributes:
        features: into and out of the layer.
        tokens: rows, divided evenly among the adapters.
        ranks: of the adapters; ``slora/merged`` takes the first.
        adapters: numbers of adapters that are compared, for ``slora/merged``.
        rounds: of measurements.
    """

    features: int
    tokens: int
    ranks: tuple[int, ...]
    adapters: tuple[int, ...] = ()
    rounds: int = 5

    def __post_init__(self) -> None:
        at_least_one(self, "features", "tokens", "rounds")


def _seconds(rounds: int, *runs: Callable[[], object]) -> list[float]:
    """Median processor seconds of each, in turns, after one that does not count."""
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds + 1):
        for run, own in zip(runs, taken, strict=True):
            began = time.process_time()
            run()
            own.append(time.process_time() - began)
    return [median(own[1:]) for own in taken]


@BENCHMARKS.register("slora/kernels")
@torch.no_grad()
def kernels(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """The adapters' part of a layer's call with mixed ranks, over that with all of the largest.

    Raises:
        ConfigError: a wrong option, or another device than the processor.
    """
    del jobs
    require_processor(settings)
    asked = build(LayerOptions, options, OPTIONS)
    most = max(asked.ranks)
    mixed, padded = (
        problem(
            Shape(asked.tokens, asked.features, (asked.features,), ranks), device="cpu", dtype=torch.float32
        )
        for ranks in (asked.ranks, (most,) * len(asked.ranks))
    )
    own, largest, plain = _seconds(
        asked.rounds,
        lambda: mixed.run("grouped"),
        lambda: padded.run("grouped"),
        lambda: mixed.x @ mixed.weight.T,
    )
    share = sum(asked.ranks) / (most * len(asked.ranks))
    ratio = (own - plain) / max(largest - plain, 1e-9)
    note = f"{1e3 * (own - plain):.2f} over {1e3 * (largest - plain):.2f} ms; the layer {1e3 * plain:.2f}"
    work = Baseline(share, "work of the low-rank products")
    figures = [
        Figure("mixed ranks: adapters' part over padded ones'", ratio, "×", "measured", work, note),
        Figure("mixed ranks: whole call over padded ones'", own / largest, "×", "measured"),
    ]
    notes = (
        f"Ranks {list(asked.ranks)}, {asked.tokens} tokens, {asked.features} features; processor seconds.",
    )
    return Report("S-LoRA, mixed ranks in one batch", tuple(figures), notes)


@BENCHMARKS.register("slora/merged")
@torch.no_grad()
def merged(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """A layer's call with adapters beside the weights, over one product for each adapter's merged weights.

    Raises:
        ConfigError: a wrong option, or another device than the processor.
    """
    del jobs
    require_processor(settings)
    asked = build(LayerOptions, options, OPTIONS)
    figures = []
    for count in asked.adapters:
        shape = Shape(asked.tokens, asked.features, (asked.features,), (asked.ranks[0],) * count)
        made = problem(shape, device="cpu", dtype=torch.float32)
        rows, own = made.x.chunk(count), [made.weight.clone() for _ in range(count)]

        def each(rows: Sequence[torch.Tensor] = rows, own: Sequence[torch.Tensor] = own) -> None:
            for x, weight in zip(rows, own, strict=True):
                torch.mm(x, weight.T)

        beside, apart = _seconds(asked.rounds, partial(made.run, "grouped"), each)
        name = f"{count} adapter{'s' * (count > 1)}: beside the weights over merged"
        note = f"{1e3 * beside:.2f} over {1e3 * apart:.2f} ms; {count} copies of the weights"
        figures.append(Figure(name, beside / apart, "×", "measured", note=note))
    notes = (f"Rank {asked.ranks[0]}, {asked.tokens} tokens, {asked.features} features; processor seconds.",)
    return Report("S-LoRA, merged weights", tuple(figures), notes)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Options of ``slora/vs_peft``.

    Attributes:
        adapters: numbers of adapters; each gets one request.
        prompt: tokens of a prompt.
        answer: tokens of an answer.
        rank: of an adapter.
    """

    adapters: tuple[int, ...]
    prompt: int
    answer: int
    rank: int = 8

    def __post_init__(self) -> None:
        at_least_one(self, "prompt", "answer", "rank")


@BENCHMARKS.register("slora/vs_peft")
@torch.no_grad()
def vs_peft(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """New tokens a processor second of requests for different adapters: together, and one by one with PEFT.

    Raises:
        ConfigError: a wrong option, or another device than the processor.
    """
    del jobs
    require_processor(settings)
    asked = build(AnswerOptions, options, OPTIONS)
    base = load_model(settings.model, cache=cache_dir(), device="cpu")
    plain = transformers_model(settings.model, cache=cache_dir())
    targets = list(AdapterSpec(asked.rank).target_modules)
    with quiet():
        alone = get_peft_model(
            plain, LoraConfig(r=asked.rank, target_modules=targets, task_type="CAUSAL_LM")
        ).eval()
    one = _peft_seconds(alone, asked)
    figures, piece = [], part("adapters", len(asked.adapters))
    for count in asked.adapters:
        piece(str(count))
        took = _joint_seconds(base, count, asked)
        rate, theirs = count * asked.answer / took, asked.answer / one
        beside = Baseline(theirs, "PEFT, one by one", at_least=1.0)
        name = f"{count} adapter{'s' * (count > 1)}"
        figures.append(Figure(f"{name}: new tokens a second", rate, "tokens/s", "measured", beside))
        figures.append(Figure(f"{name}: over PEFT", rate / theirs, "×", "measured"))
    notes = (
        f"{settings.model.kind}; a request for each adapter, prompts of {asked.prompt} tokens, "
        f"{asked.answer} new ones, rank {asked.rank}; processor seconds.",
    )
    return Report("Answers of many adapters", tuple(figures), notes)


def _peft_seconds(model: torch.nn.Module, asked: AnswerOptions) -> float:
    """Of one request, after one that does not count."""
    ids = torch.full((1, asked.prompt), 5)
    mask = torch.ones_like(ids)

    def run() -> None:
        model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=asked.answer,
            min_new_tokens=asked.answer,
            do_sample=False,
            pad_token_id=0,
        )

    return _seconds(1, run)[0]


def _joint_seconds(base: BaseModel, count: int, asked: AnswerOptions) -> float:
    """Of one request for each adapter, together."""
    bank = Bank(base.sites, device=torch.device("cpu"), compute_dtype=base.dtype)
    sites = [site.name for site in base.sites]
    for number in range(count):
        bank.attach(str(number), rank=asked.rank, scale=2.0, dropout=0.0, seed=number, sites=sites)
    bank.refresh()
    sampling = Sampling(asked.answer, stop_tokens=frozenset())
    requests = [Request((5,) * asked.prompt, str(number), sampling) for number in range(count)]
    began = time.process_time()
    complete(base, bank, requests)
    return time.process_time() - began
