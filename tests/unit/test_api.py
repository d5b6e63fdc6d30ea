"""Plait as Python imports it: overrides in two forms, names found late, errors in the same words."""

import logging
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from safetensors.torch import save_file

import plait
from plait import api
from plait.cli.app import compose
from plait.cli.main import main
from plait.config.overrides import read_request
from plait.core.errors import ConfigError, PlaitError, StorageError
from plait.core.lifecycle import JobState
from plait.core.objectives import Objective
from plait.core.settings import TrackingSettings
from plait.tracking.leaderboard import JobRecord
from plait.tracking.location import Location
from plait.tracking.results import SearchResult
from plait.utils.paths import conf_dir


def test_importing_plait_imports_nothing_that_takes_time() -> None:
    heavy = "{'hydra', 'mlflow', 'numpy', 'optuna', 'pandas', 'torch', 'transformers'}"
    code = f"import sys, plait; print({heavy} & set(sys.modules), plait.sweep.__module__, dir(plait))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("set() plait.api [")
    assert all(f"'{name}'" in done.stdout for name in plait.__all__)


@pytest.mark.parametrize(
    ("given", "call"),
    [
        ({}, "plait.open('mine')"),
        ({"root": Path("plait-runs").absolute()}, "plait.open('mine')"),
        ({"root": Path("/x y")}, "plait.open('mine', root='/x y')"),
        (
            {"uri": "http://me:secret@host", "experiment": "e"},
            "plait.open('mine', uri='http://me:***@host', experiment='e')",
        ),
    ],
)
def test_an_interrupt_says_where_its_search_is_opened(given: dict[str, Any], call: str) -> None:
    settings = TrackingSettings(**given)
    found = SearchResult("mine", JobState.PAUSED, (), "", "", Location("sqlite:///x.db", Path(), None), ())
    text = str(plait.Interrupted(api.Result(found, settings)))
    assert f"; {call} opens what there is." in text


def test_a_name_that_is_not_there_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        plait.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), []),
        (["model=tiny", "adapter.rank=4,8"], ["model=tiny", "adapter.rank=4,8"]),
        ({"adapter.rank": [4, 8]}, ["adapter.rank=choice(4,8)"]),
        ({"train.lr": list(np.array([1e-4, 0.5]))}, ["train.lr=choice(0.0001,0.5)"]),
        ({"search.enqueue": [{"adapter.rank": np.int64(4)}]}, ["search.enqueue=[{adapter.rank:4}]"]),
        ({"adapter.rank": range(4, 13, 4)}, ["adapter.rank=choice(4,8,12)"]),
        ({"train.lr": "tag(log,interval(1e-4,1e-2))"}, ["train.lr=tag(log,interval(1e-4,1e-2))"]),
        ({"train.lr": np.array([1e-4, 0.5])}, ["train.lr=choice(0.0001,0.5)"]),
        ({"train.lr": np.float64(1e-4), "train.steps": np.int64(3)}, ["train.lr=0.0001", "train.steps=3"]),
        ({"train.schedule": ["linear", "a, b"]}, ["train.schedule=choice(linear,'a, b')"]),
        ({"adapter.targets": [["q_proj"], ["o_proj"]]}, ["adapter.targets=choice([q_proj],[o_proj])"]),
        ({"search.metric": ["eval/loss", "adapter.rank"]}, ["search.metric=[eval/loss,adapter.rank]"]),
        ({"search.enqueue": [{"adapter.rank": 4}]}, ["search.enqueue=[{adapter.rank:4}]"]),
        ({"data.path": Path("my data.jsonl")}, ["data.path='my data.jsonl'"]),
        ({"train.steps": None, "search.fresh": True}, ["train.steps=null", "search.fresh=true"]),
        ({"+sweeps": "quickstart"}, ["+sweeps=quickstart"]),
    ],
)  # fmt: skip
def test_overrides_are_those_of_the_command_line(given: Any, words: list[str]) -> None:
    assert api.override_words(given) == words


