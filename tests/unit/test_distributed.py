"""Links to processes, and what a fleet says of those that do not come, die or are silent."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from forked import FORKS
from laboratory import random_data, random_texts
from linked import join_and_tell
from processes import ForkedProcess, wait_no_longer
from torch._C._distributed_c10d import TCPStore

from plait.core.errors import (
    ConfigError,
    GatheringInterruptedError,
    LostProcessError,
    ModelError,
    PlaitError,
    ProcessError,
    ShortStageError,
    StorageError,
)
from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.messages import (
    Attach,
    Attached,
    Cursor,
    Detach,
    JobLoss,
    MicrobatchDone,
    OutOfMemory,
    RunSchedule,
    SaveCheckpoint,
    Saved,
    StepDone,
    StepJob,
)
from plait.core.plans import Microbatch, ReplicaShape
from plait.core.samples import TokenisedData
from plait.core.settings import ClusterSettings, EngineSettings, ModelSettings, RunSettings
from plait.distributed import join, process
from plait.distributed import processes as processes_module
from plait.distributed.channel import (
    VERSIONS,
    Answer,
    Beat,
    Build,
    Channel,
    Door,
    Goodbye,
    Hello,
    Load,
    Measure,
    Provide,
    Refusal,
    See,
    Share,
    TakeTiles,
    VersionError,
    connect,
    limit_links,
)
from plait.distributed.exchange import Exchange, over_link
from plait.distributed.fleet import Fleet
from plait.distributed.launch import Launcher, _given_up, _remaining, fitted
from plait.distributed.layout import Layout, Piece, Position
from plait.distributed.places import (
    ADDRESS,
    LOCAL,
    NUMBER,
    Address,
    Meeting,
    Place,
    meeting_file,
    read_meeting,
)
from plait.distributed.places import KEY as KEY_NAME
from plait.distributed.processes import Asked, Fate, Process, Processes
from plait.distributed.start import Start, Started
from plait.distributed.waiting import Waiting
from plait.engine.catalogue import DataCatalogue
from plait.engine.devices import device_kind
from plait.engine.worker import ActivationShape, WorkerFacts
from plait.planner.verify import ScheduleError
from plait_kernels import autotuning
from plait_kernels.tiles import Choice, Tiles

KEY = b"k" * 32
SETTINGS = RunSettings(
    model=ModelSettings(kind="tiny", dtype="float32", seed=3),
    engine=EngineSettings(kernels="grouped", capacity=64, threads=1),
    cluster=ClusterSettings(processes=2, join_seconds=240.0),  # imports on a loaded machine
)
FACTS = WorkerFacts(ActivationShape(1, 8, 1, 16, 32, 64, 4, 8, 8), (), 64, 2**20, {"kernels": "grouped"})
JOB = JobSpec("a", AdapterSpec(2), TrainSpec(steps=4), random_texts(1, 5, 25))


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door(("127.0.0.1", 0), KEY)
    yield door
    door.close()


def came_in(door: Door, far: Channel, number: int = 0) -> Channel:
    """The coordinator's end of a link, once the other end has said who it is."""
    far.send(Hello(number, "host", number))
    came = door.next(10.0)
    assert came is not None
    return came[0]


def linked(door: Door, count: int) -> tuple[Processes, list[Channel]]:
    """So many processes that have come in, and their own ends of the links."""
    processes = Processes(60.0, lambda _: None)
    ends = [connect(door.address, KEY) for _ in range(count)]
    for number, end in enumerate(ends):
        processes.all.append(Process(Hello(number, "host", number), came_in(door, end, number)))
    return processes, ends


def test_a_message_arrives_and_a_closed_link_is_an_end(door: Door) -> None:
    far = connect(door.address, KEY)
    near = came_in(door, far)
    far.send(Beat())
    assert near.receive() == Beat()
    far.close()
    with pytest.raises(EOFError):
        near.receive()


def test_a_process_with_another_key_is_refused(door: Door) -> None:
    with pytest.raises(AuthenticationError):
        connect(door.address, b"x" * 32)
    assert door.next(0.1) is None
    came_in(door, connect(door.address, KEY))


def test_other_versions_are_refused_before_anything_is_unpickled(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Channel, "receive", lambda _: pytest.fail("unpickled"))
    said = re.escape(f"it has Plait 0.0.1, torch 1.0, the coordinator {VERSIONS}: use the same for all")
    with pytest.raises(VersionError, match=said):
        connect(door.address, KEY, "Plait 0.0.1, torch 1.0")
    old = Client(door.address, authkey=KEY)  # sends its greeting pickled, as before there were versions
    old.send(Evil(tmp_path / "ran"))
    assert old.recv_bytes().startswith(b"it has")
    assert not (tmp_path / "ran").exists()
    assert door.next(0.1) is None
    assert door.refused.keys() == {"127.0.0.1"}
    monkeypatch.setattr(process, "connect", partial(connect, versions="Plait 0.0.1, torch 1.0"))
    where = ":".join(map(str, door.address))
    assert process.main({ADDRESS: where, KEY_NAME: KEY.decode(), NUMBER: "1", LOCAL: "1"}) == 2
    assert "it has Plait 0.0.1, torch 1.0" in capsys.readouterr().err


