"""Traces of lengths: files, assumed mixtures, and the bad input that they refuse."""

import json
from pathlib import Path

import pytest

from plait.core.errors import DataError
from plait_bench.lengths import LengthGenerator
from plait_bench.pipelines import global_batches, in_batches, mixed_lengths, read_trace


def test_a_mixture_repeats_and_differs_by_job() -> None:
    generators = {
        "short": LengthGenerator("lognormal", 100, 0.3, 4096),
        "long": LengthGenerator("gamma", 1000, 0.3, 1200),
    }
    first = mixed_lengths(generators, 400, seed=1, job="a")
    assert first == mixed_lengths(generators, 400, seed=1, job="a")
    assert first != mixed_lengths(generators, 400, seed=1, job="b")
    assert first != mixed_lengths(generators, 400, seed=2, job="a")
    assert max(first) <= 1200
    assert 0.4 < sum(length > 400 for length in first) / 400 < 0.6


def test_batches_leave_an_incomplete_rest_out() -> None:
    assert in_batches([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4]]


def test_global_batches_number_samples_on() -> None:
    batches = global_batches({"a": [[3, 5], [2]]})["a"]
    assert [batch.samples for batch in batches] == [(0, 1), (2,)]
    assert [batch.step for batch in batches] == [0, 1]
    assert batches[0].loss_weight == 1 / 8


def test_a_trace_is_read_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"jobs": {"a": [[3, 5], [2]]}}))
    assert read_trace(path) == {"a": [[3, 5], [2]]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"jobs": [1]}',
        '{"jobs": {"a": [["x"]]}}',
        '{"jobs": {"a": [[0]]}}',
        '{"jobs": {"a": [[]]}}',
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"trace\.json"):
        read_trace(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.json"):
        read_trace(tmp_path / "none.json")
