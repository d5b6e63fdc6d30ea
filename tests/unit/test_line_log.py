"""The crash-safe log of JSON lines: cut anywhere, locked, durable, and never a file of somebody else."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from plait.core.errors import StorageError
from plait.utils.line_log import LineLog

BEGINS = b'{"at":'


def line(at: int) -> bytes:
    return b'{"at":%d,"text":"%s"}\n' % (at, b"x" * at)


def test_a_log_cut_anywhere_is_complete_up_to_the_cut_and_continues_there(tmp_path: Path) -> None:
    content = b"".join(map(line, range(4)))
    ends = [len(b"".join(map(line, range(at + 1)))) for at in range(4)]
    for cut in range(len(content) + 1):
        path = tmp_path / f"{cut}.log"
        path.write_bytes(content[:cut])
        whole = sum(end <= cut for end in ends)
        with LineLog(path, BEGINS) as log:
            assert log.lock()
            assert log.end == path.stat().st_size == (ends[whole - 1] if whole else 0)
            log.append(line(9))
            found = list(log.lines())
        assert [text for _, text in found] == [*map(line, range(whole)), line(9)]
        assert [at for at, _ in found] == [0, *ends[:whole]]


@pytest.mark.parametrize(
    "text",
    [
        b"my notes",
        b"my notes\n",
        b'{"other":1}\n',
        b'{"at":1}\nmy notes\nand more',  # a valid beginning is not enough
        b'{"at":1}\n{"other":1}\nand more',
        b"\0" * 40,
    ],
)
def test_a_file_of_another_kind_is_refused_and_stays_as_it_is(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(text)
    with LineLog(path, BEGINS) as log, pytest.raises(StorageError, match=r"notes\.txt") as caught:
        log.lock()
    assert caught.value.rule
    assert caught.value.remedy
    assert path.read_bytes() == text


def test_lines_are_read_in_small_blocks_as_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    with LineLog(path, BEGINS) as log:
        log.lock()
        log.append(b"".join(map(line, range(30))))
        whole = list(log.lines())
        monkeypatch.setattr("plait.utils.line_log.BLOCK", 7)
        assert list(log.lines()) == whole
        start, _ = whole[10]
        stop, _ = whole[20]
        assert list(log.lines(start, stop)) == whole[10:20]
        assert list(log.lines(start, stop + 3)) == whole[10:20]
    with path.open("ab") as file:
        file.write(b'{"at":9,')
    with LineLog(path, BEGINS) as log:
        log.lock()
        assert list(log.lines()) == whole


def test_one_process_at_a_time_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first, second = LineLog(path, BEGINS), LineLog(path, BEGINS)
    assert first.lock()
    assert not second.lock(wait=False)
    first.close()
    assert second.lock(wait=False)
    path.unlink()
    third = LineLog(path, BEGINS)
    second.close()
    assert third.lock(wait=False)
    path.unlink()  # by somebody who had it open, too
    fourth = LineLog(tmp_path / "other", BEGINS)
    (tmp_path / "other").unlink()
    assert not fourth.lock()
    for log in (third, fourth):
        log.close()


def test_a_commit_syncs_the_file_and_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    really = os.fsync

    def noted(file: int) -> None:
        synced.append(os.fstat(file).st_ino)
        really(file)

    monkeypatch.setattr(os, "fsync", noted)
    path = tmp_path / "log"
    with LineLog(path, BEGINS) as log:
        log.lock()
        log.append(line(1))
        assert synced == []
        log.commit()
        assert synced == [path.stat().st_ino, tmp_path.stat().st_ino]
        log.commit()  # nothing is new
        log.append(line(2))
        log.commit()
    assert synced == [path.stat().st_ino, tmp_path.stat().st_ino, path.stat().st_ino]


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    with LineLog(path, BEGINS) as log:
        log.lock()
        log.append(line(1))
        really = os.write
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda file, text: really(file, text[:5]))
            with pytest.raises(OSError, match="No space"):
                log.append(line(2))
        assert path.read_bytes() == line(1)
        log.append(line(3))
        assert [text for _, text in log.lines()] == [line(1), line(3)]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def missing(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", missing)
    with (
        LineLog(tmp_path / "log", BEGINS) as log,
        pytest.raises(StorageError, match="does not support locks") as caught,
    ):
        log.lock()
    assert os.strerror(number) in caught.value.value
    assert "local disk" in caught.value.remedy