class Evil:
    """What runs when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@contextmanager
def launched(folder: Path, start: Start, **cluster: Any) -> Iterator[Fleet]:
    settings = replace(SETTINGS, cluster=replace(SETTINGS.cluster, **cluster))
    with closing(Launcher(settings.cluster, start=start)) as launcher:
        yield launcher.fleet(folder, settings, DataCatalogue(random_data))


class Silent:
    """What was started and never comes."""

    def __init__(self, *given: object) -> None:
        Path(str(given[-1])).write_text("first line\nwhat it said last\n")
        self.status: int | None = None

    def poll(self) -> int | None:
        return self.status

    def kill(self) -> None:
        self.status = -9

    def wait(self) -> None:
        assert self.status == -9


class Killed(Silent):
    """What was killed before it came."""

    def poll(self) -> int:
        return -9

    def wait(self) -> None:
        pass


class Dying(Silent):
    """What ends at once."""

    def poll(self) -> int | None:
        return 7

    def wait(self) -> None:
        pass


class Starting:
    """Starts what ``kind`` says of a process's number and of how many were started before."""

    def __init__(self, kind: Callable[[int, int], Callable[..., Started]]) -> None:
        self.kind, self.numbers, self.running = kind, list[int](), list[Started]()

    def __call__(self, address: Address, key: bytes, number: int, log: Path) -> Started:
        made = self.kind(number, len(self.numbers))
        self.numbers.append(number)
        self.running.append(made(address, key, number, log))
        return self.running[-1]

    def lose_second(self, fleet: Fleet) -> None:
        """Kill the second process; the fleet is lost."""
        self.running[1].kill()
        with pytest.raises(LostProcessError, match="process 1"):
            fleet.execute(Attach(JOB))


def gathered(launcher: Launcher, folder: Path) -> Fleet:
    return launcher.fleet(folder, SETTINGS, DataCatalogue(random_data))


def test_a_process_that_does_not_come_is_named(tmp_path: Path) -> None:
    named = pytest.raises(ProcessError, match=r"process . did not join within 1 s")
    with named, launched(tmp_path, Silent, join_seconds=1.0):
        pass


def test_a_rejected_process_is_named_with_the_reason(tmp_path: Path) -> None:
    place = Place(0, 2, 0, 2, "127.0.0.1", f"test-{os.getpid()}")
    came: list[Channel] = []

    def start(address: Address, key: bytes, number: int, log: Path) -> Silent:
        came.append(connect(address, key))
        came[-1].send(Hello(number, "here", 1))
        with pytest.raises(AuthenticationError):
            connect(address, b"x" * 32)
        return Silent(log)

    cluster = replace(SETTINGS.cluster, join_seconds=1.0)
    with closing(Launcher(cluster, place, start=start)) as launcher:
        named = pytest.raises(ProcessError, match=r"^process 1 of 2 did not join within 1 s")
        with named as caught:
            gathered(launcher, tmp_path)
    assert "From 127.0.0.1 a process came with another key." in caught.value.rule


def test_a_process_that_ends_at_once_is_named_with_its_last_words(tmp_path: Path) -> None:
    named = pytest.raises(ProcessError, match=r"process . ended with status 7")
    with named as caught, launched(tmp_path, Dying):
        pass
    assert "what it said last" in caught.value.rule


class Crashing(Silent):
    """A process that joins, and ends with status 7 once it is to load the model."""

    def __init__(self, address: Address, key: bytes, number: int, log: Path) -> None:
        super().__init__(log)
        self._status: int | None = None
        channel = connect(address, key)
        channel.send(Hello(number, "here", 1))
        threading.Thread(target=self._crash, args=(channel,), daemon=True).start()

    def _crash(self, channel: Channel) -> None:
        with suppress(EOFError, OSError):
            channel.receive()
            self._status = 7
        channel.close()

    def poll(self) -> int | None:
        return self._status


def test_a_process_that_ends_by_itself_before_all_have_trained_is_not_started_again(tmp_path: Path) -> None:
    start = Starting(lambda number, _: Crashing if number == 1 else ForkedProcess)
    named = pytest.raises(LostProcessError, match=r"process 1 .* died with status 7 while loading the model")
    with named, launched(tmp_path, start):
        pass
    assert start.numbers == [0, 1]


def test_a_process_killed_before_all_have_joined_is_restarted(tmp_path: Path) -> None:
    start = Starting(lambda _, before: Killed if before == 1 else ForkedProcess)
    said: list[str] = []
    with closing(Launcher(SETTINGS.cluster, start=start)) as launcher:
        launcher.say = said.append
        assert len(gathered(launcher, tmp_path).processes) == 2
    assert start.numbers == [0, 1, 0, 1]
    assert said == ["process 1 ended with status -9. Restarting with the processes that come back ..."]


def test_a_process_that_is_lost_repeatedly_is_left_out(tmp_path: Path) -> None:
    start = Starting(lambda number, _: Killed if number == 1 else ForkedProcess)
    said: list[str] = []
    with closing(Launcher(SETTINGS.cluster, start=start)) as launcher:
        launcher.say = said.append
        (left,) = gathered(launcher, tmp_path).processes.all
    assert left.hello.process == 0
    assert start.numbers == [0, 1, 0, 1, 0, 1, 0]
    assert said[-1] == "process 1 is left out: lost 3 times; the last time it ended with status -9"


def test_once_all_have_trained_one_that_fails_to_start_is_left_out(tmp_path: Path) -> None:
    start = Starting(lambda number, before: Dying if number == 1 and before > 2 else ForkedProcess)
    with closing(Launcher(SETTINGS.cluster, start=start)) as launcher:
        start.lose_second(gathered(launcher, tmp_path))
        for _ in range(2):
            with pytest.raises(LostProcessError, match="process 1 ended with status 7"):
                gathered(launcher, tmp_path)
        assert len(gathered(launcher, tmp_path).processes) == 1


