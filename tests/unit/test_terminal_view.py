"""The terminal, with a clock that the test turns and a console that is recorded."""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_results import ended
from rich.console import Console

from plait.core.jobs import AdapterSpec, JobSpec
from plait.core.lifecycle import JobState, PauseReason
from plait.core.messages import (
    Event,
    GroupStep,
    JobAdmitted,
    JobEvaluated,
    JobPaused,
    JobProgress,
)
from plait.terminal.progress import share_done
from plait.terminal.text import (
    best_line,
    progress_line,
    setting,
    settings_line,
    shown_first,
    status_line,
    status_rows,
)
from plait.terminal.view import Terminal, jobs_table, print_summary
from plait.tracking.leaderboard import JobRecord, Leaderboard
from plait.utils.durations import duration, precise


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def spec(trial: int) -> JobSpec:
    return JobSpec(f"trial-{trial:04d}", AdapterSpec(rank=trial + 1))


def board_of(jobs: int, trials: int | None = None) -> Leaderboard:
    board = Leaderboard("minimize", jobs if trials is None else trials)
    for trial in range(jobs):
        board.add(JobRecord(spec(trial).name, trial, spec(trial).parameters()))
    return board


class Stage:
    """A board and a terminal that see the same events."""

    def __init__(self, board: Leaderboard, *, terminal: bool, height: int = 40, width: int = 120) -> None:
        self.clock = Clock()
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, force_terminal=terminal, height=height, width=width, color_system=None
        )
        self.board = board
        self.view = Terminal(board, self.console, clock=self.clock)

    def play(self, event: Event) -> None:
        self.board.handle(event)
        self.view.handle(event)

    def step(self, trial: int, step: int) -> None:
        name = spec(trial).name
        self.play(JobProgress(name, step, 2.0 / step, 1.0, 1e-4, 100 * step, 1.0, 250.0))
        self.play(GroupStep("g0", step, (name,), 1, 100, 1.0, None, 256))

    def end(self, trial: int, state: str, step: int, loss: float | None = None, **more: Any) -> None:
        """The end of a trial; ``value``: its objective."""
        measured = {"tokens": 8, "device_seconds": 1.0, "completion_seconds": 1.0} | more
        self.play(ended(state, job=spec(trial).name, step=step, eval_loss=loss, **measured))

    @property
    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()


def printed(show: Callable[[Console], None], width: int = 60) -> list[str]:
    """The lines of what is shown on a console."""
    file = io.StringIO()
    show(Console(file=file, width=width))
    return file.getvalue().splitlines()


def test_plain_output_has_one_line_for_each_event_of_importance() -> None:
    stage = Stage(board_of(2), terminal=False)
    with stage.view:
        stage.play(JobAdmitted(spec(0), 0, 10, "g0"))
        for step in range(1, 11):
            stage.clock.now += 1.0
            stage.step(0, step)
        stage.play(JobEvaluated("trial-0000", 10, 1.23456, 80))
        took = {"tokens": 1000, "device_seconds": 10.0, "completion_seconds": 65.0}
        stage.end(0, "finished", 10, 1.23456, value=1.23456, reason="budget spent", **took)
        stage.play(JobAdmitted(spec(1), 4, 10, "g0"))
        took = {"tokens": 500, "device_seconds": 5.0, "completion_seconds": 8.0}
        stage.end(1, "failed", 5, reason="loss is nan", **took)
    assert stage.lines == [
        "trial-0000 started (10 steps): adapter.rank=1",
        "5 % done, about 19 s left · 0 of 2 ended, 1 running · 100 tokens/s · train loss 2.0000",
        "trial-0000 step 10: eval loss 1.2346",
        "trial-0000 finished: eval loss 1.2346, 10 steps, 1,000 tokens, 1 min 05 s from start to end, "
        "10 s of the device",
        "best so far: trial-0000, objective 1.2346, adapter.rank=1",
        "trial-0001 resumes from step 4 (10 steps): adapter.rank=2",
        "trial-0001 failed (loss is nan): 5 steps, 500 tokens, 8 s from start to end, 5 s of the device",
        "Writing the last records to MLflow.",
    ]


