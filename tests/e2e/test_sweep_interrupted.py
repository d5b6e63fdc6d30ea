"""Ctrl-C with the real engine: the command line that is printed ends as an undisturbed search does."""

import shlex
import signal
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from forked import Forked
from mlflow import MlflowClient
from optuna.trial import FrozenTrial, TrialState

from plait.cli.main import main

STEPS = 30
Trials = Callable[..., list[FrozenTrial]]


def interrupted(arguments: Sequence[str]) -> list[str]:
    """Run `plait sweep` as a separate process, with a SIGINT when training begins; the words of the command
    line that it prints to resume with."""
    sweep = Forked(["sweep", *arguments])
    sweep.until("trial-0001 started")
    sweep.signal(signal.SIGINT)
    assert sweep.end() == 130, sweep.output
    lines = [line for line in sweep.output.splitlines() if "resume with" in line]
    (command,) = (shlex.split(line.split("resume with", 1)[1]) for line in lines)
    return command


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and losses of every adapter, as MLflow has them."""
    client = MlflowClient(f"sqlite:///{folder / 'plait-runs' / 'mlflow.db'}")
    experiments = [item.experiment_id for item in client.search_experiments()]
    runs = client.search_runs(experiments, "tags.`plait.trial` IS NOT NULL")
    return {
        run.data.tags["plait.job"]: [
            (point.step, point.value) for point in client.get_metric_history(run.info.run_id, "train/loss")
        ]
        for run in runs
    }


@pytest.mark.slow
def test_the_printed_command_resumes_to_the_losses_of_an_undisturbed_search(
    folder: Path,
    short: tuple[str, ...],
    trials: Trials,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    arguments = [
        *short, f"train.steps={STEPS}", "adapter.rank=1,2", "adapter.dropout=0.1", "search.sampler=grid",
        "search.name=mine",
    ]  # fmt: skip
    command = interrupted([*arguments, "search.fresh=true"])
    assert command == ["plait", "resume", "mine"]
    assert [item.state for item in trials(folder)] == [TrialState.RUNNING] * 2
    steps_before = {name: len(points) for name, points in curves(folder).items()}
    assert all(0 < count < STEPS for count in steps_before.values()), steps_before

    assert main(command[1:]) == 0
    assert "resumes from step" in capsys.readouterr().out
    resumed = trials(folder)
    assert [item.state for item in resumed] == [TrialState.COMPLETE] * 2

    whole = tmp_path_factory.mktemp("undisturbed")
    monkeypatch.chdir(whole)
    assert main(["sweep", *arguments]) == 0
    assert [item.value for item in resumed] == [item.value for item in trials(whole)]
    found = curves(folder)
    assert found == curves(whole)
    assert {name: [step for step, _ in points] for name, points in found.items()} == {
        name: list(range(1, STEPS + 1)) for name in ("trial-0000", "trial-0001")
    }


@pytest.mark.slow
@pytest.mark.postgres
def test_study_and_runs_in_postgresql_go_on_after_an_interruption(
    folder: Path,
    short: tuple[str, ...],
    trials: Trials,
    new_database: Callable[[], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    study, runs = new_database(), new_database()
    arguments = [
        *short, f"train.steps={STEPS}", "adapter.rank=1,2", "train.lr=tag(log,interval(1e-4,1e-2))",
        "search.trials=2", "search.sampler=random", f"search.storage={study}", f"tracking.uri={runs}",
    ]  # fmt: skip
    command = interrupted(arguments)
    assert "secret" not in shlex.join(command)
    before = trials(folder, study)
    assert [item.state for item in before] == [TrialState.RUNNING] * 2

    assert main(["sweep", *arguments]) == 0
    out = capsys.readouterr()
    assert "resumes from step" in out.out
    assert "secret" not in out.out + out.err
    after = trials(folder, study)
    assert [item.state for item in after] == [TrialState.COMPLETE] * 2
    assert [item.params for item in after] == [item.params for item in before]
    assert not (folder / "plait-runs" / "optuna.journal").exists()
    assert main(["leaderboard", "--uri", runs, "--format", "csv"]) == 0
    printed = capsys.readouterr().out.splitlines()[1:]
    assert len(printed) == 2
    for item in after:
        assert item.value is not None
        assert item.value > 0
        assert item.intermediate_values == {STEPS: item.value}
        (row,) = (line for line in printed if line.startswith(f"{item.number},"))
        assert f"{item.value}" in row

    assert main(["train", *short, f"search.storage={study}", f"tracking.uri={runs}"]) == 0
    _check_passwords(folder)


def _check_passwords(folder: Path) -> None:
    """On disk they are where resuming needs them, and nobody else may read them there."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    hydra = [path for path in files if path.parent.name == ".hydra" or path.name == "multirun.yaml"]
    assert len(hydra) == 2 * (1 + 2 * 3) + 3  # two commands with two trials each, and a single job
    holding = [path for path in files if b":secret@" in path.read_bytes()]
    assert {path.name for path in holding} == {"command.json"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in holding} == {0o600}