@pytest.mark.parametrize("given", ["model=tiny", ["model=tiny", 3], {"adapter.rank": object()}])
def test_text_that_is_not_an_override_is_refused_with_an_example(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"plait\.sweep|A value is"):
        plait.sweep(given)


@pytest.mark.parametrize(
    "wrong",
    [
        ["adapter.rnak=3"],
        ["model=tyni"],
        ["adapter.rank=choice(1,2"],
        ["hydra/sweeper=basic"],
        ["model=tiny", "train.lr=1e-4,nan"],
    ],
)
def test_errors_are_raised_in_the_words_of_the_command_line(
    wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlaitError) as caught:
        plait.sweep(wrong)
    assert capsys.readouterr() == ("", "")
    assert main(["sweep", *wrong]) == 2
    said = " ".join(capsys.readouterr().err.removeprefix("plait: ").split())
    assert said == " ".join(str(caught.value).split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("word", "said"), [("--help", "option"), ("mode=plan", "trains"), ("+sweeps=tracking_scale", "trains")]
)
def test_options_that_train_nothing_are_refused_in_python(
    word: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        plait.sweep([word])


def test_hydra_arguments_and_logging_of_the_program_stay_its_own() -> None:
    arguments, handlers = list(sys.argv), logging.getLogger().handlers[:]
    with initialize_config_dir(str(conf_dir()), version_base="1.2", job_name="mine"):
        theirs, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
        search = compose(["model=tiny", "adapter.rank=3,5"])
        with pytest.raises(ConfigError):
            compose(["adapter.rnak=3"])
        assert GlobalHydra.instance().hydra is theirs
        assert HydraConfig.instance().cfg is config
        assert hydra_compose("config", ["model=tiny"]).model.kind == "tiny"
    assert (sys.argv, logging.getLogger().handlers) == (arguments, handlers)
    assert list(search.arguments) == ["model=tiny", "adapter.rank=3,5"]
    (dimension,) = read_request(search.arguments, {}, {}, search.loader).space.dimensions
    assert dimension.name == "adapter.rank"


def test_a_second_search_in_the_same_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(_: list[str]) -> None:
        plait.sweep(["model=tiny"])

    monkeypatch.setattr(api, "_run", again)
    with pytest.raises(PlaitError, match="one search at a time"):
        plait.sweep()
    monkeypatch.setattr(api, "_run", lambda _: "free again")
    assert plait.sweep() == "free again"


def test_system_errors_become_plait_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: list[str]) -> None:
        raise OSError(28, "No space left on device", "here")

    monkeypatch.setattr(api, "_run", full)
    with pytest.raises(PlaitError, match="here: No space left"):
        plait.sweep()


ADDRESS = "postgresql://me:hunter2@host/plait"


def _refuse(_: list[str]) -> None:
    try:
        raise ValueError(f"{ADDRESS} is unknown")
    except ValueError as error:
        raise StorageError(f"tracking.uri={ADDRESS}", f"No answer: {error}", f"Start {ADDRESS}.") from error


