"""The Optuna study as a source of trials: draws, states, values, going on."""

import math
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import optuna
import pytest
import torch
from job_results import ended
from optuna.storages import BaseStorage
from optuna.trial import TrialState
from studies import space_of, study_of

from plait.core.errors import SearchError, StorageError
from plait.core.settings import SearchSettings
from plait.engine.checkpoints import HEADER
from plait.search.identity import ROWS, Identity, check_material, check_problem, sign
from plait.search.orders import Orders
from plait.search.storage import LIMITS, from_anywhere, limit_server, missing_file, open_storage
from plait.search.study import StudyTrials
from plait.search.suggest import derived_seed, distributions, make_sampler, one_torch_thread
from plait.search.trials import Trial
from plait.utils.addresses import redact, with_driver

MIXED = ("adapter.rank=4,8,16", "train.lr=tag(log,interval(1e-5,1e-3))")
NUMBERS = ("adapter.rank=interval(4,64)", "train.lr=tag(log,interval(1e-5,1e-3))")
COUNTED = ("adapter.rank=4,8,16", "train.steps=range(10,40,10)")
SPACES = {"cmaes": NUMBERS, "qmc": NUMBERS, "grid": COUNTED}


def source(
    arguments: Sequence[str] = MIXED, storage: BaseStorage | None = None, **settings: object
) -> StudyTrials:
    search = replace(SearchSettings(), **settings)  # type: ignore[arg-type]  # keyword by keyword
    return study_of(space_of(*arguments), search, storage)


def complete(trials: StudyTrials, trial: Trial, value: float = 1.0) -> None:
    trials.tell(trial, ended("finished", value))


def loss(trial: Trial) -> float:
    rank, lr = trial.values["adapter.rank"], trial.values.get("train.lr", 1e-4)
    assert isinstance(rank, int)
    assert isinstance(lr, float)
    return 1.0 / rank + abs(math.log10(lr) + 4.0)


def frozen(storage: BaseStorage) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=None, storage=storage).get_trials()


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid", "cmaes", "qmc", "gp", "nsgaii"])
def test_every_sampler_suggests_in_batches_inside_the_space(sampler: str) -> None:
    arguments = SPACES.get(sampler, MIXED)
    trials = source(arguments, sampler=sampler, trials=9)
    allowed = distributions(space_of(*arguments))
    seen = []
    while batch := [trial for _ in range(3) if (trial := trials.ask()) is not None]:
        seen += batch
        for trial in batch:
            complete(trials, trial, loss(trial))
    assert [trial.number for trial in seen] == list(range(9))
    for trial in seen:
        assert trial.values.keys() == allowed.keys()
        for key, value in trial.values.items():
            assert allowed[key]._contains(allowed[key].to_internal_repr(value))
    assert len({tuple(trial.values.items()) for trial in seen}) == 9


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid", "cmaes", "qmc", "gp", "nsgaii"])
def test_no_sampler_repeats_a_failed_point(sampler: str) -> None:
    """Until a trial succeeds, Optuna's quasi-random sampler leaves the drawing to another one."""
    trials = source(SPACES.get(sampler, MIXED), sampler=sampler, trials=6)
    seen = set()
    while (trial := trials.ask()) is not None:
        seen.add(tuple(trial.values.items()))
        trials.tell(trial, ended("failed", None, "out of luck"))
    assert len(seen) == 6


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid", "cmaes", "qmc", "nsgaii"])
def test_a_resumed_search_suggests_what_it_would_have_suggested(sampler: str, tmp_path: Path) -> None:
    """Whether one process draws all, or a new one opens the study for every batch."""

    def draw(reopen: bool, name: str) -> list[Trial]:
        def opened() -> StudyTrials:
            storage = open_storage(str(tmp_path / f"{name}.journal"), tmp_path)
            return source(SPACES.get(sampler, MIXED), storage, sampler=sampler, trials=9, name="s", seed=3)

        trials, drawn = opened(), []
        for _ in range(3):
            batch = [trial for _ in range(3) if (trial := trials.ask()) is not None]
            for trial in batch:
                complete(trials, trial, loss(trial))
            drawn += batch
            trials = opened() if reopen else trials
        return drawn

    assert draw(False, "whole") == draw(True, "pieces")


