"""Layers of each stage that fit into memory: the fastest of all splits that do, found by trying all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from memory_models import one_phase

from plait.core.errors import CapacityError
from plait.core.jobs import AdapterSpec
from plait.core.plans import ReplicaShape
from plait.core.settings import ClusterSettings, EngineSettings, RunSettings
from plait.cost.profile_store import Profile, ProfileKey
from plait.cost.time import HeadTime, LayerTime, MicrobatchShape, TimeModel
from plait.engine.admission import Admission
from plait.engine.replicas import cut
from plait.engine.splits import Splits
from plait.engine.worker import ActivationShape, WorkerFacts
from plait.models.targets import LinearInfo

Split = tuple[int, ...]
KEY = ProfileKey("m", "cpu", "float32", "auto", False, 1)


def adapter(rank: int) -> AdapterSpec:
    return AdapterSpec(rank, target_modules=("up_proj",))


def model(layers: int, sizes: list[int], vocabulary: int, memory: int) -> WorkerFacts:
    """A model whose layer i has one linear of 32 × sizes[i]."""
    linears = tuple(
        LinearInfo(f"model.layers.{n}.mlp.up_proj", 32, size)
        for n, size in zip(range(layers), sizes, strict=True)
    )
    weights = 4 * sum(32 * size for size in sizes) + 4 * 2 * 32 * vocabulary
    features = sum(32 + size for size in sizes)
    shape = ActivationShape(layers, 32, 2, vocabulary, features, weights, 4, logit_rows=40, keep_up_to=64)
    return WorkerFacts(shape, linears, 512, memory)


def cut_into(facts: WorkerFacts, settings: RunSettings, split: Split, tensor: int = 1) -> WorkerFacts:
    run = replace(settings, cluster=ClusterSettings(pipeline=len(split), layer_split=split))
    held = cut(facts, run, [ReplicaShape(len(split), tensor)], facts.memory_bytes)
    return replace(facts, held=held)


def splits_of(layers: int, stages: int) -> Iterator[Split]:
    return (each for each in product(range(1, layers + 1), repeat=stages) if sum(each) == layers)


def slowest(time: TimeModel, split: Split, capacity: int) -> float:
    shape = MicrobatchShape.of([capacity])
    return max(
        time.stage(shape, layers=count, last=stage == len(split) - 1).total
        for stage, count in enumerate(split)
    )


def profile_of(token: float, labelled: float) -> Profile:
    memory = one_phase(token=token, labelled=labelled)
    return Profile(KEY, "m", memory, None, 160, (), ("up_proj",), "measured", 0.0, None)


@pytest.mark.parametrize("schedule", ["plait", "gpipe"])
def test_the_split_is_the_fastest_of_all_that_fit(schedule: str) -> None:
    """Over made-up models, times, jobs and memories; the admission of its own run weighs each split."""
    rng, changed, refused = random.Random(14), 0, 0
    for case in range(60):
        layers, stages = rng.choice((4, 6, 8)), rng.choice((2, 3, 4))
        capacity = rng.choice((64, 256))
        facts = model(layers, [rng.choice((32, 256))] * layers, rng.choice((16, 500)), 2**40)
        settings = RunSettings(engine=EngineSettings(capacity=capacity, schedule=schedule))
        profile = rng.choice((None, profile_of(rng.choice((400.0, 4e3)), rng.choice((0.0, 2e3)))))
        time = TimeModel(
            layers, {1: LayerTime(1e-3, 1e-5)}, {1: HeadTime(0.0, rng.choice((0.0, 1e-5, 6e-5)))}
        )
        jobs = [(adapter(rng.choice((2, 32))), rng.choice((20, 60)), rng.choice((1, 8))) for _ in range(2)]
        even = next(splits_of(layers, stages))  # of what is asked, whatever the facts say
        roomy = Splits.of(cut_into(facts, settings, even), settings, profile, jobs)
        needed = roomy.fullest(roomy.balanced(time))[1]
        facts = replace(facts, memory_bytes=int(needed / 0.8 * rng.uniform(0.85, 1.02)))

        def fits(split: Split) -> bool:
            admission = Admission(cut_into(facts, settings, split), settings, profile)  # noqa: B023
            try:
                return all(admission.demand(*job) for job in jobs)  # noqa: B023
            except CapacityError:
                return False

        fitting = {each: slowest(time, each, capacity) for each in splits_of(layers, stages) if fits(each)}
        found = Splits.of(cut_into(facts, settings, even), settings, profile, jobs)
        if not fitting:
            refused += 1
            with pytest.raises(CapacityError, match=rf"stage \d of {stages} needs about"):
                found.fastest(time)
            continue
        split = found.fastest(time)
        assert split in fitting, case
        assert fitting[split] == min(fitting.values()), case
        changed += split != found.balanced(time)
    assert changed >= 10
    assert refused >= 10


def test_where_layers_differ_the_chosen_split_fits() -> None:
    rng, changed = random.Random(3), 0
    for _ in range(60):
        sizes = [rng.choice((32, 64, 256)) for _ in range(8)]
        facts = model(8, sizes, 100, int(1_450_000 * rng.uniform(0.8, 1.1)))
        settings = RunSettings(engine=EngineSettings(capacity=64))
        time = TimeModel(8, {1: LayerTime(1e-3, 1e-5)})
        found = Splits.of(cut_into(facts, settings, (4, 4)), settings, None, [(adapter(4), 20, 8)])
        try:
            split = found.fastest(time)
        except CapacityError:
            continue
        Admission(cut_into(facts, settings, split), settings).demand(adapter(4), 20, 8)
        changed += split != (4, 4)
    assert changed >= 3


def test_slices_of_a_stage_need_a_part_of_its_weights() -> None:
    facts, settings = model(8, [256] * 8, 500, 10**6), RunSettings(engine=EngineSettings(capacity=64))
    job = (adapter(4), 20, 8)
    whole, halves = (
        Splits.of(cut_into(facts, settings, (4, 4), tensor), settings, None, [job]) for tensor in (1, 2)
    )
    assert halves.stages == whole.stages == 2
    assert halves.fullest((4, 4))[1] < whole.fullest((4, 4))[1]


def test_a_job_that_fits_nowhere_names_the_stage_its_bytes_and_the_remedy() -> None:
    """The layers differ: a stage at an end has those of that end."""
    sizes = [32, 64, 128, 256, 384, 512, 512, 512]
    facts, settings = model(8, sizes, 16, 1_800_000), RunSettings(engine=EngineSettings(capacity=64))
    time, job = TimeModel(8, {1: LayerTime(1e-3, 1e-5)}), (adapter(4), 20, 8)
    found = Splits.of(cut_into(facts, settings, (4, 4)), settings, None, [job])
    stage, needed = found.fullest((4, 4))
    with pytest.raises(CapacityError) as caught:
        found.fastest(time)
    error = caught.value
    assert error.value.startswith(
        f"stage {stage + 1} of 2 needs about {needed / 2**30:.2f} GiB for its 4 layers"
    )
    most = [
        max([0, *(n for n in range(1, 8) if _alone(facts, settings, n, place) <= 0.8 * 1_800_000)])
        for place in (0, 1)
    ]
    assert f"at most [{most[0]},{most[1]}] of 8 layers" in error.rule
    assert "more stages" in error.remedy
    with pytest.raises(CapacityError, match="on stage 1 of 2, with 4 layers"):  # of a split that is given
        Admission(cut_into(facts, settings, (4, 4)), settings).demand(*job)


def _alone(facts: WorkerFacts, settings: RunSettings, count: int, stage: int) -> int:
    """Bytes of one stage of two with so many layers."""
    split = (count, 8 - count) if stage == 0 else (8 - count, count)
    roomy = replace(facts, memory_bytes=2**40)
    admission = Admission(cut_into(roomy, settings, split), settings)
    demand = admission.demand(adapter(4), 20, 8)
    return admission.needed_by(admission._facts.parts[0][stage], stage, 2, [demand])
