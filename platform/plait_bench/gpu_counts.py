"""What a step of an 8B model, and an iteration of generation, ask of a GPU, counted over meta tensors:
launches, waits, bytes, host time.

Nothing is timed on a device. Host time is measured twice: with the launches of Triton's kernels left out, the
time of Plait's own code and of torch's operators up to where they would meet the device; and with them, for a
device that is not there, so that only the driver's own work is left out.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import process_time
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LlamaConfig

from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.cost.fake_memory import fake_context, fake_model
from plait.cost.probes import Probe, ProbeSegment, probe_loss, probe_routing
from plait.models.attention import AttentionRule, Heads
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext, Rotation
from plait.models.elementwise import FrozenNorm, activated, gated
from plait.models.flash import attend
from plait.models.tiny import byte_tokeniser
from plait.serve.cells import BankAdapters
from plait.serve.engine import Engine
from plait.serve.requests import Request, Sampling
from plait_bench.benchmarks import benchmark
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import Count
from plait_kernels import AdapterStep, Bank, adamw_step
from plait_kernels.absent import absent
from plait_kernels.counting import Counts, counted
from plait_kernels.paged import CHUNK
from plait_kernels.passes import rotate_
from plait_kernels.plain import GELU, SILU
from plait_kernels.synthetic import Shape, problem
from plait_kernels.triton_backend import interpreted

DTYPE = torch.bfloat16
META = torch.device("meta")
LLAMA_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131_072,
)
LAYERS = {"qkv": (4096, 1024, 1024), "o": (4096,), "gate up": (14_336, 14_336), "down": (4096,)}
MOST_FORWARD, MOST_BACKWARD = 5, 7  # launches of a layer's call
MOST_HOST = 25e-3  # seconds of a microbatch of HOST_TOKENS
HOST_TOKENS = 2048
HOPPER = 90
_LAUNCHING = f"{HOST_TOKENS} tokens, with all of Triton's own launching but the driver's call"
MOST_BYTES = 1.2  # of the least possible
GEMMA2_9B = (Heads(16, 8), 256, AttentionRule(1 / 16, 4096, 50.0))  # heads, their size, the rule of a layer
CAPPED_BYTES = 1.4  # of the least: its gradient reads most twice, so that no number has two writers


@dataclass(frozen=True, slots=True)
class CountOptions:
    """Options of ``gpu_counts``.

    Attributes:
        layers: decoder layers of the model.
        adapters: adapters of one sample each, with ``rank`` and ``dropout``.
        length: tokens of a sample.
        labelled: share of the tokens that are labelled.
        repeats: rounds in which host time is measured.
    """

    layers: Count
    adapters: Count
    length: Count
    rank: Count
    dropout: float
    labelled: float
    repeats: Count

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch."""
        return self.adapters * self.length

    @property
    def probe(self) -> Probe:
        """The microbatch."""
        segments = (ProbeSegment(self.rank, (self.length,)),) * self.adapters
        return Probe(segments, max(1, int(self.labelled * self.tokens)))


@benchmark("gpu_counts", CountOptions)
def gpu_counts(_settings: RunSettings, _jobs: Sequence[JobSpec], asked: CountOptions) -> Report:
    """Launches and host time of a layer's call, bytes of the passes between products, and a whole step."""
    figures = (*_layer_figures(asked), *_pass_figures(asked), *_step_figures(asked))
    assumptions = ("an operator is one launch; a library may need several",)
    return Report("gpu/counts", figures, assumptions)


# ---- a layer's call ---------------------------------------------------------------------------------------