class Answering(Silent):
    """A process that joins, and says this of every request."""

    def __init__(self, reply: Answer | Refusal, address: Address, key: bytes, number: int, log: Path) -> None:
        super().__init__(log)
        self._channel = connect(address, key)
        self._channel.send(Hello(number, "here", 1))
        threading.Thread(target=self._serve, args=(reply,), daemon=True).start()

    def _serve(self, reply: Answer | Refusal) -> None:
        with suppress(EOFError, OSError):
            while not isinstance(self._channel.receive(), Goodbye):
                self._channel.send(reply)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Refusal(ModelError("no such file", "A rule.", "A remedy.")), "no such file"),
        (Answer(model="another"), "another model than the others have"),
    ],
)
def test_once_all_have_trained_one_that_cannot_load_the_model_any_more_is_left_out(
    tmp_path: Path, reply: Answer | Refusal, why: str
) -> None:
    unable = partial(Answering, reply)
    start = Starting(lambda number, before: unable if number == 1 and before > 2 else ForkedProcess)
    said: list[str] = []
    with closing(Launcher(SETTINGS.cluster, start=start)) as launcher:
        launcher.say = said.append
        start.lose_second(gathered(launcher, tmp_path))
        with pytest.raises(LostProcessError, match=why):
            gathered(launcher, tmp_path)
        assert said[-1] == f"process 1 is left out: {why}"
        assert len(gathered(launcher, tmp_path).processes) == 1


def test_the_user_may_interrupt_processes_that_come_together_again(tmp_path: Path) -> None:
    start = Starting(lambda *_: ForkedProcess)
    with closing(Launcher(SETTINGS.cluster, start=start)) as launcher:
        start.lose_second(gathered(launcher, tmp_path))
        launcher.stopping = lambda: True
        with pytest.raises(GatheringInterruptedError):
            gathered(launcher, tmp_path)
        assert len(start.running) == 4
        assert all(each.poll() is not None for each in start.running)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def waiting(door: Door, said: list[str]) -> Waiting:
    return Waiting(door, 3, said.append)


def until_come(waiting: Waiting, *numbers: int) -> None:
    while waiting.all.keys() != set(numbers):
        waiting.look(10.0)


def test_a_process_that_is_left_out_gets_the_reason(door: Door, waiting: Waiting) -> None:
    waiting.leave_out(1, "lost 3 times")
    ends = [connect(door.address, KEY) for _ in range(3)]
    for number, each in zip((1, 3, 2), ends, strict=True):
        each.send(Hello(number, "host", number))
    until_come(waiting, 2)
    while not all(each.connection.poll(0) for each in ends[:2]):
        waiting.look(0.1)
    assert ends[0].receive() == Goodbye("lost 3 times", wrong=False)
    assert ends[1].receive() == Goodbye("the coordinator waits for 3 processes, from 0 on")
    assert waiting.dismiss_all() == {2}
    assert ends[2].receive() == Goodbye()


def test_a_late_process_must_load_the_same_model(door: Door, waiting: Waiting, said: list[str]) -> None:
    load = Load(SETTINGS.model, "cpu")
    ends = [connect(door.address, KEY) for _ in range(3)]
    for number, each in enumerate(ends):
        each.send(Hello(number, "host", number))
    until_come(waiting, 0, 1, 2)
    waiting.load(load, {0, 1, 2}, "ours")
    assert [each.receive() for each in ends] == [load] * 3
    ends[0].send(Beat())
    ends[0].send(Answer(model="ours"))
    ends[1].send(Answer(model="another"))
    ends[2].send(Refusal(ModelError("no such folder")))
    while not (waiting.all.keys() == {0, 1} and all(each.ready for each in waiting.all.values())):
        waiting.look(0.1)
    waiting.load(load, {0, 1}, "ours")
    assert said == [
        "process 2 (host, pid 2) is left out: no such folder",
        "process 1 (host, pid 1) is left out: another model than the others have",
    ]
    assert waiting.take(lambda each: each.ready).keys() == {0}
    assert waiting.all == {}


