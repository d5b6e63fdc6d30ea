"""Override syntax as a search space: Hydra's grammar, Hydra's own meaning."""

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from hypothesis import assume, given
from hypothesis import strategies as st
from studies import study_of

from plait.config.overrides import is_sweep, read_request
from plait.core.errors import ConfigError, PlaitError, SearchError
from plait.core.settings import SearchSettings
from plait.core.space import Choice, Dimension, Real, Space, Whole
from plait.search.samplers import SAMPLERS, Sampler, check_sampler, of_optuna

DEFAULTS = {"adapter.rank": "choice(4,8)", "train.lr": "tag(log,interval(1e-4,1e-3))"}


def space_of(*arguments: str) -> Space:
    return read_request(arguments, {}, DEFAULTS).space


def domain_of(argument: str) -> Choice | Whole | Real:
    (dimension,) = space_of(argument).dimensions
    return dimension.domain


@pytest.mark.parametrize(
    ("argument", "domain"),
    [
        ("adapter.rank=4,8", Choice((4, 8), ("4", "8"))),
        ("adapter.rank=choice(4,8)", Choice((4, 8), ("4", "8"))),
        ("train.schedule=linear,'co sine'", Choice(("linear", "co sine"), ("linear", "'co sine'"))),
        ("adapter.alpha=null,8", Choice((None, 8), ("null", "8"))),
        ("adapter.target_modules=[q],[q,v]", Choice(("[q]", "[q,v]"), ("[q]", "[q,v]"))),
        ("data=reasoning_gym,jsonl", Choice(("reasoning_gym", "jsonl"), ("reasoning_gym", "jsonl"))),
        ("adapter.rank=range(4,8)", Whole(4, 7)),
        ("adapter.rank=range(4,20,4)", Whole(4, 16, 4)),
        ("adapter.rank=range(4,17,4)", Whole(4, 16, 4)),
        ("adapter.rank=range(10,1,-3)", Whole(4, 10, 3)),
        ("train.weight_decay=range(0,0.3,0.1)", Real(0.0, 0.2, 0.1)),
        ("train.weight_decay=range(0.1,0.35,0.1)", Real(0.1, 0.3, 0.1)),
        ("adapter.rank=tag(log,range(1,9))", Whole(1, 8, log=True)),
        ("train.lr=interval(1e-5,1e-3)", Real(1e-5, 1e-3)),
        ("train.lr=tag(log,interval(1e-5,1e-3))", Real(1e-5, 1e-3, log=True)),
        ("adapter.rank=interval(4,32)", Whole(4, 32)),
        ("adapter.rank=tag(log,interval(4,32))", Whole(4, 32, log=True)),
        ("train.steps=interval(4,32)", Whole(4, 32)),
        ("train.lora_plus_ratio=interval(1,16)", Real(1.0, 16.0)),
        ("data.size=int(interval(10,20))", Whole(10, 20)),
    ],
)
def test_overrides_become_domains(argument: str, domain: Choice | Whole | Real) -> None:
    assert domain_of(argument) == domain


@given(st.integers(-20, 20), st.integers(-20, 20), st.integers(-7, 7))
def test_a_range_holds_what_hydras_range_holds(start: int, stop: int, step: int) -> None:
    values = list(range(start, stop, step)) if step else []
    text = f"range({start},{stop},{step})"
    if not values:
        with pytest.raises((SearchError, HydraException)):
            domain_of(f"train.steps={text}")
        return
    domain = domain_of(f"train.steps={text}")
    assert isinstance(domain, Whole)
    assert list(range(domain.low, domain.high + 1, domain.step)) == sorted(values)


@given(st.integers(-50, 50), st.integers(1, 40), st.integers(1, 30))
def test_a_range_of_floats_never_holds_its_stop(start: int, length: int, step: int) -> None:
    """In tenths, that floats cannot hold: Hydra's own iterator lets some stops in by rounding."""
    text = f"train.weight_decay=range({start / 10},{(start + length) / 10},{step / 10})"
    expected = [tenths / 10 for tenths in range(start, start + length, step)]
    domain = domain_of(text)
    assert domain.count is not None
    assert [domain.at(place) for place in range(domain.count)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "params", "keys", "fixed"),
    [
        ((), {}, ["adapter.rank", "train.lr"], []),
        (("train.steps=3",), {}, ["adapter.rank", "train.lr"], ["train.steps=3"]),
        (("train.lr=3e-4",), {}, ["adapter.rank"], ["train.lr=3e-4"]),
        (("train.steps=3,4",), {}, ["train.steps"], []),
        ((), {"train.steps": "choice(3,4)"}, ["train.steps"], []),
        (("adapter.rank=2",), {"train.steps": "choice(3,4)"}, ["train.steps"], ["adapter.rank=2"]),
        (("train.steps=5,6",), {"train.steps": "choice(3,4)"}, ["train.steps"], []),
        (
            ("train.steps=5",),
            {"train.steps": "3,4", "adapter.rank": "1,2"},
            ["adapter.rank"],
            ["train.steps=5"],
        ),
        ((), {"train.steps": "3", "adapter.rank": "1,2"}, ["adapter.rank"], ["train.steps=3"]),
    ],
)
def test_the_command_line_precedes_params_and_the_default_space(
    arguments: tuple[str, ...], params: dict[str, str], keys: list[str], fixed: list[str]
) -> None:
    request = read_request(arguments, params, DEFAULTS)
    assert [dimension.name for dimension in request.space.dimensions] == keys
    assert list(request.fixed) == fixed


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["adapter.rank=4,8", "adapter.rank=2"], ["train.lr"]),
        (["adapter.rank=2", "adapter.rank=4,8"], ["adapter.rank"]),
        (["adapter.rank=4,8", "train.steps=5,6", "adapter.rank=16,32"], ["train.steps", "adapter.rank"]),
    ],
)
def test_of_a_key_given_twice_the_last_counts(arguments: list[str], keys: list[str]) -> None:
    found = space_of(*arguments)
    assert [each.name for each in found.dimensions] == keys
    if keys[-1] == "adapter.rank":
        assert found.dimensions[-1] == space_of(arguments[-1]).dimensions[0]


