"""`plait control` on a search that is recorded: orders and trials written to its study, and what is
refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Barrier

import optuna
import pytest
from held_lock import held_elsewhere
from job_results import ended
from optuna.storages import BaseStorage
from optuna.trial import TrialState

import plait
from plait.cli.control import read_words
from plait.cli.main import main
from plait.config.overrides import read_request
from plait.core.errors import ConfigError, SearchError, StorageError
from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobState
from plait.core.settings import RunSettings, SearchSettings
from plait.search.control import SearchControl
from plait.search.identity import identify
from plait.search.locks import WORKERS, LifeLock
from plait.search.orders import ORDERS, POLL_SECONDS, Mode, Orders, StudyOrders
from plait.search.ownership import Owner
from plait.search.recorded import FILE, RecordedCommand, write_command
from plait.search.storage import Patience, SharedStudy, from_anywhere, open_storage
from plait.search.stored import stored_study
from plait.search.study import StudyTrials
from plait.search.suggest import SPACE as SPACE_KEPT
from plait.search.suggest import keep_space, read_space
from plait.utils.paths import search_folder

SPACE = read_request(
    ["adapter.rank=8,16", "train.lr=tag(log,interval(1e-5,1e-3))", "train.batch_size=range(2,10,2)"], {}, {}
).space

# ---- words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("halt",), "pause, resume, status, stop"),
        (("puase",), "Did you mean pause?"),
        (("pause", "3"), "no further arguments"),
        (("stop", "three"), "number"),
        (("clone",), "number"),
        (("add",), "at least one"),
        (("add", "rank"), "KEY=VALUE"),
    ],
)
def test_words_that_are_no_command(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_words(words[0], words[1:])


def test_warm_is_for_clones() -> None:
    with pytest.raises(ConfigError, match="cloned"):
        read_words("add", ["adapter.rank=8"], warm=True)
    assert read_words("clone", ["trial-0003", "a=1"], warm=True) == (3, ("a=1",))


# ---- the orders in a study ---------------------------------------------------------------------------------


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
    return StudyOrders(SharedStudy(study, patience))


@pytest.mark.parametrize("answers", [0, 1, 2, 3])
def test_orders_are_in_force_until_withdrawn_and_all_workers_see_them(answers: int) -> None:
    storage = optuna.storages.InMemoryStorage()
    optuna.create_study(storage=storage)
    mine, other = study_orders(storage, answers), study_orders(storage)
    assert mine.read() == Orders()
    mine.set_mode("paused")
    mine.stop_trial(8)
    other.stop_trial(1)
    assert other.read() == mine.read() == Orders("paused", (1, 8))
    other.set_mode("running")
    assert mine.read() == Orders("running", (1, 8))
    assert mine.read().describe("resume") == "running, as requested with `plait control`"
    modes: tuple[Mode, ...] = ("stopping", "cancelling")
    for times, mode in enumerate(modes, 1):
        mine.set_mode(mode)
        assert other.read().mode == mode
        mine.withdraw()
        other.withdraw()  # it has been
        assert other.read() == mine.read() == Orders(ended=times, was=mode)
    assert study_orders(storage).read() == Orders(was="cancelling")  # all that was before it came


def test_a_worker_hears_of_orders_within_seconds_and_reads_one_attribute_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    study, now = optuna.create_study(), [100.0]
    worker = StudyOrders(SharedStudy(study), clock=lambda: now[0])
    assert worker.poll() == Orders()
    user = StudyOrders(SharedStudy(study))
    user.set_mode("paused")
    with monkeypatch.context() as patch:  # 1,000 iterations between two polls read nothing at all
        patch.setattr(StudyOrders, "_stored", lambda _: pytest.fail("it was read"))
        assert {worker.poll() for _ in range(1000)} == {Orders()}
    now[0] += POLL_SECONDS
    with monkeypatch.context() as patch:
        patch.setattr(optuna.Study, "get_trials", lambda *_, **__: pytest.fail("all trials were read"))
        assert worker.poll() == Orders("paused")


def test_the_search_space_is_read_from_the_study() -> None:
    space = read_request(
        [
            "adapter.alpha=null,8",
            "adapter.target_modules=[q],[q,v]",
            "data=jsonl,csv",
            "train.steps=range(1,9,3)",
            "adapter.rank=tag(log,interval(4,32))",
            "train.lr=interval(1e-5,1e-3)",
            "train.weight_decay=range(0,0.3,0.1)",
        ],
        {},
        {},
    ).space
    study = optuna.create_study()
    keep_space(study, space)
    found = read_space(study)
    assert found.describe() == space.describe()
    assert found.overrides(next(found.probes())) == space.overrides(next(space.probes()))
    with pytest.raises(SearchError, match="does not contain its search space"):
        read_space(optuna.create_study())


# ---- a search that does not run ----------------------------------------------------------------------------


def killed(root: Path, storage: str | None = None) -> optuna.Study:
    """The study of a search whose process was killed: 0 and 1 have finished, 2 was pruned, 3 and 4 were
    running and 5 is queued."""
    search = SearchSettings(name="mine", trials=5, sampler="random")
    identity = identify(SPACE, JobSpec("base"), RunSettings(search=search))
    opened, folder = open_storage(storage, root), search_folder(root, "mine")
    trials = StudyTrials(search, SPACE, identity, opened, folder=lambda _: folder)
    for number, state in enumerate((JobState.FINISHED, JobState.FINISHED, JobState.PRUNED)):
        trial = trials.ask()
        assert trial is not None
        trials.tell(trial, ended(state, 1.5 - number / 4 if state == JobState.FINISHED else None, "rung 2"))
    for _ in range(2):
        trials.ask()
    trials.enqueue({"adapter.rank": 8}, beyond=False)
    trials.close()
    command = RecordedCommand("mine", "sweep", ("model=tiny",), str(root), storage=from_anywhere(storage))
    write_command(folder, command)
    return optuna.load_study(study_name="mine", storage=opened)


class Said:
    """Runs `plait control mine ...` and gives what it prints."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._root, self._capsys = root, capsys

    def __call__(self, *words: str, status: int = 0) -> str:
        self._capsys.readouterr()
        assert main(["control", "mine", *words, "--root", str(self._root)]) == status
        shown = self._capsys.readouterr()
        return shown.out if status == 0 else shown.err


