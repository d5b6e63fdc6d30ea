"""Whole searches through the command, on a tiny model: what is trained, kept and printed."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import OperationalError
from transformers import AutoModelForCausalLM

from plait.cli.main import main
from plait.core.settings import TrackingSettings
from plait.models.tiny import byte_tokeniser, tiny_config
from plait.search.recorded import recorded_command
from plait.search.storage import study_lock
from plait.tracking.results import load_search

Trials = Callable[..., list[FrozenTrial]]
Leaderboard = Callable[..., list[dict[str, Any]]]
Short = tuple[str, ...]


def test_a_search_trains_records_and_resumes_as_the_same_search(
    folder: Path, short: Short, trials: Trials, leaderboard: Leaderboard
) -> None:
    command = [
        "sweep",
        *short,
        "adapter.rank=1,2,3",
        "train.lr=tag(log,interval(1e-4,1e-2))",
        "search.trials=3",
    ]
    assert main(command) == 0
    held = trials(folder)
    assert [item.state for item in held] == [TrialState.COMPLETE] * 3

    rows = leaderboard()
    assert sorted(row["objective"] for row in rows) == sorted(
        item.value for item in held if item.value is not None
    )
    for row in rows:
        item = held[row["trial"]]
        assert row["state"] == "finished"
        assert row["parameters"]["adapter.rank"] == item.params["adapter.rank"]
        assert {path.name for path in Path(row["adapter"]).iterdir()} >= {
            "adapter_config.json",
            "adapter_model.safetensors",
        }

    (run,) = (folder / "plait-runs" / "multirun").glob("*/*")
    for item in held:
        written = run / str(item.number) / ".hydra"
        assert (
            yaml.safe_load((written / "config.yaml").read_text())["adapter"]["rank"]
            == item.params["adapter.rank"]
        )
        assert f"adapter.rank={item.params['adapter.rank']}" in yaml.safe_load(
            (written / "overrides.yaml").read_text()
        )
        assert yaml.safe_load((written / "hydra.yaml").read_text())["hydra"]["job"]["num"] == item.number
    result = yaml.safe_load((run / "optimization_results.yaml").read_text())
    assert result["best_value"] == min(item.value for item in held if item.value is not None)

    assert main([*command[:-1], "search.trials=5"]) == 0
    assert len(trials(folder)) == 5
    assert len(leaderboard()) == 5


def test_a_search_whose_study_is_lost_says_that_it_begins_again(
    folder: Path, short: Short, trials: Trials, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", *short, "adapter.rank=2,4", "search.name=mine", "search.trials=1"]
    assert main(command) == 0
    journal = folder / "plait-runs" / "optuna.journal"
    journal.rename(folder / "moved")
    assert main(command) == 0
    said = f"mine has trained before, but its study is not in {journal.relative_to(folder)}: it begins again."
    assert said in capsys.readouterr().out
    assert len(trials(folder)) == 1
    assert main(command) == 0
    assert "it begins again" not in capsys.readouterr().out


def recorded_words(folder: Path) -> tuple[str, ...]:
    recorded = recorded_command(folder / "plait-runs", "mine")
    assert recorded is not None
    return recorded.arguments


@pytest.mark.usefixtures("no_model")
def test_a_finished_search_prints_its_result(
    finished_search: tuple[Path, list[str]],
    trials: Trials,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, command = finished_search
    monkeypatch.chdir(folder)
    before = [item.value for item in trials(folder)]
    assert len(before) == 2
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "search.fresh=true" in out
    assert f"{min(value for value in before if value is not None):.6g}" in out
    assert [item.value for item in trials(folder)] == before
    assert main(["resume", "mine", "search.trials=1"]) == 0
    assert "search.trials=1" in recorded_words(folder)  # or another resume would train more
    assert main(command) == 0
    files = set(folder.rglob("*"))
    for changed in ("++search.prior=none", "train.steps=4"):
        assert main(["resume", "mine", changed]) == 2
        assert set(folder.rglob("*")) == files, "what is refused leaves nothing"


def test_the_verbs_that_read(
    finished_search: tuple[Path, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(finished_search[0])
    out = str(tmp_path / "my out")
    assert main(["leaderboard", "mine", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert sorted(row["adapter.rank"] for row in rows) == ["1", "2"]
    assert main(["leaderboard", "mine"]) == 0
    assert "mine" in capsys.readouterr().out
    assert main(["export", "mine", "--trial", "1", "--to", out]) == 0
    assert f"only Plait can make it. `plait serve '{out}'` can serve the adapter" in capsys.readouterr().err
    config = json.loads((Path(out) / "adapter_config.json").read_text())
    assert config["r"] == int(next(row["adapter.rank"] for row in rows if row["trial"] == "1"))
    assert "| adapter.rank |" in (Path(out) / "README.md").read_text()
    merged = str(tmp_path / "merged")
    assert main(["export", "mine", "--trial", "1", "--to", merged, "--form", "merged"]) == 0
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert main(["leaderboard", "other"]) == 2
    assert main(["export", "mine", "--to", out]) == 2


def test_train_gives_the_same_result_as_a_sweep_of_one_adapter(
    folder: Path, short: Short, trials: Trials, leaderboard: Leaderboard
) -> None:
    assert main(["train", *short, "adapter.rank=3"]) == 0
    assert (
        main(
            [
                "sweep",
                *short,
                "adapter.rank=3,4",
                "search.sampler=grid",
                "search.name=two",
                "search.storage=two.db",
            ]
        )
        == 0
    )
    (alone,) = trials(folder)
    rows = {}
    for row in leaderboard():
        rows[row["parameters"]["adapter.rank"]] = row["objective"]
    assert alone.value == pytest.approx(rows[3], rel=1e-5)
    (run,) = (folder / "plait-runs" / "outputs").glob("*/*")
    assert yaml.safe_load((run / ".hydra" / "config.yaml").read_text())["adapter"]["rank"] == 3
    kept = [json.loads(path.read_text()) for path in (folder / "plait-runs").rglob("lengths.json")]
    assert kept
    assert all(summary["train"]["tokens"] > 0 for lengths in kept for summary in lengths.values())
    plans = [json.loads(path.read_text()) for path in (folder / "plait-runs").rglob("plan.json")]
    # Each of the two searches keeps its plan in its folder and among its run's artifacts.
    assert sorted(len(plan["groups"][0]["jobs"]) for plan in plans) == [1, 1, 2, 2]
    assert all(plan["choices"]["kernels"] == "grouped" for plan in plans)


@pytest.fixture
def poor_connection(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The study's database is down whenever the search's run is begun or concluded: at first, and once that
    is done; what was away when."""
    away: list[str] = []

    @contextmanager
    def lock(storage: BaseStorage, name: str, what: str = "study") -> Iterator[None]:
        if what != "run":
            with study_lock(storage, name, what):
                yield
            return
        if not away or away[-1] == "end":
            away.append("begin")
            raise OperationalError("", None, Exception("away"))
        yield
        away.append("end")
        raise OperationalError("", None, Exception("away"))

    monkeypatch.setattr("plait.search.storage.study_lock", lock)
    return away


