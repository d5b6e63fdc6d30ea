"""The terminal's view of a running search: a live table, or plain lines if output is not a terminal.

A seam: loaded only if a search trains. It is drawn between training steps, so the table is laid out here and
not by rich, which takes several times as long.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import (
    Event,
    GroupStep,
    JobAdmitted,
    JobEvaluated,
    JobGenerated,
    JobPaused,
    JobProgress,
    Notice,
)
from plait.terminal.console import leave_terminal
from plait.terminal.progress import share_done, steps_left
from plait.terminal.text import (
    MOST_PROCESSES,
    all_trained,
    best_evaluation,
    best_line,
    front_text,
    lowest_loss,
    nearest_infeasible,
    number,
    processes_line,
    progress_line,
    setting,
    settings_line,
    shown_first,
    silence_text,
    status_rows,
)
from plait.tracking.leaderboard import USUAL_KEYS, JobRecord, Leaderboard
from plait.tracking.processes import ProcessRow
from plait.utils.counts import counted
from plait.utils.durations import duration

REFRESH_SECONDS = 0.25  # least seconds between two drawings of the live view
SHARE = 0.01  # share of the time that may be spent on drawing, in the training thread
LINE_SECONDS = 15.0  # between two lines of progress if output is not a terminal
LINES_AROUND = 6  # lines of the live view around the jobs: heading, status, best and room for the prompt
EXITING = "Finishing this step{}, then exiting. Ctrl-C again exits at once."  # fits 80 columns
CLOSING = "Writing the last records to MLflow."
# Events that come for several jobs in a row: the best job is printed after the last of them.
TOGETHER = (JobEvaluated, JobGenerated, JobResult)
STYLES = {
    JobState.QUEUED: "dim",
    JobState.RUNNING: "cyan",
    JobState.PAUSED: "blue",
    JobState.ORPHANED: "blue",
    JobState.FINISHED: "green",
    JobState.PRUNED: "yellow",
    JobState.STOPPED: "yellow",
    JobState.INFEASIBLE: "yellow",
    JobState.FAILED: "red",
}
MOST_PARAMETERS = 4  # columns of parameters; the leaderboard shows all of them
BEFORE_RATE = 2  # parameters that come before the rate if not all of them fit
WIDEST = 20  # characters of a parameter's value or name
DOING = 14  # characters, for the same reason
STATE = 10  # characters, so that the columns do not move
GAP = "  "
HEADING = Style(bold=True)
DECAY = 0.99  # of an iteration's weight with each that follows it


class Terminal:
    """Shows a search while it runs. A context manager; the live view ends with it.

    ``board`` handles each event first; ``console`` decides between live view and plain lines. ``processes``
    has a row for each of several.
    """

    def __init__(
        self,
        board: Leaderboard,
        console: Console,
        *,
        processes: Callable[[], Sequence[ProcessRow]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes = processes
        self._silent: set[int] = set()  # processes of which that was said
        self._board = board
        self._console = console
        self._clock = clock
        self._shown = clock()
        self._cost = 0.0  # seconds of the last drawing
        self._pace = Pace(board, clock)
        self._best: JobRecord | None = board.best()
        self._best_changed = False  # since the best, or the front, was printed
        self._exiting = False  # Ctrl-C was pressed
        self._trained = False  # only evaluation remains, and that was printed
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if not self._console.is_terminal:
            self._shown = -math.inf  # a line after the first iteration
        else:
            # Events refresh it, not a thread: the leaderboard must not change while it is drawn.
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._exiting = False
        if self._live is not None:
            self._live.update(self._view(), refresh=True)
            self._live.stop()
            self._live = None
        self._print_best()
        if kind is None:
            self._print(CLOSING)

    def handle(self, event: Event) -> None:
        """Show what an event changed; a notice appears above the live view or among the plain lines."""
        if isinstance(event, Notice):
            self._print(event.text)
            return
        self._pace.handle(event)
        if isinstance(event, JobResult):
            self._look_for_best(event.job)
        if self._live is None:
            self._write_line(event)
        elif not isinstance(event, JobProgress):  # first come all jobs' events, then the iteration's
            self._draw()

    def lose(self, job: str) -> None:
        """Stop counting a job that another process trains from now on."""
        self._pace.lose(job)

    def announce(self) -> None:
        """Answer the first Ctrl-C by writing directly to the descriptor: the signal handler may run while the
        console writes a line, whose buffer would then be written again. In the live view, the answer
        overwrites the last line, from which the next drawing moves up."""
        self._exiting = True
        live, text = self._live is not None, self._exiting_text()
        try:
            os.write(1 if live else 2, (f"\r\x1b[2K{text}" if live else f"\n{text}\n").encode())
        except OSError as error:  # Ctrl-C also ends a `tee` that reads the output
            if error.errno == errno.EIO:
                leave_terminal()

    def _exiting_text(self) -> str:
        """The answer to Ctrl-C, with the time of a step if that is known."""
        seconds = self._pace.step_seconds
        known = "" if seconds is None else f" (about {duration(max(seconds, 1.0))})"
        return EXITING.format(known)

    def refresh(self) -> None:
        """Draw the live view if that is due, or say which process is silent: while no job trains, and
        while processes are waited for, no event brings it about."""
        if self._live is None:
            silent = {row.state.replica: row for row in self._processes() if row.silent}
            for replica in silent.keys() - self._silent:
                self._print(silence_text(silent[replica]))
            self._silent = set(silent)
        self._draw()

    @property
    def seconds_left(self) -> float | None:
        """Remaining wall-clock seconds, if they can be estimated."""
        return self._pace.seconds_left

    # ---- live ------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        """Draw the view, unless it is too soon after the last drawing, or would cost too much."""
        start = self._clock()
        if self._live is None or start - self._shown < max(REFRESH_SECONDS, self._cost / SHARE):
            return
        self._live.update(self._view(), refresh=True)
        self._shown = self._clock()
        self._cost = self._shown - start

    def _view(self) -> Group:
        processes = self._processes()
        around = LINES_AROUND + (min(len(processes), MOST_PROCESSES + 1) + 1 if processes else 0)
        rows = max(self._console.height - around, 1)
        status = status_rows(self._board, self.seconds_left, self._console.width, self._pace.share_done)
        lines = [Text(line, "bold", no_wrap=True, overflow="ellipsis") for line in status]
        if self._exiting:
            lines.append(Text(self._exiting_text(), "yellow", no_wrap=True, overflow="ellipsis"))
        elif best := best_line(self._board):
            lines.append(Text(best, "green", no_wrap=True, overflow="ellipsis"))
        below = [processes_table(processes, self._console.width)] if processes else []
        return Group(jobs_table(self._board, rows, self._console.width), *below, *lines)

    # ---- plain -----------------------------------------------------------------------------------------

    def _look_for_best(self, job: str) -> None:
        """Note whether a job that ended is the best so far, or on the Pareto front. If several end together,
        only the best is printed."""
        best = self._board.best()
        found = best is not None and best is not self._best and best.name == job
        found = found or any(record.name == job for record in self._board.front())
        self._best_changed = self._best_changed or (found and self._live is None)
        self._best = best

    def _print_best(self) -> None:
        if self._best_changed:
            self._best_changed = False
            self._print(best_line(self._board))

    def _write_line(self, event: Event) -> None:
        if not isinstance(event, TOGETHER):
            self._print_best()
        match event:
            case JobAdmitted():
                keys = self._board.varying() or USUAL_KEYS
                record = self._board.jobs[event.job.name]
                shown = settings_line(record, keys)
                shown += f" (outside the search space: {record.outside})" if record.outside else ""
                begins = "started" if event.step == 0 else f"resumes from step {event.step}"
                self._print(f"{event.job.name} {begins} ({counted(event.steps, 'step')}): {shown}")
            case JobPaused():
                self._print(f"{event.job} paused at step {event.step}: {event.reason}")
            case JobEvaluated():
                self._print(f"{event.job} step {event.step}: eval loss {number(event.loss)}")
            case JobGenerated():
                self._print(f"{event.job} step {event.step}: accuracy {event.accuracy:.1%}")
            case JobResult():
                self._print(_ended_line(event, self._board.jobs.get(event.job)))
            case GroupStep() if self._clock() - self._shown >= LINE_SECONDS or self._was_last(event):
                self._shown = self._clock()
                self._print(progress_line(self._board, self.seconds_left, self._pace.share_done))
                if line := processes_line(self._processes()):
                    self._print(line)

    def _was_last(self, step: GroupStep) -> bool:
        """Whether this was the last step of all; the evaluation that follows may take long and prints
        nothing."""
        before = self._trained
        records = [self._board.jobs[job] for job in step.jobs if job in self._board.jobs]
        self._trained = all(job.step >= job.steps for job in records) and all_trained(self._board)
        return self._trained and not before

    def _print(self, text: str) -> None:
        _print(self._console, text)


class Screen:
    """The console of one search: lines before and after its training, and the view while it trains."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._view: Terminal | None = None

    def say(self, text: str) -> None:
        """One line; above the live view while there is one."""
        _print(self._console, text)

    def watch(self, board: Leaderboard, processes: Callable[[], Sequence[ProcessRow]] = tuple) -> Terminal:
        """The view of a search that trains from now on."""
        self._view = Terminal(board, self._console, processes=processes)
        return self._view

    def announce(self) -> None:
        """Answer the first Ctrl-C, in the signal handler."""
        if self._view is not None:
            self._view.announce()

    def summarise(self, board: Leaderboard, facts: Mapping[str, Any]) -> None:
        """Show the result of the search."""
        print_summary(self._console, board, facts)