def test_one_step_is_not_steps() -> None:
    stage = Stage(board_of(1), terminal=False)
    with stage.view:
        stage.play(JobAdmitted(spec(0), 0, 1, "g0"))
        stage.end(0, "stopped", 1, tokens=1)
    assert stage.lines[0].startswith("trial-0000 started (1 step): ")
    assert stage.lines[1].startswith("trial-0000 stopped: 1 step, 1 token, ")


def test_plain_progress_is_printed_by_the_clock_not_by_the_step() -> None:
    stage = Stage(board_of(1), terminal=False)
    with stage.view:
        stage.play(JobAdmitted(spec(0), 0, 100, "g0"))
        for step in range(1, 41):
            stage.clock.now += 1.0
            stage.step(0, step)
    assert stage.lines[1:-1] == [
        "1 % done, about 1 min 40 s left · 0 of 1 ended, 1 running · 100 tokens/s · train loss 2.0000",
        "16 % done, about 1 min 25 s left · 0 of 1 ended, 1 running · 100 tokens/s · train loss 0.1250",
        "31 % done, about 1 min 10 s left · 0 of 1 ended, 1 running · 100 tokens/s · train loss 0.0645",
    ]


def test_plain_progress_shows_the_losses_and_the_best_so_far() -> None:
    board = board_of(4)
    for trial, loss in ((0, 2.5), (1, 2.0), (2, 4.0)):
        board.handle(JobAdmitted(spec(trial), 0, 10, "g0"))
        board.handle(JobProgress(spec(trial).name, 5, loss, 1.0, 1e-4, 8, 1.0, 1.0))
    told = "38 % done · 0 of 4 ended, 3 running"
    assert progress_line(board, None) == f"{told} · lowest train loss 2.0000, median 2.5000"
    for trial, loss in ((0, 2.25), (2, 2.125), (2, 3.0)):
        board.handle(JobEvaluated(spec(trial).name, 5, loss, 80))
    assert progress_line(board, None).endswith("median 2.5000 · lowest eval loss 2.1250 (trial-0002)")
    assert best_line(board) == "lowest eval loss so far: 2.1250 at step 5, trial-0002, adapter.rank=3"
    board.handle(ended("finished", 2.75, job="trial-0000"))
    assert progress_line(board, None).endswith(
        "lowest train loss 2.0000, median 3.0000 · best 2.7500 (trial-0000)"
    )


def test_only_the_best_of_trials_that_end_together_is_reported() -> None:
    stage = Stage(board_of(4), terminal=False)
    with stage.view:
        for trial, loss in ((0, 2.0), (1, 1.5), (2, 1.0)):
            stage.end(trial, "finished", 10, loss, value=loss)
        stage.play(JobAdmitted(spec(3), 0, 10, "g0"))
        stage.end(3, "finished", 10, 0.5, value=0.5)
    told = [line[:29] for line in stage.lines if line.startswith("best")]
    assert told == ["best so far: trial-0002, obje", "best so far: trial-0003, obje"]
    assert [line[:20] for line in stage.lines[3:5]] == ["best so far: trial-0", "trial-0003 started ("]
    assert stage.lines[-1] == "Writing the last records to MLflow."


