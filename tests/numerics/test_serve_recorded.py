"""Iterations of one new token each that are recorded and replayed give what launched ones give, to the bit.

On a GPU its graphs are compared. Elsewhere a stand-in for its recorder runs again what was recorded, with
all that was in it then but the uploads, as a replay does, and Triton's kernels are interpreted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from recorders import Again, Refusing, Short
from torch import Tensor
from transformers import Gemma3Config, GPT2Config, LlamaConfig

from plait.adapters.peft_folder import export_adapter
from plait.adapters.variants import attach
from plait.core.errors import ConfigError
from plait.core.jobs import AdapterSpec
from plait.core.settings import EngineSettings, ModelSettings, RunSettings
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait.models.load import load_model
from plait.models.targets import resolve_targets
from plait.models.tiny import FAMILIES
from plait.serve import engine as generation
from plait.serve import recorded
from plait.serve.cells import BankAdapters, _BankAdapter
from plait.serve.engine import Engine
from plait.serve.folders import FolderAdapters
from plait.serve.recorded import DecodingSizes, Row
from plait.serve.requests import Completion, Request, Sampling
from plait_bench.figures import Baseline
from plait_bench.slora_throughput import throughput
from plait_kernels import Bank, paged, triton_backend
from plait_kernels.check import poisoned_memory
from plait_kernels.pooled import PooledAdapter
from plait_kernels.recordings import CudaRecorder
from plait_kernels.triton_backend import interpreted

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if not triton_backend.available(DEVICE):
    pytest.skip("Triton does not run here", allow_module_level=True)
RANKS = (3, 20, 18)
CHUNK = 32  # keys, so that short requests have several chunks


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    """A tiny Llama of two layers, with Triton's kernels."""
    settings = ModelSettings(kind="tiny", family="llama", dtype="float32", seed=2)
    with pytest.MonkeyPatch.context() as patch:  # every layer is launched alike, for seconds
        patch.setitem(FAMILIES, "llama", {"num_hidden_layers": 2})
        made = load_model(settings, cache=tmp_path_factory.mktemp("base"), device=DEVICE)
    made.install(backend="triton")
    hidden = made.hidden

    def computed(context: MicrobatchContext) -> Tensor:
        context.shared.clear()  # what a device computed is recorded, and computed again
        return hidden(context)

    made.hidden = computed  # type: ignore[assignment, method-assign]
    head = made.head

    def never_zero(rows: Tensor) -> Tensor:
        logits = head(rows)
        logits[:, 0] = -1e9  # the token that fills up, whose embedding is to be NaN
        return logits

    made.head = never_zero  # type: ignore[method-assign]
    return made


@pytest.fixture(scope="module")
def adapters(base: BaseModel, tmp_path_factory: pytest.TempPathFactory) -> FolderAdapters:
    folder = tmp_path_factory.mktemp("adapters")
    bank = Bank(base.sites, device=DEVICE, compute_dtype=torch.float32)
    targets: Sequence[Any] = ("all-linear", ("q_proj", "v_proj"), ("down_proj",))
    for number, rank in enumerate(RANKS):
        name, spec = f"rank{rank}", AdapterSpec(rank, target_modules=targets[number])
        sites = resolve_targets(spec.target_modules, base.linears)
        attach(bank, name, spec, sites, seed=number, weight_of=base.frozen_weight)
        for _, b in bank.weights(name).values():
            b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(number)) * 0.2)
        bank.refresh([name])
        export_adapter(folder / name, spec, bank.weights(name), base="tiny", linears=base.linears)
    return FolderAdapters(base, {f"rank{rank}": folder / f"rank{rank}" for rank in RANKS})


def requests() -> list[Request]:
    """Prompts of one to three chunks, in an order in which adapters come again after they had to leave."""
    generator = torch.Generator().manual_seed(8)
    asked = [
        (3, 3, 8),
        (40, None, 5),
        (15, 18, 7),
        (30, 20, 8),
        (16, None, 3),
        (5, 18, 6),
        (2, 18, 4),
        (66, 3, 5),
    ]
    return [
        Request(
            tuple(torch.randint(3, 250, (length,), generator=generator).tolist()),
            None if rank is None else f"rank{rank}",
            Sampling(
                new,
                temperature=0.9 if number % 3 == 1 else 0.0,
                top_p=0.8,
                seed=number,
                stop_tokens=frozenset(),
                log_probabilities=3,
            ),
        )
        for number, (length, rank, new) in enumerate(asked)
    ]


