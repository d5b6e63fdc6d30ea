"""How processes are shown: in the live view, in plain lines, and to `plait control` in another terminal."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from plait.core.messages import SpansTaken
from plait.core.spans import ProcessState, ReplicaSpans, ReplicaTotals, Span
from plait.terminal.text import processes_line
from plait.terminal.view import Terminal, processes_table
from plait.tracking import processes as kept
from plait.tracking.leaderboard import Leaderboard
from plait.tracking.processes import (
    ProcessRow,
    ProcessWatch,
    process_rows,
    read_processes,
    remove_left,
)

TRAINS = ProcessState(0, "here", 10, "cuda:0", "training", 3.0, 0.5, 60.0)
WAITS = replace(TRAINS, replica=1, pid=11, doing="", seconds=2.0, silent=0.0)
SILENT = replace(TRAINS, replica=2, pid=12, host="there", silent=14.0, seconds=15.0)
TOTALS = {0: ReplicaTotals(90.0, 10.0, 12_345, 8), 1: ReplicaTotals(50.0, 50.0, 100, 8)}


def drawn(rows: tuple[ProcessRow, ...], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(processes_table(rows, width))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def test_the_board_sums_up_what_each_replica_did() -> None:
    board = Leaderboard("minimize", 1)
    work = (("a", 1),)
    spans = (
        Span("waiting", 0, 2),
        Span("microbatch", 2, 5, work, tokens=7),
        Span("exchange", 5, 6, work, bytes=12),
        Span("evaluation", 6, 8, work, tokens=9),
    )
    for _ in range(2):
        board.handle(SpansTaken((ReplicaSpans(3, "h", 1, "cpu", spans),)))
    assert board.replicas == {3: ReplicaTotals(12.0, 4.0, 14, 24)}


def test_one_process_has_no_rows() -> None:
    assert process_rows([TRAINS], TOTALS) == ()


def test_rows_say_what_each_does_and_the_silent_one_comes_first() -> None:
    rows = process_rows([TRAINS, WAITS, SILENT], TOTALS)
    heading, *lines = drawn(rows, 120)
    assert heading.split() == ["process", "doing", "busy", "waited", "tokens", "device", "host"]
    assert [line.split()[0] for line in lines] == ["2", "0", "1"]
    assert "silent for 14 s of 1 min 00 s, training" in lines[0]
    assert "there, pid 12" in lines[0]
    assert "training 3 s" in lines[1]
    assert "1 min 30 s" in lines[1]
    assert "12,345" in lines[1]
    assert "waiting 2 s" in lines[2]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = drawn(process_rows([TRAINS, WAITS, replace(SILENT, host="a-long-name" * 5)], TOTALS), width)
    assert len(lines) == 4
    assert all(len(line) <= width or line.split()[0] == "2" for line in lines)


def test_some_of_many_processes_are_shown() -> None:
    rows = process_rows([replace(TRAINS, replica=number) for number in range(40)], TOTALS)
    assert drawn(rows, 100)[-1] == "… 32 more"
    assert processes_line(rows) == "processes busy: 0: 90 %, 1: 50 % and 32 more"


def test_plain_lines_name_a_silent_process_once() -> None:
    console, states = Console(file=io.StringIO(), width=200), [TRAINS, WAITS]
    with Terminal(
        Leaderboard("minimize", 1), console, processes=lambda: process_rows(states, TOTALS)
    ) as view:
        view.refresh()
        states.append(SILENT)
        view.refresh()
        view.refresh()
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("silent") == 1
    assert "process 2 (there, pid 12) has been silent for 14 s while training; after 1 min 00 s" in said


def test_the_live_view_shows_the_rows() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30)
    with Terminal(
        Leaderboard("minimize", 1), console, processes=lambda: process_rows([TRAINS, WAITS], TOTALS)
    ):
        pass
    assert "training 3 s" in console.file.getvalue()  # type: ignore[attr-defined]


def test_another_terminal_reads_them_older_by_the_time_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: dict[str, Any] = {"time": 1000.0}
    monkeypatch.setattr(kept.time, "time", lambda: times["time"])
    monkeypatch.setattr(kept.os, "getpid", lambda: 77)
    watch = ProcessWatch(tmp_path, lambda: Leaderboard("minimize", 3, replicas=TOTALS))
    watch.keep()
    assert read_processes(tmp_path, ["77"]) == [], "there is one process"
    fleet = SimpleNamespace(states=lambda: [TRAINS, WAITS], processes=SimpleNamespace())
    watch.following(lambda *_: fleet)(None, None, "")  # type: ignore[arg-type,return-value]
    watch.keep()
    times["time"] += 1.0
    watch.keep()  # it is not due
    times["time"] -= 1.0
    times["time"] += 7.0
    trains, waits = read_processes(tmp_path, ["77"])
    assert trains.state == replace(TRAINS, seconds=10.0, silent=7.5)
    assert trains.silent
    assert waits.state == replace(WAITS, seconds=9.0)
    assert not waits.silent
    assert trains.totals == TOTALS[0]
    assert json.loads(json.dumps(trains.facts()))["busy_seconds"] == 90.0
    assert read_processes(tmp_path, ["78"]) == []
    watch.close()
    assert read_processes(tmp_path, ["77"]) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"at": 1, "processes": [{}]}'])
def test_a_file_of_another_form_is_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "processes").mkdir()
    (tmp_path / "processes" / "7-now.json").write_text(text)
    assert read_processes(tmp_path, ["7"]) == []


def test_empty_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "processes"
    folder.mkdir()
    for name in ("7-a-0.log", "7-a-1.log", "7-now.json", "8-b-0.log", "8-now.json"):
        (folder / name).write_text("it died" if name == "7-a-1.log" else "")
    remove_left(tmp_path, {"8"})
    assert {each.name for each in folder.iterdir()} == {"7-a-1.log", "8-b-0.log", "8-now.json"}