def _layer_figures(asked: CountOptions) -> Iterator[Figure]:
    for name, outputs in LAYERS.items():
        inputs = 14_336 if name == "down" else 4096
        shape = Shape(asked.tokens, inputs, outputs, (asked.rank,) * asked.adapters, asked.dropout)
        made = problem(shape, device=META, dtype=DTYPE)
        made.train("triton")  # tables are made once for a microbatch
        forward, backward = _phases(partial(made.run, "triton"), made.grad)
        for phase, count, most in (("forward", forward, MOST_FORWARD), ("backward", backward, MOST_BACKWARD)):
            aim = Baseline(most, "aim", at_most=1.0)
            yield Figure(f"{name}, {phase}: launches", count.launches, "", "computed", aim)


def _phases(run: Callable[[], Tensor], grad: Tensor | None) -> tuple[Counts, Counts]:
    """What forward and backward of ``run`` ask for."""
    with counted() as forward:
        out = run()
    with counted() as backward:
        torch.autograd.backward(out, grad)
    return forward, backward


# ---- passes between the products --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of one layer: what runs it on fresh input, and the least elements that it moves a token."""

    name: str
    features: int
    run: Callable[[Tensor], Tensor]
    least: int
    most: float = MOST_BYTES


def _attention_pass(asked: CountOptions) -> Pass:
    """Attention of a layer of Gemma 2 9B: q, k, v read, out written; q, k, v, out and its gradient read, that
    of q, k, v written."""
    heads, size, rule = GEMMA2_9B
    ends = tuple(range(0, asked.tokens + 1, asked.length))
    context = MicrobatchContext.of(torch.empty(asked.tokens, dtype=torch.int64, device=META), ends)
    least = 3 * heads.total * size + 3 * heads.query * size
    return Pass(
        "attention with a softcap",
        heads.total * size,
        lambda qkv: attend(qkv, heads, context, rule, "triton"),
        least,
        CAPPED_BYTES,
    )


def _pass_figures(asked: CountOptions) -> Iterator[Figure]:
    tokens = asked.tokens
    hidden, inner = LLAMA_8B.hidden_size, LLAMA_8B.intermediate_size
    weight = torch.empty(hidden, dtype=DTYPE, device=META)
    rms, layer = FrozenNorm(weight, 1e-5), FrozenNorm(weight, 1e-5, bias=weight, centred=True)
    passes = (
        # x read, out written; x and the gradient read, another written
        Pass("norm", hidden, lambda x: rms(x, backend="triton"), 5 * hidden),
        # gate and up read, out written; gate, up and the gradient read, two written
        Pass("gated MLP", 2 * inner, lambda x: gated(x, SILU, backend="triton"), 8 * inner),
        Pass("LayerNorm", hidden, lambda x: layer(x, backend="triton"), 5 * hidden),
        Pass("GELU", inner, lambda x: activated(x, GELU, backend="triton"), 5 * inner),
        _attention_pass(asked),
    )
    for each in passes:
        x = torch.empty(tokens, each.features, dtype=DTYPE, device=META, requires_grad=True)
        out = each.run(x)
        both = _phases(partial(each.run, x), torch.empty_like(out))
        yield _moved(each.name, both, tokens * each.least, each.most)
    yield _rotation_figure(tokens)


def _moved(name: str, counts: Sequence[Counts], least: int, most: float = MOST_BYTES) -> Figure:
    """What a pass moves, forward and backward, where so many elements are the least."""
    aim = Baseline(least * DTYPE.itemsize / 1e9, "least possible", at_most=most)
    note = f"{sum(count.launches for count in counts)} launches, forward and backward"
    return Figure(f"{name}: moved", sum(count.bytes for count in counts) / 1e9, "GB", "computed", aim, note)


def _rotation_figure(tokens: int) -> Figure:
    """Rotation of queries and keys, in place in the merged product: read and written, with cos and sin."""
    query = LLAMA_8B.num_attention_heads
    shared, size = LLAMA_8B.num_key_value_heads or query, LLAMA_8B.hidden_size // query
    qkv = torch.empty(tokens, query + 2 * shared, size, dtype=DTYPE, device=META)
    turned, cos = qkv[:, : query + shared], torch.empty(tokens, size, dtype=DTYPE, device=META)
    with counted() as both:
        for back in (False, True):
            rotate_(turned, cos, cos, back=back)
    return _moved("rotation", (both,), 2 * (2 * turned.numel() + 2 * cos.numel()))


