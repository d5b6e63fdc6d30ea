"""Whole searches through the command, on a tiny model: what is trained, kept, printed and refused."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.trial import TrialState

from plait.cli.main import main
from plait.search import launch
from plait.search.storage import open_storage

ROOT = Path(__file__).resolve().parents[2]
TASK = ["model=tiny", "data.task=chain_sum", "data.size=24", "data.validation=4", "train.batch_size=2"]
SHORT = [*TASK, "train.steps=3", "engine.threads=1"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every search in a folder of its own; what is tokenised stays for all."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path.parent / "cache"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def trials(folder: Path) -> list[optuna.trial.FrozenTrial]:
    storage = open_storage(None, folder / "plait-runs")
    (name,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage).get_trials()


def leaderboard(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["leaderboard", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert isinstance(rows, list)
    return rows


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the model is an error: for commands that must not get so far."""

    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(launch, "build_coordinator", loaded)


def test_a_search_trains_tracks_and_goes_on_as_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "sweep",
        *SHORT,
        "adapter.rank=1,2,3",
        "train.lr=tag(log,interval(1e-4,1e-2))",
        "search.trials=3",
    ]
    assert main(command) == 0
    held = trials(folder)
    assert [item.state for item in held] == [TrialState.COMPLETE] * 3

    rows = leaderboard(capsys)
    assert sorted(row["objective"] for row in rows) == sorted(
        item.value for item in held if item.value is not None
    )
    for row in rows:
        item = held[row["trial"]]
        assert row["state"] == "finished"
        assert item.user_attrs.get("mlflow.run_id", row["run_id"]) == row["run_id"]
        assert row["parameters"]["adapter.rank"] == item.params["adapter.rank"]
        assert {path.name for path in Path(row["adapter"]).iterdir()} >= {
            "adapter_config.json",
            "adapter_model.safetensors",
        }

    (run,) = (folder / "multirun").glob("*/*")
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
    assert len(leaderboard(capsys)) == 5


def test_a_finished_search_prints_its_result(
    folder: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    command = ["sweep", *SHORT, "adapter.rank=1,2", "search.sampler=grid"]
    assert main(command) == 0
    before = [item.value for item in trials(folder)]
    assert len(before) == 2
    capsys.readouterr()
    request.getfixturevalue("no_model")
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "search.fresh=true" in out
    assert f"{min(value for value in before if value is not None):.6g}" in out
    assert [item.value for item in trials(folder)] == before


def test_the_verbs_that_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *SHORT, "adapter.rank=1,2", "search.sampler=grid", "search.name=mine"]) == 0
    capsys.readouterr()
    assert main(["leaderboard", "mine", "--format", "csv", "--sort", "adapter.rank", "--reverse"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["adapter.rank"] for row in rows] == ["2", "1"]
    assert main(["leaderboard", "mine"]) == 0
    assert "mine" in capsys.readouterr().out
    assert main(["export", "mine", "--trial", "1", "--to", "out"]) == 0
    config = json.loads((folder / "out" / "adapter_config.json").read_text())
    assert config["r"] == int(next(row["adapter.rank"] for row in rows if row["trial"] == "1"))
    assert main(["leaderboard", "other"]) == 2
    assert main(["export", "mine", "--to", "out"]) == 2


def test_one_adapter_takes_the_same_path(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SHORT, "adapter.rank=3"]) == 0
    assert (
        main(
            [
                "sweep",
                *SHORT,
                "adapter.rank=3,4",
                "search.sampler=grid",
                "search.name=two",
                "search.storage=two.db",
            ]
        )
        == 0
    )
    (alone,) = trials(folder)
    capsys.readouterr()
    rows = {}
    for row in leaderboard(capsys):
        rows[row["parameters"]["adapter.rank"]] = row["objective"]
    assert alone.value == pytest.approx(rows[3], rel=1e-5)
    (run,) = (folder / "outputs").glob("*/*")
    assert yaml.safe_load((run / ".hydra" / "config.yaml").read_text())["adapter"]["rank"] == 3


def test_a_job_that_diverges_fails_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train.lr=choice(1e-3,1e30)", "search.sampler=grid", "train.clip_norm=null"]
    assert main(["sweep", *SHORT, "train.steps=6", *arguments]) == 3
    states = {item.params["train.lr"]: item for item in trials(folder)}
    assert states[1e-3].state == TrialState.COMPLETE
    assert states[1e30].state == TrialState.FAIL
    assert states[1e30].value is None
    assert states[1e30].user_attrs["plait.reason"]
    assert {row["state"] for row in leaderboard(capsys)} == {"finished", "failed"}


