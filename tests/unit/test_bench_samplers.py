"""Samplers on published losses: the tables as they are read, and how trials to a good one are counted."""

import json

import pytest

from plait.core.errors import ConfigError, DataError
from plait.core.settings import RunSettings, SearchSettings
from plait_bench.inputs import shipped
from plait_bench.samplers import expected_draws, read_tables, replay_samplers, trials_to_good

CONTENT = {
    "models": {
        "maker/small": {
            "rates": [1e-4, 1e-3, 1e-2],
            "ranks": [4, 64],
            "losses": [[[0.90, 0.92], [0.801], []], [[0.85], [0.80], []]],
        },
        "maker/large": {"rates": [1e-4], "ranks": [1], "losses": [[[0.5]]]},
    }
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(CONTENT))
    return path


def test_tables_have_means_of_repeats_and_gaps_where_nothing_was_published(path):
    small, large = read_tables(path)
    assert (small.model, large.model) == ("maker/small", "maker/large")
    assert small.losses[1e-4, 4] == pytest.approx(0.91)
    assert (1e-2, 4) not in small.losses
    assert small.best == 0.8
    assert small.good(0.005) == {(1e-3, 4), (1e-3, 64)}
    assert small.good(0.0) == {(1e-3, 64)}
    assert small.nearest(2.9e-4, 15) == (1e-4, 4)
    assert small.nearest(3.3e-4, 17) == (1e-3, 64)
    assert small.nearest(9e-3, 64) == (1e-2, 64)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"models": {}},
        {"models": {"maker/x": {"rates": [1e-4], "ranks": [1], "losses": [[[]]]}}},
        {"models": {"maker/x": {"rates": [1e-4], "ranks": [1, 2], "losses": [[[0.5]]]}}},
        {"models": {"maker/x": {"rates": [1e-4], "losses": [[[0.5]]]}}},
    ],
)
def test_a_file_without_such_tables_is_refused(path, wrong):
    path.write_text(json.dumps(wrong))
    with pytest.raises(DataError):
        read_tables(path)
    path.write_text("## maker/x")
    with pytest.raises(DataError, match="Give its path"):
        read_tables(path)
    with pytest.raises(DataError, match="Give its path"):
        read_tables(path.with_name("none.json"))


def test_the_published_tables_agree_with_what_is_said_of_them():
    """The sweep names the best run of each of its 35 models."""
    path = shipped("sft_sweep.json")
    said = {model: content["best"] for model, content in json.loads(path.read_text())["models"].items()}
    tables = {table.model: table for table in read_tables(path)}
    assert tables.keys() == said.keys()
    assert len(tables) == 35
    for model, best in said.items():
        assert tables[model].best == pytest.approx(best, abs=5e-4)  # a repeated run counts with its mean


def test_the_grid_never_repeats_a_point_and_random_may(path):
    small, _ = read_tables(path)
    counts = [trials_to_good(small, SearchSettings(sampler="grid", seed=s, trials=6), 0.0) for s in range(24)]
    assert set(counts) == {1, 2, 3, 4, 5, 6}  # six points, one of them good
    counts = [
        trials_to_good(small, SearchSettings(sampler="random", seed=s, trials=3), 0.0) for s in range(12)
    ]
    assert set(counts) <= {1, 2, 3, 4}
    assert 4 in counts  # not found


@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "nsgaii"])
def test_every_sampler_finds_a_good_point(path, sampler):
    small, _ = read_tables(path)
    assert trials_to_good(small, SearchSettings(sampler=sampler, trials=200), 0.005) <= 200


def test_expected_draws_without_replacement():
    assert expected_draws(5, 5) == 1
    assert expected_draws(6, 1) == 3.5  # (1 + 2 + ... + 6) / 6


def test_the_report_has_samplers_and_models(path):
    options = {"path": str(path), "samplers": {"chance": {"sampler": "random"}}, "seeds": 3, "trials": 50}
    figures = {figure.name: figure for figure in replay_samplers(RunSettings(), [], options).figures}
    assert figures["maker/large"].ours == 1
    assert figures["maker/small"].ours == pytest.approx(7 / 3)
    assert figures["chance: median"].ours >= 1
    assert "2 of 6 are good; medians: chance" in figures["maker/small"].note
    with pytest.raises(ConfigError, match="seeds=0"):
        replay_samplers(RunSettings(), [], options | {"seeds": 0})