def test_the_command_line_overrides_the_file() -> None:
    request = read_request(["train.steps=5,6"], {"train.steps": "choice(3,4)"}, DEFAULTS)
    assert request.space.dimensions[0].domain == Choice((5, 6), ("5", "6"))


@pytest.mark.parametrize(
    "arguments", [["adapter.rank=4", "train.lr=1e-3"], ["train.lr=1", "+adapter.rank=4"]]
)
def test_a_sweep_without_searched_keys_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SearchError, match="nothing to search"):
        read_request(arguments, {}, DEFAULTS)


@pytest.mark.parametrize(
    "key",
    ["model", "model.dtype", "engine.capacity", "planner.max_jobs", "cluster", "tracking.uri", "search.seed"],
)
def test_keys_of_the_run_cannot_be_swept(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        space_of(f"{key}=1,2")
    assert "applies to the whole run" in caught.value.rule
    assert "one sweep for each" in caught.value.remedy
    assert "brackets" not in caught.value.remedy


@pytest.mark.parametrize("key", ["cluster.deployment", "cluster.layer_split"])
def test_a_list_of_the_run_without_brackets_is_refused_with_them(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        space_of(f"{key}=1,2")
    assert f"in brackets: {key}=[…]" in caught.value.remedy


@pytest.mark.parametrize("key", ["mode", "description", "foo.bar"])
def test_other_keys_are_not_swept(key: str) -> None:
    with pytest.raises(ConfigError, match="Only keys of adapter, train, data"):
        space_of(f"{key}=1,2")


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("adapter.rank=range(4,4)", "is empty"),
        ("train.lr=interval(1e-3,1e-5)", "lower end must not be greater than"),
        ("train.lr=tag(log,interval(0,1))", "greater than 0"),
        ("train.lr=tag(log,choice(1,2))", "intervals and ranges can have"),
        ("train.lr=tag(square,interval(1,2))", "only tag is log"),
        ("train.steps=tag(log,range(1,9,2))", "step of 1"),
        ("adapter.rank=4,4", "given only once"),
        ("adapter.rank=choice(choice(4,8),16)", "holds single values"),
        ("train.lr=1e-4,range(1,3)", "holds single values"),
    ],
)
def test_a_domain_that_makes_no_sense(argument: str, said: str) -> None:
    with pytest.raises(SearchError, match=said):
        space_of(argument)


def test_params_in_a_file_that_cannot_be_read() -> None:
    with pytest.raises(SearchError, match=r"search\.params"):
        read_request([], {"adapter.rank": "choice(1,"}, {})


@given(
    st.lists(
        st.one_of(
            st.booleans(),
            st.integers(),
            st.floats(allow_nan=False, allow_infinity=False),
            st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12),
        ),
        min_size=2,
        max_size=5,
    )
)
def test_a_choice_comes_back_as_it_was_written(values: list[bool | int | float | str]) -> None:
    """Whatever is chosen, the override that sets it gives the same value again."""

    def written(value: bool | int | float | str) -> str:
        if isinstance(value, str):
            return QuotedString(value, Quote.single).with_quotes()
        return str(value).lower() if isinstance(value, bool) else repr(value)

    keyed = {(type(value), value) for value in values}
    assume(len(keyed) == len(values))
    (dimension,) = space_of(f"data.option=choice({','.join(map(written, values))})").dimensions
    assert isinstance(dimension.domain, Choice)
    for value, stored in zip(values, dimension.domain.values, strict=True):
        override = OverridesParser.create().parse_override(dimension.override(stored))
        assert override.value() == value
        assert type(override.value()) is type(value)


def test_prefixes_survive() -> None:
    (dimension,) = space_of("+data.extra=1,2").dimensions
    assert dimension == Dimension("data.extra", Choice((1, 2), ("1", "2")), "+")
    assert dimension.override(2) == "+data.extra=2"
    (forced,) = space_of("++data.extra=1,2").dimensions
    assert forced.override(1) == "++data.extra=1"


