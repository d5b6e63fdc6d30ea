"""The capacity of a run: given, recorded, profiled or usual, and what memory makes of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, cast

import pytest
import torch
from memory_models import one_phase

from plait.cli.profile import used_from_now_on
from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.plans import Group, Plan, Replica
from plait.core.settings import USUAL_CAPACITY, EngineSettings, ModelSettings, RunSettings
from plait.cost.profile_store import Profile, ProfileKey
from plait.engine import build as engine
from plait.engine import devices
from plait.engine.admission import LEAST_CAPACITY, Admission, activation_bytes, choose_capacity
from plait.engine.catalogue import DataCatalogue
from plait.engine.worker import ActivationShape, HeldPart, Worker, WorkerFacts
from plait.models.load import ModelShape
from plait.models.targets import LinearInfo

LINEARS = (LinearInfo("layers.0.q_proj", 8, 8),)
SHAPE = ActivationShape(1, 8, 2, 16, 16, 1000, 4, logit_rows=1000, keep_up_to=256)
ADAPTER = AdapterSpec(rank=2, target_modules=("q_proj",))
OPEN = RunSettings()


def facts(memory_bytes: int = 10**12) -> WorkerFacts:
    return WorkerFacts(SHAPE, LINEARS, max_length=10_000, memory_bytes=memory_bytes)


def profile(capacity: int, token: float = 1.0) -> Profile:
    key = ProfileKey("m", "cpu", "float32", "auto", False, 1)
    memory = one_phase(token=token, margin=0.0)
    return Profile(key, "m", memory, None, capacity, (), ("q_proj",), "measured", 0.0, None)


def test_a_given_value_precedes_recorded_and_profiled_ones() -> None:
    given = replace(OPEN, engine=EngineSettings(capacity=96))
    assert choose_capacity(given, facts(), profile(512), {(ADAPTER, 50, 1)}, recorded=64) == 96


def test_a_recorded_capacity_precedes_a_profiled_one_and_the_default() -> None:
    jobs = {(ADAPTER, 50, 1)}
    assert choose_capacity(OPEN, facts(), profile(512), jobs, recorded=64) == 64
    assert choose_capacity(OPEN, facts(), profile(512), jobs) == 512
    assert choose_capacity(OPEN, facts(), None, jobs) == USUAL_CAPACITY


def test_on_a_gpu_the_usual_capacity_follows_its_memory() -> None:
    jobs = {(ADAPTER, 50, 1)}
    found = [
        choose_capacity(OPEN, facts(memory), None, jobs, on_gpu=True) for memory in (10**12, 10**6, 10**4)
    ]
    assert found[0] == 16_384
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 3
    assert choose_capacity(OPEN, facts(), profile(512), jobs, on_gpu=True) == 512
    assert choose_capacity(OPEN, facts(), None, jobs, recorded=64, on_gpu=True) == 64


def test_on_a_gpu_a_job_leaves_a_quarter_of_the_memory_to_others() -> None:
    jobs, given = {(ADAPTER, 50, 1)}, replace(OPEN, engine=EngineSettings(capacity=16_384))
    alone = Admission(facts(), given)
    least = alone.predicted([alone.demand(ADAPTER, 50)]) / OPEN.planner.memory_share
    for memory, largest in ((least / 0.75 * 1.001, True), (least / 0.75 * 0.99, False)):
        found = choose_capacity(OPEN, facts(int(memory)), None, jobs, on_gpu=True)
        assert (found == 16_384) == largest
    assert choose_capacity(OPEN, facts(), None, jobs) == USUAL_CAPACITY, "of other devices"


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_loss_of_the_last_layers_counts_by_its_part_of_the_vocabulary(tensor: int) -> None:
    """Logits, their softmax and its gradient in float32, of so many rows at once."""
    shapes = SHAPE, replace(SHAPE, vocabulary=3 * SHAPE.vocabulary)
    part = HeldPart(range(1), 0, 0, tensor=tensor)
    narrow, wide = (
        activation_bytes(
            replace(each, logit_rows=100), capacity=512, longest=50, checkpointing=False, part=part
        )
        for each in shapes
    )
    rows = replace(SHAPE, logit_rows=100).rows_at_once(tensor)
    assert wide - narrow == 2 * SHAPE.vocabulary // tensor * min(rows, 512) * 4 * 3


def test_the_longest_sample_fits() -> None:
    jobs = {(ADAPTER, 50, 1), (ADAPTER, 3001, 1)}
    assert choose_capacity(OPEN, facts(), None, jobs) == 3001
    assert choose_capacity(OPEN, facts(), None, jobs, recorded=64) == 3001


def test_halved_until_each_job_fits_into_memory() -> None:
    # Weights and adapter take 1,512 bytes; 80 % of memory may be used; a token takes 100.
    room = int((1_512 + 100 * 300) / 0.8) + 1
    assert choose_capacity(OPEN, facts(room), profile(2048, token=100.0), {(ADAPTER, 50, 1)}) == 256
    assert choose_capacity(OPEN, facts(room), profile(2048, token=100.0), {(ADAPTER, 290, 1)}) == 290
    assert (
        choose_capacity(OPEN, facts(10), None, {(ADAPTER, 50, 1)}) == LEAST_CAPACITY
    )  # admission says why not


def test_a_stored_profile_says_what_it_changes() -> None:
    first = used_from_now_on(profile(512), None)
    assert "of up to 512 tokens (2,048 before), unless they set engine.capacity" in first
    assert "1,024 tokens (512 before)" in used_from_now_on(profile(1024), profile(512))
    assert "512 tokens (as before)" in used_from_now_on(profile(512), profile(512))


def test_a_new_search_says_that_its_capacity_is_profiled(settle, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(engine, "stored_profile", lambda *_: profile(640))
    assert settle(OPEN) == (512, ())  # it resumes
    capacity, said = settle(replace(OPEN, search=replace(OPEN.search, fresh=True)))
    assert (capacity, len(said)) == (640, 1)
    assert "up to 640 tokens, by the profile" in said[0]
    given = replace(OPEN, search=replace(OPEN.search, fresh=True), engine=EngineSettings(capacity=96))
    assert settle(given) == (96, ())


class Catalogue:
    def longest(self, _: DataSpec) -> int:
        return 50


@pytest.fixture
def settle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """settle_engine for a search whose folder has a plan that recorded capacity 512 and grouped kernels."""
    monkeypatch.setattr(engine, "worker_facts", lambda *_: facts())
    monkeypatch.setattr(engine, "stored_profile", lambda *_: None)
    group = Group(("a",), 512)
    engine.write_plan(tmp_path, Plan((Replica(),), (group,), choices={"capacity": 512, "kernels": "grouped"}))
    job = JobSpec("a", ADAPTER, TrainSpec(steps=1), DataSpec.of("none"))
    shape = cast("ModelShape", SimpleNamespace(digest="m"))

    def call(settings: RunSettings) -> tuple[int | None, tuple[str, ...]]:
        found, said = engine.settle_engine(
            settings, shape, cast("DataCatalogue", Catalogue()), [job], tmp_path
        )
        return found.engine.capacity, said

    return call


def test_a_search_resumes_with_its_original_capacity(settle) -> None:  # type: ignore[no-untyped-def]
    assert settle(OPEN) == (512, ())
    fresh = replace(OPEN, search=replace(OPEN.search, fresh=True))
    assert settle(fresh) == (USUAL_CAPACITY, ())


@pytest.mark.parametrize(
    ("threads", "processes", "launched", "said"),
    [
        (None, 2, False, ""),
        (2, 1, False, ""),
        (1, 2, False, ""),
        (8, 1, False, "engine.threads=8, with 2 processor cores: "),
        (2, 2, False, "engine.threads=2 in each of 2 processes, with 2 processor cores: "),
        (2, 4, True, ""),  # each bound to two of the host's eight
        (3, 2, True, "engine.threads=3, with 2 processor cores: "),
        (2, 5, True, "engine.threads=2 in each of 5 processes, with 8 processor cores: "),
    ],
)
def test_more_threads_than_cores_are_warned_of(
    settle,  # type: ignore[no-untyped-def]
    threads: int | None,
    processes: int,
    launched: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "cores", lambda: 2)
    monkeypatch.setattr(devices, "allowed_cores", lambda: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    cluster = replace(OPEN.cluster, processes=processes, per_host=processes if launched else None)
    asked = replace(OPEN, engine=EngineSettings(threads=threads), cluster=cluster)
    whole = f"{said}threads that wait for a core make small steps many times slower." if said else ""
    assert settle(asked) == (512, (whole,) if said else ())


def test_microbatches_that_are_recorded_otherwise_are_said(
    settle,  # type: ignore[no-untyped-def]
    tmp_path: Path,
) -> None:
    """A search that began with CUDA graphs, whose microbatches are filled up, and goes on without."""
    choices = {"capacity": 512, "kernels": "grouped", "graph_tokens": "1024"}
    engine.write_plan(tmp_path, Plan((Replica(),), (Group(("a",), 512),), choices=choices))
    said = "engine.graph_tokens=0; this search was started with 1024, so rounding may differ."
    assert settle(OPEN) == (512, (said,))
    assert settle(replace(OPEN, engine=EngineSettings(graph_tokens=1024))) == (512, ())


@pytest.mark.parametrize(
    ("dtype", "cuda", "fast", "said"),
    [
        ("float16", False, True, "Use model.dtype=bfloat16."),
        ("float16", False, False, "Use model.dtype=float32."),
        ("float16", True, True, ""),
        ("bfloat16", False, True, ""),
        ("bfloat16", False, False, "Use model.dtype=float32."),
    ],
)
def test_a_warning_names_a_dtype_that_the_device_emulates(
    settle,  # type: ignore[no-untyped-def]
    dtype: Literal["float16", "bfloat16"],
    cuda: bool,
    fast: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setattr(engine, "free_memory", lambda _: 10**12)
    monkeypatch.setattr(devices, "computes_bfloat16", lambda _: fast)
    _, lines = settle(replace(OPEN, model=ModelSettings(dtype=dtype)))
    assert [line.endswith(said) for line in lines] == [True] * bool(said)


def test_a_setting_that_differs_from_the_recorded_one_is_reported(settle) -> None:  # type: ignore[no-untyped-def]
    same = replace(OPEN, engine=EngineSettings(capacity=512, kernels="grouped"))
    assert settle(same) == (512, ())
    other = replace(OPEN, engine=EngineSettings(capacity=96, kernels="reference"))
    capacity, said = settle(other)
    assert capacity == 96
    assert [line.partition(";")[0] for line in said] == ["engine.capacity=96", "engine.kernels=reference"]
    assert "started with 512" in said[0]
    assert "started with grouped" in said[1]


def test_a_search_resumes_with_its_kernels_on_a_device_of_the_same_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "check_kernels", lambda *_: None)
    engine.write_plan(tmp_path, Plan((), (), choices={"device": "cuda:0", "kernels": "recorded"}))
    before = engine.recorded_before(OPEN, tmp_path)
    for device, kernels in (("cuda", "recorded"), ("cuda:1", "recorded"), ("cpu", "auto")):
        monkeypatch.setattr(engine, "device_of", lambda _, device=device: torch.device(device))
        assert engine._same_kernels(replace(OPEN, model=ModelSettings(dtype="float32")), before) == kernels


def test_several_processes_begin_again_with_the_tiles_of_the_plan(tmp_path: Path) -> None:
    """After a loss, too, with those that the worker has."""
    engine.write_plan(tmp_path, Plan((), (), choices={"tiles": "recorded"}))
    worker = SimpleNamespace(facts=replace(facts(), chosen={"kernels": "triton", "tiles": "taken"}))
    asked: list[str] = []

    def make(_settings: RunSettings, _data: DataCatalogue, tiles: str) -> Worker:
        asked.append(tiles)
        return cast("Worker", worker)

    coordinator = engine.build_coordinator(OPEN, DataCatalogue(None), tmp_path, make_worker=make)  # type: ignore[arg-type]
    assert coordinator._renew is not None
    coordinator._renew()
    assert asked == ["recorded", "taken"]