def test_processes_that_come_late_are_taken_together(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change of the replicas takes time, so the first of a host's processes waits for its others."""
    later, now = [0.0], time.monotonic
    with closing(Launcher(SETTINGS.cluster, start=Silent)) as launcher:
        launcher._waiting = Waiting(door, 4, launcher.say)
        launcher._processes = Processes(60.0, lambda _: None)
        launcher._request, launcher._trained = Load(SETTINGS.model, "cpu"), "digest"
        assert not launcher.grown()
        ends = [connect(door.address, KEY) for _ in range(2)]
        for number, end in enumerate(ends):
            end.send(Hello(number, "host", number))
        until_come(launcher._waiting, 0, 1)
        monkeypatch.setattr(processes_module.time, "monotonic", lambda: now() + later[0])
        assert not launcher.grown()
        ends[0].send(Answer(model="digest"))
        assert launcher._waiting.all[0].channel.connection.poll(10.0)
        assert not launcher.grown()  # the other loads the model
        later[0] += SETTINGS.cluster.join_seconds / 2
        assert not launcher.grown()
        later[0] += SETTINGS.cluster.join_seconds
        assert launcher.grown()  # it takes too long
        later[0] -= SETTINGS.cluster.join_seconds
        ends[1].send(Answer(model="digest"))
        assert launcher._waiting.all[1].channel.connection.poll(10.0)
        assert launcher.grown()


class Far(threading.Thread):
    """A process on another host, whose folder is that of the coordinator or not."""

    def __init__(self, channel: Channel, *, shared: bool) -> None:
        super().__init__(daemon=True)
        self._channel, self._shared = channel, shared
        self.asked: list[object] = []

    def run(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self.asked.append(request := self._channel.receive())
                assert isinstance(request, See)
                try:
                    process._see(request.file if self._shared else request.file.parent / "other")
                    self._channel.send(Answer())
                except StorageError as error:
                    self._channel.send(Refusal(error))


@pytest.mark.parametrize("hosts", [("", "far"), ("far", "")])
@pytest.mark.parametrize("given", [{}, {"pipeline": 2}, {"redeploy": True}])
def test_who_reads_the_searchs_files_on_another_host_must_have_its_folder(
    door: Door,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hosts: tuple[str, ...],
    given: dict[str, Any],
) -> None:
    """Replicas take what they resume from the first process; each stage reads its own part."""
    monkeypatch.setattr(process, "SEEN_SECONDS", 0.2)
    cluster = replace(SETTINGS.cluster, **given)
    for shared in (True, False):
        processes, fars = Processes(60.0, lambda _: None), []
        for number, host in enumerate(hosts):
            fars.append(Far(connect(door.address, KEY), shared=shared))
            near = came_in(door, fars[-1]._channel, number)
            processes.all.append(Process(Hello(number, host or socket.gethostname(), number), near))
            fars[-1].start()
        wanted = [number for number, host in enumerate(hosts) if host and (given or number == 0)]
        with closing(Launcher(cluster, start=Silent)) as launcher:
            refused = pytest.raises(StorageError, match="is not the folder that the coordinator has")
            with nullcontext() if shared or not wanted else refused:
                launcher._check_folder(processes, tmp_path, cluster)
        assert [number for number, far in enumerate(fars) if far.asked] == wanted
        assert list(tmp_path.iterdir()) == []


def test_a_sign_of_life_that_follows_an_answer_is_no_death(door: Door) -> None:
    processes, (end,) = linked(door, 1)
    end.send(Answer())
    processes.ask_all(Measure())
    end.send(Beat())
    assert processes.all[0].channel.connection.poll(10.0)
    with closing(Launcher(SETTINGS.cluster, start=Silent)) as launcher:
        assert launcher._grow(processes) == processes.all
        end.close()
        assert processes.all[0].channel.connection.poll(10.0)
        with pytest.raises(LostProcessError, match=r"^process 0 .* died"):
            launcher._grow(processes)


def test_a_model_that_cannot_be_loaded_is_the_error_of_the_run(tmp_path: Path) -> None:
    settings = replace(SETTINGS, model=ModelSettings(kind="hf", id="/no/such/folder", dtype="float32"))
    launcher = Launcher(settings.cluster, start=ForkedProcess)
    with closing(launcher), pytest.raises(ModelError, match="no such folder"):
        launcher.fleet(tmp_path, settings, DataCatalogue(random_data))


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGKILL, "died with status -9"), (signal.SIGSTOP, "was silent for")]
)
def test_a_process_that_is_killed_or_hangs_is_named_and_ends_the_others(
    tmp_path: Path, number: signal.Signals, said: str
) -> None:
    start = Starting(lambda *_: ForkedProcess)
    with launched(tmp_path, start) as fleet:
        first, second = start.running
        fleet.execute(Attach(JOB))
        if number == signal.SIGSTOP:
            fleet.processes.silence = 1.0
        os.kill(second.pid, number)  # type: ignore[attr-defined]
        step = RunSchedule((StepJob("a", 1, 1e-3),))
        with pytest.raises(ProcessError, match=rf"process 1 .*{said}.* while training") as caught:
            fleet.execute(step)
        assert "same command" in caught.value.remedy
        assert second.poll() == -9
        assert first.poll() is not None
        with pytest.raises(ProcessError, match="process 1"):  # the same error again
            fleet.execute(step)
    assert len(list(tmp_path.iterdir())) == 2  # what they printed: the error names it


def test_a_process_of_another_host_may_be_silent_and_rejoin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(0, 2, 0, 2, "127.0.0.1", f"test-{os.getpid()}")
    with closing(Launcher(SETTINGS.cluster, place, start=ForkedProcess)) as launcher:
        meeting = read_meeting(place, SETTINGS.cluster)
        assert meeting is not None

        def come() -> ForkedProcess:
            return ForkedProcess(meeting.address, meeting.key, 1, tmp_path / "1.log")

        def together() -> Fleet:
            return gathered(launcher, tmp_path / "logs")

        elsewhere = come()
        fleet = together()
        assert len(fleet.processes) == 2
        wait_no_longer(launcher, monkeypatch)
        fleet.processes.silence = 1.0
        os.kill(elsewhere.pid, signal.SIGSTOP)
        with pytest.raises(LostProcessError, match=r"process 1 .*was silent for"):
            fleet.execute(Attach(JOB))
        alone = together()
        assert len(alone.processes) == 1
        assert isinstance(alone.execute(Attach(JOB))[0], Attached)
        os.kill(elsewhere.pid, signal.SIGCONT)
        elsewhere.wait()  # it finds its link closed, and ends
        (done, *_) = alone.execute(RunSchedule((StepJob("a", 1, 1e-3),)))
        assert isinstance(done, StepDone)
        os.kill(alone.processes.all[0].hello.pid, signal.SIGKILL)
        with pytest.raises(LostProcessError, match="process 0"):
            alone.execute(Detach("a"))
        back = come()
        assert len(together().processes) == 2
    back.wait()
    assert not meeting_file(place).exists()


def test_an_interface_that_a_host_has_not_is_named_before_the_search(tmp_path: Path) -> None:
    wrong = pytest.raises(ConfigError, match=r"cluster\.interface=typo")
    with wrong as caught, launched(tmp_path, ForkedProcess, interface="typo"):
        pass
    assert "Available: " in caught.value.remedy


def test_a_process_that_rejoins_after_a_loss_hears_that_the_run_has_ended(
    tmp_path: Path,
) -> None:
    place = Place(0, 2, 0, 2, "127.0.0.1", f"test-{os.getpid()}")
    with closing(Launcher(SETTINGS.cluster, place, start=ForkedProcess)) as launcher:
        meeting = read_meeting(place, SETTINGS.cluster)
        assert meeting is not None
        elsewhere = ForkedProcess(meeting.address, meeting.key, 1, tmp_path / "1.log")
        fleet = launcher.fleet(tmp_path / "logs", SETTINGS, DataCatalogue(random_data))
        os.kill(fleet.processes.all[0].hello.pid, signal.SIGKILL)
        with pytest.raises(LostProcessError, match="process 0"):
            fleet.execute(Attach(JOB))
        elsewhere.wait()
        again = connect(meeting.address, meeting.key)
        again.send(Hello(1, "elsewhere", 1))
    assert again.connection.poll(10.0)
    assert again.receive() == Goodbye()