def test_seeds_differ_between_suggestions_and_searches() -> None:
    seeds = {derived_seed(seed, existing) for seed in range(20) for existing in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert (derived_seed(0, 1), derived_seed(7, 30)) == (2839049726, 2052452150), "in any process"


def test_the_gaussian_process_gives_the_threads_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_torch_thread("gp"):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("log", [True, False])
def test_whole_numbers_are_suggested_on_the_requested_scale(log: bool) -> None:
    numbers = "interval(4,64)"
    space = space_of(f"adapter.rank={f'tag(log,{numbers})' if log else numbers}")
    found = distributions(space)["adapter.rank"]
    assert isinstance(found, optuna.distributions.IntDistribution)
    assert (found.low, found.high, found.log) == (4, 64, log)


def test_another_seed_suggests_other_points() -> None:
    first = [source(seed=0).ask(), source(seed=1).ask()]
    assert first[0] != first[1]


def test_overrides_of_a_trial_match_its_values() -> None:
    trial = source(("adapter.target_modules=[q],[q,v]", "data=reasoning_gym,jsonl")).ask()
    assert trial is not None
    assert trial.overrides == tuple(f"{key}={value}" for key, value in trial.values.items())
    assert trial.name == "trial-0000"


def test_states_and_values_in_the_study() -> None:
    storage = optuna.storages.InMemoryStorage()
    trials = source(storage=storage, trials=6)
    asked = [trials.ask() for _ in range(6)]
    outcomes = [
        ended("finished", 0.5),
        ended("failed", None, "loss is nan at step 3"),
        ended("finished", math.nan),
        ended("finished", math.inf),
        ended("pruned", 0.7, "rung 1"),
        ended("pruned", None, "rung 1"),
    ]
    for trial, outcome in zip(asked, outcomes, strict=True):
        assert trial is not None
        trials.tell(trial, outcome)
    held = frozen(storage)
    states = [TrialState.COMPLETE, *[TrialState.FAIL] * 3, *[TrialState.PRUNED] * 2]
    assert [item.state for item in held] == states
    assert held[0].value == 0.5
    assert held[1].user_attrs["plait.reason"] == "loss is nan at step 3"
    assert all(item.value is None or math.isfinite(item.value) for item in held)
    assert [item.state for item in trials.finished()] == [
        "finished",
        *["failed"] * 3,
        "pruned",
        "pruned",
    ]


def test_intermediate_values_are_kept_once_and_finite() -> None:
    storage = optuna.storages.InMemoryStorage()
    trials = source(storage=storage)
    trial = trials.ask()
    assert trial is not None
    for step, value in ((5, 2.0), (5, 3.0), (10, math.nan), (15, 1.0)):
        trials.report(trial, step, value)
    assert frozen(storage)[0].intermediate_values == {5: 2.0, 15: 1.0}


def test_the_weights_of_a_warm_clone_are_removed_at_its_end(tmp_path: Path) -> None:
    """And no others: a copy of another search, or an adapter that was given by hand."""
    folders = ["search/warm/a", "search/warm/b", "search/saved", "other/warm/c"]
    copies = [tmp_path / folder for folder in folders]
    for copy in copies:
        copy.mkdir(parents=True)
    storage = optuna.storages.InMemoryStorage()
    search = SearchSettings(trials=1)

    def begin() -> StudyTrials:
        return study_of(space_of(*MIXED), search, storage, folder=lambda _: tmp_path / "search")

    trials = begin()
    for copy in copies:
        trials.enqueue({}, request=copy.name, warm_from=copy)
    drawn = [trial for trial in (trials.ask() for _ in copies) if trial is not None]
    assert [trial.warm_from for trial in drawn] == copies
    first, second, *others = drawn
    complete(trials, first)
    for trial in others:
        complete(trials, trial)
    assert [copy.exists() for copy in copies] == [False, True, True, True]
    storage.set_trial_state_values(second.number, TrialState.PRUNED)  # told, and killed before it tidied up
    begin()
    assert [copy.exists() for copy in copies] == [False, False, True, True]


def test_a_retried_trial_starts_with_the_same_settings_and_weights(tmp_path: Path) -> None:
    copy = tmp_path / "warm" / "a"
    copy.mkdir(parents=True)
    storage = optuna.storages.InMemoryStorage()
    search, space = SearchSettings(trials=1, failed="retry"), space_of(*MIXED)
    begun = []
    for state in ("failed", "failed", "finished"):
        trials = study_of(space, search, storage, folder=lambda _: tmp_path)
        if not begun:
            trials.enqueue({}, request="a", warm_from=copy, priority=5)
        trial = trials.ask()
        assert trial is not None
        assert copy.exists()
        begun.append((trial.values, trial.overrides, trial.warm_from))
        trials.tell(trial, ended(state, 1.0 if state == "finished" else None, ""))
    assert begun == [begun[0]] * 3
    assert begun[0][2] == copy
    assert "train.priority=5" in begun[0][1]
    assert not copy.exists()


@pytest.fixture(params=["journal", "sqlite"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], BaseStorage]:
    path = None if request.param == "journal" else str(tmp_path / "study.db")
    return lambda: open_storage(path, tmp_path)


def test_a_killed_search_takes_up_its_running_trials(
    opener: Callable[[], BaseStorage], tmp_path: Path
) -> None:
    killed = source(storage=opener(), trials=5)
    asked = [killed.ask() for _ in range(4)]
    assert all(asked)
    saved = tmp_path / "state"
    saved.mkdir()
    (saved / HEADER).touch()
    complete(killed, asked[0])  # type: ignore[arg-type]
    killed.pause(asked[2], saved)  # type: ignore[arg-type]
    killed.pause(asked[3], tmp_path / "gone")  # type: ignore[arg-type]

    again = source(storage=opener(), trials=5)
    assert again.claims.to_resume() == 3
    taken = [again.ask() for _ in range(5)]
    assert [trial.number for trial in taken if trial] == [1, 2, 3, 4]
    assert [trial.resume_from for trial in taken if trial] == [None, saved, None, None]
    assert [trial.values for trial in taken[:3] if trial] == [trial.values for trial in asked[1:] if trial]
    for trial in taken:
        if trial is not None:
            complete(again, trial)
    assert again.ask() is None
    assert [item.trial for item in again.finished()] == [0, 1, 2, 3, 4]


def test_more_trials_add_to_a_finished_search(opener: Callable[[], BaseStorage]) -> None:
    for trials in (2, 5):
        draws = source(storage=opener(), name="s", trials=trials)
        while (trial := draws.ask()) is not None:
            complete(draws, trial)
        assert len(draws.finished()) == trials


def test_a_study_of_another_space_is_refused_with_the_difference() -> None:
    storage = optuna.storages.InMemoryStorage()
    source(storage=storage, name="s")
    with pytest.raises(SearchError) as caught:
        source(("adapter.rank=4,8", "train.steps=1,2"), storage, name="s")
    assert "another search" in caught.value.value
    assert "space.adapter.rank: was choice(4,8,16), now choice(4,8)" in caught.value.rule
    assert "space.train.steps: was (not set), now choice(1,2)" in caught.value.rule
    assert "search.fresh=true" in caught.value.remedy


def test_another_sampler_may_go_on_with_a_study() -> None:
    storage = optuna.storages.InMemoryStorage()
    source(storage=storage, name="s").ask()
    assert source(storage=storage, name="s", sampler="random", seed=9).claims.to_resume() == 1


def test_fresh_starts_again() -> None:
    storage = optuna.storages.InMemoryStorage()
    first = source(storage=storage, name="s")
    trial = first.ask()
    assert trial is not None
    complete(first, trial)
    assert source(storage=storage, name="s", fresh=True).finished() == []


def test_fresh_ends_standing_orders_and_leaves_no_table_of_the_former_search(tmp_path: Path) -> None:
    storage, search = open_storage(None, tmp_path), SearchSettings(name="s")
    first = study_of(space_of(*MIXED), search, storage, folder=lambda _: tmp_path / "s")
    first.orders.set_mode("paused")
    first.orders.stop_trial(0)
    first.close()
    left = ["group_steps.jsonl", "fits.jsonl", "warm/copy/adapter_model.safetensors"]
    kept = ["adapters/trial-0000/adapter_model.safetensors", "peaks.json"]
    for name in (*left, *kept):
        (tmp_path / "s" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "s" / name).touch()
    again = study_of(space_of(*MIXED), replace(search, fresh=True), storage, folder=lambda _: tmp_path / "s")
    assert again.orders.read() == Orders()
    assert [name for name in (*left, *kept) if (tmp_path / "s" / name).exists()] == kept
    again.close()


def test_a_study_that_plait_did_not_make() -> None:
    storage = optuna.storages.InMemoryStorage()
    optuna.create_study(study_name="s", storage=storage).ask()
    with pytest.raises(SearchError, match="not created by Plait"):
        source(storage=storage, name="s")


def test_an_option_that_the_sampler_does_not_have() -> None:
    with pytest.raises(SearchError, match="sampler_options"):
        make_sampler(SearchSettings(sampler_options={"temperature": 1}), 0)
    make_sampler(SearchSettings(sampler_options={"n_startup_trials": 2}), 0)


# ---- storage -----------------------------------------------------------------------------------------------


def test_the_default_storage_is_a_journal_under_the_root(tmp_path: Path) -> None:
    source(storage=open_storage(None, tmp_path / "runs")).ask()
    assert (tmp_path / "runs" / "optuna.journal").stat().st_size > 0


def test_a_path_with_a_database_suffix_is_sqlite(tmp_path: Path) -> None:
    source(storage=open_storage(str(tmp_path / "new" / "s.db"), tmp_path)).ask()
    assert (tmp_path / "new" / "s.db").read_bytes().startswith(b"SQLite format 3")


def test_the_database_of_another_program_is_refused_as_it_is(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "other.db")) as database:
        database.execute("CREATE TABLE people (name TEXT)")
    before = (tmp_path / "other.db").read_bytes()
    for storage in (str(tmp_path / "other.db"), f"sqlite:///{tmp_path / 'other.db'}"):
        with pytest.raises(StorageError, match=r"the tables people\n"):
            open_storage(storage, tmp_path)
    assert (tmp_path / "other.db").read_bytes() == before
    open_storage(str(tmp_path / "own.db"), tmp_path)
    open_storage(str(tmp_path / "own.db"), tmp_path)


