"""The timeline of a search: what is kept of its spans, and the trace that is written from it."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from threading import Thread

import pytest
from trace_files import overlaps, tracks_of

from plait.cli.main import main
from plait.core.errors import StorageError
from plait.core.messages import SpansTaken
from plait.core.spans import ReplicaSpans, Span
from plait.tracking import spans as kept
from plait.tracking.spans import BEFORE_FILE, SPANS_FILE, SpanLog, write_trace

WORK = tuple((f"trial-{number:04d}", 3) for number in range(5))


def taken(replica: int, *spans: Span, offset: float = 0.0) -> SpansTaken:
    return SpansTaken((ReplicaSpans(replica, "host", 10 + replica, "cpu", spans, offset, 1e-4),))


def keep(folder: Path, *events: SpansTaken, worker: str = "worker") -> None:
    with closing(SpanLog(folder, worker)) as log:
        for event in events:
            log.add(event)


def test_a_span_has_its_jobs_and_its_tokens(tmp_path: Path) -> None:
    keep(
        tmp_path,
        taken(0, Span("waiting", 7.0, 8.0), Span("microbatch", 8.0, 8.5, WORK, tokens=64)),
        taken(1, Span("exchange", 8.0, 8.25, WORK[:1], bytes=12), offset=0.125),
    )
    text = write_trace(tmp_path)
    assert text is not None
    (waiting, microbatch), (exchange,) = tracks_of(text).values()
    assert (waiting["cat"], waiting["ts"], waiting["dur"]) == ("waiting", 0, pytest.approx(1e6))
    assert microbatch["name"] == "microbatch trial-0000#3, trial-0001#3, trial-0002#3 and 2 more"
    assert microbatch["args"] == {"jobs": [f"trial-{number:04d}#3" for number in range(5)], "tokens": 64}
    assert exchange["args"] == {"jobs": ["trial-0000#3"], "received_bytes": 12}
    clocks = json.loads(text)["otherData"]["clocks"]
    assert clocks["replica 1 on cpu (host, pid 11)"] == {"offset_seconds": 0.125, "error_seconds": 1e-4}


def test_spans_do_not_overlap_where_an_offset_is_measured_again(tmp_path: Path) -> None:
    keep(
        tmp_path,
        taken(0, Span("microbatch", 1.0, 2.0)),
        taken(0, Span("step", 1.9, 3.0), Span("waiting", 3.0, 4.0)),
    )
    (track,) = tracks_of(write_trace(tmp_path) or "").values()
    assert overlaps(track) == []
    assert sum(span["dur"] for span in track) == pytest.approx(3e6)


def test_each_worker_of_a_search_has_its_own_tracks(tmp_path: Path) -> None:
    for worker in ("one", "other"):
        keep(tmp_path, taken(0, Span("microbatch", 1.0, 2.0)), worker=worker)
    assert len(tracks_of(write_trace(tmp_path) or "")) == 2


def test_the_newest_spans_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_BYTES", 2_000)
    monkeypatch.setattr(kept, "MOST_SPANS", 7)
    monkeypatch.setattr(kept, "MOST_WAITING", 100)
    keep(tmp_path, *(taken(0, Span("microbatch", at, at + 1.0, (("a", at),))) for at in range(100)))
    sizes = [(tmp_path / name).stat().st_size for name in (SPANS_FILE, BEFORE_FILE)]
    assert all(size < 2_500 for size in sizes)
    text = write_trace(tmp_path)
    (track,) = tracks_of(text or "").values()
    assert [span["args"]["jobs"] for span in track] == [[f"a#{at}"] for at in range(93, 100)]
    assert json.loads(text or "")["otherData"]["left_out"] > 0


def test_two_processes_that_find_the_file_full_move_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one would put the new file, with a line or two, in the place of the full one."""
    monkeypatch.setattr(kept, "MOST_BYTES", 100)
    full = "x" * 200 + "\n"
    (tmp_path / SPANS_FILE).write_text(full)
    stat, others = Path.stat, []

    def look(path: Path, **options: bool) -> os.stat_result:
        found = stat(path, **options)
        if not others and path.name == SPANS_FILE:  # now the other process finds it full, too
            others.append(Thread(target=keep, args=(tmp_path, taken(1, Span("step", 1.0, 2.0)))))
            others[0].start()
            others[0].join(0.2)
        return found

    monkeypatch.setattr(Path, "stat", look)
    keep(tmp_path, taken(0, Span("microbatch", 1.0, 2.0)))
    others[0].join()
    assert (tmp_path / BEFORE_FILE).read_text() == full
    assert len((tmp_path / SPANS_FILE).read_text().splitlines()) == 2


def test_a_full_disk_ends_no_search(tmp_path: Path) -> None:
    keep(tmp_path / "missing", taken(0, Span("microbatch", 1.0, 2.0)))
    assert write_trace(tmp_path / "missing") is None


def test_a_torn_line_of_a_killed_process_spoils_no_other(tmp_path: Path) -> None:
    for torn in (b'{"spans": [[0, "ho', b'{"spans'):  # the last one while it is written
        keep(tmp_path, taken(0, Span("microbatch", 1.0, 2.0)))
        with (tmp_path / SPANS_FILE).open("ab") as file:
            file.write(torn)
    (track,) = tracks_of(write_trace(tmp_path) or "").values()
    assert len(track) == 2


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / SPANS_FILE).write_text('{"spans": 3}\n')
    with pytest.raises(StorageError, match=r"spans\.jsonl"):
        write_trace(tmp_path)


def test_the_verb_writes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "plait-runs" / "searches" / "mine"
    assert main(["trace", "mine"]) == 2
    folder.mkdir(parents=True)
    assert main(["trace", "mine"]) == 2
    keep(folder, taken(0, Span("microbatch", 1.0, 2.0)))
    assert main(["trace", "mine"]) == 0
    assert "mine-trace.json" in capsys.readouterr().out
    assert tracks_of((tmp_path / "mine-trace.json").read_text())
    assert main(["trace", "mine", "--to", "deep/trace.json"]) == 0
    assert (tmp_path / "deep" / "trace.json").exists()
    odd = tmp_path / "plait-runs" / "searches" / "a%2Fb"
    odd.mkdir()
    keep(odd, taken(0, Span("microbatch", 1.0, 2.0)))
    assert main(["trace", "a/b"]) == 0  # no folder a is made
    assert (tmp_path / "a%2Fb-trace.json").exists()
