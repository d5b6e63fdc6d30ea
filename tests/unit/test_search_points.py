"""Values of searched keys as a person writes them, beside those in the examples of requests."""

from __future__ import annotations

import pytest

from plait.core.errors import SearchError
from plait.core.space import Choice, Dimension, Domain, Real, Space, Value, Whole
from plait.search.points import read_value, read_values

ODD = Whole(1, 9, step=2)
TENTHS = Real(0.05, 0.95, step=0.1)
SWITCH = Choice((True, False), ("true", "false"))
RATES = Choice((2e-4, 1.0), ("2e-4", "1"))


def read(domain: Domain, text: str) -> Value:
    return read_value(Dimension("key", domain), text)


@pytest.mark.parametrize(
    ("domain", "text", "value"),
    [
        (ODD, "1", 1),
        (ODD, "3", 3),
        (ODD, "9", 9),
        (TENTHS, "0.35", 0.35),
        (TENTHS, "0.95", 0.95),
        (RATES, "0.00020", 2e-4),
        (RATES, "1.0", 1.0),
        (SWITCH, "true", True),
        (SWITCH, "False", False),
    ],
)
def test_a_value_that_is_searched(domain: Domain, text: str, value: Value) -> None:
    found = read(domain, text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("domain", "text"),
    [
        (ODD, "2"),
        (ODD, "11"),
        (ODD, "-1"),
        (TENTHS, "0.4"),
        (TENTHS, "0.38"),
        (RATES, "3e-4"),
        (SWITCH, "1"),
        (SWITCH, "0.0"),
    ],
)
def test_a_value_that_is_not(domain: Domain, text: str) -> None:
    with pytest.raises(SearchError, match="must come from"):
        read(domain, text)


def test_values_from_a_file_are_read_like_overrides() -> None:
    space = Space(
        (
            Dimension("switch", SWITCH),
            Dimension("list", Choice(("[q,v]", "[q]"), ("[q,v]", "[q]"))),
            Dimension("open", Choice((None, "mean"), ("null", "mean"))),
        )
    )
    given = {"switch": False, "list": ["q", "v"], "open": None}
    assert read_values(space, given) == {"switch": False, "list": "[q,v]", "open": None}
