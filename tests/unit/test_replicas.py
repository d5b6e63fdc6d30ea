"""Replicas that differ: their capacities, what memory allows, and by what samples are dispatched."""

from __future__ import annotations

from dataclasses import replace

import pytest
from curve_worker import ADAPTER, LINEARS, SHAPE, CurveWorker
from memory_models import one_phase

from plait.core.errors import CapacityError, ConfigError, DataError, ProcessError
from plait.core.plans import ReplicaShape
from plait.core.settings import ClusterSettings, EngineSettings, RunSettings
from plait.cost.memory import MemoryObservation, MemoryShape
from plait.cost.profile_store import Profile, ProfileKey
from plait.cost.time import MicrobatchShape
from plait.data.overlong import LengthLimit
from plait.engine.admission import Admission, choose_capacity
from plait.engine.build import check_engine
from plait.engine.replicas import cut, dispatch_time, replicas_of
from plait.engine.worker import WorkerFacts

ROOM = 2**26


def facts(*memory: int) -> WorkerFacts:
    known = CurveWorker().facts
    return replace(
        known,
        memory_bytes=min(memory),
        devices=tuple(f"cpu:{number}" for number in range(len(memory))),
        held=tuple(known.whole(each) for each in memory),
    )


def run(*, capacity: int | None = 4096, **cluster: object) -> RunSettings:
    engine = EngineSettings(capacity=capacity)
    return RunSettings(engine=engine, cluster=ClusterSettings(processes=2, **cluster))  # type: ignore[arg-type]


def test_capacities_that_are_given_hold_and_the_largest_is_the_run_s() -> None:
    settings = run(capacity=None, capacities=(256, 512), speeds=(1.0, 3.0))
    assert settings.engine.capacity == 512
    found = replicas_of(replace(facts(ROOM, ROOM), capacities=(256, 512), speeds=(1.0, 3.0)), settings, None)
    assert [(each.capacity, each.speed) for each in found] == [(256, 1.0), (512, 3.0)]


def test_a_device_with_less_memory_takes_smaller_microbatches() -> None:
    alike = replicas_of(facts(ROOM, ROOM), run(), None)
    assert [each.capacity for each in alike] == [4096, 4096]
    unlike = replicas_of(facts(ROOM, 2**22), run(), None)
    assert unlike[0].capacity == 4096
    assert unlike[1].capacity is not None
    assert 128 <= unlike[1].capacity < 4096