def test_when_the_last_step_is_done_evaluation_is_what_is_waited_for() -> None:
    stage = Stage(board_of(2), terminal=False)
    with stage.view:
        for trial in range(2):
            stage.play(JobAdmitted(spec(trial), 0, 10, "g0"))
        for step in range(1, 11):
            for trial in range(2):
                stage.clock.now += 0.1
                stage.step(trial, step)
        line = "99 % done, evaluating · 0 of 2 ended, 2 running · 100 tokens/s"
        assert stage.lines[3:] == [f"{line} · lowest train loss 0.2000, median 0.2000"]
        stage.end(0, "finished", 10, 1.0)
        assert (
            status_line(stage.board, 0.0) == "99 % done, evaluating · 1 of 2 ended, 1 running · 100 tokens/s"
        )
        stage.end(1, "finished", 10, 1.0)
        assert status_line(stage.board, 0.0) == "100 % done · 2 of 2 ended, 0 running · 100 tokens/s"
    stage.board.trials = 3
    assert status_line(stage.board, 0.3).startswith("67 % done, about 1 s left · ")


def test_the_line_on_the_whole_is_broken_where_it_does_not_fit() -> None:
    board = board_of(12)
    for trial in range(8):
        board.handle(ended("pruned" if trial % 2 else "failed", job=spec(trial).name))
    board.handle(JobPaused(spec(8).name, 2, PauseReason.AT_RUNG))
    board.jobs[spec(8).name].step = 2
    whole = status_line(board, 400.0)
    assert status_rows(board, 400.0, 200) == [whole]
    assert status_rows(board, 400.0, 80) == [
        "67 % done, about 6 min 30 s left · 8 of 12 ended, 0 running",
        "1 paused (at a rung) · 4 pruned · 4 failed",
    ]
    assert status_rows(board, 400.0, 40) == [
        "67 % done, about 6 min 30 s left",
        "8 of 12 ended, 0 running · 4 pruned",
    ]


def test_the_live_view_shows_jobs_progress_and_best() -> None:
    stage = Stage(board_of(3), terminal=True)
    with stage.view:
        stage.play(JobAdmitted(spec(0), 0, 10, "g0"))
        stage.clock.now += 10.0
        stage.step(0, 5)
        stage.end(0, "finished", 10, 1.5, value=1.5)
    text = stage.file.getvalue()
    assert "5/10" in text
    assert "0.4000" in text
    assert "250" in text
    assert "best so far: trial-0000, objective 1.5000, adapter.rank=1" in text
    assert "33 % done, about 20 s left · 1 of 3 ended, 0 running" in text


def test_the_live_view_is_drawn_at_most_four_times_a_second() -> None:
    stage = Stage(board_of(1), terminal=True)
    with stage.view:
        stage.play(JobAdmitted(spec(0), 0, 1000, "g0"))
        before = len(stage.file.getvalue())
        for step in range(1, 200):
            stage.clock.now += 0.001
            stage.step(0, step)
        assert len(stage.file.getvalue()) == before
        stage.clock.now += 0.1
        stage.step(0, 200)
        assert len(stage.file.getvalue()) > before