# ---- a step -----------------------------------------------------------------------------------------------


class _Step:
    """A microbatch of the whole model and the optimiser's step after it, on meta tensors."""

    def __init__(self, model: BaseModel, asked: CountOptions) -> None:
        self.model, self.probe, self.asked = model, asked.probe, asked
        self.bank = Bank(model.sites, device=META, compute_dtype=DTYPE)
        model.install(backend="triton")
        for index in range(asked.adapters):
            names = [site.name for site in model.sites]
            self.bank.attach(
                str(index), rank=asked.rank, scale=1.0, dropout=asked.dropout, seed=index, sites=names
            )
        routing, lengths = probe_routing(self.probe, self.bank), self.probe.lengths
        given = fake_context(LLAMA_8B, lengths, routing, checkpointing=False, dtype=DTYPE)
        self.tokens, self.offsets = given.token_ids, given.sample_offsets
        self.rotation = given.shared  # a fake model cannot compute it

    def load(self) -> MicrobatchContext:
        """Routing and context of the microbatch."""
        routing = probe_routing(self.probe, self.bank)
        context = MicrobatchContext.of(self.tokens, self.offsets, routing=routing)
        context.shared |= self.rotation
        return context

    def forward(self, context: MicrobatchContext) -> Tensor:
        """The weighted loss."""
        return probe_loss(self.model, self.probe, self.model.hidden(context))

    def optimise(self) -> None:
        """One step of every adapter."""
        steps = [AdapterStep(name, 1, 1e-4, 1e-4) for name in self.bank.blocks]
        adamw_step(self.bank, steps, backend="triton")

    def microbatch(self) -> None:
        """Everything of one microbatch."""
        torch.autograd.backward(self.forward(self.load()))


