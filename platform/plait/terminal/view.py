"""The terminal's view of a running search: a live table, or plain lines where output is not a terminal."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
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
from plait.terminal.eta import Pace
from plait.terminal.table import jobs_table
from plait.terminal.text import (
    all_trained,
    best_evaluation,
    best_line,
    front_text,
    lowest_loss,
    number,
    progress_line,
    settings_line,
    status_rows,
)
from plait.tracking.leaderboard import JobRecord, Leaderboard
from plait.utils.durations import duration

REFRESH_SECONDS = 0.25  # between two drawings of the live view, at least
SHARE = 0.01  # of the time may go into drawing: the training thread draws
LINES_AROUND = 6  # of the live view around the jobs: heading, status, best and room for the prompt
EXITING = "Finishing this step, then exiting. Press Ctrl-C again to exit at once."
CLOSING = "Writing the last records to MLflow."
# Events that come for several jobs in a row: the best job is printed after the last of them.
TOGETHER = (JobEvaluated, JobGenerated, JobResult)
USUAL_KEYS = ("adapter.rank", "train.lr")  # parameters shown where none varies


class Terminal:
    """Shows a search while it runs. A context manager; the live view ends with it.

    Args:
        board: the tracker's, which handles each event first.
        console: where to write; decides between live view and plain lines.
        clock: seconds, never going back; also measures what a drawing costs.
        line_seconds: time between two progress lines, where output is not a terminal.
    """

    def __init__(
        self,
        board: Leaderboard,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
        line_seconds: float = 15.0,
    ) -> None:
        self._board = board
        self._console = console
        self._clock = clock
        self._line_seconds = line_seconds
        self._shown = clock()
        self._cost = 0.0  # seconds of the last drawing
        self._pace = Pace(board, clock)
        self._best: JobRecord | None = board.best()
        self._best_changed = False  # since the best, or the front, was printed
        self._exiting = False  # Ctrl-C was pressed
        self._trained = False  # only evaluation remains, and that was printed
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # Events refresh it, not a thread: the leaderboard must not change while it is drawn.
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exiting = False
        if self._live is not None:
            self._live.update(self._view(), refresh=True)
            self._live.stop()
            self._live = None
        self._print_best()
        if kind is None:
            self._print(CLOSING)

    def handle(self, event: Event) -> None:
        """Show what an event changed; a notice stands above the live view or among the plain lines."""
        if isinstance(event, Notice):
            self._print(event.text)
            return
        self._pace.handle(event)
        if isinstance(event, JobResult):
            self._look_for_best(event.job)
        if self._live is None:
            self._write_line(event)
        elif not isinstance(event, JobProgress):  # of all jobs first: the iteration follows them
            self._draw()

    def lose(self, job: str) -> None:
        """Stop counting a job that another process trains from here on."""
        self._pace.lose(job)

    def announce(self) -> None:
        """Answer the first Ctrl-C, straight to the descriptor: the signal's handler may run in the middle
        of a line that the console writes, whose buffer it would write again. In the live view the answer
        overwrites the last line, from which the next drawing finds its way up."""
        self._exiting = True
        live = self._live is not None
        try:
            os.write(1 if live else 2, (f"\r\x1b[2K{EXITING}" if live else f"\n{EXITING}\n").encode())
        except OSError as error:  # Ctrl-C also ends a `tee` that reads the output
            if error.errno == errno.EIO:
                leave_terminal()

    def refresh(self) -> None:
        """Draw the live view where that is due: while no job trains no event brings it about."""
        self._draw()

    @property
    def seconds_left(self) -> float | None:
        """Remaining wall-clock seconds, where they can be estimated."""
        return self._pace.seconds_left

    # ---- live ------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        """Draw the view, unless that would be too soon after the last drawing, or cost too much."""
        start = self._clock()
        if self._live is None or start - self._shown < max(REFRESH_SECONDS, self._cost / SHARE):
            return
        self._live.update(self._view(), refresh=True)
        self._shown = self._clock()
        self._cost = self._shown - start

    def _view(self) -> Group:
        rows = max(self._console.height - LINES_AROUND, 1)
        status = status_rows(self._board, self.seconds_left, self._console.width)
        lines = [Text(line, "bold", no_wrap=True, overflow="ellipsis") for line in status]
        if self._exiting:
            lines.append(Text(EXITING, "yellow", no_wrap=True, overflow="ellipsis"))
        elif best := best_line(self._board):
            lines.append(Text(best, "green", no_wrap=True, overflow="ellipsis"))
        return Group(jobs_table(self._board, rows, self._console.width), *lines)

    # ---- plain -----------------------------------------------------------------------------------------

    def _look_for_best(self, job: str) -> None:
        """Note whether a job that ended is the best so far, or on the Pareto front. Of several that end
        together only the best is printed."""
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
                shown = settings_line(self._board.jobs[event.job.name], keys)
                begins = "started" if event.step == 0 else f"resumes from step {event.step}"
                self._print(f"{event.job.name} {begins} ({event.steps} steps): {shown}")
            case JobPaused():
                self._print(f"{event.job} paused at step {event.step}: {event.reason}")
            case JobEvaluated():
                self._print(f"{event.job} step {event.step}: eval loss {number(event.loss)}")
            case JobGenerated():
                self._print(f"{event.job} step {event.step}: accuracy {event.accuracy:.1%}")
            case JobResult():
                self._print(_ended_line(event, self._board.jobs.get(event.job)))
            case GroupStep() if self._clock() - self._shown >= self._line_seconds or self._was_last(event):
                self._shown = self._clock()
                self._print(progress_line(self._board, self.seconds_left))

    def _was_last(self, step: GroupStep) -> bool:
        """Whether this was the very last step: evaluation may take long, and prints nothing meanwhile."""
        before = self._trained
        records = [self._board.jobs[job] for job in step.jobs if job in self._board.jobs]
        self._trained = all(job.step >= job.steps for job in records) and all_trained(self._board)
        return self._trained and not before

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Screen:
    """The console of one search: lines before and after its training, and the view while it trains."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._view: Terminal | None = None

    def say(self, text: str) -> None:
        """One line; above the live view while there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def watch(self, board: Leaderboard) -> Terminal:
        """The view of a search that trains from now on."""
        self._view = Terminal(board, self._console)
        return self._view

    def announce(self) -> None:
        """Answer the first Ctrl-C, inside the signal's handler."""
        if self._view is not None:
            self._view.announce()

    def summarise(self, board: Leaderboard, facts: Mapping[str, Any]) -> None:
        """What the search came to."""
        print_summary(self._console, board, facts)


