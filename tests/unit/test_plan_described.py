"""Plans of described clusters: what memory and devices leave of their tables, recomputation, refusals."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import yaml
from memory_models import one_phase

from plait.cli.plan import described as described_cluster
from plait.cli.verbs import find
from plait.core.errors import CapacityError, ConfigError, ModelError
from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.samples import Sample, Split, TokenisedData
from plait.core.settings import ClusterSettings, EngineSettings, RunSettings, SearchSettings
from plait.cost.clusters import Cluster
from plait.cost.memory import StaticBytes
from plait.cost.profiles import ClusterProfile, cluster_profile
from plait.cost.replica import Configuration, balanced_split
from plait.cost.time import HeadTime, LayerTime, MicrobatchShape, TimeModel
from plait.engine.catalogue import DataCatalogue
from plait.models.targets import resolve_targets
from plait.planning import model_memory
from plait.planning.described import RECOMPUTED, _Search, plan_described
from plait.planning.model_memory import ModelMemory, fitting, inputs_read, llama_linears, weight_bytes
from plait.planning.outlook import Outlook
from plait.planning.sharded import sharded_bases
from plait.planning.workload import Workload

CLUSTERS = Path(__file__).resolve().parents[2] / "conf" / "cluster"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 100}
GIB = 2**30


def described(name: str) -> dict[str, Any]:
    options = yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text())["options"]
    assert isinstance(options, dict)
    return options


def workload(lengths: tuple[int, ...] = (40, 60), jobs: int = 2, steps: int = 4) -> Workload:
    rows = [Sample(np.zeros(n, np.int32), np.arange(n) > 0) for n in lengths]
    data = DataCatalogue(lambda _: TokenisedData("digest", Split.of(rows), Split.of(rows[:1])))
    train = TrainSpec(steps=steps, batch_size=2)
    adapter = AdapterSpec(rank=4, target_modules=("q_proj",))
    return Workload.of([JobSpec(f"j{n}", adapter, train, DataSpec.of("jsonl")) for n in range(jobs)], data)


def memory(token: float, *, weights: int = 8 * GIB, layers: int = 32) -> ModelMemory:
    model = one_phase(token=token, margin=0.0)
    adapters = (AdapterSpec(rank=4, target_modules=("q_proj",)),)
    return ModelMemory(model, StaticBytes(weights), llama_linears(SIZES, layers), 2, 256, adapters)


def planned(profile: ClusterProfile, settings: RunSettings, of: ModelMemory | None = None) -> Outlook:
    return plan_described(workload(), settings, on(profile), of, tokeniser="x")


def on(profile: ClusterProfile) -> Cluster:
    return Cluster(profile.name, (profile,))


# ---- the model's sizes ------------------------------------------------------------------------------------


def test_sizes_are_those_of_the_model_that_transformers_makes() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=3, tie_word_embeddings=False))
    linears = llama_linears(SIZES, 3)
    there = {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    assert {each.name: (each.in_features, each.out_features) for each in linears} == there
    norms = (2 * 3 + 1) * SIZES["hidden_size"]
    static = weight_bytes(SIZES, linears, 2)
    assert static.stage((3,), 0) + 2 * norms == 2 * sum(each.numel() for each in model.parameters())
    assert static.embedding == static.head == 2 * model.lm_head.weight.numel()
    assert sum(static.stage((1, 0, 2), stage) for stage in range(3)) == static.stage((3,), 0)


def test_a_quantised_weight_is_made_on_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_memory, "_observed", lambda *_: (memory(1.0).model, 256))
    profile = replace(cluster_profile(described("h100_llama31_8b")), shape=SIZES)
    jobs = workload().jobs
    found = {}
    for mode in ("none", "nf4"):
        own = model_memory.model_memory(profile, EngineSettings(), jobs, quantise=mode, say=lambda _: None)
        assert own is not None
        found[mode] = own.weights
    assert found["none"].made == 0
    # gate and up at once in 2 bytes; beside them the indices, values and scales of one
    assert found["nf4"].made == 2 * 64 * 96 * 2 + 64 * 96 * (2 + 4 + 1 / 16)
    stages = sum(found["nf4"].stage((16, 16), stage) for stage in range(2))
    assert stages == found["nf4"].stage((32,), 0) + found["nf4"].made


def test_inputs_that_are_read_together_count_once() -> None:
    linears = llama_linears(SIZES, 2)
    whole = 64 + 64 + 64 + 96
    for targets, read in [(["q_proj"], 64), (["q_proj", "v_proj"], 64), (["up_proj", "down_proj"], 160)]:
        assert inputs_read(resolve_targets(targets, linears), linears) == pytest.approx(read / whole)
    assert inputs_read(resolve_targets("all-linear", linears), linears) == 1.0


def test_an_adapter_on_what_the_cluster_s_model_does_not_have_is_refused() -> None:
    with pytest.raises(ModelError, match="c_attn"):
        memory(1.0).adapter_bytes(AdapterSpec(rank=4, target_modules=("c_attn",)))


# ---- memory -----------------------------------------------------------------------------------------------


def test_a_capacity_is_halved_until_its_heaviest_microbatch_fits() -> None:
    profile = cluster_profile(described("h100_llama31_8b"))  # one device of 80 GiB, 6,144 tokens
    for token, capacity in [(1.0, 6144), (0.02 * GIB, 1536), (0.5 * GIB, 96), (0.9 * GIB, 60)]:
        found = fitting(on(profile), memory(token), workload(), share=0.8, together=2)
        assert found.kinds[0].configurations == (Configuration(1, 1, capacity),)
    assert fitting(on(profile), None, workload(), share=0.8, together=2) == on(profile)


def staged(time: TimeModel, memory_gib: float, *rows: tuple[int, int, int]) -> ClusterProfile:
    """A cluster of eight devices with these configurations: tp, pp, most tokens."""
    profile = cluster_profile(described("h100_llama31_8b"))
    return replace(
        profile,
        time=time,
        devices=replace(profile.devices, count=8, memory_gib=memory_gib),
        configurations=tuple(Configuration(*row) for row in rows),
    )


def test_capacity_and_layers_of_stages_are_the_fastest_that_fit() -> None:
    """Of all splits at every capacity that is tried, by the seconds a token of the slowest stage."""
    rng, changed = random.Random(5), 0
    for case in range(40):
        pp, layers, longest = rng.choice((2, 3, 4)), 8, 60
        head = HeadTime(0.0, rng.choice((0.0, 1e-5, 4e-5)))
        time = TimeModel(layers, {1: LayerTime(rng.choice((1e-4, 1e-3)), 1e-5)}, {1: head})
        own = memory(rng.choice((0.01, 0.1)) * GIB, weights=8 * GIB, layers=layers)
        own = replace(own, weights=StaticBytes(8 * GIB, rng.choice((0, 2)) * GIB, rng.choice((0, 2)) * GIB))
        profile = staged(time, rng.uniform(4, 14), (1, pp, 960))
        splits = [each for each in product(range(1, layers + 1), repeat=pp) if sum(each) == layers]
        held, room = 2 * own.adapter_bytes(own.adapters[0]), 0.8 * profile.devices.memory_bytes
        every = {}
        for capacity, split in product((960, 480, 240, 120, 60), splits):
            if own.peak(Configuration(1, pp, capacity, layer_split=split), layers, held) <= room:
                stages = [
                    time.stage(MicrobatchShape.of([capacity]), layers=n, last=s == pp - 1).total
                    for s, n in enumerate(split)
                ]
                every[capacity, split] = max(stages) / capacity
        jobs = replace(workload((longest,)), labelled_share=1.0)
        if not every:
            with pytest.raises(CapacityError, match=rf"stage \d of ⟨1,{pp}⟩ takes"):
                fitting(on(profile), own, jobs, share=0.8, together=2)
            continue
        ((found,),) = (
            each.configurations for each in fitting(on(profile), own, jobs, share=0.8, together=2).kinds
        )
        balanced = balanced_split(time, pp, MicrobatchShape.of([found.max_tokens]))
        key = (found.max_tokens, found.layer_split or balanced)
        assert every[key] == pytest.approx(min(every.values()), rel=1e-12), case
        changed += bool(found.layer_split)
    assert changed >= 5


def test_a_plan_has_the_layers_that_memory_requires() -> None:
    time = TimeModel(32, {1: LayerTime(1e-4, 1e-6)}, {1: HeadTime()})
    profile = replace(staged(time, 10.0, (1, 2, 60)), shape=SIZES)
    own = replace(memory(0.0, weights=8 * GIB), weights=StaticBytes(8 * GIB, embedding=5 * GIB))
    found = planned(profile, RunSettings(), own)
    (replica,) = found.replicas
    assert replica.layer_split == (11, 21)  # 11/32 of 8 GiB and 5 GiB are at most 8 GiB
    assert replica.predicted_bytes is not None
    assert replica.predicted_bytes <= 8 * GIB
    assert any("⟨1,2⟩ has layers [11,21]" in line for line in found.assumptions)
    assert not any("Capacity reduced" in line for line in found.assumptions)
    roomy = planned(replace(profile, devices=replace(profile.devices, memory_gib=80)), RunSettings(), own)
    assert roomy.replicas[0].layer_split == (16, 16)


def test_a_sample_that_fits_nowhere_is_named_with_the_memory() -> None:
    profile = cluster_profile(described("h100_llama31_8b"))
    message = (
        r"sample of 60 tokens .*: with it alone ⟨1,1⟩ takes 68.0 GiB.*\n"
        r".*At most 64.0 GiB may be used of each of 1 × H100-80GB of 80 GiB"
    )
    with pytest.raises(CapacityError, match=message):
        fitting(on(profile), memory(1.0 * GIB), workload(), share=0.8, together=2)
    long = workload(lengths=(40, 7000))
    with pytest.raises(CapacityError, match="sample of 7000 tokens"):
        fitting(on(profile), memory(1.0), long, share=0.8, together=2)


def test_too_few_devices_for_any_replica_name_the_table() -> None:
    options = described("h100_llama31_70b")
    options["device"]["count"] = 2
    with pytest.raises(CapacityError, match=r"'mixed' has no replica for so few devices: ⟨1,4⟩ takes 4"):
        fitting(on(cluster_profile(options)), None, workload(), share=0.8, together=2)


def test_a_capacity_reduced_by_memory_is_reported_and_bytes_are_predicted() -> None:
    profile = cluster_profile(described("h100_llama31_8b"))
    found = planned(profile, RunSettings(), memory(0.02 * GIB))
    assert found.replicas[0].capacity == 1536
    assert any("⟨1,1⟩ takes 1,536 tokens" in line for line in found.assumptions)
    sizes = [group.predicted_bytes for group in found.groups]
    assert found.replicas[0].predicted_bytes == max(size for size in sizes if size is not None)
    assert all(size is not None and 8 * GIB < size < 64 * GIB for size in sizes)
    unknown = planned(profile, RunSettings())
    assert [group.predicted_bytes for group in unknown.groups] == [None]
    assert any("Memory is unknown" in line for line in unknown.assumptions)


# ---- seconds ----------------------------------------------------------------------------------------------


def test_checkpointing_counts_every_layer_s_forward_pass_twice() -> None:
    profile = cluster_profile(described("h100_llama31_8b"))
    profile = replace(profile, time=replace(profile.time, head={}))
    plain = planned(profile, RunSettings())
    again = planned(profile, RunSettings(engine=EngineSettings(checkpointing=True)))
    assert plain.predicted_seconds is not None
    assert again.predicted_seconds == pytest.approx(
        (1 + profile.time.forward_share) * plain.predicted_seconds
    )
    assert RECOMPUTED in again.assumptions
    assert RECOMPUTED not in plain.assumptions
    measured = cluster_profile(described("a100_40g_llama2_7b"))
    assert measured.error is not None
    assert measured.recomputing().error is None  # it was measured without


def test_the_link_of_a_replica_is_the_slowest_that_it_needs() -> None:
    devices = cluster_profile(described("a100_40g_llama2_7b")).devices
    assert (devices.link(8), devices.link(16)) == (600e9, 100e9)
    options = described("a100_40g_llama2_7b")
    options["device"]["between_nodes_gb_per_s"] = -1
    with pytest.raises(ConfigError, match="between_nodes"):
        cluster_profile(options)


def test_when_a_job_ends_the_others_continue_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned phase by phase it is what planning every step gives."""
    profile = cluster_profile(described("h100_llama31_8b"))
    short, long = workload(jobs=1, steps=6), workload(jobs=2, steps=60)
    mixed = replace(long, steps={"j0": 6, "j1": 60}, batches={**long.batches, "j0": short.batches["j0"]})
    settings = RunSettings(search=SearchSettings(parallel=2))
    found = plan_described(mixed, settings, on(profile), None, tokeniser="x")
    assert [(group.jobs, group.steps) for group in found.groups] == [(("j0", "j1"), 12), (("j1",), 54)]
    ends = [group.predicted_seconds for group in found.groups]
    assert ends == sorted(ends)
    assert ends[-1] == pytest.approx(found.predicted_seconds)
    monkeypatch.setattr("plait.planning.workload.MOST_STEPS", 8)
    few = plan_described(mixed, settings, on(profile), None, tokeniser="x")
    assert few.predicted_seconds == pytest.approx(found.predicted_seconds, rel=0.02)
    assert few.device_seconds_alone == pytest.approx(found.device_seconds_alone, rel=0.02)