def test_the_replica_that_is_short_of_memory_decides_who_is_admitted() -> None:
    capacities = (4096, 128)
    wide, short = (
        replace(each, capacities=capacities) for each in (facts(ROOM, ROOM), facts(ROOM, ROOM // 2))
    )
    settings = run(capacity=None, capacities=capacities)
    admission = Admission(short, settings)
    admission.take_replicas(short, replicas_of(short, settings, None))
    usual = [admission.usual]
    # Its microbatches are so small that the other one, which has more memory, needs more of what it has.
    large, small = (admission.static(usual) + admission.estimate(tokens, tokens) for tokens in (4096, 128))
    assert admission.predicted(usual) == max(large - int(0.8 * ROOM / 2), small)
    alike = Admission(wide, settings)
    alike.take_replicas(wide, replicas_of(wide, settings, None))
    assert alike.predicted(usual) == large


def test_the_fullest_stage_decides_who_is_admitted() -> None:
    """The first one keeps a microbatch for each stage that follows, the last one has the head."""
    settings = RunSettings(
        engine=EngineSettings(capacity=256), cluster=ClusterSettings(processes=2, pipeline=2)
    )
    known = replace(CurveWorker().facts, devices=("cpu + cpu",))
    known = replace(known, held=cut(known, settings, (ReplicaShape(2),), ROOM))
    (held,) = known.parts
    end = SHAPE.vocabulary * SHAPE.hidden * SHAPE.element_bytes
    assert [part.layers for part in held] == [range(1), range(1, 2)]
    admission = Admission(known, settings)
    job = admission.demand(ADAPTER, 40, samples=16)
    one = Admission(CurveWorker().facts, settings).demand(ADAPTER, 40)
    assert [job.bytes_on(part.layers) for part in held] == [one.adapter_bytes // 2] * 2
    rows = 4 * 256 * SHAPE.hidden * SHAPE.element_bytes
    first = admission.static([job], held[0]) + admission.estimate(256, 40, held[0], 2) + rows
    last = admission.static([job], held[1]) + admission.estimate(256, 40, held[1]) + rows
    assert admission.predicted([job]) == max(first, last) == first
    assert admission.estimate(256, 40, held[0], 2) == 2 * admission.estimate(256, 40, held[0])
    wide = replace(known, shape=replace(SHAPE, vocabulary=60_000, logit_rows=256))  # the head counts
    wide = replace(wide, held=cut(wide, settings, (ReplicaShape(2),), ROOM))
    assert wide.parts[0][1].weight_bytes >= 60_000 * SHAPE.hidden * SHAPE.element_bytes > 100 * end
    needs = Admission(wide, settings)
    assert needs.predicted([job]) == (
        needs.static([job], wide.parts[0][1]) + needs.estimate(256, 40, wide.parts[0][1]) + rows
    )


def deep(schedule: str = "plait") -> tuple[RunSettings, WorkerFacts]:
    """Two stages of a model, with microbatches of up to 256 tokens."""
    settings = RunSettings(
        engine=EngineSettings(capacity=256, schedule=schedule),  # type: ignore[arg-type]
        cluster=ClusterSettings(processes=2, pipeline=2),
    )
    known = replace(CurveWorker().facts, devices=("cpu + cpu",))
    return settings, replace(known, held=cut(known, settings, (ReplicaShape(2),), ROOM))


def test_stages_keep_no_more_than_the_batches_of_the_jobs_fill() -> None:
    settings, known = deep()
    (held,) = known.parts
    admission = Admission(known, settings)
    rows = 4 * 256 * SHAPE.hidden * SHAPE.element_bytes

    def kept(samples: int, jobs: int = 1) -> float:
        """Microbatches that the first stage is predicted to keep."""
        group = [admission.demand(ADAPTER, 32, samples)] * jobs
        bytes_ = admission.predicted(group) - admission.static(group, held[0]) - rows
        return bytes_ / admission.estimate(256, 32, held[0])

    assert [kept(samples) for samples in (12, 16, 99)] == [1.5, 2.0, 2.0]
    one = [admission.demand(ADAPTER, 32)]  # the stage with the head needs the most
    assert (
        admission.predicted(one)
        == admission.static(one, held[1]) + admission.estimate(256, 32, held[1]) + rows
    )
    assert kept(8, jobs=2) == 2.0  # each has a batch in flight
    mixed = [admission.demand(ADAPTER, 32, 8), admission.demand(ADAPTER, 64, 2)]  # each has its own lengths
    assert admission.predicted(mixed) == (
        admission.static(mixed, held[0]) + admission.estimate(256, 64, held[0], 1.5) + rows
    )
    usual = [admission.usual]
    full = admission.static(usual, held[0]) + rows + admission.estimate(256, 256, held[0], 2)
    assert admission.predicted(usual) == full


@pytest.mark.parametrize("schedule", ["gpipe", "mlora"])
def test_orders_that_keep_all_microbatches_get_a_capacity_for_all(schedule: str) -> None:
    settings, known = deep(schedule)
    (held,) = known.parts
    admission = Admission(known, settings)
    usual = admission.usual
    assert admission.predicted([usual]) >= admission.static([usual]) / 2 + 2 * admission.estimate(
        256, 256, held[0]
    )  # whose batches fill both stages
    open_ = replace(settings, engine=replace(settings.engine, capacity=None))
    batch = 64
    alone = Admission(known, replace(settings, engine=replace(settings.engine, capacity=2048)))
    needed = alone.predicted([alone.demand(ADAPTER, 64, batch)])
    room = replace(known, memory_bytes=int(needed / 0.8) + 1)
    room = replace(room, held=cut(room, settings, (ReplicaShape(2),), room.memory_bytes))
    assert choose_capacity(open_, room, None, {(ADAPTER, 64, batch)}) == 2048
    assert choose_capacity(open_, room, None, {(ADAPTER, 64, 2 * batch)}) < 2048  # twice as many are kept


def test_what_is_made_for_a_product_is_no_static_memory() -> None:
    dense = facts(ROOM)
    shape = replace(dense.shape, made_bytes=5000)
    made = replace(dense, shape=shape, held=(replace(dense, shape=shape).whole(ROOM),))
    before, after = (Admission(each, run()) for each in (dense, made))
    assert after.estimate(128, 64) == before.estimate(128, 64) + 5000
    usual = after.usual
    after.learn_overhead(made.shape.weight_bytes + 3 * usual.adapter_bytes, made.parts[0][0], [usual])
    assert after.static([usual]) == made.shape.weight_bytes + 3 * usual.adapter_bytes


def test_gathered_layers_are_counted_once_whatever_is_known_of_microbatches() -> None:
    """They are there while layers run: beside a profile's peaks, of whole layers, and in those of a run."""
    whole = facts(ROOM)
    sharded = replace(whole, shape=replace(whole.shape, gathered_bytes=5000), held=())
    names = tuple({each.name.rpartition(".")[2] for each in whole.linears})
    key = ProfileKey("m", "cpu", "float32", "auto", False, 1)
    fitted = one_phase(token=100.0)
    known = Profile(key, "m", fitted, None, 128, (), names, "measured", 0.0, None)
    for profile in (None, known):
        before, after = (Admission(each, run(), profile) for each in (whole, sharded))
        usual, microbatch = [before.usual], (MemoryShape.of([64]), 64)
        assert after.predicted(usual) == before.predicted(usual) + 5000
        (here,), (there,) = (each.expected(0, [microbatch], usual) for each in (after, before))
        assert here == there + 5000
    after.learn(fitted)
    assert after.predicted(usual) == before.predicted(usual)
    seen = MemoryObservation(MemoryShape.of([64]), {"forward": 900, "loss": 950, "backward": 990}, 100)
    assert seen.gathering(10).peaks == {"forward": 910, "loss": 950, "backward": 1000}


def test_memory_is_that_of_the_replicas_that_are_left() -> None:
    both, left = facts(ROOM, ROOM // 2), facts(ROOM // 2)
    settings = run()
    admission = Admission(both, settings)
    admission.take_replicas(both, replicas_of(both, settings, None))
    usual = [admission.usual]
    before = admission.predicted(usual)
    admission.take_replicas(left, replicas_of(left, settings, None))
    fresh = Admission(left, settings)
    fresh.take_replicas(left, replicas_of(left, settings, None))
    assert admission.predicted(usual) == fresh.predicted(usual) > before


def test_without_the_replica_that_takes_most_long_samples_wait_for_it() -> None:
    settings = run(capacity=None, capacities=(512, 32))
    left = replace(CurveWorker().facts, capacities=(32,))
    admission = Admission(left, settings)
    admission.take_replicas(left, replicas_of(left, settings, None))
    with pytest.raises(ProcessError, match="larger capacity is missing"):
        admission.demand(ADAPTER, 40)
    settings = run(capacity=None, capacities=(32, 32))
    with pytest.raises(CapacityError, match=r"cluster.capacities=32"):
        Admission(left, settings).demand(ADAPTER, 40)


def test_without_a_profile_the_arithmetic_of_the_model_says_what_a_sample_takes() -> None:
    time = dispatch_time(CurveWorker().facts, None)
    one, two = (time.microbatch(MicrobatchShape.of([length])) for length in (1000, 2000))
    weights = sum(each.in_features * each.out_features for each in LINEARS)
    head = SHAPE.hidden * SHAPE.vocabulary
    square = 6e-12 * SHAPE.layers * SHAPE.hidden * 1000**2
    assert one == pytest.approx(4e-12 * (1016 * weights + 1000 * head) + square)
    assert two > 2 * one - 4e-12 * 16 * weights


def test_lists_that_do_not_belong_to_the_run_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster.speeds=\[1.0\] with cluster.processes=2"):
        run(speeds=(1.0,))
    with pytest.raises(ConfigError, match=r"cluster.capacities=\[8, 8, 8\] with cluster.processes=2"):
        run(capacity=None, capacities=(8, 8, 8))
    launched = RunSettings(cluster=ClusterSettings(capacities=(8, 8)))
    with pytest.raises(ConfigError, match=r"cluster.capacities=\[8, 8\] with cluster.processes=1"):
        check_engine(launched, ())  # no launcher has said that there are two
    with pytest.raises(DataError, match=r"cluster.capacities=8 tokens.\nRaise cluster.capacities to 9 "):
        LengthLimit(64, launched.engine.capacity, key=launched.capacity_key).check_capacity(9)
    with pytest.raises(ConfigError, match=r"engine.capacity=4096 with cluster.capacities=\[256, 512\]"):
        run(capacities=(256, 512))
    with pytest.raises(ConfigError, match="a list of numbers above 0"):
        run(speeds=(1.0, 0.0))
