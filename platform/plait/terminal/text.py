"""A search and its jobs as text. A seam: pure functions of the leaderboard, tested without a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from statistics import median
from typing import Any

from plait.core.lifecycle import JobState, described_state
from plait.core.space import as_written
from plait.terminal.progress import share_done
from plait.tracking.leaderboard import JobRecord, Leaderboard
from plait.tracking.processes import ProcessRow
from plait.utils.counts import listed
from plait.utils.durations import duration

PRIORITY = "train.priority"
# States that are counted in the status line, if any job has them.
NAMED = (
    JobState.PAUSED,
    JobState.ORPHANED,
    JobState.PRUNED,
    JobState.STOPPED,
    JobState.INFEASIBLE,
    JobState.FAILED,
)
MOST_ON_FRONT = 8
MOST_PROCESSES = 8  # shown
MOST_STATUS = 2  # status lines in the live view
ORDER = {JobState.RUNNING: 0, JobState.PAUSED: 1, JobState.ORPHANED: 3, JobState.QUEUED: 3}  # not ended
ENDED = 2  # the position of jobs that have ended


def number(value: float | None) -> str:
    """A loss or an objective; "" if there is none."""
    return "" if value is None else f"{value:.4f}"


def best_evaluation(record: JobRecord) -> str:
    """The lowest validation loss of a job and its step: ``3.7849 at step 20``."""
    return f"{number(record.best_eval_loss)} at step {record.best_eval_step}"


def setting(value: Any) -> str:
    """A parameter's value as in an override, but short."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(setting, value))}]"
    return as_written(value)


def settings_line(record: JobRecord, keys: Sequence[str]) -> str:
    """The job's values of the keys: ``adapter.rank=8 train.lr=0.0002``, without the usual priority."""
    said = [key for key in keys if key in record.parameters]
    said = [key for key in said if key != PRIORITY or record.parameters[key]]
    return " ".join(f"{key}={setting(record.parameters[key])}" for key in said)


def all_trained(board: Leaderboard) -> bool:
    """Whether no step is left to train but not all jobs have ended: the last ones are being evaluated."""
    if len(board.jobs) < board.trials:
        return False
    open_jobs = [job for job in board.jobs.values() if not job.ended]
    return bool(open_jobs) and all(0 < job.steps <= job.step and not job.ended for job in open_jobs)


def status_parts(board: Leaderboard, left: float | None, share: float | None = None) -> list[str]:
    """The status of the whole search, most important part first.

    Args:
        left: remaining seconds, if they can be estimated.
        share: share of the training that is done; None: as it is now.
    """
    share = share_done(board) if share is None else share
    total = max(board.trials, len(board.jobs))
    states = Counter(job.state for job in board.jobs.values())
    ended = len(board.jobs) - sum(states[state] for state in ORDER)
    done = f"{min(100 * share, 100 if ended >= total else 99):.0f} % done"
    if all_trained(board):
        done += ", evaluating"
    elif left is not None and ended < total:
        done += f", about {duration(_rough(left))} left"
    parts = [done, f"{ended} of {total} ended, {states[JobState.RUNNING]} running"]
    named = [job for state in NAMED for job in board.jobs.values() if job.state == state]
    counts = Counter(described_state(job.state, job.reason) for job in named)
    parts += [f"{count} {state}" for state, count in counts.items()]
    if board.group is not None and board.group.seconds > 0:
        parts.append(f"{board.group.tokens / board.group.seconds:,.0f} tokens/s")
    return parts


def _rough(seconds: float) -> float:
    """An estimate without digits that would change at every look: at least 1, rounded to a tenth or less."""
    unit = max((each for each in (1, 5, 10, 30, 60, 300) if each * 10 <= seconds), default=1)
    return max(1.0, round(seconds / unit) * float(unit))


def status_line(board: Leaderboard, left: float | None, share: float | None = None) -> str:
    """The status of the whole search in one line."""
    return " · ".join(status_parts(board, left, share))


def progress_line(board: Leaderboard, left: float | None, share: float | None = None) -> str:
    """The status with the losses, if no table shows them."""
    return " · ".join([status_line(board, left, share), *losses(board)])


