"""Limits of a container, read from its control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.engine.devices import allowed_cores, free_under_limit


def _group(root: Path, **files: str) -> Path:
    for name, text in files.items():
        (root / name.replace("_", ".", 1)).write_text(text)
    return root


def test_what_is_left_of_the_limit_with_the_pages_that_can_be_given_back(tmp_path: Path) -> None:
    root = _group(
        tmp_path, memory_max="1000\n", memory_current="700\n", memory_stat="anon 500\ninactive_file 150\n"
    )
    assert free_under_limit(root) == 450


@pytest.mark.parametrize("limit", ["max\n", "nonsense"])
def test_no_limit(tmp_path: Path, limit: str) -> None:
    assert free_under_limit(_group(tmp_path, memory_max=limit, memory_current="7", memory_stat="")) is None
    assert free_under_limit(tmp_path / "none") is None


def test_never_less_than_nothing(tmp_path: Path) -> None:
    assert (
        free_under_limit(_group(tmp_path, memory_max="10", memory_current="20", memory_stat="anon 20\n")) == 0
    )


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("250000 100000", 2), ("50000 100000", 1), ("x", None)]
)
def test_cores(tmp_path: Path, text: str, cores: int | None) -> None:
    assert allowed_cores(_group(tmp_path, cpu_max=text)) == cores