@pytest.mark.parametrize("overrides", [f"tracking.uri={ADDRESS}", []], ids=["wrong-form", "no-answer"])
def test_errors_have_no_passwords(overrides: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(api, "_run", _refuse)
    with pytest.raises(PlaitError, match=r"me:\*\*\*@host") as caught:
        plait.sweep(overrides)
    assert "hunter2" not in repr(caught.value)
    assert "hunter2" not in f"{caught.value.value} {caught.value.rule} {caught.value.remedy}"
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_the_cause_of_an_error_is_shown_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(api, "_run", _refuse)
    with pytest.raises(StorageError) as caught:
        plait.sweep()
    assert isinstance(caught.value.__cause__, ValueError)


def _result(folder: Path, run_id: str) -> api.Result:
    """A search whose trial 0 left an adapter in ``folder``."""
    record = JobRecord("trial-0000", 0, state=JobState.FINISHED, adapter=str(folder), run_id=run_id)
    where = Location("sqlite:///none.db", folder, None)
    found = SearchResult("mine", JobState.FINISHED, (Objective("eval/loss"),), run_id, "1", where, (record,))
    return api.Result(found, TrackingSettings())


def test_a_trial_is_shown_in_one_line(tmp_path: Path) -> None:
    (record,) = _result(tmp_path, "a" * 32)._found.records
    record.objective, record.step, record.others = 1.25, 40, (8.0,)
    record.parameters = {"adapter.rank": 8, "data.source": "file"}
    assert repr(record) == "<trial-0000: finished, objective 1.25, 8, step 40, adapter.rank=8>"
    assert str(JobRecord("trial-0001", 1)) == "<trial-0001: queued, step 0>"


def test_an_adapter_is_that_of_its_run_though_a_restarted_search_wrote_into_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def export(_: TrackingSettings, name: str, destination: Path, **_more: object) -> None:
        fetched.append(name)
        destination.mkdir(parents=True)
        (destination / "adapter_config.json").write_text("{}")
        save_file({}, destination / "adapter_model.safetensors")

    monkeypatch.setattr("plait.tracking.results.export", export)
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "trial-0000"
    folder.mkdir()
    kept = tmp_path / "cache" / "adapters"
    for run_id in ("a" * 32, "b" * 32, "a" * 32):
        assert _result(folder, run_id).adapter(0).folder == kept / run_id
    assert fetched == ["a" * 32, "b" * 32]  # each once
    monkeypatch.setattr("plait.tracking.trained.MOST_FETCHED", 2)
    os.utime(kept / ("a" * 32), (1, 1))
    _result(folder, "c" * 32).adapter(0)
    assert sorted(path.name[0] for path in kept.iterdir()) == ["b", "c"]  # the cache does not grow for ever
    monkeypatch.setattr("plait.tracking.trained.MOST_FETCHED", 1)
    for run_id in ("b" * 32, "d" * 32):
        _result(folder, run_id).adapter(0)
    assert sorted(path.name[0] for path in kept.iterdir()) == ["b", "c", "d"]  # all may still be in use


def test_an_adapter_that_another_process_is_fetching_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes into the cache while this one looks whether it is there."""
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    fetched = tmp_path / "cache" / "adapters" / ("a" * 32)

    def look(_: Path) -> bool:
        fetched.mkdir(parents=True)
        return False

    def export(_: TrackingSettings, _name: str, destination: Path, **_more: object) -> None:
        destination.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr("plait.tracking.trained._readable", look)
    monkeypatch.setattr("plait.tracking.results.export", export)
    monkeypatch.setattr("plait.tracking.trained.shutil.rmtree", lambda *_, **__: pytest.fail("removed"))
    assert _result(tmp_path, "a" * 32).adapter(0).folder == fetched


def test_an_adapter_that_another_process_has_fetched_meanwhile_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))

    def export(_: TrackingSettings, _name: str, destination: Path, **_more: object) -> None:
        destination.mkdir(parents=True)
        raise StorageError(f"{destination} already exists")

    monkeypatch.setattr("plait.tracking.trained._readable", Path.is_dir)
    monkeypatch.setattr("plait.tracking.results.export", export)
    assert _result(tmp_path, "a" * 32).adapter(0).folder == tmp_path / "cache" / "adapters" / ("a" * 32)


def test_without_its_runs_a_search_has_the_adapters_in_its_folder_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.tracking.results.export", lambda *_: pytest.fail("there is no run to export"))
    adapter = _result(tmp_path, "").adapter(0)
    assert adapter.folder == tmp_path
    assert repr(adapter) == f"Adapter(trial=0, folder={tmp_path!r})"  # a notebook shows it
    with pytest.raises(StorageError, match=r"base model of search 'mine'.*\n.*\n.*plait\.open\('mine'\)"):
        adapter.load()
    with pytest.raises(StorageError, match=r"trial-0000 of search 'mine'.*\n.*\n.*plait\.open\('mine'\)"):
        _result(tmp_path / "none", "").adapter(0)
