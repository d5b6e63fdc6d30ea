"""Requests to a running search: written whole, answered once, acted on by one process."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
from held_lock import held_elsewhere
from hypothesis import given
from hypothesis import strategies as st
from optuna.storages import BaseStorage
from optuna.trial import TrialState

import plait
from plait.cli.control import read_request
from plait.cli.main import main
from plait.core.errors import ConfigError, SearchError, StorageError
from plait.core.lifecycle import JobState
from plait.core.space import Choice, Dimension, Real, Space, Value, Whole
from plait.search.attend import Attend
from plait.search.control.desk import LOOK_SECONDS, Clerk
from plait.search.control.mailbox import Answer, Mailbox, Request
from plait.search.control.orders import Mode, Orders
from plait.search.control.status import status_facts
from plait.search.control.targets import check_target
from plait.search.ownership import Owner as Trainer
from plait.search.points import read_point, read_values
from plait.search.recorded import RecordedCommand, write_command
from plait.search.storage import Patience, from_anywhere, open_storage
from plait.search.study_orders import StudyOrders
from plait.terminal.text import status_line
from plait.tracking.leaderboard import JobRecord, Leaderboard
from plait.utils.paths import search_folder

SPACE = Space(
    (
        Dimension("adapter.rank", Choice((8, 16), ("8", "16"))),
        Dimension("train.lr", Real(1e-5, 1e-3, log=True)),
        Dimension("train.batch_size", Whole(2, 8, step=2)),
        Dimension("train.schedule", Choice(("linear", "cosine"), ("linear", "cosine"))),
    )
)


def test_a_point_in_the_searched_space() -> None:
    point = read_point(
        SPACE, ["adapter.rank=16", "train.lr=2e-4", "train.batch_size=4", "train.schedule=cosine"]
    )
    assert point == {
        "adapter.rank": 16,
        "train.lr": 2e-4,
        "train.batch_size": 4,
        "train.schedule": "cosine",
    }
    assert type(point["adapter.rank"]) is int
    assert read_values(SPACE, {"adapter.rank": 8, "train.lr": 1e-4}) == {"adapter.rank": 8, "train.lr": 1e-4}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["adapter.rank=64"], "choice(8,16)"),
        (["train.lr=1"], "1e-05"),
        (["train.lr=nan"], "1e-05"),
        (["train.batch_size=3"], "step=2"),
        (["train.batch_size=four"], "step=2"),
        (["adapter.alpha=3"], "adapter.rank, train.batch_size, train.lr, train.schedule"),
        (["adapter.rank"], "KEY=VALUE"),
        (["adapter.rank=8", "adapter.rank=16"], "twice"),
    ],
)
def test_a_point_outside_says_what_is_searched(words: list[str], said: str) -> None:
    with pytest.raises(SearchError) as caught:
        read_point(SPACE, words)
    assert said in str(caught.value)


def test_requests_are_read_in_order_and_gone_when_answered(tmp_path: Path) -> None:
    box = Mailbox(tmp_path / "control")
    first, second = Request("pause"), Request("add", overrides=("adapter.rank=8",))
    box.post(first)
    box.post(second)
    assert box.waiting() == [first, second]
    box.answer(first, Answer(True, "done"))
    assert box.waiting() == [second]
    assert box.take_answer(first, 0) == Answer(True, "done")
    assert box.take_answer(first, 0) is None  # taken once
    assert box.take_answer(second, 0) is None


def test_a_clock_that_is_set_back_does_not_change_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Mailbox(tmp_path / "control")
    times = iter((2_000_000_000.0, 1_000_000_000.0, 3_000_000_000.0))
    monkeypatch.setattr(time, "time", lambda: next(times))
    monkeypatch.setattr(time, "time_ns", lambda: int(next(times) * 1e9))
    for verb in ("pause", "resume", "stop"):
        box.post(Request(verb))
    assert [request.verb for request in box.waiting()] == ["pause", "resume", "stop"]


GOOD = {"verb": "pause", "trial": None, "overrides": [], "warm": False, "id": "x"}


@pytest.mark.parametrize(
    "content",
    [
        b'{"verb": "pa',
        b"\xff\xfe",
        b"[]",
        b'{"a": 1}',
        *(json.dumps(GOOD | change).encode() for change in (
            {"overrides": None}, {"overrides": [1]}, {"trial": "one"}, {"verb": None}, {"id": "another"},
        )),
    ],
)  # fmt: skip
def test_what_is_no_request_is_left_alone(tmp_path: Path, content: bytes) -> None:
    box = Mailbox(tmp_path / "control")
    box.post(Request("pause"))
    folder = tmp_path / "control" / "requests"
    (folder / "00-x.json").write_bytes(content)
    (folder / ".half.json.17").write_text("{}")
    assert [request.verb for request in box.waiting()] == ["pause"]
    (folder / "00-x.json").write_text(json.dumps(GOOD | {"since": "a later version"}))
    assert next(request.id for request in box.waiting()) == "x"
    (tmp_path / "control" / "orders.json").write_bytes(content)
    assert box.orders == Orders()


def study_orders(storage: BaseStorage, answers: int = 1_000_000) -> StudyOrders:
    """One worker's view of the orders of the only study in a storage; the answer to one write gets lost."""
    study = optuna.load_study(study_name=None, storage=storage)
    write, left = study.set_user_attr, iter(range(answers))

    def lossy(key: str, value: object) -> None:
        write(key, value)
        if next(left, None) is None and not lost:
            lost.append(key)
            raise OSError("the connection is lost")

    lost: list[str] = []
    study.set_user_attr = lossy  # type: ignore[method-assign]
    patience = Patience(sleep=lambda _: None)
    return StudyOrders(study, patience, patience)


