"""Jobs, plans, samples, settings and errors: what they accept, keep and refuse."""

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan
from typing import Annotated, Any, get_type_hints

import numpy as np
import pytest

from plait.core import errors
from plait.core.checks import LARGEST, Rule, above, at_least, check
from plait.core.errors import ConfigError, PlaitError
from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.plans import (
    Choices,
    Group,
    Microbatch,
    OptimiserStep,
    Plan,
    Prediction,
    Replica,
    Segment,
    recorded_choices,
)
from plait.core.samples import Sample, Split
from plait.core.settings import (
    EngineSettings,
    ModelSettings,
    PlannerSettings,
    SearchSettings,
    StoppingSettings,
    TrackingSettings,
)
from plait.core.space import Space
from plait.search.samplers import check_sampler


@pytest.mark.parametrize(
    ("make", "key"),
    [
        pytest.param(lambda: AdapterSpec(alpha=0.0), "adapter.alpha", id="alpha"),
        pytest.param(lambda: AdapterSpec(target_modules=()), "adapter.target_modules", id="targets"),
        pytest.param(lambda: TrainSpec(lr=0.0), "train.lr", id="lr"),
        pytest.param(lambda: TrainSpec(lora_plus_ratio=0.0), "train.lora_plus_ratio", id="lora+"),
        pytest.param(lambda: TrainSpec(schedule="step"), "train.schedule", id="schedule"),  # type: ignore[arg-type]
        pytest.param(lambda: TrainSpec(warmup_steps=-1), "train.warmup_steps", id="warm-up"),
        pytest.param(lambda: TrainSpec(betas=(0.9, 1.0)), "train.betas", id="betas"),
        pytest.param(lambda: TrainSpec(clip_norm=0.0), "train.clip_norm", id="clip"),
        pytest.param(lambda: TrainSpec(batch_size=0), "train.batch_size", id="batch"),
        pytest.param(lambda: TrainSpec(accumulation=0), "train.accumulation", id="accumulation"),
        pytest.param(lambda: TrainSpec(steps=None, epochs=inf), "train.epochs", id="endless budget"),
        pytest.param(lambda: ModelSettings(dtype="int8"), "model.dtype", id="dtype"),
        pytest.param(lambda: EngineSettings(capacity=0), "engine.capacity", id="capacity"),
        pytest.param(lambda: PlannerSettings(memory_share=1.5), "planner.memory_share", id="memory share"),
        pytest.param(
            lambda: SearchSettings(max_failure_rate=2), "search.max_failure_rate", id="failure rate"
        ),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_key(make: Callable[[], object], key: str) -> None:
    """Beside those of test_config_edge, where choices are refused before an instance is made."""
    with pytest.raises(ConfigError, match=key):
        make()


CHECKED = (
    *(AdapterSpec, TrainSpec, ModelSettings, EngineSettings, PlannerSettings, TrackingSettings),
    *(SearchSettings, StoppingSettings),
)
NUMBERS = [
    pytest.param(kind, name, id=f"{kind.__name__}.{name}")
    for kind in CHECKED
    for name, hint in get_type_hints(kind).items()
    if hint in (int, float, int | None, float | None)
]


@pytest.mark.parametrize(("kind", "name"), NUMBERS)
def test_every_number_is_finite_and_of_a_sane_size(kind: type, name: str) -> None:
    for absurd in (nan, inf, -inf, 10**30, -(10**30)):
        with pytest.raises(ConfigError, match=f"{name}={absurd}"):
            kind(**{name: absurd})


@dataclass(frozen=True)
class Dial:
    level: Annotated[float, above(0), Rule("at most 1", lambda value: value <= 1)] = 0.5
    even: Annotated[int | None, Rule("even", lambda value: value % 2 == 0)] = None
    pair: Annotated[tuple[float, ...], at_least((0, 0))] = (1.0, 2.0)  # type: ignore[arg-type]
    free: Any = None

    def __post_init__(self) -> None:
        check(self, "dial")


def test_a_fields_rule_is_checked_and_reported_with_value_and_default() -> None:
    assert Dial(1, even=4, pair=(LARGEST, 0), free=nan_in_a_list()).even == 4
    for wrong, said in (
        ({"level": 0}, "dial.level=0\ndial.level must be above 0 and at most 1.\nThe default is 0.5."),
        ({"even": 3}, "dial.even=3\ndial.even must be even."),
        (
            {"pair": (0.0, nan)},
            "dial.pair=[0.0,nan]\ndial.pair must be at least (0, 0) and finite.\nThe default is [1.0,2.0].",
        ),
        (
            {"pair": (1, LARGEST + 1)},
            f"dial.pair=[1,{LARGEST + 1}]\ndial.pair must be at least (0, 0) and at most {LARGEST}.\n"
            "The default is [1.0,2.0].",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            Dial(**wrong)  # type: ignore[arg-type]
        assert str(caught.value) == said


def nan_in_a_list() -> object:
    """Options for another library are its own to check."""
    return {"value": nan}


def test_a_wrong_choice_lists_the_right_ones() -> None:
    with pytest.raises(ConfigError, match=r"cmaes, gp, grid, nsgaii, qmc, random, tpe"):
        check_sampler(SearchSettings(sampler="bayes"), Space(()))


def test_the_scale_is_alpha_over_rank_or_over_its_root() -> None:
    assert AdapterSpec(rank=16, alpha=8.0).scale == 0.5
    assert AdapterSpec(rank=16, alpha=8.0, rslora=True).scale == 2.0
    assert AdapterSpec(rank=7).scale == 2.0


def test_equal_data_options_are_equal_whatever_their_order() -> None:
    one, other = DataSpec.of("jsonl", path="a", size=3), DataSpec.of("jsonl", size=3, path="a")
    assert one == other
    assert hash(one) == hash(other)


def test_a_job_names_its_parameters_by_config_key() -> None:
    parameters = JobSpec("trial-0001", data=DataSpec.of("jsonl", path="train.jsonl")).parameters()
    assert parameters["adapter.rank"] == 16
    assert parameters["train.lr"] == 2e-4
    assert parameters["data.path"] == "train.jsonl"


KINDS = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, PlaitError)]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_travel_between_processes(kind: type[PlaitError]) -> None:
    again = pickle.loads(pickle.dumps(kind("value", "rule", "remedy")))
    assert type(again) is kind
    assert str(again) == "value\nrule\nremedy"


def test_a_plans_choices_come_back_from_its_json() -> None:
    schedule = (Microbatch(0, 0, (Segment("a", 1, (0, 1), (0, 0), (5, 6), 1.0),)), OptimiserStep("a", 1))
    choices: Choices = {"kernels": "grouped", "capacity": 512}
    group = Group(("a", "b"), 512, 8, Prediction(1.5, 10, 2.5))
    text = Plan((Replica(layer_split=(3, 2), pp=2),), (group,), schedule, choices).to_json()
    assert recorded_choices(text) == choices
    assert json.loads(text)["schedule"][0]["segments"][0]["lengths"] == [5, 6]
    assert recorded_choices(text.replace('"version": 1', '"version": 99')) is None


def test_a_microbatch_counts_whole_tiles() -> None:
    segment = Segment("a", 1, (0, 1), (0, 0), (5, 6), 1.0)
    batch = Microbatch(0, 0, (segment, segment))
    assert (batch.tokens, batch.padded(1), batch.padded(8), batch.padded(16)) == (22, 22, 32, 32)


def test_a_split_gives_back_its_samples() -> None:
    first = Sample(np.array([1, 2, 3], np.int32), np.array([True, False, True]))
    second = Sample(np.array([4], np.int32), np.array([True]))
    split = Split.of([first, second])
    assert len(split) == 2
    assert split[0].tokens.tolist() == [1, 2, 3]
    assert split[0].labels.tolist() == [False, False, True]  # nothing stands before the first token
    assert split.lengths.tolist() == [3, 1]
    assert split.labelled.tolist() == [1, 0]
    with pytest.raises(IndexError):
        split[2]
    assert len(Split.of([])) == 0
