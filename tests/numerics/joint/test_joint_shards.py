"""Promise 1 over a sharded base model: replicas that each keep a part of its layers train bit by bit as
replicas with whole layers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from laboratory import distance
from peft_folders import stored_pairs
from processes import fleet
from saved_models import saved

from plait.core.settings import ClusterSettings, EngineSettings, ModelSettings

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
