"""The table of the live view: the jobs that matter most now, in as many columns as fit the terminal.

Laid out here and not by rich's table, which takes several times as long: it is drawn between training steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.segment import Segment, Segments
from rich.style import Style

from plait.core.lifecycle import JobState
from plait.terminal.text import number, rung_text, setting, shown_first
from plait.tracking.leaderboard import JobRecord, Leaderboard

STYLES = {
    JobState.QUEUED: "dim",
    JobState.RUNNING: "cyan",
    JobState.PAUSED: "blue",
    JobState.ORPHANED: "blue",
    JobState.FINISHED: "green",
    JobState.PRUNED: "yellow",
    JobState.STOPPED: "yellow",
    JobState.FAILED: "red",
}
MOST_PARAMETERS = 4  # columns of parameters; the leaderboard shows all of them
BEFORE_RATE = 2  # parameters that come before the rate where not all of them fit
WIDEST = 20  # characters of a parameter's value or name
STATE = 10  # characters, so that the columns do not move
GAP = "  "
HEADING = Style(bold=True)


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
    """At most ``rows`` jobs, running ones first. A last line counts the others; parameters that do not fit
    are not shown."""
    records = shown_first(board.jobs.values())
    shown = records if len(records) <= rows else records[: max(rows - 1, 1)]
    columns = _columns(board, shown, width)
    widths = [column.width for column in columns]
    pairs = list(zip(columns, widths, strict=True))
    out = [Segment(GAP.join(each.fill(each.title, wide) for each, wide in pairs), HEADING), Segment.line()]
    for at, record in enumerate(shown):
        name, state, *others = (each.fill(each.cells[at], wide) for each, wide in pairs)
        style = Style.parse(STYLES[record.state])
        out += [Segment(name + GAP), Segment(state, style), Segment(GAP + GAP.join(others)), Segment.line()]
    if len(shown) < len(records):
        states = Counter(record.state for record in records[len(shown) :])
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        more = f"… {len(records) - len(shown)} more"
        out += [Segment(f"{more:<{widths[0]}}{GAP}"), Segment(counts, Style(dim=True)), Segment.line()]
    return Segments(out)


def _columns(board: Leaderboard, shown: Sequence[JobRecord], width: int) -> list[_Column]:
    """The columns that are always shown, then the rate and the parameters as far as there is room."""
    rungs = [] if board.rungs_of is None else [_Column("rung", [rung_text(board, each) for each in shown])]
    always = [
        _Column("job", [each.name for each in shown], right=False),
        _Column("state", [each.state for each in shown], right=False, least=STATE),
        _Column("step", [f"{each.step}/{each.steps}" if each.steps else "" for each in shown]),
        *rungs,
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