def _ended_line(result: JobResult, record: JobRecord | None) -> str:
    reason = f" ({result.reason})" if result.reason and result.state != JobState.FINISHED else ""
    if result.completion_seconds is None:
        return f"{result.job} {result.state}{reason}"
    figures = [f"{result.step} steps", f"{result.tokens:,} tokens", duration(result.completion_seconds)]
    if result.eval_loss is not None:
        earlier = f" (lowest: {best_evaluation(record)})" if record and record.was_better else ""
        figures.insert(0, f"eval loss {number(result.eval_loss)}{earlier}")
    return f"{result.job} {result.state}{reason}: {', '.join(figures)}"


def print_summary(console: Console, board: Leaderboard, facts: Mapping[str, Any]) -> None:
    """Print how a search ended: the best trial with its parameters and its adapter, or the Pareto front, and
    the failed trials.

    Args:
        console: where to write.
        board: all jobs.
        facts: further lines, label to value, such as the tracking address.
    """
    best = board.best()
    lines: list[tuple[str, str]] = []
    if best is not None:
        keys = board.varying() or USUAL_KEYS
        lines += [("best", f"{best.name}, objective {number(best.objective)}")]
        lines += [("parameters", settings_line(best, keys))]
        if best.adapter:
            lines += [("adapter", best.adapter)]
        if best.was_better:
            lines += [("lowest eval loss", f"{best_evaluation(best)}; the adapter is from the last step")]
        elif best.parameters.get("train.keep") == "best":
            lines += [("lowest eval loss", f"{best_evaluation(best)}; the adapter is from this step")]
    elif front := board.front():
        lines += [("Pareto front", front_text(front))]
    else:
        lines += [("best", "none: no trial finished with an objective")]
        if lowest := lowest_loss(board):
            lines += [("lowest eval loss", f"{best_evaluation(lowest)}, {lowest.name}")]
    failed = [job for job in board.ordered() if job.state == JobState.FAILED]
    lines += [("failed", f"{job.name}: {job.reason}") for job in failed]
    lines += [(label, str(value)) for label, value in facts.items()]
    width = max(len(label) for label, _ in lines)
    for label, value in lines:
        console.print(f"{label:<{width}}  {value}", markup=False, highlight=False, soft_wrap=True)