def _ended_line(result: JobResult, record: JobRecord | None) -> str:
    reason = f" ({result.reason})" if result.reason and result.state != JobState.FINISHED else ""
    if result.completion_seconds is None:
        return f"{result.job} {result.state}{reason}"
    figures = [counted(result.step, "step"), counted(result.tokens, "token")]
    figures += [f"{duration(result.completion_seconds)} from start to end"]
    figures += [f"{duration(result.device_seconds)} of the device"]
    if result.eval_loss is not None:
        earlier = f" (lowest: {best_evaluation(record)})" if record and record.was_better else ""
        figures.insert(0, f"eval loss {number(result.eval_loss)}{earlier}")
    return f"{result.job} {result.state}{reason}: {', '.join(figures)}"


def print_summary(console: Console, board: Leaderboard, facts: Mapping[str, Any]) -> None:
    """Print how a search ended: the best trial with its parameters and its adapter, or the Pareto front, and
    the failed trials; then further facts by label.
    """
    best = board.best()
    lines: list[tuple[str, str]] = []
    if best is not None:
        keys = board.varying() or USUAL_KEYS
        lines += [("best", f"{best.name}, objective {number(best.objective)}")]
        lines += [("parameters", settings_line(best, keys))]
        if best.adapter:
            lines += [("adapter", best.adapter)]
        if best.keeps_most_accurate and best.accuracy is not None:
            lines += [("accuracy", f"{best.accuracy:.1%}; the adapter is from its most accurate evaluation")]
        elif best.was_better:
            lines += [("lowest eval loss", f"{best_evaluation(best)}; the adapter is from the last step")]
        elif best.parameters.get("train.keep") == "best":
            lines += [("lowest eval loss", f"{best_evaluation(best)}; the adapter is from this step")]
    elif front := board.front():
        lines += [("Pareto front", front_text(front))]
    elif infeasible := nearest_infeasible(board):
        lines += [("best", "none: no finished trial keeps every constraint")]
        lines += [("infeasible", f"{infeasible.name}, objective {number(infeasible.objective)}")]
        lines += [("reason", infeasible.reason)]
    else:
        lines += [("best", "none: no trial finished with an objective")]
        if lowest := lowest_loss(board):
            lines += [("lowest eval loss", f"{best_evaluation(lowest)}, {lowest.name}")]
    failed = [job for job in board.ordered() if job.state == JobState.FAILED]
    lines += [("failed", f"{job.name}: {job.reason}") for job in failed]
    lines += [(label, str(value)) for label, value in facts.items()]
    width = max(len(label) for label, _ in lines)
    for label, value in lines:
        _print(console, f"{label:<{width}}  {value}")


