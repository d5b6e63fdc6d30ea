"""What a new user sees first: a line before anything slow, and nothing that libraries would write."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import plait
import plait_dashboards
from plait.cli.main import main

SLOW = """
import sys
from importlib.abc import MetaPathFinder

class Slow(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("torch", "transformers", "mlflow", "optuna"):
            sys.exit(f"{name} is imported")

sys.meta_path.insert(0, Slow())
from plait.cli.main import main
for words in sys.argv[1:]:
    try:
        main(words.split())
    except SystemExit as end:
        print(end, end="\\0", file=sys.stderr, flush=True)
"""
MLFLOW_FIRST = """
import sys
import mlflow
import plait.tracking
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

print(LocalArtifactRepository(sys.argv[1]).download_artifacts("", sys.argv[2]))
"""


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    paths = [Path(module.__file__ or "").parents[1] for module in (plait, plait_dashboards)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment = {key: value for key, value in environment.items() if not key.startswith("MLFLOW_")}
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_command_says_what_it_does_before_the_slow_libraries_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process runs them all, each to its first import of a slow library."""
    cases = {
        "generate mine --prompt a": "Reading the search from MLflow ...",
        "export mine --to there": "Reading the search from MLflow ...",
        "report mine": "Reading the search from MLflow ...",
        "leaderboard mine": "Reading the search from MLflow ...",
        "chat mine": "Reading the search from MLflow ...",
        "eval mine --tasks arc_easy": "Loading torch, lm-eval and MLflow ...",
        "plan model=tiny": "Checking the search, and loading torch and transformers ...",
        "data model=tiny": "Checking the search, and loading torch and transformers ...",
        "profile model=tiny": "Checking the search, and loading torch and transformers ...",
    }
    monkeypatch.chdir(tmp_path)
    done = run(SLOW, "sweep model=tiny data.task=chain_sum", *cases)
    assert done.stdout == "Checking the search ...\n"
    searched, *shown, last = done.stderr.split("\0")
    assert searched.endswith(" is imported")
    assert last == ""
    for said, (first, *others) in zip(cases.values(), map(str.splitlines, shown), strict=True):
        assert first == said
        assert others[-1].endswith(" is imported")


def test_no_bars_of_mlflow_are_shown_where_it_was_imported_first(tmp_path: Path) -> None:
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "weights").write_text("1")
    (tmp_path / "here").mkdir()
    done = run(MLFLOW_FIRST, tmp_path / "artifacts", tmp_path / "here")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "here" / "weights").exists()


def test_nothing_is_said_of_fonts(caplog: pytest.LogCaptureFixture) -> None:
    fonts = logging.getLogger("matplotlib.font_manager")
    fonts.setLevel(logging.NOTSET)
    with caplog.at_level(logging.INFO):  # as Hydra sets it
        assert main(["sweep", "--cfg", "job"]) == 0
        fonts.info("generated new fontManager")
    assert caplog.records == []
