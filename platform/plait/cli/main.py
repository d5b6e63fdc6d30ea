"""The command `plait`."""

from __future__ import annotations

import os
import select
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from plait.cli.verbs import find, verbs
from plait.core.errors import EXIT_DONE, EXIT_INTERRUPTED, FULL_ERROR, ConfigError, PlaitError, StorageError
from plait.utils.program import Ending, open_closed_streams, seldom_collected

HELP = ("-h", "--help", "help")
ALONE = (*HELP, "--version")  # options without a verb
EXIT_BROKEN_PIPE = 141  # a shell's status for a command that SIGPIPE ended
COMPLETION = ("-sc", "--shell-completion")
AGAIN_SECONDS = 0.02  # until Ctrl-C comes again where it was dropped
SHOWN_FIRST, SHOWN_LAST = 4000, 400  # characters of a longer text in an error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `plait` and return the exit status: 0 done, 2 bad input, 3 finished with failed jobs, 130
    interrupted.

    Without ``arguments``, it uses the program's own arguments, and the program ends with this call.
    """
    ending = Ending() if arguments is None else None
    if ending is not None:
        open_closed_streams()
    with _ended_by_signals(), _interrupts_kept(), seldom_collected():
        status = _main(list(sys.argv[1:] if arguments is None else arguments))
    if ending is not None:
        ending.leave(status)
    return status


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Within the context, SIGTERM and SIGHUP end the program like Ctrl-C; a search that trains first saves
    its state (``plait.search.run.Interrupts``). Signals ignored by nohup stay ignored."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Within the context, Ctrl-C comes again a moment later where Python drops it, because a callback was
    running in which nothing can be raised: SQLAlchemy has many."""
    before = sys.unraisablehook

    def keep(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            again = (threading.main_thread().ident, signal.SIGINT)
            threading.Timer(AGAIN_SECONDS, signal.pthread_kill, again).start()
        else:
            before(dropped)

    sys.unraisablehook = keep
    try:
        yield
    finally:
        sys.unraisablehook = before


def _main(given: list[str]) -> int:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal must not end a search
    try:
        try:
            status = _dispatch(given)
        except SystemExit:  # of a parser that has printed its help
            print(end="", flush=True)
            raise
        print(end="", flush=True)  # here a full disk is still noticed
        return status
    except PlaitError as error:
        return report(error)
    except KeyboardInterrupt as error:
        # Ctrl-C also ends a `tee` that reads the output, and may come a second time.
        with suppress(OSError, KeyboardInterrupt):
            print(_interrupted(given, str(error)), file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not _reader_left():
            raise
        return EXIT_BROKEN_PIPE
    except (OSError, RecursionError, UnicodeError, RuntimeError) as error:
        return report(refusal(error))


def refusal(error: Exception) -> PlaitError:
    """An error of the system or a library as a PlaitError.

    Raises:
        Exception: ``error`` itself, if it is a fault in the program.
    """
    where = f"{FULL_ERROR}=1 shows where."
    if isinstance(error, FileNotFoundError) and error.filename is None and _without_folder():
        return StorageError(
            "the working directory is gone",
            "Paths of a command are relative to it, but it was deleted or moved.",
            "Change to a folder that exists; `cd .` is enough where it was made again.",
        )
    if isinstance(error, OSError) and _output_fails():
        rule = "What a command prints must be written."
        return StorageError(f"the output: {error.strerror}", rule, "Free some space, or print elsewhere.")
    if isinstance(error, OSError) and error.strerror:
        named = f"{error.filename}: " if error.filename is not None else ""
        return StorageError(f"{named}{error.strerror}", "A file could not be read or written.", where)
    if isinstance(error, RecursionError):
        return ConfigError("an input is nested too deeply", "No file or value needs this many levels.", where)
    if isinstance(error, UnicodeError):
        return ConfigError(str(error), "Text must be valid in its encoding.", where)
    if "home directory" in str(error):
        remedy = "Set HOME, or PLAIT_CACHE and PLAIT_KERNELS_CACHE."
        return StorageError(str(error), "Plait's caches are kept in it.", remedy)
    raise error


def _output_fails() -> bool:
    """Whether the output cannot be written: then what was printed is still in its buffer."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _without_folder() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _interrupted(given: Sequence[str], name: str) -> str:
    """The last line; ``name``: of a search that can be resumed."""
    if not name and given[:1] not in (["sweep"], ["train"], ["resume"]):
        return "Interrupted."
    from plait.core.settings import TrackingSettings
    from plait.utils.addresses import redact

    named = [word for word in given[1:] if "=" not in word and not word.startswith("-")]
    if given[0] == "resume" and named:
        return f"Interrupted. `{redact(shlex.join(('plait', *given)))}` resumes it."
    if not name:
        return "Interrupted before training began: start the same command again."
    usual = f"tracking.root={TrackingSettings().root}"
    root = [word for word in given if word.startswith("tracking.root=") and word != usual]
    return f"Interrupted. `{shlex.join(('plait', 'resume', name, *root))}` resumes it."


def _reader_left() -> bool:
    """Whether the output is a pipe whose reader has ended, as `head` does; if so, the output is discarded."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)
    left = any(event & select.POLLERR for _, event in poll.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return left


def _dispatch(given: list[str]) -> int:
    if not given or given[0] in HELP:
        print(overview())
        return EXIT_DONE
    if given[0] == "--version":
        from plait.core.version import __version__

        print(f"plait {__version__}")
        return EXIT_DONE
    if given[0] in COMPLETION:
        from plait.cli.app import complete

        return complete(given, {verb.name: verb.hydra for verb in verbs().values()})
    verb = find(given[0])
    if text := verb.help_for(given[1:]):
        print(text, end="")
        return EXIT_DONE
    return verb.load()(given[1:])


def overview() -> str:
    """The text of `plait --help`."""
    known = verbs().values()
    width = max(len(verb.name) for verb in known)
    lines = [f"  plait {verb.name:<{width}}  {verb.describe()}" for verb in known]
    return "\n".join(
        (
            "Plait trains many LoRA adapters at once over one frozen base model.",
            "",
            *lines,
            "",
            "`plait sweep` without arguments runs a real search on this machine. `plait sweep --help` lists",
            "every setting, `plait VERB --help` the arguments of a verb.",
        )
    )


def report(error: PlaitError) -> int:
    """Print an error as value, rule and remedy, without passwords in addresses, and return the exit status.

    With HYDRA_FULL_ERROR=1, its traceback comes first.
    """
    from plait.utils.addresses import redact  # only now, because most commands report no error

    if os.environ.get(FULL_ERROR) == "1":
        traceback.print_exception(error)
    with suppress(OSError):  # the status says it, too
        print(f"plait: {redact(_short(error.value))}", file=sys.stderr)
        for part in (error.rule, error.remedy):
            for line in redact(_short(part)).splitlines():
                print(f"  {line}", file=sys.stderr)
    return error.exit_status


def _short(text: str) -> str:
    """A text of an error; if too long for a screen, without its middle."""
    left_out = len(text) - SHOWN_FIRST - SHOWN_LAST
    if left_out <= 0:
        return text
    return f"{text[:SHOWN_FIRST]} … ({left_out:,} characters) … {text[-SHOWN_LAST:]}"
