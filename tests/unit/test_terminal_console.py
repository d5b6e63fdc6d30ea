"""A search outlives the reader of its output."""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from plait.terminal.console import (
    OUTPUT_CLOSED,
    OUTPUT_FAILED,
    SearchConsole,
    filled,
    literal_console,
    plain,
    wide_console,
)

SEARCH = """
from plait.terminal.console import SearchConsole
console = SearchConsole()
input()
for step in range(3):
    console.print(f"step {step}")
print("the end", flush=True)
"""


@pytest.mark.parametrize("make", [literal_console, wide_console, SearchConsole])
def test_what_looks_like_markup_or_an_emoji_is_printed_as_it_is(
    make: Callable[[], Console], capsys: pytest.CaptureFixture[str]
) -> None:
    value = "[q_proj,v_proj] :boom: [/] [bold]x"
    console = make()
    plain(console, value)
    console.print(filled("title [red]", ("heading [red]",), [(value,)]))
    printed = capsys.readouterr().out
    assert printed.count(value) == 2
    assert printed.count("[red]") == 2


@pytest.mark.parametrize("make", [literal_console, wide_console, SearchConsole])
def test_a_width_of_0_is_no_reason_to_show_nothing(
    make: Callable[[], Console], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    console = make()
    console.print("a line")
    console.print(filled("", ("heading",), [("cell",)]))
    shown = capsys.readouterr().out
    assert "a line" in shown
    assert "cell" in shown


class Left(io.StringIO):
    """A pipe whose reader has ended."""

    def write(self, _: str) -> int:
        raise BrokenPipeError


def test_a_table_whose_reader_has_ended_is_left_to_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ends silently, as with any other output: rich would end it as failed."""
    monkeypatch.setattr(sys, "stdout", Left())
    with pytest.raises(BrokenPipeError):
        literal_console().print("a line")


def test_a_search_continues_when_its_output_is_closed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SEARCH],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.stderr.read() == f"{OUTPUT_CLOSED}\n"
    process.stderr.close()
    assert process.wait() == 0


def test_a_search_continues_when_its_output_is_full() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", SEARCH],
            input="\n",
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        )
    assert done.stderr == f"{OUTPUT_FAILED.format('No space left on device')}\n"
