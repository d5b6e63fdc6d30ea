"""The edge: YAML and overrides become frozen dataclasses, and what is wrong is named."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from plait.config.build import RUN_GROUPS, flat_params, is_whole, job_of, plain, settings_of
from plait.config.fields import build, convert
from plait.core.errors import ConfigError
from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.settings import RunSettings, SearchSettings
from plait.utils.paths import conf_dir

JOB: dict[str, Any] = {"adapter": {}, "train": {}, "data": {"source": "reasoning_gym", "task": "chain_sum"}}


def read_conf(group: str, name: str) -> dict[str, Any]:
    content = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{name}.yaml"))
    assert isinstance(content, dict)
    for default in content.pop("defaults", []):  # a group within the group
        if default != "_self_":
            ((inner, chosen),) = default.items()
            content[inner] = read_conf(f"{group}/{inner}", chosen)
    return {str(key): value for key, value in content.items()}


@pytest.mark.parametrize(
    ("group", "name"),
    [("engine", "default"), ("planner", "default"), ("tracking", "local"), ("search", "default")],
)
def test_a_groups_file_has_every_key_with_its_default(group: str, name: str) -> None:
    content = read_conf(group, name)
    hint = get_type_hints(RunSettings)[group]
    assert content.keys() == {field.name for field in fields(hint)}
    default_params = content.pop("default_params", {})
    assert getattr(settings_of({group: content}), group) == hint()
    assert all(isinstance(value, str) for value in default_params.values())


def test_epochs_alone_need_no_word_about_steps() -> None:
    def train(**changed: float) -> TrainSpec:
        return build(TrainSpec, read_conf("train", "default") | changed, "train")

    assert (train().steps, train().epochs) == (40, None)
    assert (train(epochs=2).steps, train(epochs=2).epochs) == (None, 2.0)
    assert (train(steps=7).steps, train(steps=7).epochs) == (7, None)


@pytest.mark.parametrize(
    ("group", "name", "spec"), [("adapter", "lora", AdapterSpec), ("train", "default", TrainSpec)]
)
def test_a_job_groups_file_has_every_key_with_its_default(group: str, name: str, spec: type) -> None:
    content = read_conf(group, name)
    assert content.keys() == {field.name for field in fields(spec)}
    assert build(spec, content, group) == spec()


def test_a_job_from_plain_mappings() -> None:
    job = job_of(
        "trial-0003", JOB | {"adapter": {"rank": 3, "target_modules": ["q_proj"]}, "train": {"lr": 1}}
    )
    assert job == JobSpec(
        "trial-0003",
        AdapterSpec(rank=3, target_modules=("q_proj",)),
        TrainSpec(lr=1.0),
        DataSpec.of("reasoning_gym", task="chain_sum"),
    )
    assert isinstance(job.train.lr, float)
    assert hash(job) == hash(
        job_of(
            "trial-0003", JOB | {"adapter": {"target_modules": ["q_proj"], "rank": 3}, "train": {"lr": 1.0}}
        )
    )


def test_settings_from_plain_mappings() -> None:
    settings = settings_of({"search": {"params": {"adapter": {"rank": "choice(1,2)"}, "train.lr": 1e-3}}})
    assert settings.search.params == {"adapter.rank": "choice(1,2)", "train.lr": "0.001"}
    assert settings_of({"cluster": {"kind": "simulated", "nodes": 2}}).cluster.options == {"nodes": 2}
    assert settings_of({"tracking": {"root": "there"}}).tracking.root == Path("there")


def read_all(config: dict[str, Any]) -> None:
    settings_of(config)
    job_of("x", JOB | config)


def wrong(config: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_all(config)
    return caught.value


@pytest.mark.parametrize(
    ("config", "found", "said"),
    [
        ({"adapter": {"rnak": 8}}, "adapter.rnak", "Did you mean adapter.rank"),
        ({"adapter": {"rank": "abc"}}, "adapter.rank='abc'", "whole number. Write it in digits, such as 8."),
        ({"adapter": {"rank": 1.5}}, "adapter.rank=1.5", "whole number"),
        ({"adapter": {"rank": True}}, "adapter.rank=true", "whole number"),
        ({"adapter": {"rank": None}}, "adapter.rank=null", "whole number"),
        ({"adapter": {"rank": 0}}, "adapter.rank=0", "at least 1"),
        ({"adapter": {"rslora": 1}}, "adapter.rslora=1", "true or false"),
        ({"adapter": {"dropout": 1.0}}, "adapter.dropout=1.0", "[0, 1)"),
        ({"adapter": {"target_modules": 3}}, "adapter.target_modules=3", "text or a list"),
        ({"adapter": {"target_modules": ["a", 3]}}, "adapter.target_modules[1]=3", "text"),
        ({"search": {"direction": [None, "minimize"]}}, "search.direction[0]=null", "text"),
        ({"train": {"betas": [0.9]}}, "train.betas", "a list of 2"),
        ({"train": {"schedule": "cubic"}}, "train.schedule='cubic'", "constant, cosine, linear"),
        ({"train": {"lr": "fast"}}, "train.lr='fast'", "a number. Write it in digits, such as 0.5 or 1e-4."),
        ({"train": {"steps": 3, "epochs": 2}}, "train.steps=3, train.epochs=2", "Only one"),
        ({"train": {"seed": -1}}, "train.seed=-1", "between 0 and"),
        ({"data": {"source": "???"}}, "data.source is not set", "needs a value"),
        ({"data": {"source": "jsonl", "path": "???"}}, "data.path is not set", "needs a value"),
        ({"model": {"kind": "foo"}}, "model.kind='foo'", "gguf, hf, smollm2, tiny"),
        ({"model": {"revision": 123}}, "model.revision=123", "text"),
        ({"search": {"trials": 0}}, "search.trials=0", "at least 1"),
        ({"search": {"direction": "up"}}, "search.direction='up'", "maximize, minimize"),
        ({"search": 3}, "search=3", "a group of keys"),
        (
            {"search": {"stopping": "asha"}},
            "search.stopping='asha'",
            "Did you mean search.stopping.kind=asha? ",
        ),
        ({"planer": {}}, "planer", "Did you mean planner"),
        ({"mode": "play"}, "mode='play'", "bench, data, plan, profile, simulate, train"),
        (
            {"tracking": {"root": "s3://a/b"}},
            "tracking.root='s3://a/b'",
            "neither empty nor an address",
        ),
        ({"tracking": {"root": ""}}, "tracking.root=''", "neither empty"),
        ({"tracking": {"flush_seconds": -1}}, "tracking.flush_seconds=-1", "at least"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_errors_name_the_wrong_value_and_the_rule(config: dict[str, Any], found: str, said: str) -> None:
    error = wrong(config)
    assert found in error.value
    assert said in f"{error.rule} {error.remedy}"


@pytest.mark.parametrize(
    "config", [{"train": {"betas": [0.9, 0.99, 0.999]}}, {"adapter": {"target_modules": [["q", "k"], ["v"]]}}]
)
def test_a_list_where_a_list_is_right_is_not_answered_with_several_values(config: dict[str, Any]) -> None:
    assert "several" not in wrong(config).remedy


def test_an_error_lists_the_right_keys() -> None:
    error = wrong({"adapter": {"rnak": 8}})
    assert all(f"adapter.{field.name}" in error.remedy for field in fields(AdapterSpec))


@given(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(),
        st.lists(st.integers()),
    )
)
def test_a_value_passes_unchanged_or_not_at_all(value: object) -> None:
    """Only a whole number for a float changes its type: it becomes the nearest float."""
    for hint in (int, float, str, bool, int | None, float | None, Literal["a", "b"]):
        try:
            made = convert(hint, value, "key")
        except ConfigError:
            continue
        if type(made) is float and type(value) is int:
            assert made == float(value)
        else:
            assert made == value
            assert type(made) is type(value)


@dataclass(frozen=True)
class Figures:
    name: str
    value: float = 0.0


def test_a_field_without_default_must_be_given() -> None:
    with pytest.raises(ConfigError, match="it has no name"):
        build(Figures, {"value": 1}, "it")
    assert build(Figures, {"name": "n"}, "it") == Figures("n")


def test_flat_params_keep_what_an_override_would_say() -> None:
    params = {
        "adapter": {"rank": "choice(1,2)", "rslora": True},
        "train.steps": None,
        "adapter.target_modules": ["a", "b"],
    }
    assert flat_params(params) == {
        "adapter.rank": "choice(1,2)",
        "adapter.rslora": "true",
        "train.steps": "null",
        "adapter.target_modules": "[a,b]",
    }


def test_interpolations_are_resolved_and_a_broken_one_is_named() -> None:
    config = OmegaConf.create(
        {"hydra": {"job": {"num": 3}}, "train": {"seed": "${hydra.job.num}"}, "mode": "train"}
    )
    assert plain(config) == {"train": {"seed": 3}, "mode": "train"}
    with pytest.raises(ConfigError, match="nowhere"):
        plain(OmegaConf.create({"train": {"seed": "${nowhere}"}}))


@pytest.mark.parametrize(
    ("key", "whole"),
    [
        ("adapter.rank", True),
        ("train.batch_size", True),
        ("train.steps", True),
        ("train.lr", False),
        ("train.epochs", False),
        ("adapter.alpha", False),
        ("data.size", False),
        ("nothing", False),
    ],
)
def test_keys_that_take_whole_numbers_are_known(key: str, whole: bool) -> None:
    assert is_whole(key) is whole


def test_every_group_of_a_run_is_known() -> None:
    assert RUN_GROUPS == ("model", "engine", "planner", "cluster", "tracking", "search")
    assert SearchSettings() == RunSettings().search