@pytest.fixture
def said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    return Said(tmp_path, capsys)


@pytest.mark.parametrize("storage", [None, "study.db"])
def test_orders_are_in_the_study_and_existing_ones_are_named(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch, storage: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    study = killed(tmp_path, storage)
    (tmp_path / "another").mkdir()
    monkeypatch.chdir(tmp_path / "another")  # the study is found from any folder
    modes = {"pause": "paused", "stop": "stopping", "cancel": "cancelling", "resume": "running"}
    for verb, mode in modes.items():
        assert f"this takes effect when `plait resume mine tracking.root={tmp_path}` resumes it" in said(verb)
        assert study.user_attrs[ORDERS]["mode"] == mode
        again = said(verb)
        if mode == "running":
            assert again.startswith("The search is not paused. It is not running now")
        else:
            assert again == f"The search is already {mode}.\n"
    assert said("stop", "3").startswith("Trial 3 ends after the current step.")
    assert said("stop", "trial-0004").startswith("Trial 4 ends")
    assert study.user_attrs[ORDERS]["stops"] == [3, 4]
    assert not list((tmp_path / "another").iterdir())


@pytest.mark.parametrize("storage", [None, "study.db"])
def test_orders_given_at_once_are_all_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str | None
) -> None:
    """Each is written on top of what was read: without a lock the last one would undo the others."""
    monkeypatch.chdir(tmp_path)
    study, stored, together = killed(tmp_path, storage), StudyOrders._stored, Barrier(2)

    def slowly(orders: StudyOrders) -> Orders:
        found = stored(orders)
        time.sleep(0.3)
        return found

    def stop(number: int) -> None:
        recorded = RecordedCommand("mine", "sweep", (), str(tmp_path), storage=from_anywhere(storage))
        control = SearchControl(recorded, tmp_path)
        together.wait()
        control.stop_trial(number)

    monkeypatch.setattr(StudyOrders, "_stored", slowly)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(stop, (3, 4)))
    assert study.user_attrs[ORDERS]["stops"] == [3, 4]


