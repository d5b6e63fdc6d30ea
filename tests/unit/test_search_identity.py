"""Identity of a search: what changes it, what does not."""

from dataclasses import replace

import pytest

from plait.config.overrides import read_request
from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.settings import (
    ClusterSettings,
    EngineSettings,
    ModelSettings,
    PlannerSettings,
    RunSettings,
    SearchSettings,
    StoppingSettings,
    TrackingSettings,
)
from plait.core.space import Space
from plait.search.identity import Identity, difference, identify

BASE = JobSpec(
    "base", AdapterSpec(rank=4), TrainSpec(lr=1e-3), DataSpec.of("reasoning_gym", task="chain_sum")
)
RUN = RunSettings()


def space(*arguments: str) -> Space:
    return read_request(arguments, {}, {}).space


def identity(
    arguments: tuple[str, ...] = ("adapter.rank=4,8",), base: JobSpec = BASE, run: RunSettings = RUN
) -> Identity:
    return identify(space(*arguments), base, run)


SAME = [
    replace(RUN, engine=EngineSettings(threads=1, capacity=64, kernels="reference", checkpointing=True)),
    replace(RUN, planner=PlannerSettings(max_jobs=2)),
    replace(RUN, cluster=ClusterSettings("other")),
    replace(RUN, tracking=TrackingSettings(experiment="other", uri="sqlite:///x.db")),
    replace(
        RUN,
        search=SearchSettings(
            name="given", trials=99, parallel=1, storage="x.db", fresh=True, max_failure_rate=0.5
        ),
    ),
]
OTHER = [
    replace(RUN, model=ModelSettings(kind="tiny")),
    replace(RUN, model=ModelSettings(dtype="float32")),
    replace(RUN, search=SearchSettings(seed=1)),
    replace(RUN, search=SearchSettings(sampler="random")),
    replace(RUN, search=SearchSettings(sampler_options={"n_startup_trials": 3})),
    replace(RUN, search=SearchSettings(direction="maximize")),
    replace(RUN, search=SearchSettings(metric="train/loss")),
    replace(RUN, search=SearchSettings(stopping=StoppingSettings(kind="median"))),
]


@pytest.mark.parametrize("run", SAME, ids=range(len(SAME)))
def test_settings_that_leave_a_search_the_same(run: RunSettings) -> None:
    assert identity(run=run).name == identity().name


@pytest.mark.parametrize("run", OTHER, ids=range(len(OTHER)))
def test_settings_that_make_another_search(run: RunSettings) -> None:
    assert identity(run=run).name != identity().name


def test_the_space_and_what_is_fixed_make_the_search() -> None:
    assert identity(("adapter.rank=4,8",)).name == identity(("adapter.rank=choice(4,8)",)).name
    assert identity(("adapter.rank=4,16",)).name != identity().name
    assert identity(base=replace(BASE, train=TrainSpec(lr=2e-3))).name != identity().name
    assert identity(base=replace(BASE, data=DataSpec.of("jsonl", path="x"))).name != identity().name


def test_the_base_value_of_a_searched_key_does_not_matter() -> None:
    assert identity(base=replace(BASE, adapter=AdapterSpec(rank=64))).name == identity().name
    both = ("adapter.rank=4,8", "data=reasoning_gym,jsonl")
    assert identity(both, replace(BASE, data=DataSpec.of("jsonl", path="x"))).name == identity(both).name


def test_the_manner_of_drawing_is_no_part_of_the_problem() -> None:
    other = identity(run=replace(RUN, search=SearchSettings(sampler="random", seed=5)))
    assert other.name != identity().name
    assert other.problem_json == identity().problem_json


def test_names_are_stable() -> None:
    """A digest that changes between releases would orphan unfinished searches."""
    assert Identity({"a": 1}, {"search.seed": 0}).name == "search-25b6fdd7d69c"


def test_a_difference_is_shown_key_by_key() -> None:
    lines = difference({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 4, "d": 5})
    assert lines == ["b: was 2, now 4", "c: was 3, now (not set)", "d: was (not set), now 5"]
