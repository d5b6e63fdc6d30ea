"""Promise 1 over a sharded base model: replicas that each keep a part of its layers train bit by bit as
replicas with whole layers do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from laboratory import ENGINE, TINY, assert_same, assert_same_bits, with_train
from processes import fleet
from saved_models import saved

from plait.adapters.variants import adapter_bytes
from plait.core.errors import CapacityError
from plait.core.jobs import AdapterSpec, JobSpec
from plait.core.settings import ClusterSettings, RunSettings
from plait.engine.admission import Admission
from plait.engine.build import worker_facts
from plait.engine.worker import WorkerFacts
from plait.models.load import inspect_model, load_model
from plait.models.targets import LinearInfo, resolve_targets

UNLIKE: dict[str, Any] = {"capacities": (160, 96), "speeds": (2.0, 0.5)}  # so one has fewer microbatches


def test_a_sharded_base_trains_as_whole_ones_do(laboratory: Any, tmp_path: Path) -> None:
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1, steps=6)[1:5]
    alone = lab.undisturbed(jobs, kernels="grouped")
    found, model = {}, saved(TINY, tmp_path / "model")  # read by parts
    for shards in (False, True):
        own = {**UNLIKE, "shard_base": shards, "join_seconds": 240.0}  # the machine may be busy
        cluster, folder = ClusterSettings(processes=2, **own), tmp_path / str(shards)
        with fleet(2, model, ENGINE, folder, **own) as worker:
            found[shards] = lab.run(jobs, worker=worker, cluster=cluster, folder=folder)
            held = worker.facts.shape
    layer = sum(each.nbytes for each in lab.model.layers[0].parameters())
    assert held.weight_bytes == lab.model.weight_bytes - 2 * layer  # of four layers half
    assert held.gathered_bytes == 2 * layer
    assert_same_bits(found[True], found[False], jobs)
    assert_same(found[True], alone, jobs)


@pytest.mark.usefixtures("peaks")
def test_peaks_are_predicted_with_each_gathered_layer_counted_once(laboratory: Any, tmp_path: Path) -> None:
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1, steps=5)[:3]
    jobs = [with_train(each, batch_size=4, accumulation=3) for each in jobs]
    cluster = ClusterSettings(processes=2, shard_base=True, join_seconds=240.0)
    with fleet(2, TINY, ENGINE, tmp_path / "processes", shard_base=True) as worker:
        steps = lab.run(jobs, worker=worker, cluster=cluster).steps
        facts = worker.facts
    parts = sum(each.nbytes for layer in lab.model.layers for each in layer.parameters()) / 2
    always = lab.model.weight_bytes - parts  # of the layers half
    always += sum(adapter_bytes(each.adapter, sites(each, facts), 4) for each in jobs)
    known = [each for each in steps if not each.bytes_by_rule and each.peak_bytes is not None]
    assert known
    for step in known:
        for time in step.replicas:
            assert time.peak_bytes is not None
            assert time.predicted_bytes is not None
            above = time.peak_bytes - always
            print(step.iteration, above, (time.predicted_bytes - always) / above - 1)
            assert time.predicted_bytes - always == pytest.approx(above, rel=0.02)


def sites(job: JobSpec, facts: WorkerFacts) -> list[LinearInfo]:
    names = resolve_targets(job.adapter.target_modules, facts.linears)
    return [each for each in facts.linears if each.name in names]


def admission(cluster: ClusterSettings, memory_bytes: int, cache: Path) -> Admission:
    settings = RunSettings(model=TINY, cluster=cluster)
    return Admission(worker_facts(settings, inspect_model(TINY, cache=cache), memory_bytes), settings)


@pytest.mark.parametrize("count", [2, 4])
def test_what_a_process_will_hold_is_known_before_it_is_loaded(tmp_path: Path, count: int) -> None:
    """So a model that fits only when it is sharded is not refused."""
    settings = RunSettings(model=TINY, cluster=ClusterSettings(processes=count, shard_base=True))
    facts = worker_facts(settings, inspect_model(TINY, cache=tmp_path), 2**30)
    model = load_model(TINY, cache=tmp_path)
    model.shard(cast(Any, SimpleNamespace(number=0, count=count)))
    assert model.shards is not None
    known = [model.weight_bytes, model.shards.gathered_bytes]
    assert [facts.shape.weight_bytes, facts.shape.gathered_bytes] == pytest.approx(known, rel=0.01)
    for part in (part for own in facts.parts for part in own):
        assert [part.weight_bytes, part.gathered_bytes] == pytest.approx(known, rel=0.01)


def test_a_model_that_fits_only_when_it_is_sharded_is_accepted(tmp_path: Path) -> None:
    whole, sharded = ClusterSettings(processes=4), ClusterSettings(processes=4, shard_base=True)
    adapter = AdapterSpec(rank=2, target_modules=("q_proj",))
    needed = [
        roomy.predicted([roomy.demand(adapter, 32)])
        for roomy in (admission(each, 2**34, tmp_path) for each in (sharded, whole))
    ]
    between = int(sum(needed) / 2 / RunSettings().planner.memory_share)
    admission(sharded, between, tmp_path).demand(adapter, 32)
    with pytest.raises(CapacityError, match="one job needs"):
        admission(whole, between, tmp_path).demand(adapter, 32)