@pytest.mark.parametrize(
    ("words", "value", "rule", "remedy"),
    [
        (("stop", "99"), "trial 99", "no such trial", "shows the trials"),
        (("stop", "1"), "trial 1 is finished", "not ended", "shows the trials"),
        (("stop", "5"), "trial 5 is queued", "has started", "shows the trials"),
        (("clone", "6"), "trial 6", "no such trial", "shows the trials"),
        (("clone", "5", "adapter.rank=8"), "trial 5 is queued", "can be cloned", "shows the trials"),
        (("add", "adapter.rank=0"), "adapter.rank=0", "at least 1", "The default is 16"),
        (("add", "adapter.rank=x"), "adapter.rank='x'", "a whole number", ""),
        (("add", "train.lr=1,2"), "train.lr=1,2", "one value for each key", "Choose one"),
        (("add", "adapter.alhpa=1"), "key adapter.alhpa", "no such key", "Did you mean adapter.alpha"),
        (("add", "data.size=9"), "data.size=9", "has the same value in all trials", "adapter, train"),
        (("add", "train.lr=1", "+train.lr=2"), "train.lr=2", "given twice", "Give it once"),
        (("add", "train.priority=soon"), "train.priority=soon", "whole number", "train.priority=5"),
        (("clone", "0", "adapter.rank=0"), "adapter.rank=0", "at least 1", "The default is 16"),
        (("clone", "0", "--warm", "adapter.rank=16"), "adapter.rank=16", "cannot change rank", "--warm"),
        (("clone", "0", "--warm"), "trial 0 has no saved weights", "saved", "without --warm"),
        (("add", "adapter.target_modules=[nope]"), "nope", "any linear layer of the model", "q_proj"),
        (("clone", "0", "adapter.target_modules=[nope]"), "nope", "any linear layer of the model", "q_proj"),
        (("add", "train.steps=4", "train.epochs=1"), "train.steps=4, train.epochs=1", "Only one", "null"),
        (("add", "train.keep=best", "train.eval_every=0"), "train.keep=best", "evaluat", "train.eval_every"),
        (("add", "adapter.rank=100000000"), "adapter.rank=100000000", "at most 65536", "The default is 16"),
        (("pause", "--json"), "--json with pause", "Only `status`", "Leave out --json"),
    ],
)  # fmt: skip
def test_impossible_values_are_refused_with_value_rule_and_remedy(
    tmp_path: Path, said: Said, words: tuple[str, ...], value: str, rule: str, remedy: str
) -> None:
    study = killed(tmp_path)
    before = study.user_attrs
    text = said(*words, status=2)
    assert all(part in text for part in (value, rule, remedy)), text
    assert study.user_attrs == before
    assert len(study.get_trials()) == 6
    assert not (search_folder(tmp_path, "mine") / "warm").exists()


def test_a_trial_added_to_a_paused_search_waits_for_resume(tmp_path: Path, said: Said) -> None:
    killed(tmp_path)
    assert "is paused" not in said("add", "adapter.rank=16")
    said("pause")
    lift = f"`plait control mine resume tracking.root={tmp_path}`"
    assert f"The search is paused: run {lift} first." in said("add", "adapter.rank=4")


def test_trials_are_added_and_cloned(tmp_path: Path, said: Said) -> None:
    study = killed(tmp_path)
    zero = study.get_trials()[0].params
    weights = search_folder(tmp_path, "mine") / "adapters" / "trial-0000"
    weights.mkdir(parents=True)
    (weights / "adapter_model.safetensors").write_bytes(b"weights")
    assert said("add", "adapter.rank=16", "train.lr=2e-4").startswith(
        "Trial 6 is queued. It starts as soon as a slot is free."
    )
    assert "preempted" in said("add", "adapter.rank=16", "train.priority=5")
    assert "preempted" not in said("clone", "1")
    said("clone", "0", "train.lr=3e-4", "--warm")
    added = study.get_trials()[6:]
    assert [item.system_attrs["fixed_params"] for item in added] == [
        {"adapter.rank": 16, "train.lr": 2e-4},
        {"adapter.rank": 16},
        study.get_trials()[1].params,
        zero | {"train.lr": 3e-4},
    ]
    assert [item.user_attrs.get("plait.priority") for item in added] == [None, 5, None, None]
    assert all(item.user_attrs["plait.beyond"] for item in added)
    copy = Path(added[-1].user_attrs["plait.warm_from"])
    assert copy.parent == search_folder(tmp_path, "mine") / "warm"
    assert (copy / "adapter_model.safetensors").read_bytes() == b"weights"