def test_side_by_side_each_job_has_the_replica_on_which_it_takes_least() -> None:
    profile = cluster_profile(described("a100_40g_llama2_7b"))
    search = SearchSettings(parallel=2)
    found = plan_described(workload(), RunSettings(search=search), on(profile), None, tokeniser="x")
    # 4 steps of one microbatch of 100 tokens, two jobs: on one device each, whatever else the table has
    lengths = MicrobatchShape.of([40, 60], labelled=98)
    assert found.device_seconds_side_by_side == pytest.approx(
        2 * 4 * profile.time.microbatch(lengths), rel=1e-6
    )
    single = replace(
        profile, configurations=tuple(each for each in profile.configurations if each.devices == 8)
    )
    settings = RunSettings(search=search)
    wide = plan_described(workload(), settings, on(single), None, tokeniser="x", numbers=[{"": 16}])
    assert found.device_seconds_side_by_side is not None
    assert wide.device_seconds_side_by_side is not None
    assert wide.device_seconds_side_by_side > found.device_seconds_side_by_side
    assert wide.device_seconds_alone is not None
    assert wide.device_seconds_side_by_side < wide.device_seconds_alone


def test_the_engine_s_capacity_bounds_the_cluster_s_table() -> None:
    cluster = ClusterSettings("described", described("h100_llama31_8b"))
    settings = RunSettings(cluster=cluster, engine=EngineSettings(capacity=512))
    found, described_as = described_cluster(settings)
    (profile,) = described_as.kinds
    assert {each.max_tokens for each in profile.configurations} == {512}
    assert found.engine.capacity == 512
    assert {
        each.max_tokens for each in described_cluster(RunSettings(cluster=cluster))[1].kinds[0].configurations
    } == {6144}