def test_a_job_that_diverges_fails_alone(
    folder: Path, short: Short, trials: Trials, leaderboard: Leaderboard, poor_connection: list[str]
) -> None:
    arguments = ["train.lr=choice(1e-3,1e30)", "search.sampler=grid", "train.clip_norm=null"]
    for _ in range(2):  # the second time there is nothing to be trained
        assert main(["sweep", *short, "train.steps=6", *arguments]) == 3
        assert poor_connection == ["begin", "end"] * 2
        assert len(list(folder.rglob("optimization_results.yaml"))) > 0
    states = {item.params["train.lr"]: item for item in trials(folder)}
    assert states[1e-3].state == TrialState.COMPLETE
    assert states[1e30].state == TrialState.FAIL
    assert states[1e30].value is None
    assert states[1e30].user_attrs["plait.reason"]
    assert {row["state"] for row in leaderboard()} == {"finished", "failed"}


def test_a_search_in_which_too_many_fail_says_so_and_is_not_finished(
    folder: Path, short: Short, trials: Trials, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train.lr=choice(1e30,1e31)", "search.sampler=grid", "train.clip_norm=null", "search.name=s"]
    command = ["sweep", *short, *arguments, "search.parallel=1"]
    why = "1 of 2 trials failed, more than search.max_failure_rate=0.1 allows"
    assert main([*command, "search.max_failure_rate=0.1"]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert f"ended early {why}" in said
    assert "plait resume s search.max_failure_rate=1" in said, "how to go on"
    address = f"sqlite:///{folder / 'plait-runs' / 'mlflow.db'}"
    run_id = load_search(TrackingSettings(root=folder / "plait-runs"), "s").run_id
    assert MlflowClient(address).get_run(run_id).data.tags["plait.reason"] == why
    assert main(["resume", "s"]) == 3
    said = capsys.readouterr().out
    assert f"s ended early: {why}. search.max_failure_rate=1 resumes it" in said
    assert "Engine" not in said, "nothing is loaded"
    assert [item.state for item in trials(folder)] == [TrialState.FAIL]
    assert main(["resume"]) == 0
    assert "search.name=s" in capsys.readouterr().out, "it can go on"


def test_whole_groups_and_lists_are_swept(folder: Path, short: Short, trials: Trials) -> None:
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "completion": f"{n + 1}"}) + "\n" for n in range(24))
    )
    arguments = [
        "data=jsonl,reasoning_gym",
        "adapter.target_modules=[q_proj],[k_proj,v_proj]",
        "search.sampler=grid",
    ]
    keys = [word for word in short if not word.startswith("data.task")]
    assert (
        main(["sweep", *keys, "++data.path=rows.jsonl", "adapter.rank=2", *arguments, "search.trials=2"]) == 2
    )
    mine = folder / "conf" / "data"
    mine.mkdir(parents=True)
    (mine / "rows.yaml").write_text("defaults: [jsonl]\npath: rows.jsonl\n")
    (mine / "sums.yaml").write_text("defaults: [reasoning_gym]\ntask: chain_sum\n")
    arguments[0] = "data=rows,sums"
    named = [*keys, "adapter.rank=2", *arguments, "search.name=own"]
    assert main(["sweep", "--config-dir", "conf", *named]) == 0
    assert main(["resume", "own"]) == 0, "it composes the same groups"
    points = {(item.params["data"], item.params["adapter.target_modules"]) for item in trials(folder)}
    assert points == {
        (data, target) for data in ("rows", "sums") for target in ("[q_proj]", "[k_proj,v_proj]")
    }


def test_a_finished_search_is_reported_when_its_model_is_gone(
    folder: Path, short: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    tokeniser = byte_tokeniser()
    config = tiny_config("llama", len(tokeniser))
    model, away = folder / "model", folder / "away"
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    tokeniser.save_pretrained(model)
    command = ["train", *short, "model=hf", f"model.id={model}", "model.dtype=float32", "search.name=gone"]
    assert main(command) == 0
    model.rename(away)
    capsys.readouterr()
    assert main(["resume", "gone"]) == 0
    assert "gone is finished" in "".join(capsys.readouterr())
