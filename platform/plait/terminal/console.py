"""Consoles: one for a search, which survives the loss of its output, and those for tables. All print text as
it is: a value such as [q_proj] or :boom: would be markup or an emoji to rich."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import IO, Any, TextIO, cast

from rich.console import Console
from rich.table import Table

LOG_WIDTH = 140  # columns if output is not a terminal
USUAL_WIDTH = 80  # where the width is said to be 0 (COLUMNS=0), in which nothing can be shown
OUTPUT_CLOSED = "The output was closed. The search continues without it."
OUTPUT_FAILED = "The output cannot be written ({}). The search continues without it."


def leave_terminal() -> None:
    """Stop writing to a closed terminal, because each attempt would be an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)


class _LiteralConsole(Console):
    """A console that leaves it to the command what to do if the reader of a pipe has ended."""

    def on_broken_pipe(self) -> None:
        """Pass on the error that rich is handling; by itself it would end the program as failed."""
        raise


def literal_console(width: int | None = None) -> Console:
    """A console on the standard output.

    Args:
        width: in characters; None: the terminal's, or 80.
    """
    console = _LiteralConsole(width=width, markup=False, emoji=False)
    console.width = console.width or USUAL_WIDTH
    return console


def wide_console(width: int = LOG_WIDTH) -> Console:
    """A console for tables, because a table cut to 80 columns cannot be read in a log."""
    console = literal_console()
    return console if console.is_terminal else literal_console(width)


def plain(console: Console, text: str) -> None:
    """Print a line literally, without markup."""
    console.print(text, markup=False, highlight=False)


def filled(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str] = ()
) -> Table:
    """A table with its rows; columns in ``left`` contain words, the others figures."""
    table = Table(title=title)
    for heading in headings:
        words = heading in left
        table.add_column(
            heading, justify="left" if words else "right", overflow="fold" if words else "ellipsis"
        )
    for row in rows:
        table.add_row(*row)
    return table


class SearchConsole(Console):
    """A console whose search continues when its output fails: neither a killed tee in `plait sweep | tee log`
    nor a full disk must end days of training."""

    def __init__(self) -> None:
        self._output = _Output(sys.stdout)
        # Lines of text in a notebook, too: rich would make a page element of each line.
        output = cast("IO[str]", self._output)
        super().__init__(file=output, force_jupyter=False, markup=False, emoji=False)
        if not self.width:
            self.width = USUAL_WIDTH

    def on_broken_pipe(self) -> None:
        """Stop writing, and report it once on standard error."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        reason = self._output.failure
        with suppress(OSError):
            os.write(2, f"{OUTPUT_FAILED.format(reason) if reason else OUTPUT_CLOSED}\n".encode())


class _Output:
    """A stream that turns every failure into a broken pipe, the only one that rich's console passes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise self._broken(error) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise self._broken(error) from error

    def _broken(self, error: OSError) -> BrokenPipeError:
        self.failure = "" if isinstance(error, BrokenPipeError) else error.strerror or str(error)
        return BrokenPipeError()
