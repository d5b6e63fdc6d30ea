"""Sorting the leaderboard."""

import pytest

from plait.cli.results import sort_records
from plait.errors import ConfigError
from plait.tracking import JobRecord

RECORDS = [
    JobRecord("a", 0, {"train.lr": 1e-3}, "finished", objective=2.0),
    JobRecord("b", 1, {"train.lr": 1e-4}, "failed"),
    JobRecord("c", 2, {"train.lr": 1e-2}, "finished", objective=1.0),
]


@pytest.mark.parametrize(
    ("column", "names"),
    [
        ("trial", "abc"),
        ("-trial", "cba"),
        ("objective", "cab"),
        ("-objective", "acb"),
        ("train.lr", "bac"),
        ("state", "bac"),
    ],
)
def test_by_a_column(column: str, names: str) -> None:
    assert (
        "".join(
            record.name
            for record in sort_records(RECORDS, column.lstrip("-"), reverse=column.startswith("-"))
        )
        == names
    )


def test_by_a_column_that_is_not_there() -> None:
    with pytest.raises(ConfigError) as caught:
        sort_records(RECORDS, "colour")
    assert "objective" in caught.value.remedy
