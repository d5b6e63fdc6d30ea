"""What is recorded: when, with what uploads, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from recorders import Again
from torch import Tensor

from plait_kernels import KernelError, Routing
from plait_kernels.recordings import MOST, CudaRecorder, Recordings
from plait_kernels.synthetic import Shape, counters_of, even_segments, problem
from plait_kernels.tables import tile_table
from plait_kernels.uploads import Places, refused, upload

CPU = torch.device("cpu")


class Work:
    """Adds up what was uploaded, with a table of the microbatch."""

    def __init__(self, run: Callable[[Work, Any], Any] | None = None) -> None:
        made = problem(Shape(12, 16, (16,), (4, 4)), device="cpu", dtype=torch.float32)
        self.bank = made.bank
        self.recorder = Again()
        self.launched = 0
        self.recordings: Recordings[Any, Any] = Recordings(
            self.recorder, lambda loaded: loaded[0], lambda loaded: (run or Work.sum)(self, loaded)
        )

    def sum(self, loaded: tuple[Routing, Tensor]) -> float:
        self.launched += 1
        routing, values = loaded
        return float(values.sum() + tile_table(routing, 8).tiles.sum())

    def of(self, number: float, sizes: object = "usual", length: int = 3) -> Any:
        def load() -> tuple[Routing, Tensor]:
            segments = even_segments(12, ["0", "1"])
            routing = Routing.build(self.bank, segments, counters_of(12, "cpu"), training=True)
            return routing, upload(torch.full((length,), number), CPU)

        return self.recordings.compute(sizes, load)[1]


def test_the_second_of_a_kind_is_recorded_and_all_after_it_replayed() -> None:
    work = Work()
    tiles = work.of(0.0)
    assert [work.of(number) - tiles for number in (1.0, 2.0, 5.0)] == [3.0, 6.0, 15.0]
    assert work.recorder.said == ["recorded", "replayed", "replayed", "replayed"]
    assert work.of(1.0, "other") - tiles == 3.0
    assert (work.recordings.replays, len(work.recorder.said)) == (3, 4)


def test_what_waits_or_sends_while_it_is_recorded_runs_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    def sends(work: Work, loaded: Any) -> float:
        if work.launched == 1:
            upload(torch.zeros(1), CPU)
        return work.sum(loaded)

    work = Work(sends)
    monkey = work.recorder.record
    tries: list[int] = []

    def once(run: Callable[[], Any]) -> Callable[[], Any]:
        tries.append(1)
        run()  # as a device goes through it while it records
        return monkey(run)

    work.recorder.record = once  # type: ignore[method-assign]
    tiles = work.of(0.0)
    assert [work.of(number) - tiles for number in (1.0, 2.0, 3.0)] == [3.0, 6.0, 9.0]
    assert tries == [1]
    assert "sends nothing" in work.recordings.refusals["usual"]
    assert ["usual" in each.message and "sends nothing" in each.message for each in caplog.records] == [True]
    assert work.recordings.replays == 0


def test_what_a_refused_recording_has_made_is_not_used() -> None:
    """What is computed while a device records is recorded and not computed: it is there, without values."""
    seen: list[Any] = []
    work = Work(lambda _, loaded: seen.append(loaded))

    def waits(run: Callable[[], Any]) -> Callable[[], Any]:
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    work.recorder.record = waits  # type: ignore[method-assign]
    for _ in range(2):
        work.of(1.0)
    _, recorded, launched = seen
    assert launched is not recorded
    assert launched[0] is not recorded[0]
    assert launched[1].tolist() == [1.0, 1.0, 1.0]


def test_a_recording_keeps_no_adapter_and_is_made_again_once_it_is_forgotten() -> None:
    work = Work()
    records = work.recorder.record

    def record(run: Callable[[], Any]) -> Callable[[], Any]:
        found = run()
        return records(lambda: found)  # as on a device, which keeps none of Python's objects

    work.recorder.record = record  # type: ignore[method-assign]
    for _ in range(3):
        work.of(1.0)
    assert work.recorder.said == ["recorded", "replayed", "replayed"]
    state = weakref.ref(work.bank.block("0").state)
    work.bank.detach("0")
    gc.collect()
    assert state() is None
    work = Work()
    for _ in range(2):
        work.of(1.0)
    work.recordings.forget()
    work.of(1.0)
    assert work.recorder.said == ["recorded", "replayed", "forgotten", "recorded", "replayed"]


class Cuda:
    """What torch has of a device, and says of it."""

    def __init__(self) -> None:
        self.shared: list[object] = []  # whose memory each graph took
        self.current = "usual"
        self.fails = False

    def current_stream(self) -> str:
        return self.current

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    class CUDAGraph:
        def pool(self) -> object:
            return self

    @contextmanager
    def graph(self, _: CUDAGraph, *, pool: object, **__: object) -> Iterator[None]:
        self.shared.append(pool)
        before, self.current = self.current, "capturing"
        yield
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    for name in ("current_stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    return cuda


def test_graphs_share_their_memory_until_they_are_forgotten(cuda: Cuda) -> None:
    """Torch takes no memory from a graph that is gone."""
    recorder = CudaRecorder()
    for _ in range(3):
        recorder.record(lambda: None)
    recorder.forget()
    recorder.record(lambda: None)
    assert cuda.shared[0] is cuda.shared[3] is None
    assert cuda.shared[1] is cuda.shared[2] is not None


def test_after_a_refusal_the_work_goes_on_where_it_was(cuda: Cuda) -> None:
    cuda.fails, seen = True, list[str]()
    with pytest.raises(RuntimeError, match="a previous error"):
        CudaRecorder().record(lambda: seen.append(cuda.current))
    assert (seen, cuda.current) == (["capturing"], "usual")


def test_other_uploads_than_those_recorded_are_an_error() -> None:
    work = Work()
    for _ in range(2):
        work.of(1.0)
    with pytest.raises(KernelError, match="the uploads are always these"):
        work.of(1.0, length=4)


def test_those_used_longest_ago_are_let_go_of() -> None:
    work = Work()
    for sizes in range(MOST + 1):
        for _ in range(2):
            work.of(1.0, sizes)
    before = work.recorder.said.count("recorded")
    work.of(1.0, MOST)
    assert work.recorder.said.count("recorded") == before
    work.of(1.0, 0)
    assert work.recorder.said.count("recorded") == before + 1


def test_places_stay_and_take_new_values() -> None:
    places = Places()
    source = torch.arange(3)
    with places.filled():
        first = upload(source, CPU)
    with places.filled():
        second = upload(torch.arange(3) + 5, CPU)
    assert second is first
    assert first.tolist() == [5, 6, 7]
    assert source.tolist() == [0, 1, 2]
    with pytest.raises(KernelError, match="0 uploads"), places.filled():
        pass
    with pytest.raises(KernelError, match="upload 2"), places.filled():
        _ = [upload(source, CPU), upload(source, CPU)]
    with pytest.raises(KernelError, match="a replay would read"), refused():
        upload(source, CPU)
    assert upload(source, CPU) is source