def test_a_further_trial_may_leave_the_space_and_is_marked(tmp_path: Path, said: Said) -> None:
    study = killed(tmp_path)
    zero = study.get_trials()[0].params
    text = said("add", "adapter.rank=64", "train.lr=2e-4", "train.steps=80")
    assert "adapter.rank=64 train.steps=80 lie outside the search space: the sampler does not learn" in text
    said("clone", "0", "train.lr=1")
    study._storage.set_trial_state_values(study.get_trials()[7]._trial_id, TrialState.RUNNING)
    said("clone", "7", "train.batch_size=3")  # of what is outside, and more of it
    said("clone", "7", "train.lr=3e-4")  # back into the space
    added = study.get_trials()[6:]
    batch = {key: value for key, value in zero.items() if key != "train.lr"}
    assert [item.system_attrs["fixed_params"] for item in added[:2]] == [{"train.lr": 2e-4}, batch]
    assert [item.user_attrs.get("plait.outside") for item in added] == [
        {"adapter.rank": ["64", 64], "train.steps": ["80", 80]},
        {"train.lr": ["1", 1]},
        {"train.lr": ["1", 1], "train.batch_size": ["3", 3]},
        None,
    ]
    shown = {job["trial"]: (job["outside"], job["parameters"]) for job in json.loads(said("--json"))["jobs"]}
    assert shown[7] == ("train.lr=1", batch | {"train.lr": 1})
    assert shown[0] == ("", zero)
    assert re.search(r"trial-0007  orphaned  .*train.lr=1  \(outside the search space\)", said())


def test_a_warm_clone_begins_with_no_adapter_of_a_former_search(tmp_path: Path, said: Said) -> None:
    """search.fresh starts the search again and leaves the adapters that were exported before."""
    killed(tmp_path)
    for number in (2, 3):
        weights = search_folder(tmp_path, "mine") / "adapters" / f"trial-000{number}"
        weights.mkdir(parents=True)
        (weights / "adapter_model.safetensors").write_bytes(b"weights")
        assert f"trial {number} has no saved weights" in said("clone", str(number), "--warm", status=2)


def test_a_grid_takes_partial_points_and_completes_them(tmp_path: Path) -> None:
    """What is left open comes from the combinations that no trial has."""
    search = SearchSettings(name="mine", trials=4, sampler="grid")
    space = read_request(["adapter.rank=8,16", "train.batch_size=2,4"], {}, {}).space
    identity = identify(space, JobSpec("base"), RunSettings(search=search))
    storage = open_storage(None, tmp_path)
    trials = StudyTrials(search, space, identity, storage, folder=lambda name: search_folder(tmp_path, name))
    control = SearchControl(RecordedCommand("mine", "sweep", (), str(tmp_path)), tmp_path)
    assert "Trial 0" in control.add(["adapter.rank=16"])
    assert "Trial 1" in control.add(["adapter.rank=16"])
    found = []
    while (trial := trials.ask()) is not None:
        found.append((trial.values["adapter.rank"], trial.values["train.batch_size"]))
    trials.close()
    assert {rank for rank, _ in found[:2]} == {16}
    assert sorted(found) == [(8, 2), (8, 4), (16, 2), (16, 4)]


def test_a_priority_that_is_searched_is_a_value_as_any_other(tmp_path: Path) -> None:
    study = killed(tmp_path)
    space = read_request(["train.priority=0,5"], {}, {}).space
    another = optuna.create_study()
    keep_space(another, space)
    study.set_user_attr(SPACE_KEPT, another.user_attrs[SPACE_KEPT])
    control = SearchControl(RecordedCommand("mine", "sweep", (), str(tmp_path)), tmp_path)
    assert "preempted" not in control.add(["train.priority=5"])
    assert study.get_trials()[-1].system_attrs["fixed_params"] == {"train.priority": 5}


def test_a_trial_is_enqueued_once_however_often_the_answer_gets_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = killed(tmp_path)
    lost: list[int] = []
    enqueue_trial = optuna.Study.enqueue_trial

    def lossy(self: optuna.Study, *words: object, **more: object) -> None:
        enqueue_trial(self, *words, **more)  # type: ignore[arg-type]
        lost.append(1)
        raise OSError("the connection is lost")

    monkeypatch.setattr(optuna.Study, "enqueue_trial", lossy)
    monkeypatch.setattr("plait.search.storage.FIRST_DELAY", 0.0)
    control = SearchControl(RecordedCommand("mine", "sweep", (), str(tmp_path)), tmp_path, wait=30)
    assert control.add(["adapter.rank=16"]).startswith("Trial 6")
    assert len(lost) == 1
    assert len(study.get_trials()) == 7