class Saving:
    """A process of a run that is signalled, with the one that joins it, and is needed for a while yet."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.ended = clock, False

    def poll(self) -> int | None:
        if self.clock[0] == 0.0:
            os.kill(os.getpid(), signal.SIGTERM)
        self.ended = self.clock[0] > 100.0
        return 0 if self.ended else None

    def kill(self) -> None:
        assert self.ended

    def wait(self) -> None:
        pass


def test_after_a_signal_a_launched_process_stays_until_the_coordinator_ends_it(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(join.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(join.time, "sleep", lambda _: clock.__setitem__(0, clock[0] + 15.0))
    monkeypatch.setattr(join, "read_meeting", lambda *_: Meeting(door.address, KEY))
    monkeypatch.setattr(join, "start_process", lambda *_: Saving(clock))
    assert join.join_run(Place(1, 2, 1, 2, "127.0.0.1", "a run"), SETTINGS.cluster) == 0


def test_processes_that_end_leave_nothing_behind(tmp_path: Path) -> None:
    with launched(tmp_path, ForkedProcess):
        pass
    assert list(tmp_path.iterdir()) == []


class SlowLink:
    """The coordinator's end of a link that takes 100 s, by a made-up clock, to send."""

    def __init__(self, channel: Channel, clock: list[float]) -> None:
        self.connection, self.receive, self.close = channel.connection, channel.receive, channel.close
        self._clock = clock

    def send(self, _: object) -> None:
        self._clock[0] += 100.0


