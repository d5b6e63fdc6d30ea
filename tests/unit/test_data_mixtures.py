"""Mixtures: samples of several sources in one job, in the shares that the weights say."""

import json
from collections import Counter

import pytest
from tokenisers import byte_tokeniser

from plait.core.errors import ConfigError, DataError
from plait.core.jobs import DataSpec, TrainSpec
from plait.core.samples import RowCounts, Share
from plait.data.loading import check_data, load_data
from plait.engine.steps import DataOrder


@pytest.fixture(scope="module")
def tokeniser():
    return byte_tokeniser()


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"a{n}"}) + "\n" for n in range(20)))
    (tmp_path / "b.csv").write_text("q,r\n" + "".join(f"b{n},x\n" for n in range(10)))
    return {
        "a": {"path": str(tmp_path / "a.jsonl")},
        "b": {"path": str(tmp_path / "b.csv"), "prompt_field": "q", "completion_field": "r"},
        "task": {"task": "chain_sum", "size": 5},
    }


def load(sources, tokeniser, tmp_path, **options):
    spec = DataSpec.of("mixture", sources=sources, **options)
    check_data(spec)
    return load_data(spec, tokeniser, max_length=300, cache=tmp_path / "cache")


def test_the_samples_are_those_of_the_sources_each_split_by_itself(files, tmp_path, tokeniser):
    sources = [
        files["a"] | {"weight": 3},
        files["b"] | {"weight": 1, "size": 8},
        files["task"] | {"weight": 0.5},
    ]
    for _ in range(2):  # the second time from the cache
        data = load(sources, tokeniser, tmp_path, validation=0.25, seed=1)
        assert data.train.shares == (Share(15, 3.0), Share(6, 1.0), Share(4, 0.5))
        assert (len(data.train), len(data.validation)) == (25, 8)
        assert data.train.counts == RowCounts(rows=25)
        assert sorted([*data.train.rows, *data.validation.rows]) == list(range(33))
    texts = [tokeniser.decode(data.train[i].tokens) for i in range(25)]
    assert [text[0] for text in texts[:21]] == ["a"] * 15 + ["b"] * 6
    assert texts[15].endswith("\nx<|im_end|>")
    for kind, at in (("a", 0), ("b", 15)):
        alone = DataSpec.of("file", **{key: v for key, v in sources[at // 15].items() if key != "weight"})
        alone = DataSpec.of("file", **alone.mapping(), validation=0.25, seed=1)
        own = load_data(alone, tokeniser, max_length=300, cache=tmp_path / "cache").train
        mixed = [data.train[at + i].tokens.tolist() for i in range(len(own))]
        assert mixed == [own[i].tokens.tolist() for i in range(len(own))], kind


def test_the_digest_names_the_weights(files, tmp_path, tokeniser):
    def digest(*weights):
        sources = [files["a"] | {"weight": weights[0]}, files["b"] | {"weight": weights[1]}]
        return load(sources, tokeniser, tmp_path).digest

    assert digest(3, 1) == digest(3.0, 1)
    assert digest(3, 1) != digest(1, 1)
    assert load([files["a"], files["b"]], tokeniser, tmp_path).train.shares == ()


def test_an_adapter_sees_the_shares_that_the_weights_say(files, tmp_path, tokeniser):
    sources = [files["a"] | {"weight": 3}, files["b"] | {"weight": 1}]
    split = load(sources, tokeniser, tmp_path, validation=0).train
    order = DataOrder.over(TrainSpec(steps=50, batch_size=4), split)
    seen = [sample for step in range(1, 51) for sample in order.at(step)[0]]
    for start in range(0, len(seen), 4):
        assert sum(sample < 20 for sample in seen[start : start + 4]) == 3
    assert set(Counter(seen[: 4 * 40]).values()) == {6, 4}


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ([], ["data.sources=[]", "non-empty"]),
        ("a.jsonl", ["data.sources='a.jsonl'", "a list"]),
        (["a.jsonl"], ["data.sources[0]='a.jsonl'", "a mapping"]),
        ([{"weight": 1}], ['data.sources[0]={"weight": 1}', "id, path, task"]),
        ([{"source": "mixture", "path": "a"}], ["data.sources[0]", "id, path, task"]),
        ([{"source": "csv"}], ["data.sources[0]: data.source=csv", "Unknown data source 'csv'"]),
        ([{"path": "a", "weight": 0}], ["data.sources[0].weight=0.0", "above 0"]),
        ([{"path": "a", "weight": "x"}], ["data.sources[0].weight='x'", "a number"]),
        ([{"path": "a", "weight": 1}, {"path": "b"}], ["data.sources[1] has no weight"]),
        ([{"path": "a", "validation": 3}], ["data.sources[0].validation=3", "Set data.validation instead"]),
        ([{"path": "a", "weigth": 3}], ["unknown key data.sources[0].weigth", "data.sources[0].weight"]),
        ([{"task": "chain_sum", "generate": True}], ["unknown key data.sources[0].generate"]),
        ([{"path": 3}], ["data.sources[0].path=3", "text"]),
        ([{"path": "/data.path"}], ["data.sources[0]: data.path='/data.path': no such file"]),
        ([{"path": "a", "size": 0}], ["data.sources[0]: data.size=0"]),
        ([{"path": "a", "prompt_field": "q"}], ["data.sources[0]: data.prompt_field=q, data.compl"]),
        ([{"source": 3}], ["data.sources[0].source=3", "text"]),
        ([{"source": ["a"]}], ["data.sources[0].source=[a]", "text"]),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(sources, words):
    with pytest.raises((ConfigError, DataError)) as caught:
        check_data(DataSpec.of("mixture", sources=sources))
    for word in words:
        assert word in str(caught.value)


def test_errors_in_reading_rows_name_the_entry(files, tmp_path, tokeniser):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "bad.jsonl").write_text('{"q": 1}')
    for name, words in (("empty", r"data\.sources\[1\]: empty"), ("bad", r"data\.sources\[1\]: bad")):
        for options in ({}, {"path": files["a"]["path"], "validation_path": str(tmp_path / f"{name}.jsonl")}):
            wrong = {"path": str(tmp_path / f"{name}.jsonl")} | options
            with pytest.raises(DataError, match=words):
                load([files["a"], wrong], tokeniser, tmp_path)


def test_a_size_of_the_whole_is_refused():
    with pytest.raises(ConfigError, match=r"data\.size=3 with data=mixture\n"):
        check_data(DataSpec.of("mixture", sources=[{"path": "a"}], size=3))