def test_status_is_what_the_study_knows(tmp_path: Path, said: Said) -> None:
    study = killed(tmp_path)
    far = asdict(Owner("far", "node7 its-boot", "/nowhere"))
    study._storage.set_trial_user_attr(study.get_trials()[3]._trial_id, "plait.owner", far)
    study._storage.set_trial_intermediate_value(study.get_trials()[4]._trial_id, 20, 1.75)
    said("pause")
    first, counts, best, *trials, last = said().splitlines()
    there = f"tracking.root={tmp_path}"
    lift = f"`plait control mine resume {there}` ends the pause."
    assert first == f"mine is not running. Pending: paused. {lift}"
    assert counts == "6 trials: 1 queued, 1 orphaned, 2 finished, 1 pruned, 1 running on host node7."
    assert best.startswith("Best: trial-0001, eval/loss 1.25 adapter.rank=")
    assert re.match(r"  trial-0003  running   adapter.rank=", trials[0])
    assert re.match(r"  trial-0004  orphaned  eval loss 1.75 at step 20  adapter.rank=", trials[1])
    shows = f"`plait leaderboard mine {there}` shows its trials"
    assert last == f"{shows}, `plait resume mine {there}` resumes it."
    lrs = [float(each) for each in re.findall(r"train\.lr=(\S+)", "\n".join([best, *trials]))]
    assert all(lr == float(f"{lr:.4g}") for lr in lrs)
    facts = json.loads(said("--json"))
    shown = tuple(facts[key] for key in ("search", "mode", "trials", "ended"))
    assert shown == ("mine", "not running", 6, 3)
    assert [(job["state"], job["host"], job["reported_step"]) for job in facts["jobs"]] == [
        ("finished", "", None), ("finished", "", None), ("pruned", "", None),
        ("running", "node7", None), ("orphaned", "", 20), ("queued", "", None),
    ]  # fmt: skip
    assert all("step" not in job for job in facts["jobs"])  # the study knows no other
    assert facts["jobs"][5]["parameters"] == {"adapter.rank": 8}
    assert facts["jobs"][1]["objectives"] == [1.25]
    assert facts["jobs"][2]["reason"] == "rung 2"
    assert "its workers are on node7" in said("resume")


def test_a_storage_that_does_not_answer_is_an_error_without_its_password(tmp_path: Path, said: Said) -> None:
    command = RecordedCommand(
        "mine", "sweep", (), str(tmp_path), storage="postgresql://me:secret@127.0.0.1:1/x"
    )
    write_command(search_folder(tmp_path, "mine"), command)
    for words in ((), ("stop", "99")):
        text = said(*words, "--wait", "0", status=2)
        assert "The database does not answer" in text
        assert "secret" not in text