def test_sending_and_an_answer_that_waits_are_no_silence(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(processes_module.time, "monotonic", lambda: clock[0])
    processes, ends = linked(door, 2)
    for each in processes.all:
        each.channel = SlowLink(each.channel, clock)  # type: ignore[assignment]

    def watch() -> None:
        if ends:
            ends.pop().send(Answer())  # the last first; the other has said nothing since it was asked
        if not ends:
            clock[0] += 100.0  # its answer is there

    processes.watch = watch
    assert processes.ask_all(Measure()) == {0: Answer(), 1: Answer()}


def test_a_coordinator_that_was_stopped_in_its_own_work_calls_no_one_silent(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(processes_module.time, "monotonic", lambda: clock[0])
    processes, (first, second) = linked(door, 2)
    looks = iter(range(3))

    def watch() -> None:
        match next(looks):
            case 1:  # all were stopped for long, and one of them is sooner to say that it lives
                clock[0] += 1000.0
                first.send(Beat())
            case 2:
                first.send(Answer())
                second.send(Answer())

    first.send(Beat())
    processes.watch = watch
    assert processes.ask_all(Measure()) == {0: Answer(), 1: Answer()}


# ---- a fleet of processes that answer as they are told ---------------------------------------------------


class Told(Processes):
    """Two processes; ``said`` has what each answers to a kind of request."""

    def __init__(self, said: Mapping[type, Sequence[Answer]]) -> None:
        super().__init__(60.0, lambda _: Fate(None, ""))
        self.said = {Build: [Answer(facts=FACTS)] * 2} | dict(said)
        self.all = [Process(Hello(number, "host", number), Mock()) for number in range(2)]
        self.asked: list[tuple[int, object]] = []

    def ask(self, requests: Mapping[int, object]) -> dict[int, Answer]:
        self.asked += requests.items()
        answers = {number: self.said.get(type(each), [Answer()] * 2) for number, each in requests.items()}
        return {number: answers[number][number] for number in sorted(answers)}

    def begin(self, requests: Mapping[int, object]) -> Asked:
        return Asked(set(), self.ask(requests))

    def answers(self, asked: Asked) -> dict[int, Answer]:
        self.asked.append((-1, asked))
        return asked.answers


def told(
    said: Mapping[type, Sequence[Answer]], cluster: ClusterSettings = SETTINGS.cluster
) -> tuple[Fleet, Told]:
    processes = Told(said)
    fleet = Fleet(processes, DataCatalogue(random_data), SETTINGS.engine, None, cluster)
    processes.asked.clear()
    return fleet, processes


def test_speeds_are_given_or_measured_where_devices_differ() -> None:
    alike, _ = told({})
    assert (alike.facts.speeds, alike.facts.replica_bytes) == ((1.0, 1.0), (2**20, 2**20))
    unlike = [Answer(facts=replace(FACTS, kinds=(kind,))) for kind in ("slow", "fast")]
    rates = [Answer(rate=rate) for rate in (100.0, 253.0)]
    measured, _ = told({Build: unlike, Measure: rates})
    assert measured.facts.speeds == (1.0, 2.5)
    given, processes = told({Build: unlike}, replace(SETTINGS.cluster, speeds=(1.0, 4.0)))
    assert given.facts.speeds == (1.0, 4.0)
    assert processes.asked == []


def test_processes_on_devices_of_one_kind_take_the_same_tiles() -> None:
    """Those that the search began with, else those of the first that has the layer."""

    def built(kind: str, **tiles: int) -> Answer:
        chosen = FACTS.chosen | {"tiles": json.dumps(tiles)}
        return Answer(facts=replace(FACTS, kinds=(kind,), chosen=chosen))

    alike = Told({Build: [built("fast", q=1, down=2), built("fast", q=3, up=4)]})
    fleet = Fleet(alike, DataCatalogue(random_data), SETTINGS.engine, None, SETTINGS.cluster)
    same = {"fast": {"q": 1, "down": 2, "up": 4}}
    assert json.loads(fleet.facts.chosen["tiles"]) == same
    assert [json.loads(each.tiles) for _, each in alike.asked if isinstance(each, TakeTiles)] == [same] * 2
    unlike = Told({Build: [built("fast", q=1), built("slow", q=5)], Measure: [Answer(rate=1.0)] * 2})
    before = json.dumps({"slow": {"q": 5}})
    fleet = Fleet(unlike, DataCatalogue(random_data), SETTINGS.engine, None, SETTINGS.cluster, before)
    assert json.loads(fleet.facts.chosen["tiles"]) == {"fast": {"q": 1}, "slow": {"q": 5}}
    asked = [type(each) for _, each in unlike.asked]
    assert asked.index(TakeTiles) < asked.index(Build), "what is known need not be measured"
    newer = Told({Build: [built("fast", q=1), built("fast", q=2)]})
    before = json.dumps({"fast": {"q": "of another release", "v": 6}})
    fleet = Fleet(newer, DataCatalogue(random_data), SETTINGS.engine, None, SETTINGS.cluster, before)
    assert json.loads(fleet.facts.chosen["tiles"]) == {"fast": {"q": 1, "v": 6}}
    assert "tiles" not in told({})[0].facts.chosen


def test_a_process_takes_the_tiles_of_its_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[object, Choice] = {}
    monkeypatch.setattr(autotuning, "_known", taken)
    replica = object.__new__(process.Replica)
    replica._device, replica._dtype = torch.device("cpu"), torch.bfloat16
    own = {"64>32+16": asdict(Choice(down=Tiles(16))), "64>8": {"of": "another release"}}
    text = json.dumps({device_kind("cpu"): own, "another": {"64>64": asdict(Choice())}})
    replica.answer(TakeTiles(text))
    assert taken == {((64, (32, 16)), torch.bfloat16): Choice(down=Tiles(16))}


def test_each_process_is_built_with_its_own_capacity() -> None:
    cluster = replace(SETTINGS.cluster, capacities=(64, 32))
    processes = Told({})
    Fleet(processes, DataCatalogue(random_data), SETTINGS.engine, None, cluster)
    built = {number: each.engine.capacity for number, each in processes.asked if isinstance(each, Build)}
    assert built == {0: 64, 1: 32}


def test_each_gets_its_own_microbatches_and_all_steps() -> None:
    done = [MicrobatchDone(number, (JobLoss("a", 1, 2.0, 3, 4),), 0.5) for number in range(2)]
    stepped = StepDone("a", 1, 1.0, 0.25)
    said = [Answer((each, stepped)) for each in done]
    fleet, processes = told({RunSchedule: said})
    step = StepJob("a", 1, 1e-3)
    microbatches = tuple(Microbatch(replica, replica, ()) for replica in range(2))
    assert fleet.execute(RunSchedule((*microbatches, step))) == [
        *done,
        StepDone("a", 1, 1.0, 0.5),
    ]
    assert processes.asked == [
        (number, RunSchedule((each, step))) for number, each in enumerate(microbatches)
    ]


def test_replicas_take_part_in_every_round_also_in_one_without_microbatches_of_theirs() -> None:
    fleet, processes = told({})
    first, second, last = (Microbatch(replica, index, ()) for index, replica in enumerate((0, 0, 1)))
    one, two = (StepJob(job, 1, 1e-3) for job in "ab")
    fleet.execute(RunSchedule((first, one, second, two, last)))
    assert processes.asked == [
        (0, RunSchedule((first, one))),
        (1, RunSchedule((one,))),
        (0, RunSchedule((second, two))),
        (1, RunSchedule((two,))),
        (0, RunSchedule(())),
        (1, RunSchedule((last,))),
    ]


def test_the_work_of_the_others_is_reported_if_one_process_runs_out_of_memory() -> None:
    done = MicrobatchDone(0, (JobLoss("a", 1, 2.0, 3, 4),), 0.5)
    short = OutOfMemory("no room", 0.25)
    fleet, _ = told({RunSchedule: [Answer((done,)), Answer((short,))]})
    microbatches = tuple(Microbatch(replica, replica, ()) for replica in range(2))
    assert fleet.execute(RunSchedule((*microbatches, StepJob("a", 1, 1e-3)))) == [done, short]


def test_if_one_replica_cannot_attach_a_job_none_has_it() -> None:
    short = OutOfMemory("no room", 0.25)
    fleet, processes = told({Attach: [Answer((Attached("a", Cursor()),)), Answer((short,))]})
    assert fleet.execute(Attach(JOB)) == [short]
    assert processes.asked[-1] == (0, Detach("a"))


def test_stages_end_where_one_cannot_attach_a_job_while_they_train() -> None:
    said = {Attach: [Answer((Attached("a", Cursor()),)), Answer((OutOfMemory("no room", 0.25),))]}
    fleet, processes = told(said, replace(SETTINGS.cluster, pipeline=2))
    window = RunSchedule((), drained=False)
    assert [*fleet.execute(window), *fleet.execute(Attach(JOB))] == []
    kinds = [RunSchedule, RunSchedule, Asked, Provide, Provide, Attach, Attach]
    assert [type(each) for _, each in processes.asked] == kinds  # data are sent to those that wait for them
    with pytest.raises(ShortStageError, match="while a was attached"):
        fleet.execute(window)
    assert not processes.live  # so others are started, whatever these still do


def test_a_resumed_jobs_tensors_and_best_weights_are_sent_to_all_processes() -> None:
    attached = Attached("a", Cursor(3, best_step=2))
    fleet, processes = told({Attach: [Answer((attached,), 1.0), Answer((attached,), 2.0)]})
    (event,) = fleet.execute(Attach(JOB))
    assert event == replace(attached, seconds=3.0)
    assert processes.asked[-2:] == [(0, Share("a", best=True)), (1, Share("a", best=True))]


@pytest.mark.parametrize(
    ("stages", "processes", "kept"),
    [
        ((1, 1, 1), 2, (1, 1)),
        ((1, 1), 3, (1, 1, 1)),
        ((3,), 2, (2,)),
        ((1, 2), 2, (2,)),
        ((2, 2), 3, (3,)),
        ((2, 1, 2), 5, (2, 1, 2)),
        ((2, 1, 2), 4, (2, 2)),
        ((4, 4), 7, (4, 3)),
        ((5,), 4, (4,)),
        ((1, 4), 8, (4, 4)),
        ((3, 3), 8, (3, 4, 1)),
        ((2, 2, 2), 1, (1,)),
    ],
)
def test_fewer_processes_keep_the_largest_replicas(
    stages: tuple[int, ...], processes: int, kept: tuple[int, ...]
) -> None:
    assert fitted([*map(ReplicaShape, stages)], processes, 4) == tuple(map(ReplicaShape, kept))


@pytest.mark.parametrize(
    ("shapes", "processes", "kept"),
    [(("1", "2x2"), 4, ("2x2",)), (("1", "2x2", "2x2"), 7, ("2x2", "3")), (("2x1", "2x1"), 3, ("3",))],
)
def test_replicas_in_slices_stay_or_become_stages(
    shapes: tuple[str, ...], processes: int, kept: tuple[str, ...]
) -> None:
    cluster = ClusterSettings(deployment=shapes)
    assert tuple(map(str, fitted(cluster.shapes, processes, 4))) == kept


def test_what_was_set_and_does_not_hold_for_those_that_are_left_is_said() -> None:
    def left(count: int, **given: Any) -> tuple[ClusterSettings, list[str]]:
        cluster = ClusterSettings(**given)
        remaining = _remaining(cluster, range(count), cluster.shapes, 2)
        return remaining, list(_given_up(cluster, remaining))

    split, said = left(3, processes=4, deployment=(2, 2), layer_split=(1, 1))
    assert (split.stages, said) == ((2, 1), [])
    slices, said = left(3, processes=4, pipeline=2, tensor=2)
    assert (slices.stages, slices.slicing) == ((2, 1), "")
    assert said == [
        "cluster.tensor=2 does not hold for replicas of [2, 1] processes: each stage has whole layers"
    ]
    shards, said = left(2, processes=3, shard_base=True)
    assert (shards.shard_base, said) == (True, [])
    whole, said = left(1, processes=3, shard_base=True)
    assert whole.shard_base is False
    assert said == ["cluster.shard_base=true does not hold for one process: it has the whole base model"]


def test_layers_are_exchanged_by_those_that_hold_them() -> None:
    whole, cut = [range(4)], [range(1), range(1, 4)]
    halves = [range(2), range(2, 4)]

    def pieces(own: str, layers: list[list[range]]) -> list[tuple[range, tuple[int, ...]]]:
        layout = Layout(ClusterSettings(deployment=tuple(own)).shapes, layers)
        return [(each.layers, each.processes) for each in layout.pieces()]

    assert pieces("12", [whole, cut]) == [(range(1), (0, 1)), (range(1, 4), (0, 2))]
    of_three = [(range(1), (0, 2)), (range(1, 2), (0, 3)), (range(2, 4), (1, 3))]
    assert pieces("22", [halves, cut]) == of_three


def test_processes_are_numbered_by_replica_stage_and_slice() -> None:
    shapes = ClusterSettings(deployment=(1, "2x2")).shapes
    layout = Layout(shapes, [[range(4)], [range(3), range(3, 4)]])
    assert layout.position(0) == Position(0, 0, 0, range(1), range(1))
    assert layout.position(4) == Position(1, 1, 1, range(3, 5), range(2, 5, 2))
    first, second = Piece(range(3), (range(1), range(1, 3))), Piece(range(3, 4), (range(1), range(3, 5)))
    assert layout.pieces() == [first, second]


def test_replicas_that_step_apart_end_the_run() -> None:
    steps = [Answer((StepDone("a", 1, norm, 0.1),)) for norm in (1.0, 1.0000001)]
    schedule = RunSchedule((StepJob("a", 1, 1e-3),))
    fleet, _ = told({RunSchedule: steps})
    with pytest.raises(ProcessError, match="steps differ"):
        fleet.execute(schedule)
    same, _ = told({RunSchedule: [steps[0], steps[0]]})
    assert same.execute(schedule) == [StepDone("a", 1, 1.0, 0.2)]


def test_data_of_the_same_content_are_sent_once() -> None:
    made: dict[DataSpec, TokenisedData] = {}

    def load(spec: DataSpec) -> TokenisedData:
        return made.setdefault(spec, replace(random_data(JOB.data), digest=spec.mapping()["content"]))

    attached = Answer((Attached("a", Cursor()),))
    processes = Told({Attach: [attached] * 2})
    fleet = Fleet(processes, DataCatalogue(load), SETTINGS.engine, None, SETTINGS.cluster)
    specs = [DataSpec.of("made up", content=each, name=n) for n, each in enumerate("xyxy")]
    for spec in [*specs, specs[0]]:
        fleet.execute(Attach(replace(JOB, data=spec)))
        fleet.execute(Detach(JOB.name))
    provided = [each for number, each in processes.asked if number == 1 and isinstance(each, Provide)]
    x, y = (made[spec] for spec in specs[:2])
    contents = [("x", x), ("y", y), ("x", None), ("y", None)]
    assert provided == [
        Provide(spec, digest, data) for spec, (digest, data) in zip(specs, contents, strict=True)
    ]


@pytest.mark.parametrize("deferred", [True, False])
def test_sums_come_after_the_weights_that_are_gathered_beside_them(
    monkeypatch: pytest.MonkeyPatch, deferred: bool
) -> None:
    """So that both have one order in all processes, as NCCL needs it."""
    done: list[str] = []
    monkeypatch.setattr(Exchange, "_sum", lambda _self, _vector, work: done.append(work[0][0]))
    monkeypatch.setattr(Exchange, "_any", lambda _, own: own)
    exchange = object.__new__(Exchange)
    exchange.deferred = deferred
    exchange._device, exchange._begun, exchange._later = torch.device("cpu"), [], []
    with ThreadPoolExecutor(1) as exchange._thread:
        for name in ("a", "b"):
            exchange.add_up(torch.zeros(1), name, 1)
        exchange._thread.submit(done.append, "gathered").result()
        assert not exchange.finish(short=False)
    assert done == (["gathered", "a", "b"] if deferred else ["a", "b", "gathered"])


def test_all_processes_saves_of_sharded_moments_take_time() -> None:
    said = [Answer((Saved("a", 1.0),), 1.0), Answer((), 0.5)]
    sharded = replace(SETTINGS.cluster, optimiser="sharded")
    fleet, _ = told({SaveCheckpoint: said}, sharded)
    assert fleet.execute(SaveCheckpoint("a", Path("here"), Cursor())) == [Saved("a", 1.5)]


def test_the_time_of_a_request_that_a_lost_process_brings_to_nothing_is_known(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(processes_module.time, "monotonic", lambda: clock[0])
    processes, ends = linked(door, 3)

    def watch() -> None:
        clock[0] += 2.0
        if clock[0] == 2.0:
            ends[0].send(Answer(seconds=1.5))
        else:
            ends[1].send(Refusal(LostProcessError("the link to the others broke")))
            ends[2].close()

    processes.watch = watch
    with pytest.raises(LostProcessError, match=r"process 2 .* died"):
        processes.ask_all(Measure())
    assert processes.spent == 1.5 + 4.0 + 4.0
    clock[0] += 30.0
    assert not any(each.state("cpu", 60.0).silent for each in processes.all), "they have ended"


def test_a_link_that_breaks_without_a_death_ends_all_who_would_wait_for_ever(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_module, "TURN", 0.05)
    processes, ends = linked(door, 3)

    def watch() -> None:
        processes.watch = lambda: None
        ends[1].send(Refusal(LostProcessError("the link to the others broke", "A rule.", "A remedy.")))
        ends[2].send(Beat())  # it waits for what does not come, and says that it lives

    processes.watch = watch
    with pytest.raises(
        LostProcessError, match=r"^process 1 .* while measuring its speed: the link"
    ) as caught:
        processes.ask_all(Measure())
    assert (caught.value.remedy, processes.culprit, processes.live) == ("A remedy.", None, False)
    assert all(isinstance(each.receive(), Measure) for each in ends)
    for each in ends:
        with pytest.raises(EOFError):
            each.receive()
    with pytest.raises(LostProcessError, match="process 1"):
        processes.ask_all(Measure())


def test_what_was_refused_before_says_nothing_of_what_is_asked_now(door: Door) -> None:
    processes, (end,) = linked(door, 1)
    end.send(Refusal(StorageError("a full disk")))
    with pytest.raises(StorageError):
        processes.ask_all(Measure())
    assert list(processes.refused) == [0]
    end.send(Answer())
    processes.ask_all(Measure())
    assert not processes.refused


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux limits what is repeated")
def test_links_that_others_have_made_get_the_limit_too() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as link,
    ):
        gc.collect()  # what other tests have left behind
        files = len(list(Path("/dev/fd").iterdir()))
        limit_links(12.0)
        assert len(list(Path("/dev/fd").iterdir())) <= files
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        names = ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        found = [link.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
        assert found == [12_000, 4, 2, 4]
        link.sendall(b"more")
        assert server.accept()[0].recv(4) == b"more"


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux limits what is repeated")
def test_links_that_replicas_make_as_they_begin_to_train_are_limited_too() -> None:
    """Replicas in stages make groups of those that hold the same layers, with links of their own."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends, running = [], []
    for number in range(2):
        end, other = FORKS.Pipe()
        ends.append(end)
        running.append(FORKS.Process(target=join_and_tell, args=(number, store.port, 12.0, other)))
        running[-1].start()
    for end in ends:
        assert end.poll(120)
        before, after = end.recv()
        assert len(after) > len(before) > 0
        assert set(after) == {12_000}
    for end in ends:
        end.send(None)
    for each in running:
        each.join(60)
        assert each.exitcode == 0


def test_a_process_that_stops_in_the_middle_of_an_answer_is_lost() -> None:
    with closing(Door(("127.0.0.1", 0), KEY, 1.0)) as door:
        processes, (end,) = linked(door, 1)
        os.write(end.connection.fileno(), struct.pack("!i", 100) + b"half")
        with pytest.raises(LostProcessError, match=r"^process 0 .* stopped in the middle of an answer"):
            processes.ask_all(Measure())


SLICED = Build(SETTINGS.engine, shapes=(ReplicaShape(tensor=2),))


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (SLICED, ModelError("no such file", "A rule.", "A remedy.")),
        (RunSchedule(()), ScheduleError("no such file", "A rule.", "A remedy.")),
    ],
)
def test_a_process_that_cannot_do_its_part_ends_all_who_wait_for_it(
    door: Door, request_: object, error: PlaitError
) -> None:
    processes, ends = linked(door, 2)
    ends[1].send(Refusal(error))
    ends[0].send(Beat())  # it waits for the other's rows, or gradients
    with pytest.raises(type(error), match=r"^process 1 .*: no such file"):
        processes.ask_all(request_)
    assert not processes.live


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_memory_that_runs_out_in_a_sum_is_no_broken_link(error: Exception) -> None:
    """A smaller group follows; after a link that broke, the same one."""

    def raising() -> None:
        raise error

    with pytest.raises(
        ShortStageError, match=r"no memory for what the other processes send: .*[Mm]emory"
    ) as caught:
        over_link(raising, "the other processes", "A rule.")
    assert "engine.capacity" in caught.value.remedy


def test_a_system_that_lists_no_links_has_no_limit_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "net_connections", denied)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as link,
    ):
        limit_links(12.0)
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
