"""Links to processes, and what a fleet says of those that do not come, die or are silent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import AuthenticationError
from pathlib import Path

import pytest
from laboratory import random_data, random_texts
from processes import ForkedProcess

from plait.core.errors import ModelError, ProcessError
from plait.core.jobs import AdapterSpec, JobSpec, TrainSpec
from plait.core.messages import Attach, Detach
from plait.core.settings import ClusterSettings, EngineSettings, ModelSettings, RunSettings
from plait.distributed.channel import Address, Beat, Door, connect
from plait.distributed.fleet import Fleet
from plait.distributed.launch import Start, launch_here
from plait.engine.catalogue import DataCatalogue

KEY = b"k" * 32
SETTINGS = RunSettings(
    model=ModelSettings(kind="tiny", dtype="float32", seed=3),
    engine=EngineSettings(kernels="grouped", capacity=64, threads=1),
    cluster=ClusterSettings(processes=2),
)
JOB = JobSpec("a", AdapterSpec(2), TrainSpec(steps=4), random_texts(1, 5, 25))


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door(("127.0.0.1", 0), KEY)
    yield door
    door.close()


def test_a_message_arrives_and_a_closed_link_is_an_end(door: Door) -> None:
    far = connect(door.address, KEY)
    near = door.next(10.0)
    assert near is not None
    far.send(Beat())
    assert near.receive() == Beat()
    far.close()
    with pytest.raises(EOFError):
        near.receive()


def test_who_has_another_key_does_not_come_in(door: Door) -> None:
    with pytest.raises(AuthenticationError):
        connect(door.address, b"x" * 32)
    assert door.next(0.1) is None
    known = threading.Thread(target=connect, args=(door.address, KEY))
    known.start()
    assert door.next(10.0) is not None
    known.join()


def launched(folder: Path, start: Start, **cluster: float) -> Fleet:
    settings = replace(SETTINGS, cluster=replace(SETTINGS.cluster, **cluster))
    return launch_here(settings, DataCatalogue(random_data), folder, start=start)


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


class Dying(Silent):
    """What ends at once."""

    def poll(self) -> int | None:
        return 7

    def wait(self) -> None:
        pass


def test_a_process_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match=r"process 0 did not come within 1 s"):
        launched(tmp_path, Silent, join_seconds=1.0)


def test_a_process_that_ends_at_once_is_named_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="process 0 ended with status 7") as caught:
        launched(tmp_path, Dying)
    assert "what it said last" in caught.value.rule


def test_a_model_that_cannot_be_loaded_is_the_error_of_the_run(tmp_path: Path) -> None:
    settings = replace(SETTINGS, model=ModelSettings(kind="hf", id="/no/such/folder", dtype="float32"))
    with pytest.raises(ModelError, match="no such folder"):
        launch_here(settings, DataCatalogue(random_data), tmp_path, start=ForkedProcess)


@pytest.mark.parametrize(("number", "said"), [(signal.SIGKILL, "it died"), (signal.SIGSTOP, "it was silent")])
def test_a_process_that_is_killed_or_hangs_is_named_and_ends_the_others(
    tmp_path: Path, number: signal.Signals, said: str
) -> None:
    started: list[ForkedProcess] = []

    def start(address: Address, key: bytes, process: int, log: Path) -> ForkedProcess:
        started.append(ForkedProcess(address, key, process, log))
        return started[-1]

    fleet = launched(tmp_path, start, silence_seconds=5.0)
    fleet.execute(Attach(JOB))
    os.kill(started[1].pid, number)
    with pytest.raises(ProcessError, match=rf"process 1 .*{said}.* \(Detach\)") as caught:
        fleet.execute(Detach("a"))
    assert "same command" in caught.value.remedy
    assert [each.poll() for each in started] == [-9, -9]
