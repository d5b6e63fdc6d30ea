"""How a search stands, in a few lines."""

from __future__ import annotations

import json
import shlex
from typing import Any

from plait.search.control.orders import Mode
from plait.terminal.text import best_line, number, settings_line, shown_first, status_line
from plait.tracking.leaderboard import Leaderboard, to_json

MOST_JOBS = 40


def describe_status(board: Leaderboard, mode: Mode, name: str) -> str:
    """How the search ``name`` stands: a line on the whole, the best so far, a line for each job, live ones
    first."""
    lines = [f"{mode}: {status_line(board, None)}"]
    lines += [line for line in (best_line(board),) if line]
    records = shown_first(list(board.jobs.values()))
    keys = board.varying()
    for record in records[:MOST_JOBS]:
        parts = [f"{record.name}  {record.state:<9}"]
        if record.steps:
            parts.append(f"step {record.step}/{record.steps}")
        losses = (("loss", record.loss), ("eval loss", record.eval_loss), ("objective", record.objective))
        parts += [f"{label} {number(value)}" for label, value in losses if value is not None]
        lines.append("  ".join([*parts, settings_line(record, keys)]).rstrip())
    if len(records) > MOST_JOBS:
        lines.append(f"... {len(records) - MOST_JOBS} more: `plait leaderboard {shlex.quote(name)}`")
    return "\n".join(lines)


def status_facts(board: Leaderboard, mode: Mode, name: str) -> dict[str, Any]:
    """The same for programs: all jobs by trial, with what the leaderboard knows of each."""
    records = sorted(board.jobs.values(), key=lambda record: record.trial)
    jobs = [
        row | {"state": str(record.state), "step": record.step, "steps": record.steps}
        for row, record in zip(json.loads(to_json(records)), records, strict=True)
    ]
    ended = sum(record.ended for record in records)
    return {"search": name, "mode": mode, "trials": board.trials, "ended": ended, "jobs": jobs}