def test_a_storage_that_answers_again_in_time_is_waited_for(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first look at it on."""
    killed(tmp_path)
    opened, away = stored_study, iter(range(3))

    def late(storage: str | None, root: Path, name: str) -> optuna.Study:
        if next(away, None) is not None:
            raise StorageError("search.storage", "does not answer") from OSError("connection refused")
        return opened(storage, root, name)

    monkeypatch.setattr("plait.search.control.stored_study", late)
    monkeypatch.setattr("plait.search.storage.FIRST_DELAY", 0.0)
    assert said("pause", "--wait", "30").startswith("All trials are paused")


def test_a_finished_search_takes_no_orders_and_one_that_never_trained_has_no_status(
    tmp_path: Path, said: Said
) -> None:
    (search_folder(tmp_path, "mine")).mkdir(parents=True)
    assert "ended before training started" in said(status=2)
    study = killed(tmp_path)
    write_command(
        search_folder(tmp_path, "mine"), RecordedCommand("mine", "sweep", (), str(tmp_path), finished=True)
    )
    assert said().startswith("mine is finished.")
    assert "plait resume mine search.trials=N" in said("cancel", status=2)
    assert ORDERS not in study.user_attrs


def test_a_damaged_command_is_named_with_what_writes_it_again(tmp_path: Path, said: Said) -> None:
    killed(tmp_path)
    file = search_folder(tmp_path, "mine") / FILE
    file.write_text("[")
    error = said(status=2)
    assert f"{file}: the file is damaged" in error
    assert "Give the `plait sweep` command again" in error


# ---- searches that run -------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """A search that another process of this host trains, and one that was killed."""
    killed(tmp_path)
    write_command(search_folder(tmp_path, "killed"), RecordedCommand("killed", "sweep", ("model=tiny",), "."))
    taking = "from plait.search.locks import LifeLock; lock = LifeLock(path)"
    with held_elsewhere(taking, search_folder(tmp_path, "mine") / "workers" / "1-worker"):
        yield tmp_path


def test_running_and_resumable_searches_are_listed(
    runs: Path, said: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    there = f"tracking.root={runs}"
    lift = f"`plait control mine resume {there}`"
    assert said("pause").startswith(f"All trials are paused after the current step; {lift} resumes them.")
    assert said().startswith(f"mine is paused. {lift} ends the pause.")
    assert main(["control", "--root", str(runs)]) == 0
    status = f"`plait control mine status {there}`"
    assert capsys.readouterr().out == f"mine\tpaused\n{status} shows its status.\n"
    (search_folder(runs, "killed") / "adapters" / "trial-0000").mkdir(parents=True)
    assert main(["resume", f"tracking.root={runs}"]) == 0
    assert capsys.readouterr().out == (
        "killed\t1 adapter trained\tplait sweep model=tiny\n"
        f"Running: mine (`plait control {there}` controls them).\n"
    )
    assert main(["control", "pause", "--root", str(runs)]) == 2
    assert f"Type `plait control mine pause {there}`." in capsys.readouterr().err
    assert main(["control", "kiled", "pause", "--root", str(runs)]) == 2
    assert "Did you mean killed?" in capsys.readouterr().err
    assert main(["control", "mi", f"tracking.root={runs}"]) == 0
    assert capsys.readouterr().out.startswith("mine is paused.")
    search_folder(runs, "mining").mkdir()
    assert main(["control", "mi", "--root", str(runs)]) == 2
    assert "Several names begin with it: mine, mining." in capsys.readouterr().err
    assert main(["trace", "kill", f"tracking.root={runs}"]) == 2
    assert "plait trace killed" in capsys.readouterr().err


def test_a_pause_that_is_not_carried_out_yet_is_said(runs: Path, said: Said) -> None:
    study = stored_study(None, runs, "mine")
    for number in (3, 4):
        trial = study.get_trials()[number]
        lock = search_folder(runs, "mine") / "workers" / "1-worker"
        owner = trial.user_attrs["plait.owner"] | {"file": str(lock)}
        study._storage.set_trial_user_attr(trial._trial_id, "plait.owner", owner)
    said("pause")
    lift = f"`plait control mine resume tracking.root={runs}` ends the pause."
    first, counts, *_ = said().splitlines()
    assert first == f"mine is being paused: 2 trials still running, to the end of the step. {lift}"
    assert "2 running" in counts


def test_control_says_that_no_search_is_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["control", "--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "is running" in out
    assert f"`plait resume tracking.root={tmp_path}`" in out
    assert main(["control", "pause", "--root", str(tmp_path)]) == 2
    assert "is running" in capsys.readouterr().err


def loaded_by(words: list[str], heavy: set[str]) -> str:
    """Which of these libraries a command imports."""
    program = (
        "import sys; from plait.cli.main import main\n"
        f"assert main({words!r}) == 0\n"
        f"print(sorted({heavy!r} & {{name.partition('.')[0] for name in sys.modules}}))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(Path(plait.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    return shown.stdout.splitlines()[-1]


def test_listing_the_searches_loads_nothing_heavy(tmp_path: Path) -> None:
    heavy = {"hydra", "omegaconf", "optuna", "mlflow", "torch", "numpy", "rich"}
    assert loaded_by(["control", "--root", str(tmp_path)], heavy) == "[]"


@pytest.mark.parametrize("words", [["status"], ["stop"], ["add", "adapter.rank=16"]], ids=" ".join)
def test_a_command_for_a_search_loads_only_what_reads_its_study(words: list[str], runs: Path) -> None:
    heavy = {"mlflow", "torch", "transformers", "pandas", "sklearn"}
    if words[0] != "add":  # which composes the search's command
        heavy |= {"scipy", "rich"}
    assert loaded_by(["control", "mine", *words, "--root", str(runs)], heavy) == "[]"


@pytest.mark.parametrize(("text", "rule"), [("nan", "at least 0"), ("-1", "at least 0"), ("soon", "float")])
def test_a_wait_is_a_time(text: str, rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["control", "mine", "pause", f"--wait={text}"]) == 2
    assert rule in capsys.readouterr().err


def test_the_searches_that_run_are_listed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = LifeLock(search_folder(tmp_path, "mine") / WORKERS / "1-a")
    assert main(["control", "--json", "--root", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == {"mine": "starting"}
    lock.release()