def test_unknown_cluster_kinds_and_kinds_on_this_machine_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be local or described\.\nChoose"):
        described_cluster(RunSettings(cluster=ClusterSettings("moon")))
    with pytest.raises(ConfigError, match=r"cluster\.kinds .*\n.*described clusters.*\n.*cluster=NAME"):
        ClusterSettings(kinds=({"name": "a", "count": 1},))
    with pytest.raises(ConfigError, match=r"cluster\.processes=2 .*\n.*this machine.*\n.*--devices N"):
        ClusterSettings("described", described("h100_llama31_8b"), processes=2)


def test_help_names_every_described_cluster() -> None:
    names = {path.stem for path in CLUSTERS.glob("*.yaml")} - {"local"}
    assert len(names) >= 4
    assert all(name in find("plan").text for name in names)


def test_more_than_one_job_in_a_microbatch_counts_for_each_and_once_in_all() -> None:
    found = planned(
        cluster_profile(described("h100_llama31_8b")), RunSettings(search=SearchSettings(parallel=2))
    )
    assert found.microbatches == 4
    assert [group.microbatches for group in found.groups] == [4]
    assert found.microbatches_alone == 8
    assert len(found.simulated) == 1
    assert found.simulated[0].bubble.total == pytest.approx(0.0)


# ---- a sharded base ---------------------------------------------------------------------------------------