def _print(console: Console, text: str) -> None:
    """Print a text literally, whatever it holds; the terminal wraps it."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cells: Sequence[str]
    right: bool = True
    least: int = 0  # characters

    @property
    def width(self) -> int:
        return max(self.least, *map(cell_len, (self.title, *self.cells)))

    def fill(self, text: str, width: int) -> str:
        space = " " * (width - cell_len(text))
        return space + text if self.right else text + space


def jobs_table(board: Leaderboard, rows: int, width: int) -> Segments:
    """A table of at most ``rows`` jobs, running ones first. The last line counts the others; parameters that
    do not fit are not shown."""
    records = shown_first(board.jobs.values())
    shown = records if len(records) <= rows else records[: max(rows - 1, 1)]
    columns = _columns(board, shown, width)
    out = _segments(columns, [STYLES[record.state] for record in shown])
    if len(shown) < len(records):
        states = Counter(record.state for record in records[len(shown) :])
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        more = f"… {len(records) - len(shown)} more"
        out += [Segment(f"{more:<{columns[0].width}}{GAP}"), Segment(counts, Style(dim=True)), Segment.line()]
    return Segments(out)


def _segments(columns: Sequence[_Column], styles: Sequence[str]) -> list[Segment]:
    """A heading and rows; ``styles`` are those of the second cell of each row."""
    pairs = [(column, column.width) for column in columns]
    out = [Segment(GAP.join(each.fill(each.title, wide) for each, wide in pairs), HEADING), Segment.line()]
    for at, style in enumerate(styles):
        name, state, *others = (each.fill(each.cells[at], wide) for each, wide in pairs)
        out += [Segment(name + GAP), Segment(state, Style.parse(style))]
        out += [Segment(GAP + GAP.join(others)), Segment.line()]
    return out


def processes_table(rows: Sequence[ProcessRow], width: int) -> Segments:
    """At most ``MOST_PROCESSES`` processes in the order given, with what they do and what they have done so
    far; columns that do not fit are not shown."""
    shown = rows[:MOST_PROCESSES]
    columns = [
        _Column("process", [str(row.state.replica) for row in shown]),
        _Column("doing", [row.doing for row in shown], right=False, least=DOING),
        _Column("busy", [duration(row.totals.busy_seconds) for row in shown]),
        _Column("waited", [duration(row.totals.waited_seconds) for row in shown]),
        _Column("tokens", [f"{row.totals.tokens:,}" for row in shown]),
        _Column("device", [row.state.device for row in shown], right=False),
        _Column("host", [f"{row.state.host}, pid {row.state.pid}" for row in shown], right=False),
    ]
    while sum(column.width + len(GAP) for column in columns) - len(GAP) > width and columns[2:]:
        columns.pop()
    out = _segments(columns, ["red" if row.silent else "cyan" if row.state.doing else "dim" for row in shown])
    if len(rows) > len(shown):
        out += [Segment(f"… {len(rows) - len(shown)} more"), Segment.line()]
    return Segments(out)


def _columns(board: Leaderboard, shown: Sequence[JobRecord], width: int) -> list[_Column]:
    """The columns that are always shown, then the rate and the parameters as far as there is room."""
    always = [
        _Column("job", [each.name for each in shown], right=False),
        _Column("state", [each.state for each in shown], right=False, least=STATE),
        _Column("step", [f"{each.step}/{each.steps}" if each.steps else "" for each in shown]),
        _Column("loss", [number(each.loss) for each in shown]),
        _Column("eval loss", [number(each.eval_loss) for each in shown]),
    ]
    rate = _Column("tokens/s", [_rate(each) for each in shown])
    keys = board.varying()[:MOST_PARAMETERS]
    parameters = [
        _Column(_short(key.split(".", 1)[-1]), [_value(each, key) for each in shown]) for key in keys
    ]
    room = width - sum(each.width + len(GAP) for each in always) + len(GAP)
    fits: list[_Column] = []
    for column in (*parameters[:BEFORE_RATE], rate, *parameters[BEFORE_RATE:]):
        if column.width + len(GAP) <= room:
            room -= column.width + len(GAP)
            fits.append(column)
    return always + [each for each in (rate, *parameters) if any(each is one for one in fits)]


def _rate(record: JobRecord) -> str:
    return f"{record.tokens_per_s:,.0f}" if record.live and record.tokens_per_s is not None else ""


def _value(record: JobRecord, key: str) -> str:
    return _short(setting(record.parameters[key])) if key in record.parameters else ""


def _short(text: str) -> str:
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


class Pace:
    """Recent seconds for one optimiser step of one job; time in which all jobs were paused is not counted.

    The search's remaining time is estimated from it and the jobs' remaining steps: crude after the first
    iteration, better with each. ``board`` handles each event first.

    Attributes:
        step_seconds: seconds of the last iteration; None before there is one.
    """

    def __init__(self, board: Leaderboard, clock: Callable[[], float]) -> None:
        self._board = board
        self._clock = clock
        self._training: set[str] = set()  # in this process; the board also has those of others
        self._last: float | None = None  # end of the last iteration; None if no job has trained since
        self._iterations = 0
        self._interrupted = False
        self.step_seconds: float | None = None
        self._seconds = self._steps = 0.0
        self._wanted, self._share = 0, 0.0  # trials, and the share of them that was said to be done

    def handle(self, event: Event) -> None:
        """Learn from an event."""
        if isinstance(event, JobAdmitted):
            self._last = self._last if self._training else None
            self._training.add(event.job.name)
        elif isinstance(event, (JobPaused, JobResult)):
            self.lose(event.job)
            self._interrupted |= isinstance(event, JobResult) and event.state == JobState.PAUSED
        elif isinstance(event, GroupStep):
            now = self._clock()
            seconds = event.seconds if self._last is None else now - self._last
            if self._iterations == 1:  # the first one also warms up kernels and caches
                self._seconds = self._steps = 0.0
            self.step_seconds = seconds
            self._seconds = DECAY * self._seconds + seconds
            self._steps = DECAY * self._steps + len(event.jobs)
            self._iterations += 1
            self._last = now

    def lose(self, job: str) -> None:
        """Stop counting a job: it no longer trains here."""
        self._training.discard(job)

    @property
    def seconds_left(self) -> float | None:
        """Wall-clock seconds that the whole search still needs; None before they can be estimated."""
        if not self._iterations or self._interrupted:
            return None
        left = steps_left(list(self._board.jobs.values()), self._board.trials)
        return None if left is None else left * self._seconds / self._steps

    @property
    def share_done(self) -> float:
        """Share of the search's training that is done. It never falls, although the expected work may grow;
        only further trials make it fall."""
        wanted = max(self._board.trials, len(self._board.jobs))
        before = self._share if wanted == self._wanted else 0.0
        self._wanted, self._share = wanted, max(before, share_done(self._board))
        return self._share
