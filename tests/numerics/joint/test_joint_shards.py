"""Promise 1 over a sharded base model: replicas that each keep a part of its layers train bit by bit as
replicas with whole layers do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from laboratory import distance
from peft_folders import stored_pairs
from processes import fleet
from saved_models import saved

from plait.core.errors import CapacityError
from plait.core.jobs import AdapterSpec
from plait.core.settings import ClusterSettings, EngineSettings, ModelSettings, RunSettings
from plait.engine.admission import Admission
from plait.engine.build import worker_facts
from plait.models.load import inspect_model, load_model

TINY = ModelSettings(kind="tiny", dtype="float32", seed=3)
ENGINE = EngineSettings(kernels="grouped", capacity=160, threads=1)
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
            held = worker.facts.shape.weight_bytes
    layer = sum(each.nbytes for each in lab.model.layers[0].parameters())
    assert held == lab.model.weight_bytes - layer  # of four layers half, and one that is gathered
    for job in jobs:
        assert found[True].losses(job.name) == found[False].losses(job.name)
        assert found[True].evaluations(job.name) == found[False].evaluations(job.name)
        assert found[True].losses(job.name) == pytest.approx(alone.losses(job.name), rel=1e-5)
        weights = [stored_pairs(each.ended(job.name).adapter) for each in found.values()]
        assert distance(*weights) == 0.0


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
    assert facts.shape.weight_bytes == pytest.approx(model.weight_bytes, rel=0.01)
    assert all(part.weight_bytes == facts.shape.weight_bytes for own in facts.parts for part in own)


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