def linked(gb_per_s: float, *rows: tuple[int, int, int], memory_gib: float = 8.0) -> ClusterProfile:
    time = TimeModel(
        32,
        {1: LayerTime(1e-4, 1e-5), 2: LayerTime(1e-4, 8e-6), 4: LayerTime(1e-4, 7e-6)},
        {1: HeadTime(0.0, 1e-5)},
        forward_share=0.4,
    )
    found = staged(time, memory_gib, *rows)
    devices = replace(
        found.devices, within_node_gb_per_s=gb_per_s, per_node=4, between_nodes_gb_per_s=gb_per_s / 4
    )
    return replace(found, devices=devices, shape=SIZES)


def test_a_sharded_base_has_its_part_of_the_layers_and_two_gathered_ones() -> None:
    weights = StaticBytes(8 * GIB, embedding=GIB, head=GIB)
    own = replace(memory(100.0), weights=weights)
    profile = linked(400, (4, 1, 60))
    bases = {base.cluster.devices[""]: base for base in sharded_bases(on(profile), own)}
    assert sorted(bases) == [2, 4, 8]
    for count, base in bases.items():
        alone = Configuration(1, 1, 60, shards=count)
        needed = base.memory.peak(alone, 32, 0)
        assert needed == pytest.approx(8 * GIB / count + 2 * 8 * GIB / 32 + 2 * GIB + 6000, abs=2)
        assert base.cluster.kinds[0].configurations == (alone,)
        link = 400e9 if count <= 4 else 100e9
        assert base.cluster.kinds[0].time.gather == pytest.approx(8 * GIB / 32 * (1 - 1 / count) / link)
    assert [str(base) for base in sharded_bases(on(profile), own, every=False)] == ["sharded ⟨1,1⟩×8"]
    without = replace(profile, time=replace(profile.time, layer={4: LayerTime(1e-4, 7e-6)}))
    assert list(sharded_bases(on(without), own)) == []