@pytest.mark.parametrize("answers", [0, 1, 2, 3])
def test_orders_stand_until_withdrawn_and_all_workers_see_them(answers: int) -> None:
    storage = optuna.storages.InMemoryStorage()
    optuna.create_study(storage=storage)
    mine, other = study_orders(storage, answers), study_orders(storage)
    assert mine.read() == Orders()
    mine.set_mode("paused")
    mine.stop_trial(3)
    other.stop_trial(1)
    assert other.read() == mine.read() == Orders("paused", (1, 3))
    other.set_mode("running")
    assert mine.read() == Orders("running", (1, 3))
    modes: tuple[Mode, ...] = ("stopping", "cancelling")
    for times, mode in enumerate(modes, 1):
        mine.set_mode(mode)
        assert other.read().mode == mode
        mine.withdraw()
        other.withdraw()  # it has been
        assert other.read() == mine.read() == Orders(ended=times, was=mode)
    assert study_orders(storage).read() == Orders(was="cancelling")  # all that was before it came


def test_changes_within_one_tick_of_the_files_clock_are_seen(tmp_path: Path) -> None:
    mine, other = Mailbox(tmp_path), Mailbox(tmp_path)
    path = tmp_path / "orders.json"
    modes: tuple[Mode, ...] = ("paused", "stopping", "running")
    seen = {other.orders_stamp}
    for mode in modes:
        mine.show_orders(Orders(mode))
        os.utime(path, ns=(0, 0))
        assert other.orders_stamp not in seen
        seen = {other.orders_stamp}
        assert other.orders.mode == mode


def test_one_process_has_the_desk_and_its_end_frees_it(tmp_path: Path) -> None:
    box = Mailbox(tmp_path)
    assert not box.attended
    with box.desk() as desk:
        assert desk.take()
        assert box.attended
        with box.desk() as second:
            assert not second.take()
    assert not box.attended
    with (tmp_path / "desk.lock").open("rb") as another:  # who asks whether it is attended, at this moment
        fcntl.flock(another, fcntl.LOCK_SH)
        assert not box.attended


