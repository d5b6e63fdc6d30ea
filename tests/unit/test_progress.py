"""What a benchmark says while it runs: elapsed, what now, and what is left if it can be told."""

import io
import threading
import time

import pytest

from plait_bench import progress
from plait_bench.progress import Progress, part, shown


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the clock shows."""
    now = [0.0]

    def made(name: str, to: io.StringIO) -> Progress:
        return Progress(name, to, clock=lambda: now[0])

    monkeypatch.setattr(progress, "Progress", made)
    return now


def test_the_time_left_is_reported_from_the_second_piece_on(now: list[float]) -> None:
    out = io.StringIO()
    with shown("race", out, heartbeat=3600):
        now[0] = 5.0
        piece = part("training", 4)
        for name in "abc":
            piece(name)
            now[0] += 60.0
    assert out.getvalue().splitlines() == [
        "       0 s  race: started",
        "       5 s  race: training: 1 of 4 (a)",
        "1 min 05 s  race: training: 2 of 4 (b), about 3 min 00 s left of this part",
        "2 min 05 s  race: training: 3 of 4 (c), about 2 min 00 s left of this part",
    ]


@pytest.mark.parametrize(
    ("seconds", "left"),
    [(0, "2 min 00 s"), (40, "1 min 20 s"), (60, "1 min 45 s"), (600, "13 min 00 s")],
)
def test_the_time_left_rises_while_a_piece_runs_longer_than_those_before(
    now: list[float], seconds: float, left: str
) -> None:
    out = io.StringIO()
    with shown("race", out, heartbeat=3600):
        piece = part("training", 3)
        piece("a")
        now[0] = 60.0
        piece("b")
        now[0] += seconds
        current = progress._current.get()
        assert current is not None
        current.again()
    assert out.getvalue().splitlines()[-1].endswith(f"training: 2 of 3 (b), about {left} left of this part")


def test_a_part_of_one_piece_says_so_at_once_and_what_runs_on_says_so_again() -> None:
    out = io.StringIO()
    twice = threading.Event()

    class Noting(io.StringIO):
        def write(self, text: str) -> int:
            out.write(text)
            if out.getvalue().count("race: loading") > 1:
                twice.set()
            return len(text)

    with shown("race", Noting(), heartbeat=0.01):
        part("loading")
        assert twice.wait(30)
    ended = out.getvalue()
    time.sleep(0.05)
    assert out.getvalue() == ended


def test_without_an_output_nothing_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    part("loading")
    part("training", 2)("a")
    assert capsys.readouterr() == ("", "")
