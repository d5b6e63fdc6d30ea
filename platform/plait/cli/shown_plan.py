"""What `plait plan` prints: replicas, groups, trials, and totals with and without Plait.

A seam: it shows a finished plan, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from plait.planning.outlook import ChangeOutlook, DevicesOutlook, ObjectiveOutlook, Outlook
from plait.search.results import short
from plait.terminal.console import filled, plain
from plait.utils.durations import precise

UNKNOWN = "unknown"
NO_PROFILE = "Seconds are unknown: run `{}` on this machine first, then `plait plan` again"
SHOWN = 64  # trials in the table
UNITS = {"time": "s", "device_seconds": "device-seconds", "money": "money"}  # of the objective


def show(outlook: Outlook, console: Console) -> None:
    """Print a plan: replicas, groups, trials, totals with and without Plait, assumptions."""
    plain(console, f"{outlook.cluster}: {outlook.devices}")
    if outlook.objective is not None:
        plain(console, _objective(outlook, outlook.objective))
    if outlook.profile:
        plain(console, f"profile: {outlook.profile}")
    if outlook.measure:
        plain(console, NO_PROFILE.format(outlook.measure))
    if outlook.candidates:
        console.print(_candidates(outlook))
    console.print(_replicas(outlook), _groups(outlook), _trials(outlook), _totals(outlook))
    if outlook.processes:
        console.print(_processes(outlook))
    if outlook.every:
        console.print(_devices(outlook))
        plain(console, outlook.why)
    if outlook.simulated:
        console.print(_simulated(outlook))
    if outlook.changes:
        console.print(_changes(outlook))
    if outlook.predicted_seconds is not None:
        plain(console, _predicted(outlook))
    for line in outlook.assumptions:
        plain(console, f"- {line}")


def _objective(outlook: Outlook, chosen: ObjectiveOutlook) -> str:
    """Which devices are used and why."""
    unit = UNITS[chosen.objective]
    other = "fewer device-seconds" if chosen.objective == "time" else "less time"
    proven = "all candidates" if any(each.sharded for each in outlook.replicas) else "any number of devices"
    return (
        f"uses {outlook.devices} of {chosen.available} (planner.objective={chosen.objective}): "
        f"{chosen.value:,.4g} {unit} per step, {100 * chosen.gap:.1f} % above the bound "
        f"proven for {proven}; it may be up to {100 * chosen.slack:g} % worse for {other} "
        "(planner.slack)"
    )


def _predicted(outlook: Outlook) -> str:
    """Seconds and money of the search, their error, and how that is known."""
    money = "" if outlook.money is None else f", cost {_money(outlook.money)}"
    band = "unknown" if outlook.error is None else f"± {100 * outlook.error:.1f} % on average"
    return (
        f"predicted: {_seconds(outlook.predicted_seconds)} on {outlook.devices}{money}; error {band} "
        f"({outlook.error_source})"
    )


def _trials(outlook: Outlook) -> Table:
    """Each trial with the values that distinguish it, and where it trains if the plan chooses that."""
    shown = outlook.trials[:SHOWN]
    headings = ["trial", "wave", "configuration", "trained on"]
    if not any(each.replicas for each in shown):
        del headings[-1]
    table = filled(
        "Trials",
        headings,
        (
            (
                each.trial,
                str(each.wave),
                " ".join(f"{key}={short(value)}" for key, value in each.values.items()),
                ", ".join(f"{name} {100 * share:.0f} %" for name, share in each.replicas.items()),
            )[: len(headings)]
            for each in shown
        ),
        left=("trial", "configuration", "trained on"),
    )
    return _first(table, len(outlook.trials))


def _first(table: Table, total: int) -> Table:
    """The table, saying where the rest is if it does not show all."""
    if total > SHOWN:
        table.caption = f"The first {SHOWN} of {total}; --json prints all of them."
    return table


def _devices(outlook: Outlook) -> Table:
    """The search on each requested number of devices."""
    return filled(
        "Devices",
        ("devices", "seconds", "device-seconds", "money", "replicas", "choice"),
        (
            (
                each.devices,
                "" if each.refused else f"{_seconds(each.seconds)}{_band(each)}",
                "" if each.refused else f"{_seconds(each.device_seconds)}{_band(each)}",
                ""
                if each.refused
                else f"{_money(each.money)}{_band(each) if each.money is not None else ''}",
                each.refused or each.replicas,
                "best" if each.chosen else "",
            )
            for each in outlook.every
        ),
        left=("replicas",),
    )


def _band(row: DevicesOutlook) -> str:
    return "" if row.error is None else f" ± {100 * row.error:.1f} %"


def _replicas(outlook: Outlook) -> Table:
    return filled(
        "Replicas",
        ("replicas", "tp", "pp", "capacity", "layers per stage", "memory per device"),
        (
            (
                " ".join(filter(None, (str(each.count), each.kind, "sharded" if each.sharded else ""))),
                str(each.tp),
                str(each.pp),
                f"{each.capacity:,} tokens",
                " ".join(map(str, each.layer_split)) or "all",
                ", ".join(filter(None, (_bytes(each.predicted_bytes), each.bytes_source))),
            )
            for each in outlook.replicas
        ),
    )


def _candidates(outlook: Outlook) -> Table:
    """The replicas that were weighed, and why one was chosen."""
    return filled(
        "Candidates",
        ("replicas", "jobs at once", "memory of the fullest", "seconds of a step", "why not"),
        (
            (
                each.replicas,
                str(each.jobs or ""),
                _bytes(each.predicted_bytes),
                _seconds(each.step_seconds),
                each.why or "chosen",
            )
            for each in outlook.candidates
        ),
        left=("replicas", "why not"),
    )


def _processes(outlook: Outlook) -> Table:
    """What each of several processes holds and does."""
    table = filled(
        "Processes",
        ("process", "device", "capacity", "memory", "tokens", "seconds busy", "waiting"),
        (
            (
                str(each.process),
                each.device,
                f"{each.capacity:,} tokens",
                _bytes(each.predicted_bytes),
                f"{each.tokens:,}",
                _seconds(each.busy_seconds),
                UNKNOWN if each.waiting_share is None else f"{100 * each.waiting_share:.1f} %",
            )
            for each in outlook.processes[:SHOWN]
        ),
        left=("device",),
    )
    return _first(table, len(outlook.processes))


def _groups(outlook: Outlook) -> Table:
    return filled(
        "Groups",
        ("wave", "jobs", "steps", "microbatches", "predicted seconds", "device-seconds", "memory per device"),
        (
            (
                str(each.wave),
                " ".join(each.jobs),
                f"{each.steps:,}",
                f"{each.microbatches:,}",
                _seconds(each.predicted_seconds),
                _seconds(each.device_seconds),
                _bytes(each.predicted_bytes),
            )
            for each in outlook.groups
        ),
        left=("jobs",),
    )


def _totals(outlook: Outlook) -> Table:
    """Plait compared with the same jobs without it."""
    beside, alone = outlook.device_seconds_side_by_side, outlook.device_seconds_alone
    rows: list[Sequence[str]] = [
        ("with Plait", f"{outlook.microbatches:,}", _seconds(outlook.device_seconds))
    ]
    if beside is not None:
        rows.append(("side by side", "", _seconds(beside), _saved(outlook, beside)))
    rows.append(("job by job", f"{outlook.microbatches_alone:,}", _seconds(alone), _saved(outlook, alone)))
    table = filled("Totals", ("", "microbatches", "device-seconds", "saved with Plait"), rows, left=("",))
    if outlook.gap is not None:
        table.caption = (
            f"Deployment within {100 * outlook.gap:.2f} % of the proven optimum: "
            f"{_seconds(outlook.step_seconds)} per step, {_seconds(outlook.equal_step_seconds)} "
            f"with the best equal replicas, {outlook.equal_replicas}"
        )
    return table


def _saved(outlook: Outlook, without: float | None) -> str:
    if outlook.device_seconds is None or not without:
        return ""
    return f"{100 * (1 - outlook.device_seconds / without):.1f} % (simulated)"


def _simulated(outlook: Outlook) -> Table:
    """The simulator's figures for each wave."""
    headings = (
        "wave", "tokens/s", "mean completion", "idle", "fill, drain, waits", "uneven stages",
        "uneven microbatches", "padding", "between stages",
    )  # fmt: skip
    rows = []
    for each in outlook.simulated:
        bubble = each.bubble
        parts = (bubble.total, bubble.fill_and_drain, bubble.imbalance, bubble.raggedness, each.padding_share)
        rows.append(
            (
                str(each.wave),
                f"{each.tokens_per_second:,.0f}",
                _seconds(each.mean_completion),
                *(f"{round(100 * part, 2) + 0.0:.2f} %" for part in parts),  # rounding may leave a -0
                f"{each.communication_bytes / 2**30:,.2f} GiB",
            )
        )
    return filled("Simulated", headings, rows)


def _changes(outlook: Outlook) -> Table:
    """Whether each later wave gets a new deployment."""
    return filled(
        "Deployment changes",
        ("before wave", "steps", "step now", "replicas", "step after", "saved", "worth it after"),
        (
            (
                str(each.wave),
                f"{each.steps:,}",
                "does not fit" if each.step_seconds is None else _seconds(each.step_seconds),
                _then(each),
                ("" if each.replicas else "at least ") + _seconds(each.new_step_seconds),
                "required" if each.saved is None else _seconds(each.saved),
                "" if each.break_even is None else f"{each.break_even:,} steps",
            )
            for each in outlook.changes
        ),
    )


def _then(change: ChangeOutlook) -> str:
    if change.replicas is None:
        return "unchanged: no other deployment is worth a restart"
    return change.replicas if change.changed else f"unchanged: {change.replicas} is not worth a restart"


def _bytes(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value / 2**30:.2f} GiB"


def _money(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.2f}" if value >= 1 else f"{value:.2g}"


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else precise(value)
