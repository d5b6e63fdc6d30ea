"""What the terminal shows of a search, as text and tables: pure functions of the board."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from plait.durations import duration
from plait.tracking.board import PARKED, WAITING, Board, JobRecord
from plait.tracking.names import FAILED, FINISHED, PRUNED, RUNNING

STYLES = {RUNNING: "cyan", PARKED: "blue", FINISHED: "green", PRUNED: "yellow", FAILED: "red", WAITING: "dim"}
CUT_SHORT = "cut short"
PRIORITY = "train.priority"
MOST_PARAMETERS = 4  # columns of parameters; the leaderboard shows them all
MOST_ON_FRONT = 8
MOST_RUNGS = 2  # that are named in the line on the whole
ORDER = {RUNNING: 0, PARKED: 1, WAITING: 3}  # what has ended stands between


def number(value: float | None) -> str:
    """A loss or an objective; nothing where there is none."""
    return "" if value is None else f"{value:.4f}"


def best_evaluation(record: JobRecord) -> str:
    """The lowest validation loss of a job, and where it was: ``3.7849 at step 20``."""
    return f"{number(record.best_eval_loss)} at step {record.best_eval_step}"


def setting(value: Any) -> str:
    """A parameter's value, short."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return ",".join(setting(item) for item in value)
    return str(value)


def settings_line(record: JobRecord, keys: Sequence[str]) -> str:
    """The job's values of the keys: ``adapter.rank=8 train.lr=0.0002``. The usual priority goes without
    saying."""
    said = [key for key in keys if key in record.parameters]
    said = [key for key in said if key != PRIORITY or record.parameters[key]]
    return " ".join(f"{key}={setting(record.parameters[key])}" for key in said)


def share_done(board: Board) -> float:
    """Share of the search's training that is done, in [0, 1]: every trial counts the same."""
    total = max(board.trials, len(board.jobs), 1)
    done = sum(
        1.0 if job.ended else job.step / job.steps if job.steps else 0.0 for job in board.jobs.values()
    )
    return min(done / total, 1.0)


def status_line(board: Board, left: float | None) -> str:
    """One line about the whole search.

    Args:
        board: all jobs.
        left: seconds that remain, if they can be told.
    """
    total = max(board.trials, len(board.jobs))
    ended, running = sum(job.ended for job in board.jobs.values()), board.count(RUNNING)
    parts = [f"{100 * share_done(board):.0f} % done", f"{ended} of {total} ended, {running} running"]
    parts += [f"{board.count(state)} {state}" for state in (PARKED, PRUNED, FAILED) if board.count(state)]
    if cut := sum(state_text(board, job) == CUT_SHORT for job in board.jobs.values()):
        parts.append(f"{cut} {CUT_SHORT}")
    parts += rungs_waited_for(board)[:MOST_RUNGS]
    if board.group is not None and board.group.seconds > 0:
        parts.append(f"{board.group.tokens / board.group.seconds:,.0f} tokens/s")
    if left is not None:
        parts.append(f"about {duration(left)} left")
    return " · ".join(parts)


def state_text(board: Board, record: JobRecord) -> str:
    """A job's state in words; where it waits at a rung, at which; where it had begun to train and waits for
    another process to go on with it, that it was cut short."""
    if record.state == WAITING and record.step > 0:
        return CUT_SHORT
    waits = board.ladder is not None and record.state == PARKED
    if waits and board.ladder is not None and record.step in board.ladder(record.trial).steps:
        return f"at rung {record.step}"
    return record.state


def rung_text(board: Board, record: JobRecord) -> str:
    """How many of its rungs a job has reached: 2/3."""
    if board.ladder is None:
        return ""
    steps = board.ladder(record.trial).steps
    return f"{sum(step <= record.step for step in steps)}/{len(steps)}"


def rungs_waited_for(board: Board) -> list[str]:
    """Where jobs wait for their cohort: ``rung 10: 5 of 8 there``, earliest trials first."""
    if board.ladder is None:
        return []
    found: dict[tuple[range, int], None] = {}
    for record in sorted(board.jobs.values(), key=lambda each: each.trial):
        ladder = board.ladder(record.trial)
        if ladder.cohort and record.state == PARKED and record.step in ladder.steps:
            found[ladder.cohort, record.step] = None
    return [_there(board, cohort, rung) for cohort, rung in found]


def _there(board: Board, cohort: range, rung: int) -> str:
    total = max(board.trials, len(board.jobs))
    members = range(cohort.start, min(cohort.stop, total))
    there = sum(
        record.trial in members and (record.ended or record.step >= rung) for record in board.jobs.values()
    )
    return f"rung {rung}: {there} of {len(members)} there"


def best_line(board: Board) -> str:
    """The best so far, with what it is made of, or the front of several objectives; empty before there is
    one."""
    if front := board.front():
        return f"Pareto front so far: {front_text(front)}"
    best = board.best()
    if best is None:
        return ""
    keys = board.varying()
    return (
        f"best so far: {best.name}, objective {number(best.objective)}, {settings_line(best, keys)}".rstrip(
            ", "
        )
    )


def front_text(front: Sequence[JobRecord]) -> str:
    """Jobs with their objectives, at most ``MOST_ON_FRONT`` of them: ``trial-0003 (0.61, 8)``."""
    shown = []
    for job in front[:MOST_ON_FRONT]:
        values = [value for value in (job.objective, *job.others) if value is not None]
        shown.append(f"{job.name} ({', '.join(f'{value:.4g}' for value in values)})")
    more = len(front) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def shown_first(records: Sequence[JobRecord]) -> list[JobRecord]:
    """Live jobs, parked ones, ended ones (newest trial first), then those that wait (oldest first)."""

    def key(record: JobRecord) -> tuple[int, int]:
        place = ORDER.get(record.state, 2)
        return place, -record.trial if place == 2 else record.trial

    return sorted(records, key=key)


def jobs_table(board: Board, rows: int) -> Table:
    """The jobs, at most ``rows`` of them: live ones first. What does not fit is counted in a last line."""
    records = shown_first(list(board.jobs.values()))
    shown = records if len(records) <= rows else records[: max(rows - 1, 1)]
    keys = board.varying()[:MOST_PARAMETERS]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("job", no_wrap=True)
    table.add_column("state", no_wrap=True)
    rungs = () if board.ladder is None else ("rung",)
    for name in ("step", *rungs, "loss", "eval loss", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for key in keys:
        table.add_column(key.split(".", 1)[-1], justify="right", overflow="ellipsis", no_wrap=True)
    for record in shown:
        step = f"{record.step}/{record.steps}" if record.steps else ""
        rate = f"{record.tokens_per_s:,.0f}" if record.live and record.tokens_per_s is not None else ""
        state = Text(state_text(board, record), STYLES.get(record.state, ""))
        rung = (rung_text(board, record),) if rungs else ()
        values = [setting(record.parameters[key]) if key in record.parameters else "" for key in keys]
        losses = number(record.loss), number(record.eval_loss)
        table.add_row(record.name, state, step, *rung, *losses, rate, *values)
    hidden = records[len(shown) :]
    if hidden:
        states = list(dict.fromkeys(record.state for record in hidden))
        counts = ", ".join(f"{sum(item.state == state for item in hidden)} {state}" for state in states)
        table.add_row(f"… {len(hidden)} more", Text(counts, "dim"))
    return table