def damage_header(file: Path) -> None:
    file.write_bytes(b"garbage " * 1000)


def damage_pages(file: Path) -> None:
    """All but the first page, as where a disk has lost blocks."""
    content = file.read_bytes()
    file.write_bytes(content[:4096] + b"garbage " * ((len(content) - 4096) // 8))


@pytest.mark.parametrize("damage", [damage_header, damage_pages])
def test_a_damaged_database_is_named_as_a_file_with_what_to_do(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    file = tmp_path / "s.db"
    source(storage=open_storage(str(file), tmp_path)).ask()
    damage(file)
    with pytest.raises(StorageError) as caught:
        open_storage(str(file), tmp_path)
    assert caught.value.value.startswith(f"search.storage={file}: the file is damaged (")
    assert "move it away" in caught.value.remedy
    assert "server" not in str(caught.value)
    file.unlink()
    source(storage=open_storage(str(file), tmp_path)).ask()  # the remedy


@pytest.mark.parametrize(("version", "says"), [("v3.0.0.d", "storage upgrade"), ("v99", "updating optuna")])
def test_a_database_of_another_version_of_optuna_is_named_as_that(
    version: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "s.db"
    open_storage(str(file), tmp_path)
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = ?", [version])
    with pytest.raises(StorageError, match=f"{file}: its tables are of another version") as caught:
        open_storage(str(file), tmp_path)
    assert says in caught.value.rule
    assert "answer" not in str(caught.value)


def test_a_database_file_that_cannot_be_made_is_no_server(tmp_path: Path) -> None:
    (tmp_path / "s.db").mkdir()
    with pytest.raises(StorageError, match=r"unable to open database file\n.*\n.*or set search") as caught:
        open_storage(str(tmp_path / "s.db"), tmp_path)
    assert "server" not in str(caught.value)


def test_a_database_file_that_is_locked_is_no_matter_of_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "s.db"
    open_storage(str(file), tmp_path)
    at_once = partial(sqlite3.connect, timeout=0)  # and not after five seconds
    for module in (sqlite3, sqlite3.dbapi2):
        monkeypatch.setattr(module, "connect", at_once)
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StorageError, match=r"s\.db: database is locked\n.*\nWait until no other program"):
            open_storage(str(file), tmp_path)


def test_a_database_that_is_damaged_while_a_search_trains_is_not_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    trials = source(storage=open_storage(str(file), tmp_path))
    damage_pages(file)
    with pytest.raises(StorageError, match=r"the file is damaged \(database disk image is malformed\)"):
        trials.ask()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be created"):
        open_storage(None, tmp_path / "file" / "runs")


def test_a_file_that_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "x.journal").mkdir()
    with pytest.raises(StorageError, match=r"x\.journal"):
        open_storage(str(tmp_path / "x.journal"), tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        '{"op_code":99}',
        '{"op_code":0}',
        '{"op_code":0,"study_name":1,"directions":1}',
    ],
)
def test_a_journal_of_another_kind(line: str, tmp_path: Path) -> None:
    (tmp_path / "x.journal").write_text(f"{line}\n")
    with pytest.raises(StorageError, match="lines that Optuna does not write"):
        open_storage(str(tmp_path / "x.journal"), tmp_path)


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+pysqlite"])
def test_a_database_file_is_found_in_any_form_of_its_address(scheme: str, tmp_path: Path) -> None:
    storage = f"{scheme}:///{tmp_path}/x.db?timeout=60"
    assert missing_file(storage, tmp_path) == tmp_path / "x.db"
    open_storage(storage, tmp_path)
    assert missing_file(storage, tmp_path) is None


def test_a_root_that_begins_with_a_tilde_is_in_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert missing_file(None, Path("~/r")) == tmp_path / "r" / "optuna.journal"
    open_storage(None, Path("~/r"))
    assert missing_file(None, Path("~/r")) is None


@pytest.mark.parametrize(
    "storage", ["sqlite:///:memory:", "sqlite:///file:x.db?uri=true", "postgresql://h/x"]
)
def test_a_database_without_a_path_misses_no_file(storage: str, tmp_path: Path) -> None:
    assert missing_file(storage, tmp_path) is None
    assert from_anywhere(storage) == storage


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://someone:secret@127.0.0.1:1/none",
        "nonsense://u:secret@h/d",
        "sqlite:////nowhere/at/all.db",
        "postgresql://me:p@secret@127.0.0.1:1/x",
    ],
)
def test_a_database_that_does_not_answer(url: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        open_storage(url, tmp_path)
    assert "search.storage" in caught.value.value
    assert "secret" not in str(caught.value)


def test_urls_name_a_driver_that_is_installed() -> None:
    assert with_driver("sqlite:///x.db") == "sqlite:///x.db"
    assert with_driver("postgresql+asyncpg://h/d") == "postgresql+asyncpg://h/d"
    assert with_driver("postgresql://u@h/d").startswith("postgresql")
    assert with_driver("postgres://u@h/d").endswith("://u@h/d")
    assert redact("postgresql://u:p@h/d") == "postgresql://u:***@h/d"
    assert redact("sqlite:///x.db") == "sqlite:///x.db"


def test_an_empty_study_whose_maker_was_killed_before_it_had_signed_it_is_taken() -> None:
    storage = optuna.storages.InMemoryStorage()
    optuna.create_study(study_name="s", storage=storage)
    first = source(storage=storage, name="s")
    assert first.token
    assert source(storage=storage, name="s").token == first.token
    with pytest.raises(SearchError, match="belongs to another search") as caught:
        source(NUMBERS, storage=storage, name="s")
    assert caught.value.remedy.startswith("Restore what it was started with")


def test_a_study_of_another_search_is_named_with_few_differences() -> None:
    study = optuna.create_study(study_name="s")
    identities = [Identity({f"data.{key}": value for key in "abcdefgh"}, {}) for value in (1, 2)]
    sign(study, identities[0])
    check_problem(study, identities[0])
    with pytest.raises(SearchError) as caught:
        check_problem(study, identities[1])
    assert caught.value.rule.splitlines() == [
        *(f"data.{key}: was 1, now 2" for key in "abc"),
        "and 5 more settings",
    ]


def test_data_and_model_of_a_search_must_not_change(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "journal"), tmp_path)
    source(storage=storage, name="s").check_material({"data train.jsonl": "aaa", "model": "m"})
    again = source(storage=storage, name="s")
    again.check_material({"data train.jsonl": "aaa", "model": "m", "data more.jsonl": "ccc"})
    with pytest.raises(SearchError, match=r"train\.jsonl: was aaa, now bbb") as caught:
        again.check_material({"data train.jsonl": "bbb", "model": "m"})
    assert "search.fresh=true" in caught.value.remedy
    again.check_material({"data more.jsonl": "ccc"})
    assert again.material == {"data train.jsonl": "aaa", "model": "m", "data more.jsonl": "ccc"}


