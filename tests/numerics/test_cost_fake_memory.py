"""Memory predicted from at most twelve observations without weights, on ragged packed microbatches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import Gemma2Config, LlamaConfig

from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.settings import EngineSettings
from plait.cost.fake_memory import fake_context, fake_model, observe_extrapolated, observe_whole
from plait.cost.memory import MemoryModel
from plait.cost.peaks import KnownResults, StorageCounter
from plait.cost.probes import Probe, ProbeOptions, ProbeSegment, observe, probe_grid
from plait.cost.profiles import cluster_profile
from plait.models.context import MicrobatchContext
from plait.planning.model_memory import llama_linears, model_memory, weight_bytes
from plait_kernels import Routing
from plait_kernels.loss import CHUNK_LOGITS

HELD_OUT = 6
ROOT = Path(__file__).resolve().parents[2]
SHAPES = {
    "SmolLM2-135M": LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_hidden_layers=30,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "Llama-3.1-8B": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=32,
        vocab_size=128256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    ),
}


def _probes(count: int, most: int, seed: int) -> list[Probe]:
    """Ragged samples of one to four adapters, ranks mixed, 10 to 100 % of the tokens labelled."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        adapters = int(rng.integers(1, 5))
        tokens = int(np.exp(rng.uniform(np.log(256), np.log(most)))) // adapters
        segments = []
        for _ in range(adapters):
            lengths, left, mean = [], tokens, float(rng.choice([80, 200, 500]))
            while left > 0:
                drawn = int(np.clip(rng.lognormal(np.log(mean), 0.6), 8, 2048))
                lengths.append(min(drawn, left))
                left -= lengths[-1]
            segments.append(ProbeSegment(int(rng.choice([4, 8, 16, 32, 64])), tuple(lengths)))
        labelled = max(1, int(tokens * adapters * rng.uniform(0.1, 1.0)))
        found.append(Probe(tuple(segments), labelled))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checkpointing"), [("Llama-3.1-8B", False), ("SmolLM2-135M", True)])
def test_held_out_error_is_at_most_a_quarter_percent(name: str, checkpointing: bool) -> None:
    config, options = SHAPES[name], ProbeOptions(checkpointing=checkpointing)
    grid, held_out = probe_grid(4096), _probes(HELD_OUT, 4096, seed=0)
    assert len(grid) <= 12
    observed = observe_extrapolated(config, [*grid, *held_out], options)
    fitted, held = observed[: len(grid)], observed[len(grid) :]
    model = MemoryModel.fitted(fitted, logit_rows=CHUNK_LOGITS // config.vocab_size)
    errors = np.abs(model.errors(held))
    assert errors.mean() <= 0.0025
    assert errors.max() <= 0.005
    for each in held:
        assert model.safe_peak(each.shape, static=each.static) >= max(each.peaks.values()) * 0.9995


@pytest.mark.parametrize("checkpointing", [False, True])
def test_extrapolation_equals_full_depth(checkpointing: bool) -> None:
    config, options = SHAPES["SmolLM2-135M"], ProbeOptions(checkpointing=checkpointing)
    probe = Probe((ProbeSegment(16, (100, 300)), ProbeSegment(8, (120,))), 260)
    whole = observe_whole(config, probe, options)
    (extrapolated,) = observe_extrapolated(config, [probe], options)
    assert extrapolated.static == whole.static
    assert extrapolated.dynamic == whole.dynamic
    # bfloat16 weights, each once (SmolLM2 ties embedding and head): 134,515,008 parameters
    assert whole.static >= 2 * 134_515_008


def test_bits_of_dropped_features_are_seen() -> None:
    pytest.importorskip("triton")
    config, probe = SHAPES["SmolLM2-135M"], Probe((ProbeSegment(16, (100, 300)), ProbeSegment(8, (120,))), 26)
    plain, drops = (
        observe_whole(config, probe, ProbeOptions(backend="triton", dropout=dropout)).peaks
        for dropout in (0.0, 0.1)
    )
    row = 640 // 8  # of 576 features, in blocks of 128
    kept = 520 * row * 4 * config.num_hidden_layers  # q, k and v each have their own
    for phase in ("forward", "loss"):
        assert drops[phase] - plain[phase] == kept, phase


def test_attention_with_a_softcap_has_no_scores_in_memory_on_a_gpu() -> None:
    pytest.importorskip("triton")
    config = Gemma2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )

    def dynamic(backend: str, lengths: tuple[int, ...]) -> float:
        probe = Probe((ProbeSegment(8, lengths),), 1)
        return observe_whole(config, probe, ProbeOptions(backend=backend)).dynamic

    long, short = (dynamic("triton", lengths) for lengths in ((1024,), (64,) * 16))
    tables = 2 * 1024 * 64 * torch.bfloat16.itemsize  # cos and sin by position
    assert long - short <= tables
    assert dynamic("grouped", (1024,)) > 2 * long