class SlowFile(io.StringIO):
    """A terminal that takes its time for each writing."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds, self.spent = clock, seconds, 0.0

    def write(self, text: str) -> int:
        self.clock.now += self.seconds
        self.spent += self.seconds
        return super().write(text)


@pytest.mark.parametrize("seconds", [0.0001, 0.02, 0.5])
def test_drawing_takes_at_most_a_hundredth_of_the_time(seconds: float) -> None:
    stage = Stage(board_of(4), terminal=True)
    with stage.view:
        stage.console.file = file = SlowFile(stage.clock, seconds)
        stage.clock.now += 1.0
        stage.step(0, 1)
        first, begun = file.spent, stage.clock.now
        assert first > 0
        for step in range(2, 4001):
            stage.clock.now += 0.05
            stage.step(0, step)
            if step % 100 == 0:
                stage.view.refresh()
        elapsed = stage.clock.now - begun
        assert file.spent - first <= 0.01 * elapsed
        assert file.spent > first  # it was drawn again
        drawn = file.spent
        stage.end(0, "finished", 4000, 1.5)
    assert "finished" in file.getvalue().rsplit("job", 1)[1]  # whatever it costs, the end is shown
    assert file.spent > drawn


@pytest.mark.parametrize("height", [8, 12, 24])
def test_the_live_view_fits_the_screen_and_shows_live_jobs_first(height: int) -> None:
    board = board_of(200)
    for trial in (190, 191):
        board.handle(JobAdmitted(spec(trial), 0, 10, "g0"))
    stage = Stage(board, terminal=True, height=height, width=100)
    with stage.console.capture() as capture:
        stage.console.print(stage.view._view())
    lines = capture.get().splitlines()
    assert len(lines) <= height
    assert all(len(line) <= 100 for line in lines)
    assert lines[1].startswith("trial-0190")
    hidden = next(line for line in lines if "more" in line)
    assert f"{200 - (height - 7)} more" in hidden


def test_live_jobs_come_first_then_the_newest_that_ended_then_the_next_to_start() -> None:
    board = board_of(6)
    for trial, state in ((1, "finished"), (3, "running"), (4, "failed")):
        board.jobs[spec(trial).name].state = state
    assert [job.trial for job in shown_first(list(board.jobs.values()))] == [3, 4, 1, 0, 2, 5]


# ---- time left ---------------------------------------------------------------------------------------------


class Played:
    """A search of equal trials at a constant pace: a step of one job takes a second, wherever it trains."""

    def __init__(self, lengths: Sequence[int], parallel: int, steps: int) -> None:
        self.stage = Stage(board_of(0, trials=len(lengths)), terminal=True)
        self.lengths, self.parallel, self.steps = list(lengths), parallel, steps
        self.left: list[tuple[float, float | None]] = []  # truly, and as told
        self.most: list[int] = []  # if all that have not ended take all their steps

    def run(self) -> None:
        """Trials end after their lengths; those that come to the full number of steps have finished."""
        stage, live, drawn, iteration = self.stage, dict[int, int](), 0, 0
        while drawn < len(self.lengths) or live:
            while drawn < len(self.lengths) and len(live) < self.parallel:
                stage.board.add(JobRecord(spec(drawn).name, drawn, spec(drawn).parameters()))
                stage.play(JobAdmitted(spec(drawn), 0, self.steps, "g0"))
                live[drawn] = 0
                drawn += 1
            iteration += 1
            stage.clock.now += len(live)
            names = tuple(spec(trial).name for trial in live)
            for trial in live:
                live[trial] += 1
                name = spec(trial).name
                stage.play(JobProgress(name, live[trial], 1.0, 1.0, 1e-4, 8, 1.0, 1.0))
            stage.play(GroupStep("g0", iteration, names, 1, 8 * len(live), float(len(live)), None, 256))
            truth = sum(n - live.get(t, n if t < drawn else 0) for t, n in enumerate(self.lengths))
            self.left.append((truth, stage.view.seconds_left))
            rest = sum(self.steps - step for step in live.values())
            self.most.append(rest + self.steps * (len(self.lengths) - drawn))
            for trial in [trial for trial, step in live.items() if step == self.lengths[trial]]:
                self.end(trial, live.pop(trial))

    def end(self, trial: int, step: int) -> None:
        state = "finished" if step == self.steps else "pruned"
        self.stage.end(trial, state, step, 1.0, value=1.0, tokens=8 * step)


@settings(max_examples=40)
@given(trials=st.integers(1, 12), parallel=st.integers(1, 5), steps=st.integers(6, 40))
def test_time_left_is_exact_at_a_constant_pace_where_all_come_to_their_ends(
    trials: int, parallel: int, steps: int
) -> None:
    played = Played([steps] * trials, parallel, steps)
    played.run()
    told = [(truth, left) for truth, left in played.left if left is not None]
    assert len(told) == len(played.left)
    assert [left for _, left in told] == pytest.approx([truth for truth, _ in told], abs=1e-6)


@settings(max_examples=20)
@given(st.lists(st.sampled_from([5, 10, 20, 40]), min_size=12, max_size=40), st.integers(1, 6))
def test_time_left_is_no_more_than_without_pruning(lengths: list[int], parallel: int) -> None:
    """It may rise: a trial that comes further than all before it tells that the others may, too."""
    played = Played(lengths, parallel, 40)
    played.run()
    told = [
        (left, most) for (_, left), most in zip(played.left, played.most, strict=True) if left is not None
    ]
    assert all(0 <= left <= most + 1e-6 for left, most in told)
    assert played.stage.view.seconds_left == pytest.approx(0.0, abs=1e-6)


def test_time_left_falls_on_average_where_trials_are_pruned() -> None:
    played = Played([5, 40, 10, 20] * 8, 3, 40)
    played.run()
    left = [left for _, left in played.left if left is not None]
    half = len(left) // 2
    assert fmean(left[:half]) > fmean(left[half:])


def test_time_left_of_jobs_far_longer_than_the_time_so_far() -> None:
    """Trials that were ended early do not count as work done in no time."""
    stage = Stage(board_of(4), terminal=False)
    for trial in range(4):
        stage.play(JobAdmitted(spec(trial), 0, 100_000, "g0"))
    names = tuple(spec(trial).name for trial in range(4))
    told = []
    for step in range(1, 41):
        stage.clock.now += 0.4
        for trial in range(4):
            stage.board.handle(JobProgress(names[trial], step, 1.0, 1.0, 1e-4, 8, 1.0, 1.0))
        stage.play(GroupStep("g0", step, names, 1, 8, 0.4, None, 256))
        if step == 20:
            stage.end(0, "stopped", step, 1.0, reason="by the user")
            stage.board.handle(ended("pruned", 1.0, job=names[0]))
            told = [stage.view.seconds_left]
    told.append(stage.view.seconds_left)
    assert told[0] == pytest.approx(3 * 99_980 * 0.1, rel=0.01)
    assert told[1] is not None
    assert told[0] is not None
    assert 25_000 < told[1] < told[0]


@pytest.mark.parametrize("others", [0, 1])
def test_time_without_training_does_not_count_for_the_pace(others: int) -> None:
    """Whatever other processes train meanwhile."""
    stage = Stage(board_of(1 + others), terminal=False)
    if others:
        job = stage.board.jobs["trial-0001"]
        job.state, job.step, job.steps = JobState.RUNNING, 100, 100
    stage.play(JobAdmitted(spec(0), 0, 100, "g0"))
    for step in range(1, 41):
        stage.clock.now += 1.0
        if step == 21:
            stage.play(JobPaused("trial-0000", 20, PauseReason.BY_USER))
            if others:  # what this process trained for a while, until it was taken over
                stage.view.handle(JobAdmitted(spec(1), 100, 100, "g0"))
                stage.view.lose("trial-0001")
            stage.clock.now += 3600.0
            stage.play(JobAdmitted(spec(0), 20, 100, "g0"))
        stage.board.handle(JobProgress("trial-0000", step, 1.0, 1.0, 1e-4, 8, 1.0, 1.0))
        stage.play(GroupStep("g0", step, ("trial-0000",), 1, 8, 1.0, None, 256))
    assert stage.view.seconds_left == pytest.approx(60.0)


def test_time_left_of_a_resumed_search_leaves_out_what_is_done() -> None:
    board = board_of(2)
    board.jobs["trial-0000"].state = JobState.FINISHED  # by an earlier process; its last step is known
    board.jobs["trial-0000"].step = board.jobs["trial-0000"].steps = 10
    stage = Stage(board, terminal=False)
    assert stage.view.seconds_left is None
    stage.play(JobAdmitted(spec(1), 0, 10, "g0"))
    for step in range(1, 6):
        stage.clock.now += 12.0
        stage.board.handle(JobProgress("trial-0001", step, 1.0, 1.0, 1e-4, 8, 1.0, 1.0))
        stage.play(GroupStep("g0", step, ("trial-0001",), 1, 8, 12.0, None, 256))
    assert share_done(board) == 0.75
    assert stage.view.seconds_left == pytest.approx(60.0)


def test_share_done_and_time_left_use_the_same_measure() -> None:
    stage = Stage(board_of(2, trials=4), terminal=False)
    for trial in range(2):
        stage.play(JobAdmitted(spec(trial), 0, 10, "g0"))
        stage.step(trial, 1)
    pace = stage.view._pace
    assert pace.share_done == 2 / 40
    for trial in range(2):
        stage.play(replace(ended("pruned", None, job=spec(trial).name), step=1))
    assert pace.share_done == pytest.approx(0.5)  # the other two are expected to take one step, too


def test_the_share_that_is_done_falls_only_if_more_trials_are_wanted() -> None:
    board = board_of(3, trials=4)
    stage = Stage(board, terminal=False)
    for trial in range(2):
        stage.play(JobAdmitted(spec(trial), 0, 10, "g0"))
        stage.step(trial, 1)
        stage.play(replace(ended("pruned", None, job=spec(trial).name), step=1))
    pace = stage.view._pace
    said = pace.share_done
    stage.play(JobAdmitted(spec(2), 0, 10, "g0"))
    stage.step(2, 2)
    assert share_done(board) < said  # it gets further than was expected
    assert pace.share_done == said
    board.trials = 8
    assert pace.share_done == share_done(board)


def test_trials_not_yet_suggested_count_as_work_to_do() -> None:
    board = board_of(2, trials=8)
    for job in board.jobs.values():
        job.state = JobState.FINISHED
    assert share_done(board) == 0.25
    assert status_line(board, None) == "25 % done · 2 of 8 ended, 0 running"


def test_paused_jobs_are_counted_with_the_reason() -> None:
    board = board_of(4)
    for trial in range(3):
        board.handle(JobPaused(spec(trial).name, 2, PauseReason.AT_RUNG))
    board.handle(JobPaused(spec(3).name, 3, PauseReason.BY_USER))
    assert "3 paused (at a rung) · 1 paused (by the user)" in status_line(board, None)


@pytest.mark.parametrize("width", [53, 64, 80, 87, 100, 160])
def test_parameters_have_columns_as_far_as_there_is_room(width: int) -> None:
    board = board_of(0)
    for trial in range(3):
        names = {
            "adapter.rank": 8 + trial,
            "train.lr": 0.000123 * (trial + 1),
            "data.path": "x" * (90 - trial),
        }
        board.add(JobRecord(spec(trial).name, trial, names | {"train.warmup_steps": 0.1 * trial}))
        board.handle(JobAdmitted(spec(trial), 0, 10, "g0"))
        board.handle(JobProgress(spec(trial).name, 3, 1.5, 0.1, 1e-4, 300, 2.0, 15000.0))
    heading, *rows = printed(lambda console: console.print(jobs_table(board, 10, width)), width)
    assert len(rows) == 3
    assert len({len(row) for row in rows}) == 1
    assert all(len(row) <= width for row in (heading, *rows))
    shown = [name for name in ("tokens/s", "rank", "lr", "path", "warmup_steps") if name in heading.split()]
    expected = {
        53: ["rank"],
        64: ["rank", "lr"],
        80: ["tokens/s", "rank", "lr"],
        87: ["tokens/s", "rank", "lr", "warmup_steps"],
        100: ["tokens/s", "rank", "lr", "path"],
        160: ["tokens/s", "rank", "lr", "path", "warmup_steps"],
    }
    assert shown == expected[width]


def test_a_table_without_jobs_and_one_of_jobs_that_do_not_differ() -> None:
    for board in (board_of(0), board_of(1)):
        table = jobs_table(board, 10, 100)
        assert "job" in printed(lambda console, table=table: console.print(table))[0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations_are_written_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_fractions_of_a_second_are_written_without_an_exponent() -> None:
    texts = [precise(seconds) for seconds in (0, 1e-5, 4.567e-4, 9.994e-4, 9.996e-4, 0.01234)]
    assert texts == ["0 s", "10 µs", "457 µs", "999 µs", "0.001 s", "0.0123 s"]
    assert [precise(seconds) for seconds in (1.2345, 12.34, 1234.5)] == ["1.23 s", "12.3 s", "1,234.5 s"]


def test_settings_are_short() -> None:
    assert [setting(value) for value in (2e-4, 16, ["q", "v"], None, True)] == [
        "0.0002",
        "16",
        "[q,v]",
        "null",
        "true",
    ]


def test_a_priority_is_shown_for_trials_that_have_one() -> None:
    board = board_of(2)
    board.add(JobRecord("trial-0002", 2, dict(spec(2).parameters()) | {"train.priority": 5}))
    assert [settings_line(job, board.varying()) for job in board.jobs.values()] == [
        "adapter.rank=1",
        "adapter.rank=2",
        "adapter.rank=3 train.priority=5",
    ]


def test_the_summary_says_what_was_found_and_what_failed() -> None:
    board = board_of(2)
    board.handle(ended("finished", 1.25, job="trial-0000"))
    board.jobs["trial-0000"].adapter = "runs/adapters/trial-0000"
    board.handle(ended("failed", None, "loss is nan", job="trial-0001"))
    facts = {"tracking": "sqlite:///" + "x" * 80, "open": "plait ui"}
    assert printed(lambda console: print_summary(console, board, facts)) == [
        "best        trial-0000, objective 1.2500",
        "parameters  adapter.rank=1",
        "adapter     runs/adapters/trial-0000",
        "failed      trial-0001: loss is nan",
        "tracking    sqlite:///" + "x" * 80,
        "open        plait ui",
    ]


def test_a_better_earlier_evaluation_is_reported_at_the_end() -> None:
    stage = Stage(board_of(1), terminal=False)
    for step, loss in ((20, 3.7849), (40, 3.8664)):
        stage.play(JobEvaluated("trial-0000", step, loss, 80))
    took = {"tokens": 1000, "device_seconds": 10.0, "completion_seconds": 65.0}
    stage.end(0, "finished", 40, 3.8664, value=3.8664, **took)
    figures = "eval loss 3.8664 (lowest: 3.7849 at step 20), 40 steps, 1,000 tokens"
    line = f"trial-0000 finished: {figures}, 1 min 05 s from start to end, 10 s of the device"
    assert line in stage.lines
    print_summary(stage.console, stage.board, {})
    assert "lowest eval loss  3.7849 at step 20; the adapter is from the last step" in stage.lines


def test_the_summary_names_the_finished_trial_that_breaks_a_constraint() -> None:
    board = board_of(3)
    for trial, objective in enumerate((1.75, 1.25)):
        result = ended("finished", objective, "violates train/tokens <= 9", job=f"trial-{trial:04d}")
        board.handle(replace(result, violations={"train/tokens <= 9": 1.0}))
    rejected = ended("infeasible", None, "violates adapter.rank <= 2", job="trial-0002")
    board.handle(replace(rejected, violations={"adapter.rank <= 2": 1.0}))
    assert printed(lambda console: print_summary(console, board, {})) == [
        "best        none: no finished trial keeps every constraint",
        "infeasible  trial-0001, objective 1.2500",
        "reason      violates train/tokens <= 9",
    ]
    assert "3 of 3 ended, 0 running · 1 infeasible" in status_line(board, None)


def test_a_single_job_is_summed_up_in_a_line() -> None:
    board = board_of(1)
    board.handle(ended("finished", 1.5, job="trial-0000"))
    lines = printed(lambda console: print_summary(console, board, {}))
    assert "parameters  adapter.rank=1 train.lr=0.0002" in lines