class Answered:
    """The answers to requests of which one or two join in each iteration; the pool has no room for all."""

    def __init__(
        self, base: BaseModel, adapters: FolderAdapters, recorder: Any | None, rows: int = 4
    ) -> None:
        self.engine = Engine(
            base, adapters, pool_tokens=216, most=4, graph_rows=rows * bool(recorder), recorder=recorder
        )
        self.recordings = None if self.engine.recorded is None else self.engine.recorded.recordings
        self.sizes: set[int] = set()
        left, self.completions = list(enumerate(requests())), dict[int, Completion]()
        numbers: dict[int, int] = {}
        turn = 0
        while left or not self.engine.idle:
            for _ in range((3, 0, 0, 1, 0, 0)[turn % 6]):
                if left:
                    index, request = left.pop(0)
                    numbers[self.engine.add(request)] = index
            turn += 1
            for update in self.engine.step():
                assert update.error is None
                if update.ended is not None:
                    self.completions[numbers[update.request]] = update.ended
            self.sizes.add(len(self.engine.running))

    @property
    def said(self) -> list[Completion]:
        return [self.completions[number] for number in sorted(self.completions)]


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "CHUNK", CHUNK)
    monkeypatch.setattr(recorded, "LEAST_PAGES", 2)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's, of rows that fill up
