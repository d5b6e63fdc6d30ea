"""What a new user sees first: a line before anything slow, and nothing that libraries would write."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import plait
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
main(["sweep", "model=tiny", "data.task=chain_sum"])
"""
MLFLOW_FIRST = """
import sys
import mlflow
import plait.tracking
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

print(LocalArtifactRepository(sys.argv[1]).download_artifacts("", sys.argv[2]))
"""


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(plait.__file__).parents[1])}
    environment = {key: value for key, value in environment.items() if not key.startswith("MLFLOW_")}
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_line_is_shown_before_the_slow_libraries_are_imported() -> None:
    done = run(SLOW)
    assert done.stdout == "Loading torch, transformers and MLflow ...\n"
    assert done.stderr.endswith(" is imported\n")


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
