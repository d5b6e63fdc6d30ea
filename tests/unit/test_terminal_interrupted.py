"""What the terminal says of trials that were saved when the search was interrupted: they have not ended."""

import io
import os

import pytest
from rich.console import Console

from plait.core.jobs import AdapterSpec, JobSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import Event, GroupStep, JobAdmitted, JobEvaluated, JobProgress
from plait.engine.coordinator import INTERRUPTED
from plait.terminal.progress import share_done
from plait.terminal.text import status_line
from plait.terminal.view import EXITING as ANSWER
from plait.terminal.view import Terminal, jobs_table, print_summary
from plait.tracking.leaderboard import JobRecord, Leaderboard

EXITING = ANSWER.format("")


def interrupted_search(console: Console) -> tuple[Leaderboard, Terminal]:
    """Two of four trials are interrupted at step 5 of 10, one was by order, one waits."""
    board = Leaderboard("minimize", 4)
    jobs = [JobSpec(f"trial-{trial:04d}", AdapterSpec(rank=trial + 1)) for trial in range(4)]
    for trial, job in enumerate(jobs):
        board.add(JobRecord(job.name, trial, job.parameters()))

    def play(event: Event) -> None:
        board.handle(event)
        view.handle(event)

    with Terminal(board, console) as view:
        for job in jobs[:3]:
            play(JobAdmitted(job, 0, 10, "g0"))
            play(JobProgress(job.name, 5, 2.0, 1.0, 1e-4, 100, 1.0, 100.0))
        for iteration in range(1, 6):
            play(GroupStep("g0", iteration, ("trial-0000",), 1, 100, 1.0, None, 256))
        assert view.seconds_left is not None
        play(JobEvaluated(jobs[0].name, 5, 2.25, 80))
        play(JobResult(jobs[2].name, JobState.STOPPED, 5, "by order", None, 100, 1.0, 1.0, None))
        for job in jobs[:2]:
            play(JobResult(job.name, JobState.PAUSED, 5, INTERRUPTED, None, 100, 1.0, 1.0, None))
    return board, view


def test_ctrl_c_is_answered_at_once_and_leaves_the_live_view_whole(
    capfd: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with Terminal(Leaderboard("minimize", 1), console, clock=lambda: now[0]) as view:
        view.announce()
        out, err = capfd.readouterr()
        assert out == f"\r\x1b[2K{EXITING}"  # no line is begun
        assert not err
        now[0] += 1.0
        view.refresh()  # it is drawn though nothing happens
        assert EXITING in console.file.getvalue()  # type: ignore[attr-defined]
        drawn = len(console.file.getvalue())  # type: ignore[attr-defined]
        view.refresh()
        assert len(console.file.getvalue()) == drawn  # type: ignore[attr-defined]
    assert EXITING not in console.file.getvalue()[drawn:]  # type: ignore[attr-defined]


def test_the_answer_to_ctrl_c_says_how_long_a_step_takes(capfd: pytest.CaptureFixture[str]) -> None:
    with Terminal(Leaderboard("minimize", 1), Console(file=io.StringIO())) as view:
        view.handle(GroupStep("g0", 1, ("trial-0000",), 1, 100, 12.4, None, 256))
        view.announce()
    assert capfd.readouterr().err.startswith("\nFinishing this step (about 12 s), then exiting. ")


def test_ctrl_c_is_answered_in_a_line_where_there_is_no_live_view(capfd: pytest.CaptureFixture[str]) -> None:
    with Terminal(Leaderboard("minimize", 1), Console(file=io.StringIO())) as view:
        view.announce()
        assert capfd.readouterr() == ("", f"\n{EXITING}\n")


@pytest.mark.parametrize("terminal", [False, True])
def test_ctrl_c_without_a_reader_of_the_output_is_no_error(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    write = os.write
    monkeypatch.setattr("plait.terminal.view.os.write", lambda _, text: write(writer, text))
    with Terminal(Leaderboard("minimize", 1), Console(file=io.StringIO(), force_terminal=terminal)) as view:
        view.announce()
    monkeypatch.undo()
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"x")
    os.close(writer)


def test_an_iteration_is_drawn_as_a_whole() -> None:
    board, now = Leaderboard("minimize", 2), [0.0]
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with Terminal(board, console, clock=lambda: now[0]) as view:
        before = len(console.file.getvalue())  # type: ignore[attr-defined]
        names = ("trial-0000", "trial-0001")
        now[0] += 10.0
        for name in names:
            event = JobProgress(name, 5, 2.0, 1.0, 1e-4, 100, 1.0, 100.0)
            board.handle(event)
            view.handle(event)
            assert len(console.file.getvalue()) == before  # type: ignore[attr-defined]
        view.handle(GroupStep("g0", 5, names, 1, 100, 1.0, None, 256))
        assert len(console.file.getvalue()) > before  # type: ignore[attr-defined]


def test_trials_that_were_interrupted_have_not_ended() -> None:
    console = Console(file=io.StringIO(), width=100)
    board, view = interrupted_search(console)
    print_summary(console, board, {})
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert (
        "trial-0001 paused (interrupted): 5 steps, 100 tokens, 1 s from start to end, 1 s of the device"
        in lines
    )
    assert (
        "trial-0002 stopped (by order): 5 steps, 100 tokens, 1 s from start to end, 1 s of the device"
        in lines
    )
    assert "lowest eval loss  2.2500 at step 5, trial-0000" in lines
    assert share_done(board) == 0.5
    assert (
        status_line(board, view.seconds_left)
        == "50 % done · 1 of 4 ended, 0 running · 2 paused (interrupted) · 1 stopped · 100 tokens/s"
    )


def test_interrupted_trials_are_named_so_in_the_table() -> None:
    console = Console(file=io.StringIO(), width=100)
    board, _ = interrupted_search(Console(file=io.StringIO()))
    console.print(jobs_table(board, 10, 100))
    rows = [line.split()[:2] for line in console.file.getvalue().splitlines()[1:]]  # type: ignore[attr-defined]
    assert rows == [
        ["trial-0000", "paused"],
        ["trial-0001", "paused"],
        ["trial-0002", "stopped"],
        ["trial-0003", "queued"],
    ]