def test_a_plan_for_described_gpus_counts_these_bits() -> None:
    pytest.importorskip("triton")
    text = (ROOT / "conf" / "cluster" / "h100_llama31_8b.yaml").read_text()
    cluster, found = cluster_profile(yaml.safe_load(text)["options"]), {}
    for dropout in (0.0, 0.1):
        spec = AdapterSpec(rank=16, dropout=dropout, target_modules="all-linear")
        jobs = [JobSpec("j", spec, TrainSpec(steps=1, batch_size=1), DataSpec.of("jsonl"))]
        engine = EngineSettings()
        made = model_memory(cluster, engine, jobs, quantise="none", say=lambda _: None)
        assert made is not None
        found[dropout] = made.model
    probe = Probe((ProbeSegment(16, (500, 524)), ProbeSegment(8, (1024,))), 300)
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    options = ProbeOptions(targets=targets, backend="triton", dropout=0.1)
    (real,) = observe_extrapolated(SHAPES["Llama-3.1-8B"], [probe], options)
    assert found[0.1].dynamic(real.shape) > real.dynamic
    bits = 2048 * (6 * 4096 + 14336) // 8 * 32
    added = found[0.1].dynamic(real.shape) - found[0.0].dynamic(real.shape)
    assert added == pytest.approx(bits, rel=0.01)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_results_that_are_known_change_no_peak(checkpointing: bool) -> None:
    """Two probes after another, of which the second knows what the first has computed."""
    config, options = SHAPES["SmolLM2-135M"], ProbeOptions(checkpointing=checkpointing)
    model, known = fake_model(config, layers=2, dtype=options.dtype), KnownResults()

    def context(probe: Probe, routing: Routing) -> MicrobatchContext:
        return fake_context(config, probe.lengths, routing, checkpointing=checkpointing, dtype=options.dtype)

    for lengths in ((100, 300), (100, 300), (90, 300, 7)):
        probe = Probe((ProbeSegment(16, lengths), ProbeSegment(8, (120,))), 260)
        assert observe(model, probe, options, context, known) == observe(model, probe, options, context)


def test_only_results_of_the_same_form_are_known() -> None:
    known, add = KnownResults(), torch.ops.aten.add.Tensor
    first, other = torch.empty(3, 4, device="meta"), torch.empty(3, 4, device="cpu")
    for given in (first, torch.empty(3, 1, device="meta"), first.double(), first):
        out = known.run(add, (first, given), {})
        assert (out.shape, out.dtype, out.device.type) == ((3, 4), (first + given).dtype, "meta")
        assert out.untyped_storage()._cdata != first.untyped_storage()._cdata
    for value in (1, 1.0, 2):
        assert known.run(torch.ops.aten.add_.Tensor, (first, value), {}) is first
    for _ in range(2):  # a view stays a view, an operation on real tensors is computed
        view = known.run(torch.ops.aten.view.default, (first, [12]), {})
        assert view.untyped_storage()._cdata == first.untyped_storage()._cdata
        other.fill_(2)
        assert known.run(add, (other, other), {}).tolist() == [[4.0] * 4] * 3
    grown = torch.empty(2, device="meta")
    for size in (5, 2, 5):
        assert known.run(torch.ops.aten.resize_.default, (grown, [size]), {}) is grown
        assert grown.shape == (size,)
    for _ in range(3):  # each one shares another one's storage
        own, another = torch.empty(2, device="meta"), torch.empty(2, device="meta")
        known.run(torch.ops.aten.set_.source_Tensor, (own, another), {})
        assert own.untyped_storage()._cdata == another.untyped_storage()._cdata


def test_counter_counts_each_storage_once_and_forgets_it() -> None:
    with StorageCounter() as counter:
        x = torch.zeros(1000)
        view = x.view(10, 100)[1]
        assert counter.live == 4000
        y = x + 1.0
        assert counter.live == 8000
        del y
        assert (counter.live, counter.peak) == (4000, 8000)
        del x
        assert counter.live == 4000  # the view keeps it
        del view
        assert counter.live == 0
        counter.restart()
        assert counter.peak == 0


class Part:
    """One of several processes, of which the others are not there."""

    def __init__(self, number: int, count: int) -> None:
        self.number, self.count = number, count
        self.add: Any = None
        self.gather: Any = None
        self.fill: Any = None


def test_parts_of_a_70b_model_take_the_bytes_that_the_memory_model_says() -> None:
    """Four of its layers, over meta tensors: what a stage, a slice and a shard keep."""
    sizes = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    config = LlamaConfig(**sizes, tie_word_embeddings=False)  # type: ignore[arg-type]
    static = weight_bytes(sizes, llama_linears(sizes, 4), 2)
    norms = 1e-4  # of the bytes, which the memory model leaves out
    for stages, stage, part in (
        (4, 0, Part(0, 1)),
        (4, 2, Part(0, 1)),
        (2, 0, Part(1, 2)),
        (2, 1, Part(0, 2)),
    ):
        model = fake_model(config, layers=4, dtype=torch.bfloat16)
        layers = 4 // stages
        model.keep(range(stage * layers, (stage + 1) * layers))
        if part.count > 1:
            model.take_slice(part)
        expected = static.stage([layers] * stages, stage) / part.count
        assert model.weight_bytes == pytest.approx(expected, rel=norms)
    model = fake_model(config, layers=4, dtype=torch.bfloat16)
    model.shard(Part(3, 4))
    expected = static.layers / 4 + static.embedding + static.head
    assert model.weight_bytes == pytest.approx(expected, rel=norms)
    assert model.shards is not None
    assert model.shards.gathered_bytes == pytest.approx(static.layers / 2, rel=norms)  # one, and the next