def test_a_value_that_the_space_does_not_have() -> None:
    (dimension,) = space_of("adapter.rank=1,2").dimensions
    with pytest.raises(SearchError, match="must come from"):
        dimension.override(3)
    with pytest.raises(SearchError, match="must come from"):
        dimension.override(True)  # equal to 1, and yet another value


def test_probes_hold_every_choice_and_both_ends() -> None:
    space = space_of("adapter.rank=1,2,3", "train.lr=interval(1e-5,1e-3)", "train.steps=range(2,9,3)")
    probes = list(space.probes())
    assert {probe["adapter.rank"] for probe in probes} == {1, 2, 3}
    assert {probe["train.lr"] for probe in probes} == {1e-5, 1e-3}
    assert {probe["train.steps"] for probe in probes} == {2, 8}
    assert len(probes) == 3
    assert list(Space().probes()) == []


@pytest.mark.parametrize(
    ("argument", "sweeps"),
    [
        ("a=1", False),
        ("a=1,2", True),
        ("a=[1,2]", False),
        ("a=interval(0,1)", True),
        ("~a", False),
        ("--cfg", False),
    ],
)
def test_overrides_that_sweep_are_recognised(argument: str, sweeps: bool) -> None:
    assert is_sweep(argument) is sweeps


# ---- samplers and spaces ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "arguments", "said"),
    [
        ("grid", ["train.lr=interval(1e-5,1e-3)"], "a finite number of values"),
        ("cmaes", ["adapter.rank=1,2", "train.lr=interval(1e-5,1e-3)"], "cannot learn from choices"),
        ("cmaes", ["train.lr=interval(1e-5,1e-3)"], "at least 2"),
        ("qmc", ["adapter.rank=1,2"], "cannot learn from choices"),
    ],
)
def test_a_sampler_that_cannot_do_the_space(sampler: str, arguments: list[str], said: str) -> None:
    with pytest.raises(SearchError) as caught:
        check_sampler(SearchSettings(sampler=sampler), space_of(*arguments))
    assert f"search.sampler={sampler}" in caught.value.value
    assert said in caught.value.rule


@pytest.mark.parametrize("sampler", ["tpe", "random", "gp", "nsgaii"])
def test_samplers_that_can_do_any_space(sampler: str) -> None:
    search = SearchSettings(sampler=sampler)
    space = space_of("adapter.rank=1,2", "train.lr=interval(1e-5,1e-3)")
    check_sampler(search, space)
    trial = study_of(space, search).ask()
    assert trial is not None
    assert trial.values["adapter.rank"] in (1, 2)
    rate = trial.values["train.lr"]
    assert isinstance(rate, float)
    assert 1e-5 <= rate <= 1e-3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sampler": "tpee"}, "Did you mean tpe"),
        ({"sampler": "bayes"}, "cmaes, gp, grid, nsgaii, qmc, random, tpe"),
        ({"sampler": "cmaes", "metric": ("eval/loss", "train.steps")}, "gp, grid, nsgaii, qmc, random, tpe"),
        ({"sampler": "cmaes", "constraints": {"train.steps": "<= 2"}}, "gp, grid, nsgaii, qmc, random, tpe"),
        ({"sampler": "random", "prior": "before"}, "cmaes, gp, tpe"),
    ],
)
def test_an_unsuitable_sampler_is_refused_with_the_suitable_ones(given: dict[str, Any], said: str) -> None:
    with pytest.raises(PlaitError, match=said):
        check_sampler(
            SearchSettings(**given), space_of("train.steps=interval(2,9)", "train.lr=interval(1,2)")
        )


def test_a_sampler_from_outside_says_what_it_can_do() -> None:
    SAMPLERS.add("mine", Sampler(of_optuna("RandomSampler"), choices=False))
    try:
        check_sampler(SearchSettings(sampler="mine"), space_of("train.steps=interval(2,9)"))
        with pytest.raises(SearchError, match="mine sampler cannot learn from choices"):
            check_sampler(SearchSettings(sampler="mine"), space_of("train.steps=2,9"))
    finally:
        SAMPLERS.remove("mine")


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("adapter.rank=interval(4,32)", "interval(4,32)"),
        ("adapter.rank=tag(log,interval(4,32))", "tag(log,interval(4,32))"),
        ("adapter.rank=range(4,20,4)", "range(4,20,4)"),
        ("train.lr=interval(0.5,1.5)", "interval(0.5,1.5)"),
        ("train.weight_decay=range(0.1,0.4,0.1)", "range(0.1,0.4,0.1)"),
        ("adapter.rank=4,8", "choice(4,8)"),
    ],
)
def test_a_domain_is_written_as_it_was_typed(argument: str, text: str) -> None:
    assert str(domain_of(argument)) == text
    key = argument.partition("=")[0]
    assert domain_of(f"{key}={text}") == domain_of(argument)


def test_the_grid_counts_every_point() -> None:
    space = space_of("adapter.rank=1,2,3", "train.steps=range(2,9,3)", "train.weight_decay=range(0,0.3,0.1)")
    assert space.size == 3 * 3 * 3