def test_whole_groups_and_lists_are_swept(folder: Path) -> None:
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "completion": f"{n + 1}"}) + "\n" for n in range(24))
    )
    arguments = [
        "data=jsonl,reasoning_gym",
        "adapter.target_modules=[q_proj],[k_proj,v_proj]",
        "search.sampler=grid",
    ]
    keys = [word for word in SHORT if not word.startswith("data.task")]
    assert (
        main(["sweep", *keys, "++data.path=rows.jsonl", "adapter.rank=2", *arguments, "search.trials=2"]) == 2
    )
    mine = folder / "conf" / "data"
    mine.mkdir(parents=True)
    (mine / "rows.yaml").write_text("defaults: [jsonl]\npath: rows.jsonl\n")
    (mine / "sums.yaml").write_text("defaults: [reasoning_gym]\ntask: chain_sum\n")
    arguments[0] = "data=rows,sums"
    assert main(["sweep", "--config-dir", "conf", *keys, "adapter.rank=2", *arguments]) == 0
    points = {(item.params["data"], item.params["adapter.target_modules"]) for item in trials(folder)}
    assert points == {
        (data, target) for data in ("rows", "sums") for target in ("[q_proj]", "[k_proj,v_proj]")
    }


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["adapter.rank=4,65536"], ["adapter.rank=65536", "at most"]),
        (["adapter.target_modules=[nothing],[q_proj]"], ["nothing", "q_proj"]),
        (["adapter.rank=1,2", "planner.memory_share=1e-9"], ["one job needs", "planner.memory_share"]),
        (["adapter.rank=1,2", "engine.capacity=16"], ["engine.capacity"]),
        (["adapter.rank=1,2", "data.task=no_such_task"], ["no_such_task"]),
        (["train.batch_size=1,0"], ["train.batch_size=0", "at least 1"]),
        (["train.lr=interval(-1,1)"], ["train.lr=-1", "above 0"]),
        (
            ["adapter.rank=1,2", "search.storage=postgresql://u:secret@127.0.0.1:1/x"],
            ["search.storage", "***"],
        ),
        (["adapter.rank=1,2", "tracking.uri=http://127.0.0.1:1"], ["tracking.uri"]),
        (["adapter.rank=1,2", "tracking.root=file/runs"], ["tracking.root", "file/runs"]),
        (["adapter.rank=1,2", "hydra.sweep.dir=file/sweep"], ["file/sweep", "hydra.sweep.dir"]),
        (["adapter.rank=1,2", "engine.device=cuda"], ["engine.device=cuda"]),
    ],
    ids=lambda value: value[-1].split("=")[0] + value[0][-8:] if value[0].count("=") else None,
)
def test_bad_input_is_refused_before_the_model_loads(
    arguments: list[str], said: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "engine.device=cuda" in arguments:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device here")
    (folder / "file").write_text("")
    assert main(["sweep", *SHORT, *arguments]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "secret" not in err
    for words in said:
        assert words in err


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("", "empty"),
        ('{"text": "a"}\nnot json\n', "line 2"),
        ('{"text": "a"}\n{"other": "b"}\n', "line 2"),
        ('{"text": "' + "long " * 400 + '"}\n{"text": "b"}\n', "tokens"),
    ],
    ids=["missing", "empty", "no JSON", "no fields", "too long"],
)
def test_a_faulty_file_is_refused_before_the_model_loads(
    content: str | None, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (folder / "rows.jsonl").write_text(content)
    arguments = [
        "data=jsonl",
        "data.path=rows.jsonl",
        "data.validation=1",
        "data.loss=all",
        "adapter.rank=1,2",
    ]
    assert main(["sweep", "model=tiny", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_study_of_another_space_is_refused(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    command = ["sweep", *SHORT, "adapter.rank=1,2", "search.sampler=grid", "search.name=mine"]
    assert main(command) == 0
    request.getfixturevalue("no_model")
    assert main([*command, "adapter.dropout=0.5"]) == 2
    assert "adapter.dropout: was 0.0, now 0.5" in capsys.readouterr().err


def test_ctrl_c_saves_and_the_printed_command_goes_on(folder: Path) -> None:
    """`python -m plait -m` as a process of its own, with a real SIGINT."""
    arguments = [
        *TASK,
        "engine.threads=1",
        "train.steps=150",
        "adapter.rank=1,2",
        "search.sampler=grid",
        "search.name=mine",
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("platform", "kernels")),
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "plait", "-m", *arguments, "search.fresh=true"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "trial-0001 started" in line:
            process.send_signal(signal.SIGINT)
    assert process.wait() == 130, "".join(lines)
    (going_on,) = (line.split("go on with", 1)[1].split() for line in lines if line.startswith("go on with"))
    assert going_on == ["plait", "sweep", *arguments]
    assert [item.state for item in trials(folder)] == [TrialState.RUNNING] * 2

    done = subprocess.run(
        [sys.executable, "-m", "plait", "-m", *going_on[2:]],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "goes on from step" in done.stdout
    assert [item.state for item in trials(folder)] == [TrialState.COMPLETE] * 2