@pytest.mark.usefixtures("chunked")
def test_replayed_iterations_answer_as_launched_ones_to_the_bit(
    base: BaseModel, adapters: FolderAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    base.install(backend="reference" if interpreted() else "triton")  # the interpreter takes seconds
    plain = Answered(base, adapters, None)
    base.install(backend="triton")
    launched = Answered(base, adapters, Refusing())
    recorder = Again() if DEVICE.type == "cpu" else CudaRecorder()
    embedding: Any = base._parts.embedding
    spoilt = embedding.weight.clone()
    spoilt[0] = torch.nan  # of the tokens that fill up, and of no other
    with monkeypatch.context() as patch, poisoned_memory():  # in its memory a replay finds what others left
        patch.setattr(embedding.weight, "data", spoilt)
        replayed = Answered(base, adapters, recorder)
    assert replayed.recordings is not None
    assert launched.recordings is not None
    assert replayed.sizes >= {1, 2, 3}
    assert not replayed.recordings.refusals
    assert replayed.recordings.replays > 2 * len(launched.recordings.refusals) >= 4, "of all sizes"
    assert replayed.engine.store.loads > len(RANKS), "adapters came again after they had made room"
    assert not any(0 in each.tokens for each in plain.said)
    assert replayed.said == launched.said
    assert [each.tokens for each in replayed.said] == [each.tokens for each in plain.said]
    for one, other in zip(replayed.said, plain.said, strict=True):
        for score, expected in zip(one.scores, other.scores, strict=True):
            assert score.log_probability == pytest.approx(expected.log_probability, abs=1e-5)


def test_where_memory_runs_out_nothing_is_replayed_any_more(
    base: BaseModel, adapters: FolderAdapters, caplog: pytest.LogCaptureFixture
) -> None:
    short = Short()
    engine = Engine(base, adapters, pool_tokens=99, graph_rows=4, recorder=short)
    asked = [replace(each, tokens=each.tokens[:3]) for each in requests()[:2]]
    found = engine.complete(asked)
    assert engine.recorded is None
    assert short.forgotten == 1
    assert ["Memory has run out" in each.message for each in caplog.records] == [True]
    launched = Engine(base, adapters, pool_tokens=99).complete(asked)
    assert [each.tokens for each in found] == [each.tokens for each in launched]


@pytest.mark.parametrize("where", ["head", "choose_tokens", "score_rows"])
def test_memory_of_recordings_is_given_back_wherever_it_runs_out(
    base: BaseModel, adapters: FolderAdapters, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    module: Any = base if where == "head" else generation
    engine, real = (
        Engine(base, adapters, pool_tokens=99, graph_rows=4, recorder=Again()),
        getattr(module, where),
    )

    def short(*arguments: Any) -> Any:
        if engine.recorded is not None and (where != "choose_tokens" or engine.recorded.recordings.replays):
            raise torch.OutOfMemoryError("no room")
        return real(*arguments)

    asked = Request((7, 8, 9), None, Sampling(4, stop_tokens=frozenset()), scored=2 * (where == "score_rows"))
    expected = Engine(base, adapters, pool_tokens=99).complete([asked])
    monkeypatch.setattr(module, where, short)
    assert engine.complete([asked]) == expected
    assert engine.recorded is None


def test_adapters_that_a_bank_computes_are_launched(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = Bank(base.sites, device=DEVICE, compute_dtype=torch.float32)
    spec = AdapterSpec(3, target_modules="all-linear")
    sites = resolve_targets(spec.target_modules, base.linears)
    attach(bank, "one", spec, sites, seed=1, weight_of=base.frozen_weight)
    for _, b in bank.weights("one").values():
        b.fill_(0.1)
    bank.refresh(["one"])
    monkeypatch.setattr(_BankAdapter, "pooled", False)
    again, own = Again(), Request((7, 8), "one", Sampling(4, stop_tokens=frozenset()))
    engine = Engine(base, BankAdapters(bank), pool_tokens=99, graph_rows=4, recorder=again)
    found = engine.complete([own, own])
    assert found == Engine(base, BankAdapters(bank), pool_tokens=99).complete([own, own])
    assert found != engine.complete([replace(own, adapter=None)] * 2)
    assert again.recorded == 1, "of the base model alone"


def test_more_rows_than_asked_for_are_launched(base: BaseModel, adapters: FolderAdapters) -> None:
    again = Again()
    engine = Engine(base, adapters, pool_tokens=99, graph_rows=1, recorder=again)
    asked = [Request((7, 8), None, Sampling(4, stop_tokens=frozenset()))] * 2
    engine.complete(asked)
    assert again.recorded == 0
    engine.complete(asked[:1])
    assert again.recorded == 1


def test_sizes_are_few_and_have_room_for_what_is_in_them() -> None:
    def row(pages: int, rank: int | None = None) -> Row:
        adapter = None if rank is None else PooledAdapter(rank, 1.0, frozenset(), torch.empty(0))
        return Row(5, 1, tuple(range(pages)), adapter)

    every = set()
    for count in range(1, 300):
        sizes = DecodingSizes.of([row(1 + count // 3, count % 64 or None)] * count)
        assert sizes.rows >= count
        assert sizes.pages > count // 3
        assert sizes.rank >= count % 64
        every.add(sizes.rows)
    assert len(every) == len(recorded.ROWS) + 1
    assert DecodingSizes.of([row(1), row(3)]) == DecodingSizes(2, 8, 0)
    assert DecodingSizes.of([row(9, 3)]) == DecodingSizes(1, 16, 8)


def test_nothing_is_replayed_without_a_gpu_or_without_tritons_kernels(base: BaseModel) -> None:
    with pytest.raises(ConfigError, match=r"4 rows as CUDA graphs\n.*on a GPU.*\nLeave --graph-rows .*out"):
        recorded.check_device(torch.device("cpu"), 4)
    base.install(backend="reference")
    with pytest.raises(ConfigError, match="4 rows as CUDA graphs"):
        Engine(base, FolderAdapters(base), pool_tokens=99, graph_rows=4, recorder=Again())
    base.install(backend="triton")


def test_heads_that_are_too_wide_are_known_by_the_configuration() -> None:
    like = torch.empty(0, device=DEVICE)
    recorded.check_model(LlamaConfig(hidden_size=512, num_attention_heads=2), "triton", like, 4)
    recorded.check_model(Gemma3Config(), "triton", like, 4)  # its text's sizes are not known here
    for wide in (
        LlamaConfig(hidden_size=512, num_attention_heads=1),
        LlamaConfig(head_dim=258),
        GPT2Config(n_embd=512, n_head=1),  # has no head_dim
    ):
        with pytest.raises(ConfigError, match="4 rows as CUDA graphs"):
            recorded.check_model(wide, "triton", like, 4)


SERVED: dict[str, Any] = {
    **{"layers": 1, "hidden": 32, "inner": 48, "heads": 4, "shared": 2, "vocabulary": 97},
    **{"files": 1, "requests": 3, "rate": 1000.0, "shortest": 5, "longest": 6, "pool_tokens": 256},
    "cases": [{"name": "S1", "adapters": 2, "ranks": [3], "host_bytes": 0}],
    **{"graph_rows": 8, "seed": 0},
}


@pytest.mark.parametrize(
    ("rows", "why"), [(8, "8 rows as CUDA graphs"), (-1, r"options\.graph_rows=-1\n.*at least 0")]
)
def test_the_benchmark_refuses_rows_before_it_makes_a_model(rows: int, why: str) -> None:
    settings = RunSettings(engine=EngineSettings(device="cpu", kernels="triton"))
    wrong = {"hidden": 33}  # of which no model is made
    with pytest.raises(ConfigError, match=why):
        throughput(settings, [], SERVED | wrong | {"graph_rows": rows})


@pytest.mark.skipif(not interpreted(), reason="runs Triton's kernels in its interpreter")
def test_the_benchmark_serves_launched_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "CudaRecorder", Again)
    monkeypatch.setattr(recorded, "check_device", lambda *_: None)
    settings = RunSettings(engine=EngineSettings(device="cpu", kernels="triton"))
    report = throughput(settings, [], SERVED)
    found = {figure.name: figure for figure in report.figures}
    assert list(found) == ["S1", "S1: read", "S1: replayed", "S1: sizes refused"]
    assert found["S1: replayed"].target == Baseline(found["S1"].ours, "launched", at_least=1.0)
    replays, of = map(int, re.findall(r"\d+", found["S1: replayed"].note))
    assert 0 < replays < of
    assert found["S1: sizes refused"].ours == 0
