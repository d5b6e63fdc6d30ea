"""The file in which tracking waits: read back after any cut, shared among processes, on a full disk; and the
points that are written when a search is killed again and again."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plait.core.errors import StorageError
from plait.core.messages import JobProgress
from plait.tracking.encoding import Head, Held, Line, Taken, decode, encode
from plait.tracking.names import TRAIN_LOSS
from plait.tracking.operations import (
    EndRun,
    LogFile,
    LogFolder,
    LogPoints,
    LogText,
    OpenRun,
    Operation,
    Reopen,
    Request,
    SetTags,
)
from plait.tracking.outgoing import Outgoing
from plait.tracking.spool import Spool, free_spools, open_spool
from plait.tracking.thinning import Curve, grown_stride, is_kept

HEAD = Head("parent", "search demo", "sqlite:///there")
numbers = st.floats(allow_nan=False, allow_infinity=False)
pairs = st.lists(st.tuples(st.text(), st.text())).map(tuple)
points = st.builds(
    LogPoints,
    st.text(),
    st.integers(0),
    st.integers(0),
    st.dictionaries(st.text(), numbers, min_size=1).map(lambda values: tuple(values.items())),
    st.booleans(),
)
lines: st.SearchStrategy[Line] = st.one_of(
    points,
    st.builds(SetTags, st.text(), pairs),
    st.builds(OpenRun, st.text(), st.integers(0), st.text(), pairs, pairs, st.integers(0), st.booleans()),
    st.builds(LogText, st.text(), st.text(), st.text()),
    st.builds(LogFolder, st.text(), st.sampled_from([Path("/a"), Path("b/c")]), st.text()),
    st.builds(LogFile, st.text(), st.sampled_from([Path("/a"), Path("b/c")]), st.text()),
    st.builds(EndRun, st.text(), st.text(), st.integers(0)),
    st.builds(Reopen, st.text()),
    st.builds(Held, st.text(), st.none() | points, st.none() | points),
    st.builds(
        Taken, st.text(), st.dictionaries(st.text(), st.integers(0)), st.lists(st.integers(0)).map(tuple)
    ),
    st.just(HEAD),
)


def point(run: str, step: int, loss: float = 1.0) -> LogPoints:
    return LogPoints(run, step, 1000 + step, ((TRAIN_LOSS, loss),))


def steps(spool: Spool) -> list[int]:
    return [item.step for item in spool.peek(1000) if isinstance(item, LogPoints)]


@given(lines)
def test_a_line_comes_back_as_it_went(line: Line) -> None:
    text = encode(line)
    assert text.index(b"\n") == len(text) - 1
    assert decode(text) == line


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b'["points"]', b'["points","a",1,2,3]', b'["what"]', b"\0" * 40, b"7"]
)
def test_what_is_no_line_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError, match="not a line of a spool"):
        decode(text)


def test_a_file_cut_anywhere_is_read_up_to_the_cut_and_goes_on_from_there(tmp_path: Path) -> None:
    whole = open_spool(tmp_path, HEAD)
    ends = [whole.path.stat().st_size]
    for step in range(1, 5):
        whole.append(point("a", step))
        ends.append(whole.path.stat().st_size)
    whole.close()
    text = whole.path.read_bytes()
    for cut in range(ends[0], len(text) + 1):
        whole.path.write_bytes(text[:cut])
        again = open_spool(tmp_path, HEAD)
        there = sum(end <= cut for end in ends[1:])
        assert steps(again) == list(range(1, there + 1))
        assert again.waiting == again.waiting_points == there
        for step in range(1, 6):
            again.append(point("a", step))
        assert steps(again) == [1, 2, 3, 4, 5]
        again.close()


def test_a_file_without_its_first_line_begins_anew(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, HEAD)
    spool.close()
    spool.path.write_bytes(encode(HEAD)[:7])
    assert list(free_spools(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_kind_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / f"{HEAD.parent_id}-0.jsonl"
    path.write_bytes(b'["spool",2,"parent","search demo","there"]\n["points","a",1,1,{}]\n')
    before = path.read_bytes()
    with pytest.raises(StorageError, match="version 2") as caught:
        open_spool(tmp_path, HEAD)
    assert str(path) in caught.value.value
    assert path.read_bytes() == before


def test_what_was_sent_is_not_sent_again_and_what_was_not_is(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, HEAD)
    for step in range(1, 6):
        spool.append(point("a", step))
    assert [item.run for item in spool.peek(3)] == ["a"] * 3
    spool.append(point("a", 6))
    spool.drop()
    spool.peek(2)  # the process ends before the store has said that it has these
    spool.close()
    again = open_spool(tmp_path, HEAD)
    assert (again.waiting, steps(again)) == (3, [4, 5, 6])
    again.close()


def test_lost_count_of_what_was_sent_sends_all_again(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, HEAD)
    spool.append(point("a", 1))
    spool.peek(1)
    spool.drop()
    spool.close()
    spool.path.with_suffix(".sent").write_bytes(b"12")
    again = open_spool(tmp_path, HEAD)
    assert steps(again) == [1]
    again.close()


def test_each_process_has_a_file_of_its_own_and_takes_over_that_of_one_that_ended(tmp_path: Path) -> None:
    mine, other = open_spool(tmp_path, HEAD), open_spool(tmp_path, HEAD)
    assert mine.path != other.path
    assert list(free_spools(tmp_path)) == []
    other.append(point("b", 1))
    other.peek(1)
    other.drop()
    other.append(point("b", 2))
    other.note(Held("b", point("b", 2), None))
    other.close()
    mine.append(point("a", 1))
    (left,) = free_spools(tmp_path, HEAD.parent_id)
    mine.take_over(left)
    assert not left.path.exists()
    assert [(item.run, item.step) for item in mine.peek(9) if isinstance(item, LogPoints)] == [
        ("a", 1),
        ("b", 2),
    ]
    mine.close()
    mine = open_spool(tmp_path, HEAD)
    for step in (1, 2, 3):
        mine.append(point("b", step))  # trained again: only the third is new
    assert steps(mine) == [1, 2, 3]
    assert mine.waiting == 3
    assert mine.written.held("b") == Held("b", point("b", 2), None)
    mine.close()


def test_a_full_disk_is_told_keeps_what_was_there_and_can_be_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = open_spool(tmp_path, HEAD)
    spool.append(point("a", 1))
    before = spool.path.read_bytes()
    really = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, text: really(file, text[: len(text) // 2]))
        with pytest.raises(StorageError, match="No space left on device") as caught:
            spool.append(point("a", 2))
    assert caught.value.exit_status == 2
    assert str(spool.path) in caught.value.value
    assert "start the same command again" in caught.value.remedy
    assert spool.path.read_bytes() == before
    spool.append(point("a", 2))
    assert steps(spool) == [1, 2]
    spool.close()


# ---- which points are written --------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(1, 400))
def test_a_curve_has_first_and_last_and_few_others(length: int, most: int) -> None:
    curve = Curve.of("a", length, most, None)
    kept = [step for step in range(1, length + 1) if curve.take(point("a", step))]
    assert kept[0] == 1
    assert kept[-1] == length
    assert len(kept) <= most + 2
    if length <= most:
        assert kept == list(range(1, length + 1))


@given(st.integers(4, 400))
def test_a_curve_of_unknown_length_stays_small(most: int) -> None:
    kept = [step for step in range(1, 20_001) if is_kept(step, grown_stride(step, most))]
    assert kept[: most // 4] == list(range(1, most // 4 + 1))
    quarter = most // 4
    assert len(kept) <= quarter * (2 + (20_000 // quarter).bit_length()) + 1


class Nowhere:
    """A sender of which nothing is heard."""

    def send(self, request: Request) -> None:
        raise ConnectionError(request.run)


class Life:
    """One process after the other trains a job; each may die at any moment."""

    def __init__(self, folder: Path, losses: list[float], most: int) -> None:
        self.folder, self.losses, self.most = folder, losses, most
        self.checkpoint = 0
        self.clock = 0

    def process(self, until: int, saves: set[int], lost: int, *, over: bool = False) -> None:
        """Train from the checkpoint to a step; then die, or bring the job to its end, and lose so many of the
        bytes that were written since the last commit."""
        spool = open_spool(self.folder, HEAD)
        out = Outgoing(spool, Nowhere(), 3600.0, self.most, self.now)
        out.begin_curve("a", len(self.losses))
        safe = spool.path.stat().st_size
        for step in range(self.checkpoint + 1, until + 1):
            out.progress(JobProgress("a", step, self.losses[step - 1], 1.0, 1e-4, step, 0.5, 10.0))
            if step in saves:
                out.commit()
                self.checkpoint, safe = step, spool.path.stat().st_size
        if over:
            out.end_curve("a")
        out.close(0.0, done=False)
        size = spool.path.stat().st_size
        os.truncate(spool.path, max(safe, size - lost))

    def now(self) -> int:
        self.clock += 1
        return self.clock

    def points(self) -> list[tuple[int, str, float]]:
        spool = open_spool(self.folder, HEAD)
        found = [
            (item.step, *pair)
            for item in spool.peek(10**6)
            if isinstance(item, LogPoints)
            for pair in item.values
        ]
        spool.close()
        return sorted(found)


deaths = st.lists(
    st.tuples(st.integers(0, 60), st.sets(st.integers(1, 60)), st.integers(0, 2000), st.booleans()),
    max_size=5,
)


@settings(max_examples=40)
@example([2.0] * 12 + [1.0] + [2.0] * 47, 5, [(25, {20}, 0, False)])  # its best lies before the checkpoint
@given(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=60), st.integers(1, 30), deaths)
def test_killed_at_any_moment_every_point_is_written_once(
    losses: list[float], most: int, killed: list[tuple[int, set[int], int, bool]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        whole, life = Life(Path(name) / "whole", losses, most), Life(Path(name) / "killed", losses, most)
        whole.process(len(losses), set(), 0, over=True)
        for until, saves, lost, over in killed:
            end = min(until, len(losses))
            life.process(end, saves, lost, over=over and end == len(losses))
        life.process(len(losses), set(), 0, over=True)
        assert life.points() == whole.points()


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    opened = open_spool(tmp_path, HEAD)
    yield opened
    opened.close()


def test_the_best_step_is_written_when_the_job_is_over(spool: Spool) -> None:
    out = Outgoing(spool, Nowhere(), 3600.0, 5, lambda: 1)
    out.begin_curve("a", 100)
    for step in range(1, 51):
        out.progress(JobProgress("a", step, abs(step - 33.0), 1.0, 1e-4, step, 0.5, 10.0))
    out.end_curve("a")  # pruned at step 50
    found: list[Operation] = spool.peek(99)
    assert [(item.step, item.late) for item in found if isinstance(item, LogPoints)] == [
        (1, False), (20, False), (40, False), (50, False), (33, True)
    ]  # fmt: skip
    out.writer.close(0.0)
