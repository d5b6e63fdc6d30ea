"""The process from which tests fork searches has imported what they need, or each would do so by itself."""

import sys

import pytest
from forked import Talking, end_likewise, tell_left, tell_missing
from mlflow_server import tell_whole


def test_all_that_forked_processes_need_is_imported_before() -> None:
    told = Talking(tell_missing)
    assert told.stdout.read() == "[]\n"
    assert told.wait() == 0


def test_nothing_is_left_of_the_command_that_ran_before() -> None:
    told = Talking(tell_left)
    assert told.stdout.read() == "False\n"
    assert told.wait() == 0


def test_mlflow_is_whole_when_its_server_is_imported_again() -> None:
    """Else its pages show runs without charts and files."""
    told = Talking(tell_whole)
    assert told.stdout.read() == "True\n"
    assert told.wait() == 0


@pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="a forked process no longer has its parent's exit functions"
)
def test_it_ends_without_taking_apart_what_it_imported() -> None:
    """Else Triton's bindings report at the end of a run what of theirs is left, as leaks."""
    told = Talking(end_likewise)
    assert told.stdout.read() == ""
    assert told.wait() == 0