def test_changed_data_are_named_with_their_rows_then_and_now() -> None:
    def material(digest: str, rows: int) -> dict[str, str]:
        return {"data file": digest, f"{ROWS}data file": f"train.jsonl with {rows} rows to train on"}

    study = optuna.create_study()
    check_material(study, material("aaa", 90))
    for rows, said in (
        (80, "It was train.jsonl with 90 rows to train on; now it is train.jsonl with 80 rows to train on."),
        (90, "The content changed of train.jsonl with 90 rows to train on."),
    ):
        with pytest.raises(SearchError) as caught:
            check_material(study, material("bbb", rows))
        assert caught.value.rule == said
    check_material(study, material("aaa", 90))


def test_failed_trials_are_retried_once_if_requested() -> None:
    storage = optuna.storages.InMemoryStorage()
    first = source(storage=storage, name="s", trials=3)
    drawn = [first.ask() for _ in range(3)]
    for number, trial in enumerate(drawn):
        assert trial is not None
        first.tell(trial, ended("failed", None, "broken") if number == 1 else ended("finished", 1.0))
    assert first.ask() is None
    for _ in range(2):  # not again for a second start
        again = source(storage=storage, name="s", trials=3, failed="retry")
        assert again.total == 4
    retried = again.ask()
    assert retried is not None
    assert drawn[1] is not None
    assert (retried.number, retried.values) == (3, drawn[1].values)
    assert again.ask() is None
    again.tell(retried, ended("finished", 2.0))
    assert source(storage=storage, name="s", trials=3, failed="retry").ask() is None