def test_a_process_that_is_killed_leaves_the_desk_free(tmp_path: Path) -> None:
    box = Mailbox(tmp_path)
    program = (
        "import sys, time; from pathlib import Path; from plait.search.control.mailbox import Mailbox\n"
        "desk = Mailbox(Path(sys.argv[1])).desk(); assert desk.take()\n"
        "print('taken', flush=True); time.sleep(600)"
    )
    platform = str(Path(plait.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": platform},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "taken\n"
            assert box.attended
        finally:
            process.kill()
    assert not box.attended


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "control").write_text("a file")
    with pytest.raises(StorageError, match="Requests to a running search"):
        Mailbox(tmp_path / "control").post(Request("pause"))


class KeptOrders:
    """Orders in memory, and how often they were asked for."""

    def __init__(self) -> None:
        self.now = Orders()
        self.looks = 0

    def read(self) -> Orders:
        self.looks += 1
        return self.now

    def set_mode(self, mode: Mode) -> None:
        self.now = replace(self.now, mode=mode)

    def stop_trial(self, number: int) -> None:
        self.now = replace(self.now, stops=(*self.now.stops, number))

    def withdraw(self) -> None:
        self.now = Orders()


class Study:
    """A study in memory."""

    def __init__(self) -> None:
        self.orders = KeptOrders()
        self.states = {0: JobState.FINISHED, 1: JobState.RUNNING}
        self.points: dict[int, Mapping[str, Value]] = {
            0: {"adapter.rank": 8, "train.lr": 1e-4, "train.batch_size": 2, "train.schedule": "linear"},
            1: {"adapter.rank": 16, "train.lr": 1e-4, "train.batch_size": 2, "train.schedule": "linear"},
        }
        self.requests: dict[str, int] = {}
        self.warm: dict[int, Path | None] = {}
        self.priorities: list[int | None] = []
        self.saved: set[str] = set()
        self.asked = 0
        self.said: list[str] = []
        self.can_save = False

    def save(self, number: int) -> bool:
        assert number == 1
        self.asked += 1
        return self.can_save

    def trial_states(self) -> list[str]:
        return list(self.states.values())

    def values(self, number: int) -> Mapping[str, Value]:
        return self.points[number]

    def enqueue(
        self,
        values: Mapping[str, Value],
        *,
        request: str,
        warm_from: Path | None = None,
        priority: int | None = None,
    ) -> int:
        if request not in self.requests:
            self.priorities.append(priority)
            number = self.requests[request] = len(self.states)
            self.states[number], self.points[number], self.warm[number] = JobState.QUEUED, values, warm_from
        return self.requests[request]


def _clerk(folder: Path, study: Study, clock: Callable[[], float] = time.monotonic) -> Clerk:
    box = Mailbox(folder)
    return Clerk(
        box,
        box.desk(),
        study,
        SPACE,
        weights=lambda number, name: folder / name if number == 0 or name in study.saved else None,
        save=study.save,
        describe=lambda mode: f"{mode}: 2 trials",
        facts=lambda mode: {"mode": mode, "trials": 2},
        say=study.said.append,
        name="a search",
        clock=clock,
    )


def _said(clerk: Clerk, *words: str, warm: bool = False) -> Answer:
    request = read_request(words[0], words[1:], warm=warm)
    clerk.mailbox.post(request)
    clerk.attend()
    answer = clerk.mailbox.take_answer(request, 0)
    assert answer is not None
    return answer


def test_an_added_trial_may_have_a_priority_of_its_own(tmp_path: Path) -> None:
    study = Study()
    clerk = _clerk(tmp_path, study)
    assert "makes room" in _said(clerk, "add", "train.priority=5", "adapter.rank=8").text
    assert study.points[2] == {"adapter.rank": 8}
    assert "makes room" not in _said(clerk, "clone", "1").text
    assert "makes room" in _said(clerk, "clone", "1", "train.priority=-1").text
    assert study.points[4] == study.points[1]
    assert study.priorities == [5, None, -1]
    clerk.space = Space((*SPACE.dimensions, Dimension("train.priority", Choice((0, 5), ("0", "5")))))
    assert "makes room" not in _said(clerk, "add", "train.priority=5").text  # it is searched
    assert (study.points[5], study.priorities[3:]) == ({"train.priority": 5}, [None])
    clerk.space = SPACE
    refused = _said(clerk, "add", "train.priority=soon")
    assert not refused.done
    assert "whole number" in refused.text


def test_modes_and_stops(tmp_path: Path) -> None:
    clerk = _clerk(tmp_path, Study())
    for verb, mode in (
        ("pause", "paused"),
        ("resume", "running"),
        ("stop", "stopping"),
        ("cancel", "cancelling"),
    ):
        assert _said(clerk, verb).done
        assert clerk.attend().mode == mode
    assert "already" in _said(clerk, "cancel").text
    assert _said(clerk, "stop", "1").done
    assert clerk.attend().stops == (1,)
    refused = _said(clerk, "stop", "0")
    assert not refused.done
    assert "finished" in refused.text
    assert not _said(clerk, "stop", "9").done
    clerk.withdraw()
    assert clerk.attend() == clerk.mailbox.orders == Orders()
    assert _said(clerk, "status").text == "running: 2 trials"


def test_add_and_clone(tmp_path: Path) -> None:
    study = Study()
    clerk = _clerk(tmp_path, study)
    assert _said(clerk, "add", "adapter.rank=16", "train.lr=2e-4").text.startswith("Trial 2")
    assert study.points[2] == {"adapter.rank": 16, "train.lr": 2e-4}
    assert _said(clerk, "clone", "0", "train.lr=3e-4", warm=True).done
    assert study.points[3] == {**study.points[0], "train.lr": 3e-4}
    warm = study.warm[3]
    assert warm is not None
    assert warm.parent == tmp_path
    assert "shape of the adapter" in _said(clerk, "clone", "0", "adapter.rank=16", warm=True).text
    assert "no saved weights" in _said(clerk, "clone", "1", warm=True).text
    assert "choice(8,16)" in _said(clerk, "add", "adapter.rank=64").text
    assert study.said[-1] == "plait control add adapter.rank=64: refused. adapter.rank=64"


def test_a_warm_clone_of_a_live_trial_waits_for_its_state(tmp_path: Path) -> None:
    study = Study()
    study.can_save = True
    clerk = _clerk(tmp_path, study)
    request = read_request("clone", ["1"], warm=True)
    behind = Request("status")
    clerk.mailbox.post(request)
    clerk.mailbox.post(behind)
    clerk.attend()
    assert clerk.mailbox.waiting() == [request]
    assert clerk.mailbox.take_answer(behind, 0) == Answer(True, "running: 2 trials")  # it waits for nobody
    study.saved.add(request.id)  # by the next boundary
    clerk.attend()
    assert clerk.mailbox.take_answer(request, 0) == Answer(
        True, "Trial 2 comes next, as soon as a place is free."
    )
    second = read_request("clone", ["1"], warm=True)
    clerk.mailbox.post(second)
    clerk.attend()
    clerk.attend()  # it was asked for, and did not come
    answer = clerk.mailbox.take_answer(second, 0)
    assert answer is not None
    assert not answer.done
    assert study.asked == 2


def test_a_request_begun_before_a_crash_is_done_once(tmp_path: Path) -> None:
    study = Study()
    clerk = _clerk(tmp_path, study)
    request = read_request("add", ["adapter.rank=16"])
    clerk.mailbox.post(request)
    study.enqueue({"adapter.rank": 16}, request=request.id)  # and then it was killed
    clerk.attend()
    assert len(study.requests) == 1
    assert clerk.mailbox.waiting() == []


def test_a_second_worker_obeys_without_the_desk(tmp_path: Path) -> None:
    study = Study()
    first, second = _clerk(tmp_path, study), _clerk(tmp_path, study)
    assert _said(first, "pause").done
    assert second.attend().mode == "paused"
    second.mailbox.post(Request("resume"))
    assert second.attend().mode == "paused"  # the first has the desk
    assert first.attend().mode == "running"


def test_a_worker_of_another_folder_obeys_within_seconds_and_asks_the_study_seldom(tmp_path: Path) -> None:
    study, now = Study(), [100.0]
    here, there = (_clerk(tmp_path / name, study, lambda: now[0]) for name in ("here", "there"))
    assert there.attend() == Orders()
    assert _said(here, "pause").done
    assert _said(here, "stop", "1").done
    looks = study.orders.looks
    for _ in range(1000):
        there.attend()
    assert study.orders.looks == looks
    now[0] += LOOK_SECONDS
    assert there.attend() == Orders("paused", (1,))
    assert there.mailbox.orders == Orders("paused", (1,))  # for `plait control` without a name
    assert study.orders.looks == looks + 1
    assert _said(there, "resume").done
    now[0] += LOOK_SECONDS
    assert here.attend().mode == "running"
    for clerk in (here, there):
        clerk.close()


def test_a_file_of_orders_that_another_search_of_this_name_left_orders_nothing(tmp_path: Path) -> None:
    Mailbox(tmp_path).show_orders(Orders("cancelling"))
    clerk = _clerk(tmp_path, Study())
    assert clerk.attend() == clerk.mailbox.orders == Orders()
    clerk.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("halt",), "pause, resume, status, stop"),
        (("pause", "3"), "no further words"),
        (("stop", "three"), "number"),
        (("clone",), "number"),
        (("add",), "at least one"),
        (("add", "rank"), "KEY=VALUE"),
    ],
)
def test_words_that_are_no_command(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_request(words[0], words[1:])
    assert said in str(caught.value)


def test_of_answers_that_nobody_fetches_the_last_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.search.control.mailbox.MOST_ANSWERS", 3)
    box = Mailbox(tmp_path)
    requests = [Request("status") for _ in range(6)]
    for number, request in enumerate(requests):
        box.post(request)
        box.answer(request, Answer(True, str(number)))
        stamp = 10**18 + number  # a file's clock may not tell them apart
        os.utime(tmp_path / "answers" / f"{request.id}.json", ns=(stamp, stamp))
    found = [box.take_answer(request, 0) for request in requests]
    assert found == [None, None, None, Answer(True, "3"), Answer(True, "4"), Answer(True, "5")]


def test_warm_is_for_clones() -> None:
    with pytest.raises(ConfigError, match="cloned"):
        read_request("add", ["adapter.rank=8"], warm=True)
    assert read_request("clone", ["trial-0003"], warm=True).trial == 3


def test_a_search_begun_anew_has_no_requests(tmp_path: Path) -> None:
    study = Study()
    clerk = _clerk(tmp_path, study)
    clerk.mailbox.post(Request("cancel"))
    clerk.begin_anew()
    assert clerk.attend() == Orders()
    assert clerk.mailbox.waiting() == []


def test_a_grid_takes_whole_points_only(tmp_path: Path) -> None:
    study = Study()
    clerk = _clerk(tmp_path, study)
    clerk.whole = True
    refused = _said(clerk, "add", "adapter.rank=16", "train.lr=2e-4")
    assert not refused.done
    assert "without train.batch_size, train.schedule" in refused.text
    assert _said(clerk, "clone", "0", "train.lr=2e-4").done
    whole = ["adapter.rank=16", "train.lr=2e-4", "train.batch_size=4", "train.schedule=cosine"]
    assert _said(clerk, "add", *whole).done


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Three searches: one trains, one was killed, one is finished."""
    for name, finished in (("trains", False), ("killed", False), ("done", True)):
        command = RecordedCommand(name, "sweep", ("model=tiny",), str(tmp_path), finished)
        write_command(search_folder(tmp_path, name), command)
    taking = (
        "from plait.search.control.mailbox import Mailbox; desk = Mailbox(path).desk(); assert desk.take()"
    )
    with held_elsewhere(taking, search_folder(tmp_path, "trains") / "control"):
        yield tmp_path


def test_which_searches_train_and_which_can_go_on(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str, status: int = 0) -> str:
        assert main(arguments) == status
        shown = capsys.readouterr()
        return shown.out if status == 0 else shown.err

    at = ("--root", str(root))
    assert said("control", *at) == "trains\trunning\n`plait control trains status` says how it stands.\n"
    assert said("resume", f"tracking.root={root}") == (
        "killed\tplait sweep model=tiny\nTraining now: trains (`plait control` steers them).\n"
    )
    assert "Type `plait control trains pause`." in said("control", "pause", *at, status=2)
    assert "Did you mean killed?" in said("control", "kiled", "pause", *at, status=2)
    assert "Did you mean pause?" in said("control", "killed", "puase", *at, status=2)
    assert "`plait resume killed` goes on" in said("control", "killed", *at)
    assert "done is finished" in said("control", "done", *at)
    assert "plait resume done search.trials=N" in said("control", "done", "cancel", *at, status=2)
    assert Mailbox(search_folder(root, "done") / "control").waiting() == []
    assert "or refuse it" in said("control", "killed", "stop", "99", *at)


def killed(root: Path, storage: str | None = None) -> Path:
    """A search of which one trial ran when its process was killed; its mailbox's folder."""
    command = RecordedCommand("killed", "sweep", ("model=tiny",), str(root), storage=from_anywhere(storage))
    write_command(search_folder(root, "killed"), command)
    study = optuna.create_study(study_name="killed", storage=open_storage(storage, root))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(["eval/loss"])
    for loss in (1.5, 1.25, 1.75):
        trial = study.ask({"adapter.rank": optuna.distributions.IntDistribution(1, 8)})
        study.tell(trial, loss)
    for _ in range(2):
        study.ask()
    study.tell(3, state=TrialState.PRUNED)
    study.enqueue_trial({"adapter.rank": 2})
    return search_folder(root, "killed") / "control"


@pytest.mark.parametrize(
    ("words", "found", "rule", "instead"),
    [
        (("stop", "99"), "trial 99", "no such trial", "Those that run: 4."),
        (("stop", "1"), "trial 1 is finished", "Only a trial that runs", "Those that run: 4."),
        (("stop", "5"), "trial 5 is queued", "Only a trial that runs", "Those that run: 4."),
        (("clone", "6"), "trial 6", "no such trial", "Those that have begun: 0, 1, 2, 3, 4."),
        (("clone", "5", "adapter.rank=1"), "has not begun", "with values", "begun: 0, 1, 2, 3, 4."),
    ],
)
def test_a_trial_of_a_search_that_is_down_must_be_there(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    found: str,
    rule: str,
    instead: str,
) -> None:
    control = killed(tmp_path)
    assert main(["control", "killed", *words, "--root", str(tmp_path)]) == 2
    text = capsys.readouterr().err
    assert found in text
    assert rule in text
    assert instead in text
    assert Mailbox(control).waiting() == []
    assert main(["control", "killed", words[0], "4", "--root", str(tmp_path)]) == 0
    assert (
        capsys.readouterr().out
        == "The search does not run now; it will do this, or refuse it, when it goes on.\n"
    )
    assert [request.trial for request in Mailbox(control).waiting()] == [4]


@pytest.mark.parametrize(
    "storage", ["study.db", "sqlite:///study.db", "postgresql://me:secret@127.0.0.1:1/x"]
)
def test_a_study_elsewhere_is_found_from_any_folder_and_one_that_is_away_is_no_refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    monkeypatch.chdir(tmp_path)
    there = "127" not in storage
    if there:
        control = killed(tmp_path, storage)
    else:
        control = search_folder(tmp_path, "killed") / "control"
        command = RecordedCommand("killed", "sweep", (), str(tmp_path), storage=from_anywhere(storage))
        write_command(control.parent, command)
    (tmp_path / "another").mkdir()
    monkeypatch.chdir(tmp_path / "another")
    status = main(["control", "killed", "stop", "99", "--root", str(tmp_path)])
    shown = capsys.readouterr()
    assert status == (2 if there else 0)
    assert "secret" not in shown.out + shown.err
    if not there:
        assert "it will do this, or refuse it" in shown.out
        assert "Its study cannot be read now: The database does not answer" in shown.out
    assert len(Mailbox(control).waiting()) == (0 if there else 1)
    assert not list((tmp_path / "another").iterdir())


def test_status_of_a_search_that_is_down_is_what_its_study_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Mailbox(killed(tmp_path)).show_orders(Orders("paused"))
    study = optuna.load_study(study_name="killed", storage=open_storage(None, tmp_path))
    for host in ("node7 its-boot", f"{socket.gethostname()} the boot before"):
        study.ask().set_user_attr("plait.owner", Trainer("far", host, "/nowhere").to_json())
    assert main(["control", "killed", "--root", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["control", "killed", "--json", "--root", str(tmp_path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    shown = tuple(facts[key] for key in ("search", "mode", "trials", "ended"))
    assert shown == ("killed", "not running", 7, 4)
    states = [(job["state"], job["host"]) for job in facts["jobs"][3:]]
    assert states == [("pruned", ""), ("orphaned", ""), ("running", "node7"), ("orphaned", "")]
    assert main(["control", "killed", "pause", "--root", str(tmp_path)]) == 0
    assert "ask on node7" in capsys.readouterr().out
    assert main(["control", "killed", "stop", "--json", "--root", str(tmp_path)]) == 2
    assert "Only a status" in capsys.readouterr().err
    assert lines[0] == "killed does not run now. Ordered: paused."
    assert lines[1] == "7 trials: 2 orphaned, 3 finished, 1 pruned, 1 running on host node7."
    assert lines[2].startswith("Best: trial-0001, eval/loss 1.25 adapter.rank=")
    assert lines[3] == "Ask on node7 where that still trains."
    assert lines[4] == "`plait leaderboard killed` shows its trials, `plait resume killed` goes on."


@given(
    st.lists(st.sampled_from([JobState.RUNNING, JobState.QUEUED, JobState.FINISHED]), max_size=30),
    st.integers(0, 40),
)
def test_in_place_of_a_trial_that_will_not_do_the_nearest_are_named(
    states: list[JobState], number: int
) -> None:
    running = [at for at, state in enumerate(states) if state == "running"]
    if number in running:
        check_target("stop", number, states, "s")
        return
    with pytest.raises(SearchError) as caught:
        check_target("stop", number, states, "s")
    named = [int(digits) for digits in re.findall(r"\d+", caught.value.remedy)]
    assert set(named) <= set(running)
    assert len(named) == min(len(running), 5)
    left = set(running) - set(named)
    assert all(abs(at - number) <= abs(other - number) for at in named for other in left)


def test_where_nothing_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["control", "--root", str(tmp_path)]) == 0
    assert "No search below" in capsys.readouterr().out
    assert main(["control", "pause", "--root", str(tmp_path)]) == 2
    assert "trains now" in capsys.readouterr().err


def test_asking_a_search_that_runs_loads_nothing_heavy(tmp_path: Path) -> None:
    """Answers come as fast as Python starts."""
    program = (
        "import sys; from plait.cli.main import main\n"
        "assert main(['control', '--root', sys.argv[1]]) == 0\n"
        "heavy = {'hydra', 'omegaconf', 'optuna', 'mlflow', 'torch', 'numpy', 'rich'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(Path(plait.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.splitlines()[-1] == "[]"


def test_a_status_for_programs_has_every_job(tmp_path: Path) -> None:
    board = Leaderboard("minimize", 3)
    for trial, state in ((1, JobState.RUNNING), (0, JobState.QUEUED)):
        board.add(JobRecord(f"trial-{trial:04d}", trial, {"adapter.rank": 8}, state, step=trial + 3, steps=9))
    facts = status_facts(board, "paused", "mine")
    assert {key: facts[key] for key in ("search", "mode", "trials", "ended")} == {
        "search": "mine", "mode": "paused", "trials": 3, "ended": 0,
    }  # fmt: skip
    assert [(job["trial"], job["state"], job["step"], job["steps"]) for job in facts["jobs"]] == [
        (0, "queued", 3, 9),
        (1, "running", 4, 9),
    ]
    assert facts["jobs"][0]["parameters"] == {"adapter.rank": 8}
    clerk = _clerk(tmp_path, Study())
    request = Request("facts")
    clerk.mailbox.post(request)
    clerk.attend()
    answer = clerk.mailbox.take_answer(request, 0)
    assert answer is not None
    assert json.loads(answer.text) == {"mode": "running", "trials": 2}


def test_the_total_that_is_shown_is_the_studys() -> None:
    """What was added by hand counts, before it begins, and the study is asked when something happened."""
    source = SimpleNamespace(revision=0, total=14, departed=list)
    board = Leaderboard("minimize", 12)
    times = iter((0.0, 1.0, 2.0, 10.0))
    attend = Attend(source, board, print, Orders, clock=lambda: next(times))
    assert attend() == Orders()
    assert "0 of 14 ended" in status_line(board, None)
    source.total = 16
    attend()
    assert board.trials == 14
    source.revision += 1
    attend()
    assert board.trials == 16
    source.total = 17  # by another process
    attend()
    assert board.trials == 17
