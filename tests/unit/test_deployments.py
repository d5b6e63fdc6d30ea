"""Which replicas a run's processes make if that is left open: the best of all candidates."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from laboratory import random_data, random_texts
from memory_models import one_phase

from plait.core.errors import CapacityError, ConfigError
from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.plans import Choices, Plan, ReplicaShape
from plait.core.settings import ClusterSettings, EngineSettings, ModelSettings, RunSettings, SearchSettings
from plait.cost.profile_store import Profile, ProfileKey
from plait.cost.time import HeadTime, LayerTime, TimeModel
from plait.engine import deployments
from plait.engine.build import PLAN_FILE, worker_facts, write_plan
from plait.engine.catalogue import DataCatalogue
from plait.engine.deployments import Replicas, Weighing, candidates, settle_deployment, written
from plait.engine.splits import Splits, settle_split
from plait.models.load import inspect_model
from plait.search.checks import check_cut

TINY = ModelSettings(kind="tiny", dtype="float32", seed=3)
ROOM = 2**30
KEY = ProfileKey("m", "cpu", "float32", "auto", False, 1)
DATA = DataCatalogue(random_data)


def job(name: str = "job", *, longest: int = 30, batch: int = 8, shortest: int = 4) -> JobSpec:
    train = TrainSpec(steps=8, batch_size=batch)
    return JobSpec(name, AdapterSpec(4), train, random_texts(1, shortest, longest, train=40))


def profile_of(time: TimeModel | None, token: float = 100.0) -> Profile:
    memory = one_phase(token=token)
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return Profile(KEY, "m", memory, time, 160, (), every, "measured", 0.0, None)


def time_of_layers(fixed: float, token: float, square: float = 0.0, labelled: float = 0.0) -> TimeModel:
    return TimeModel(4, {1: LayerTime(fixed, token, square)}, {1: HeadTime(0.0, labelled)})


def weighing(
    cache: Path,
    profile: Profile | None,
    *jobs: JobSpec,
    processes: int = 4,
    memory: int = ROOM,
    capacity: int | None = 160,
    **cluster: Any,
) -> Weighing:
    chosen = ClusterSettings(processes=processes, deployment="auto", **cluster)
    search = SearchSettings(trials=len(jobs) or 1)
    settings = RunSettings(
        model=TINY, engine=EngineSettings(capacity=capacity), cluster=chosen, search=search
    )
    model, asked = inspect_model(TINY, cache=cache), jobs or (job(),)
    known = [replace(each, data=DataSpec.of("file", path="none")) for each in asked]  # of no test's making
    return Weighing(
        settings, model, DATA, asked, profile, memory, len(asked), lambda run: check_cut(run, model, known)
    )


def test_the_choice_is_the_best_of_all_candidates(tmp_path: Path) -> None:
    """Over made-up speeds, links, memories and lengths; every shape is weighed on its own here."""
    rng, won = random.Random(8), set()
    for case in range(40):
        processes = rng.choice((1, 2, 3, 4, 6))
        time = time_of_layers(
            10 ** rng.uniform(-5, -2), 10 ** rng.uniform(-6, -4), labelled=rng.choice((0, 1e-5))
        )
        jobs = [
            job(f"job{n}", longest=rng.choice((20, 60, 150)), batch=rng.choice((1, 4, 8)))
            for n in range(rng.choice((1, 3)))
        ]
        found = weighing(
            tmp_path,
            profile_of(time, token=rng.choice((100.0, 3e4))),
            *jobs,
            processes=processes,
            memory=rng.choice((950_000, 1_050_000, 4_000_000, ROOM)),
            link_gb_per_s=rng.choice((None, 0.01, 1.0, 1e4)),
        )
        sizes = range(1, processes + 1)
        every = [
            Replicas(ReplicaShape(p, t), processes // (t * p))
            for t in sizes
            for p in sizes
            if processes % (t * p) == 0
        ]
        every += [Replicas(ReplicaShape(), processes, sharded=True)] * (processes > 1)
        assert sorted(map(str, every)) == sorted(map(str, candidates(processes)))
        weighed = {str(each): found.weigh(each) for each in every}
        fits = [each for each in weighed.values() if each.fits]
        if not fits:
            with pytest.raises(CapacityError, match="No replicas fit"):
                found.choose()
            continue
        choice = found.choose()
        known = [each.seconds for each in fits if each.seconds is not None]
        assert choice.chosen.seconds == (min(known) if known else None), case
        assert choice.chosen.why == ""
        assert choice.chosen.bytes is not None
        assert choice.chosen.bytes <= found.settings.planner.memory_share * found.memory_bytes
        assert [bool(each.why) for each in choice.candidates].count(False) == 1
        won.add(str(choice.chosen.replicas).rpartition(" ")[0])
    assert len(won) >= 4  # whole replicas, stages, slices and a sharded base have all been chosen
    assert "sharded base" in won


def test_the_seconds_are_those_of_the_slowest_replica(tmp_path: Path) -> None:
    """Eight samples of ten tokens: four on each of two replicas, of two stages each with a ramp."""
    time = time_of_layers(0.5, 0.001)
    found = weighing(tmp_path, profile_of(time), job(shortest=10, longest=10), link_gb_per_s=1e-3)
    whole, halves = found.weigh(Replicas(ReplicaShape(1, 1), 4)), found.weigh(Replicas(ReplicaShape(2, 1), 2))
    assert whole.seconds == pytest.approx(4 * (0.5 + 20 * 0.001))
    assert halves.seconds == pytest.approx(2 * 2 * (0.5 + 40 * 0.001))  # one microbatch, twice
    sharded = found.weigh(Replicas(ReplicaShape(1, 1), 4, sharded=True))
    layer = found.model.parameters * 4 / 4  # bytes of all, over four layers
    assert sharded.seconds == pytest.approx(whole.seconds + 4 * 2 * 0.75 * layer / 1e6, rel=1e-3)
    sliced = found.weigh(Replicas(ReplicaShape(1, 4), 1))
    rows = 4 * 2 * 0.75 * 64 * 4  # sums of hidden states of 64 features
    assert sliced.seconds == pytest.approx(4 * (0.5 + 80 * (0.001 / 4 + rows / 1e6)))


def test_on_gpus_a_layer_is_gathered_while_another_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = weighing(
        tmp_path, profile_of(time_of_layers(0.5, 0.001)), job(shortest=10, longest=10), link_gb_per_s=1e-3
    )
    whole, shards = Replicas(ReplicaShape(1, 1), 4), Replicas(ReplicaShape(1, 1), 4, sharded=True)
    alone = found.weigh(whole).seconds
    monkeypatch.setattr(deployments, "on_gpu", lambda _: True)
    sharded = found.weigh(shards).seconds
    layer = 0.75 * found.model.parameters * 4 / 4 / 1e6  # seconds of gathering; fewer than a layer takes
    assert alone is not None
    assert sharded == pytest.approx(alone + 2 * layer, rel=1e-3)  # of the first layer in each pass


def test_stages_have_layers_by_the_profile_s_seconds(tmp_path: Path) -> None:
    slow_head = weighing(tmp_path, profile_of(time_of_layers(0.0, 1e-4, labelled=2e-4)), processes=2)
    settings = slow_head.weigh(Replicas(ReplicaShape(2, 1), 1)).settings
    assert settings is not None
    assert settings.cluster.layer_split == (3, 1)
    assert settings.cluster.stages == (2,)


def test_without_seconds_the_first_that_fits_is_taken_and_said(tmp_path: Path) -> None:
    for profile in (None, profile_of(None)):
        choice = weighing(tmp_path, profile, processes=2).choose()
        assert str(choice.chosen.replicas) == "⟨1,1⟩ ×2"
        assert "the first that fits" in str(choice)
        (why,) = {each.why for each in choice.candidates if each.fits and each.why}
        assert why.startswith("seconds unknown: run `plait profile")
        assert why in str(choice)


def test_a_model_too_large_for_one_process_gets_stages(tmp_path: Path) -> None:
    time = time_of_layers(0.0, 1e-4)
    roomy = weighing(tmp_path, profile_of(time)).weigh(Replicas(ReplicaShape(1, 1), 4))
    assert roomy.bytes is not None
    found = weighing(tmp_path, profile_of(time), memory=int(roomy.bytes / 0.8 * 0.9)).choose()
    first, *others = found.candidates
    assert not first.fits
    assert "one job needs about" in first.why
    assert found.chosen in others
    assert found.chosen.settings is not None
    assert found.chosen.settings.cluster.stages in ((2, 2), (4,))


def test_what_cannot_be_made_is_a_candidate_with_the_reason(tmp_path: Path) -> None:
    three = weighing(tmp_path, None, processes=3).weigh(Replicas(ReplicaShape(1, 3), 1))
    assert "must divide" in three.why.lower()
    assert (
        "set cluster.link_gb_per_s"
        in weighing(tmp_path, profile_of(time_of_layers(0, 1))).weigh(Replicas(ReplicaShape(1, 4), 1)).why
    )
    assert (
        "at least one"
        in {str(e.replicas): e for e in weighing(tmp_path, None, processes=6).choose().candidates}[
            "⟨1,6⟩ ×1"
        ].why
    )


def test_an_order_of_stages_leaves_only_stages_to_choose_from(tmp_path: Path) -> None:
    found = weighing(tmp_path, None, processes=2)
    ordered = replace(found.settings, engine=replace(found.settings.engine, schedule="gpipe"))
    found.check(ordered)
    choice = replace(found, settings=ordered).choose()
    assert str(choice.chosen.replicas) == "⟨1,2⟩ ×1"
    assert "engine.schedule=gpipe" in choice.candidates[0].why


@pytest.mark.parametrize(
    "beside", [{"pipeline": 2}, {"shard_base": True}, {"redeploy": True}, {"capacities": (64, 64)}]
)
def test_what_is_chosen_cannot_be_given(beside: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.deployment=auto"):
        ClusterSettings(processes=2, deployment="auto", **beside)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"processes": 2, "deployment": "2x1"},
            ["cluster.deployment=2x1", "in brackets", "Write cluster.deployment=[2x1]."],
        ),
        ({"processes": 2, "deployment": 2}, ["cluster.deployment=2\n", "Write cluster.deployment=[2]."]),
        ({"tensor": 2}, ["cluster.tensor=2 with cluster.processes=1", "takes 2 processes", "Use 2"]),
        ({"processes": 3, "tensor": 2}, ["cluster.tensor=2 with cluster.processes=3", "a multiple of 2"]),
        (
            {"processes": 6, "tensor": 2, "pipeline": 2},
            ["cluster.pipeline=2 and cluster.tensor=2 with cluster.processes=6", "takes 4 processes"],
        ),
        (
            {"processes": 2, "deployment": (1, "2x2")},
            ["cluster.deployment=[1,2x2] with cluster.processes=2", "need exactly 5 processes", "Use 5"],
        ),
        (
            {"processes": 3, "deployment": (1, 2), "tensor": 2},
            ["cluster.deployment=[1,2] with cluster.tensor=2", "3 stages in 2 slices"],
        ),
        (
            {"processes": 4, "deployment": ("2x2",), "shard_base": True},
            ["cluster.shard_base=true with cluster.deployment=[2x2]", "no stages and no slices"],
        ),
        (
            {"processes": 2, "tensor": 2, "shard_base": True},
            ["cluster.shard_base=true with cluster.tensor=2", "Leave one of them out"],
        ),
        (
            {"processes": 2, "redeploy": True, "shard_base": True},
            ["cluster.shard_base=true with cluster.redeploy=true, which makes stages"],
        ),
        ({"shard_base": True}, ["cluster.shard_base=true with cluster.processes=1", "cluster.processes=2"]),
    ],
)
def test_what_was_written_is_named_with_the_rule_and_the_remedy(
    given: dict[str, Any], said: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterSettings(**given).check_lists()
    for each in said:
        assert each in str(caught.value)
    written = {"deployment", "tensor", "pipeline"} - given.keys()
    assert not [key for key in written if f"cluster.{key}" in caught.value.value]


def test_more_stages_than_layers_name_what_was_written(tmp_path: Path) -> None:
    model = inspect_model(TINY, cache=tmp_path)
    for given in ({"pipeline": 5}, {"deployment": (5,)}):
        run = RunSettings(model=TINY, cluster=ClusterSettings(processes=5, **given))
        with pytest.raises(ConfigError, match=r"cluster\.\w+=\[?5\]? with a model of 4 layers"):
            check_cut(run, model, [])


@pytest.mark.parametrize("wrong", ["best", (0, 2)])
def test_another_word_for_a_deployment_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="auto or a list of the stages of each replica"):
        ClusterSettings(processes=2, deployment=wrong)


def test_a_search_resumes_with_its_own_choice_on_as_many_processes(tmp_path: Path) -> None:
    own = weighing(tmp_path, None)
    kept = replace(own.settings.cluster, deployment=(), pipeline=2, layer_split=(3, 1))
    plan = Plan((), (), choices={"processes": 4, "deployment": written(kept)})
    write_plan(tmp_path, plan)
    assert json.loads((tmp_path / PLAN_FILE).read_text())["choices"]["deployment"] == "1 2 0 4 3,1"

    def settled(settings: RunSettings) -> ClusterSettings:
        return settle_deployment(settings, own.model, DATA, own.jobs, own.check, folder=tmp_path)[0].cluster

    assert settled(own.settings) == kept
    fresh = replace(own.settings, search=replace(own.settings.search, fresh=True))
    assert settled(fresh).stages == (1,) * 4
    fewer = replace(own.settings, cluster=replace(own.settings.cluster, processes=2))
    assert settled(fewer).stages == (1, 1)


def test_candidates_are_weighed_with_the_capacity_that_the_search_resumes_with(tmp_path: Path) -> None:
    """One that was begun with other processes chooses again, and keeps its capacity."""
    own = weighing(tmp_path, None, capacity=None)
    write_plan(tmp_path, Plan((), (), choices={"processes": 8, "capacity": 96}))

    def capacities(folder: Path) -> set[int | None]:
        found = settle_deployment(own.settings, own.model, DATA, own.jobs, own.check, folder=folder)[1]
        assert found is not None
        runs = [each.settings for each in found.candidates if each.settings is not None]
        return {run.engine.capacity for run in runs}

    assert capacities(tmp_path) == {96}
    assert 96 not in capacities(tmp_path / "another")


def test_a_search_that_lost_a_process_resumes_with_as_many_as_it_was_begun_with_or_as_are_left(
    tmp_path: Path,
) -> None:
    """The plan counts those that trained last; the choice was made for all of them."""
    own = weighing(tmp_path, None, processes=4)
    kept = replace(own.settings.cluster, deployment=(), pipeline=4, layer_split=(1, 1, 1, 1))
    write_plan(tmp_path, Plan((), (), choices={"processes": 3, "deployment": written(kept)}))

    def settled(processes: int) -> ClusterSettings:
        asked = replace(own.settings, cluster=replace(own.settings.cluster, processes=processes))
        return settle_deployment(asked, own.model, DATA, own.jobs, own.check, folder=tmp_path)[0].cluster

    assert settled(3).stages == (1, 1, 1)
    assert settled(4) == kept


def test_a_search_resumes_with_the_layers_that_memory_required(tmp_path: Path) -> None:
    """As long as they fit; what is given is not changed, nor replicas of different numbers of stages."""
    model, asked = inspect_model(TINY, cache=tmp_path), {(AdapterSpec(4), 30, 16)}

    def settled(memory: int, before: Choices | None = None, **cluster: Any) -> tuple[tuple[int, ...], bool]:
        given = cluster or {"processes": 2, "pipeline": 2}
        run = RunSettings(model=TINY, engine=EngineSettings(capacity=96), cluster=ClusterSettings(**given))
        found, said = settle_split(run, model, None, asked, memory, before)
        return found.cluster.layer_split, bool(said)

    assert settled(ROOM) == ((), False)
    needed = Splits.of(
        worker_facts(
            RunSettings(
                model=TINY,
                engine=EngineSettings(capacity=96),
                cluster=ClusterSettings(processes=2, pipeline=2),
            ),
            model,
            ROOM,
        ),
        RunSettings(model=TINY, engine=EngineSettings(capacity=96)),
        None,
        asked,
    ).fullest((2, 2))[1]
    less = int(0.95 * needed / 0.8)
    assert settled(less) == ((1, 3), True)
    assert settled(ROOM, {"layer_split": "1,3"}) == ((1, 3), False)
    assert settled(less, {"layer_split": "3,1"}) == ((1, 3), True)  # no longer fits
    assert settled(ROOM, {"layer_split": "1,1,2"}) == ((), False)  # of other stages
    assert settled(less, processes=2, pipeline=2, layer_split=(2, 2)) == ((2, 2), False)
    assert settled(less, processes=5, deployment=(2, 3)) == ((), False)