def test_telling_twice_is_telling_once() -> None:
    storage = optuna.storages.InMemoryStorage()
    trials = source(storage=storage, trials=1)
    trial = trials.ask()
    assert trial is not None
    complete(trials, trial, 1.0)
    trials.tell(trial, ended("failed", None, "again"))
    assert [(item.state, item.value) for item in frozen(storage)] == [(TrialState.COMPLETE, 1.0)]


def test_a_request_enqueues_one_additional_trial_once() -> None:
    trials = source(trials=1)
    assert trials.ask() is not None
    numbers = [trials.enqueue({"adapter.rank": 16}, request="a") for _ in range(2)]
    assert numbers == [1, 1]
    assert trials.total == 2
    asked = trials.ask()
    assert asked is not None
    assert asked.values["adapter.rank"] == 16
    assert asked.values.keys() == {"adapter.rank", "train.lr"}
    assert trials.ask() is None


def test_a_server_that_does_not_know_a_limit_keeps_its_own() -> None:
    """PostgreSQL before 12 has no tcp_user_timeout; a failed statement would end all that follow."""
    connection = MagicMock(Error=sqlite3.Error)
    cursor = connection.cursor.return_value.__enter__.return_value
    cursor.execute.side_effect = [*[None] * (len(LIMITS) - 1), sqlite3.Error("no such setting")]
    limit_server(connection, None)
    assert connection.commit.call_count == len(LIMITS) - 1
    connection.rollback.assert_called_once_with()