def _step_figures(asked: CountOptions) -> Iterator[Figure]:
    config = copy.deepcopy(LLAMA_8B)
    model = fake_model(config, layers=asked.layers, dtype=DTYPE)
    step = _Step(model, asked)
    step.microbatch()  # what a bank makes once
    with counted() as load:
        context = step.load()
    forward, backward = _phases(partial(step.forward, context), None)
    with counted() as optimiser:
        step.optimise()
    parts = {"load": load, "forward": forward, "backward": backward, "optimiser": optimiser}
    for name, count in parts.items():
        note = f"{count.uploads} uploads, {count.waits} waits, {count.bytes / 1e9:.1f} GB in passes"
        yield Figure(f"step, {name}: launches", count.launches, "", "computed", note=note)
    waits = sum(count.waits for count in parts.values())
    yield Figure("step: waits of the host", waits, "", "computed", Baseline(1, "aim", at_most=1.0))
    short = _Step(model, replace(asked, length=max(1, HOST_TOKENS // asked.adapters)))
    aim = Baseline(MOST_HOST, "aim", at_most=1.0)
    note = f"{HOST_TOKENS} tokens, without Triton's own launching"
    seconds = _host_seconds(short, asked.repeats)
    yield Figure("microbatch: host time", seconds, "s", "measured", aim, note)
    if not interpreted():
        with absent(HOPPER):
            seconds = _host_seconds(short, asked.repeats)
        yield Figure("microbatch: host time, launching", seconds, "s", "measured", aim, _LAUNCHING)
    yield from _iteration_figures(model, step.bank, asked)


# ---- an iteration of generation ---------------------------------------------------------------------------


def _iteration_figures(model: BaseModel, bank: Bank, asked: CountOptions) -> Iterator[Figure]:
    """A token for each of ``adapters`` requests with ``length`` earlier ones, drawn and with its score."""
    model.tokeniser = byte_tokeniser()
    with _rotations(model):
        room = asked.adapters * (asked.length + 2)
        engine = Engine(model, BankAdapters(bank), pool_tokens=2 * room, most_prompt_tokens=room)
        sampling = Sampling(3, 0.8, top_p=0.9, stop_tokens=frozenset(), log_probabilities=1)
        for number in range(asked.adapters):
            engine.add(Request((number,) + (1,) * (asked.length - 1), str(number), sampling))
        with counted():
            engine.step()  # the prompts
            engine.step()  # what layers make once
        with counted() as count:
            engine.step()
    yield Figure("iteration: launches", count.launches, "", "computed", note=f"{count.uploads} uploads")
    aim = Baseline(1, "aim", at_most=1.0)
    yield Figure("iteration: waits of the host", count.waits, "", "computed", aim)
    moved, least = _attention_bytes(asked.length + 1)
    moved, least = moved * asked.adapters, least * asked.adapters
    aim = Baseline(least / 1e9, "least possible", at_most=MOST_BYTES)
    yield Figure("iteration: attention of a layer, moved", moved / 1e9, "GB", "computed", aim)


def _attention_bytes(keys: int) -> tuple[int, int]:
    """Bytes that a row's attention moves, and the least possible: its keys and values, query and result."""
    heads = LLAMA_8B.num_attention_heads
    shared = LLAMA_8B.num_key_value_heads or heads
    size = LLAMA_8B.hidden_size // heads
    least = (2 * keys * shared + 2 * heads) * size * DTYPE.itemsize
    chunks = -(-keys // CHUNK)
    joined = 2 * chunks * heads * (size + 2) * torch.float32.itemsize if chunks > 1 else 0
    return least + joined, least


@contextmanager
def _rotations(model: BaseModel) -> Iterator[None]:
    """Give a fake model the rotations that it cannot compute."""
    size = LLAMA_8B.hidden_size // LLAMA_8B.num_attention_heads

    def rotation(_layer: int, context: MicrobatchContext) -> Rotation:
        own = torch.empty(1, len(context.token_ids), size, dtype=DTYPE, device=META)
        return Rotation((own, own), None)

    with patch.object(model, "_rotation", rotation):
        yield


def _host_seconds(step: _Step, repeats: int) -> float:
    with _in_compiled_code():
        return median([_seconds(step.microbatch) for _ in range(repeats + 1)][1:])


@contextmanager
def _in_compiled_code() -> Iterator[None]:
    """Have operators of a layer that are compiled code on a device cost as much on meta tensors,
    on which torch needs up to 0.5 ms of Python for each."""

    def like(x: Tensor, *_given: object, dtype: torch.dtype | None = None, **_options: object) -> Tensor:
        return torch.empty(x.shape, dtype=dtype or x.dtype, device=META)

    def cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        return torch.empty(shape, dtype=parts[0].dtype, device=META)

    def flash(query: Tensor, *_given: object, **_options: object) -> tuple[Tensor, ...]:
        sums = torch.empty((query.shape[1], len(query)), device=META)
        state = torch.empty(2, dtype=torch.uint64, device=META)
        return torch.empty_like(query), sums, state, state, state

    def flash_back(_grad: Tensor, *given: Tensor, **_options: object) -> tuple[Tensor, ...]:
        query, key, value = given[:3]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    with warnings.catch_warnings(), torch.library._scoped_library("aten", "IMPL") as library:
        warnings.simplefilter("ignore")  # torch warns that these have a kernel already
        replaced: tuple[tuple[str, Callable[..., object]], ...] = (
            *(("add.Tensor", like), ("empty_like", like), ("cat", cat)),
            *(("_flash_attention_forward", flash), ("_flash_attention_backward", flash_back)),
        )
        for name, made in replaced:
            library.impl(name, made, "Meta")
        yield


def _seconds(run: Callable[[], None]) -> float:
    """Seconds of the processor, so that other work on the machine is not in them."""
    started = process_time()
    run()
    return process_time() - started