def test_the_better_of_replicas_and_a_sharded_base_is_planned() -> None:
    """Weights of 8 GiB on devices of which 6.4 GiB may be used: in four slices, or sharded."""
    own = memory(100.0)
    chosen = {}
    for gb_per_s in (1000.0, 0.1):
        found = planned(linked(gb_per_s, (4, 1, 120)), RunSettings(), own)
        slices, *bases = found.candidates
        assert slices.replicas.startswith("⟨4,1⟩")
        assert [each.replicas for each in bases] == [f"sharded ⟨1,1⟩×{count}" for count in (2, 4, 8)]
        (best,) = (each for each in found.candidates if not each.why)
        assert found.replicas[0].sharded == best.replicas.startswith("sharded")
        assert f"{found.replicas[0].count}" == best.replicas[-1]
        assert found.objective is not None
        seconds = {
            each.replicas: each.step_seconds * int(each.replicas[-1]) * (4 if each is slices else 1)
            for each in found.candidates
            if each.step_seconds
        }
        assert found.objective.value == pytest.approx(seconds[best.replicas])
        assert found.objective.value <= 1.1 * min(seconds.values())
        chosen[gb_per_s] = best.replicas
        assert any("gathers each layer" in line for line in found.assumptions) == found.replicas[0].sharded
    assert chosen[1000.0].startswith("sharded ⟨1,1⟩")
    assert chosen[0.1].startswith("⟨4,1⟩")


def test_where_replicas_do_not_fit_the_sharded_base_is_planned_and_the_reason_said() -> None:
    own, profile = memory(100.0, weights=26 * GIB), linked(100, (4, 1, 120))
    found = planned(profile, RunSettings(), own)
    assert found.replicas[0].sharded
    assert found.replicas[0].count == 8  # for fewer, their part of 26 GiB and two layers are too much
    assert "with it alone ⟨4,1⟩ takes 6.5 GiB on a device. At most " in found.candidates[0].why


def test_a_tie_is_no_reason_against_a_candidate() -> None:
    """What decides between equal objectives is said; of two that are equal in all, that they are."""
    search = Mock(planner=RunSettings().planner, together=1, workload=Mock(jobs=["a"]))
    best, slower, same = (
        Mock(value=value, memory=None, deployment=Mock(makespan=makespan, __str__=Mock(return_value=name)))
        for name, value, makespan in (("A", 100.0, 2.0), ("B", 100.2, 3.0), ("C", 99.9, 2.0))
    )
    costly = Mock(value=150.0, memory=None, deployment=Mock(makespan=1.0))
    why = [_Search._row(search, "", each, None, best).why for each in (best, slower, same, costly)]
    assert why == [
        "",
        "1.50 times the seconds of A",
        "no better than those of A",
        "1.50 times the device-seconds of A",
    ]


def test_what_cannot_be_sharded_is_not_weighed() -> None:
    quantised = RunSettings(model=replace(RunSettings().model, quantise="int8"))
    assert planned(linked(1000, (4, 1, 120)), quantised, memory(100.0)).candidates == ()
    assert planned(linked(1000, (4, 1, 120)), RunSettings(), None).candidates == ()


def test_given_devices_are_used_sharded_if_that_is_faster() -> None:
    for gb_per_s, sharded in ((1000.0, True), (0.1, False)):
        profile = linked(gb_per_s, (4, 1, 120))
        found = plan_described(
            workload(), RunSettings(), on(profile), memory(100.0), tokeniser="x", numbers=[{"": 4}]
        )
        assert [each.replicas.startswith("sharded") for each in found.every] == [sharded]
        assert found.candidates == ()