def status_rows(board: Leaderboard, left: float | None, width: int, share: float | None = None) -> list[str]:
    """The status in at most ``MOST_STATUS`` lines of ``width`` characters; less important parts are
    dropped."""
    lines: list[str] = []
    for part in status_parts(board, left, share):
        if lines and len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f" · {part}"
        elif len(lines) < MOST_STATUS:
            lines.append(part)
    return lines


def processes_line(rows: Sequence[ProcessRow]) -> str:
    """What share of the time each of several processes was busy so far; "" for a single one."""
    shares = []
    for row in sorted(rows, key=lambda row: row.state.replica)[:MOST_PROCESSES]:
        whole = row.totals.busy_seconds + row.totals.waited_seconds
        shares += [f"{row.state.replica}: {100 * row.totals.busy_seconds / whole:.0f} %"] if whole else []
    more = f" and {len(rows) - MOST_PROCESSES} more" if len(rows) > MOST_PROCESSES else ""
    return f"processes busy: {', '.join(shares)}{more}" if shares else ""


def silence_text(row: ProcessRow) -> str:
    """That a process has not been heard of, and what follows from it."""
    state = row.state
    return (
        f"process {state.replica} ({state.host}, pid {state.pid}) has been silent for "
        f"{duration(state.silent)} while {state.doing}; after {duration(state.limit)} it counts as dead"
    )


def losses(board: Leaderboard) -> list[str]:
    """The lowest and the median training loss of running jobs; then the best so far: by the objective, or
    by the evaluations while no job has finished."""
    live = [job.loss for job in board.jobs.values() if job.live and job.loss is not None]
    parts = (
        [f"lowest train loss {number(min(live))}, median {number(median(live))}"]
        if live[1:]
        else [f"train loss {number(each)}" for each in live]
    )
    if (best := board.best()) is not None:
        parts.append(f"best {number(best.objective)} ({best.name})")
    elif lowest := lowest_loss(board):
        parts.append(f"lowest eval loss {number(lowest.best_eval_loss)} ({lowest.name})")
    return parts


def lowest_loss(board: Leaderboard) -> JobRecord | None:
    """The job with the lowest validation loss; None with several objectives, for which it may not matter."""
    evaluated = [] if board.others else [job for job in board.jobs.values() if job.best_eval_loss is not None]
    return min(evaluated, key=lambda job: (job.best_eval_loss, job.trial), default=None)


def nearest_infeasible(board: Leaderboard) -> JobRecord | None:
    """The best finished job that breaks a constraint; None if there is none."""
    done = (job for job in board.jobs.values() if job.state == JobState.FINISHED and not job.feasible)
    return min(done, key=board.rank, default=None)


def best_line(board: Leaderboard) -> str:
    """The best job so far with its parameters, or the Pareto front; by the evaluations while no job has
    finished; "" before there is one."""
    if front := board.front():
        return f"Pareto front so far: {front_text(front)}"
    if best := board.best():
        found, line = best, f"best so far: {best.name}, objective {number(best.objective)}"
    elif lowest := lowest_loss(board):
        found, line = lowest, f"lowest eval loss so far: {best_evaluation(lowest)}, {lowest.name}"
    else:
        return ""
    return f"{line}, {settings_line(found, board.varying())}".rstrip(", ")


def front_text(front: Sequence[JobRecord]) -> str:
    """Jobs with their objectives, at most ``MOST_ON_FRONT`` of them: ``trial-0003 (0.61, 8)``."""
    shown = [f"{job.name} ({', '.join(f'{value:.4g}' for value in job.values)})" for job in front]
    return listed(shown, MOST_ON_FRONT)


def shown_first(records: Iterable[JobRecord]) -> list[JobRecord]:
    """Running jobs, paused ones, ended ones (newest trial first), then orphaned and queued ones."""
    places: list[list[JobRecord]] = [[], [], [], []]
    for record in records:
        places[ORDER.get(record.state, ENDED)].append(record)
    for place, each in enumerate(places):
        each.sort(key=lambda record: record.trial, reverse=place == ENDED)
    return list(chain.from_iterable(places))
