"""A package that Plait does not know adds a choice of each kind; a search and a benchmark use them all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import optuna
import pytest
import torch
from optuna.trial import TrialState
from peft_folders import stored_pairs
from torch import Tensor

from plait.adapters.lora import Lora
from plait.cli.main import main
from plait.core.settings import TrackingSettings
from plait.search.storage import open_storage
from plait.tracking.results import load_search

GROUPS = ("stopping_rules", "samplers", "data_sources", "adapter_variants", "benchmarks")
SEARCH = (
    *("model=tiny", "engine.kernels=reference", "engine.threads=1", "train.steps=4", "train.batch_size=2"),
    *("adapter.variant=frozen_a", "adapter.rank=1,2,3,4,5", "data.source=sums", "+data.start=5"),
    *("data.validation=3", "search.name=outside", "search.trials=4", "search.sampler=last_first"),
    *("+search.sampler_options.skip=1", "search.stopping.kind=every_nth", "search.stopping.rungs=[2]"),
    "+search.stopping.options.nth=2",
)
BENCH = ("mode=bench", "bench.run=outside/ranks", "+bench.options.title=hello")
PROGRAM = """
import json, sys
from plait.cli.main import main
sys.exit(max(main(words) for words in json.loads(sys.argv[1])))
"""


@pytest.fixture
def installed(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an empty store; the package is "installed": entry points name its module."""
    (tmp_path / "plait-runs").mkdir()
    shutil.copy(empty_store, tmp_path / "plait-runs")
    info = tmp_path / "site" / "outside-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    points = (f"[plait.{group}]\noutside = outside_package\n" for group in GROUPS)
    (info / "entry_points.txt").write_text("\n".join(points))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)]))
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plait(*commands: Sequence[str]) -> str:
    """What the commands print, in a process of their own."""
    program = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_search_and_a_benchmark_use_what_another_package_adds(installed: Path) -> None:
    shown = plait(["sweep", *SEARCH, *BENCH], ["sweep", *SEARCH])
    assert "hello, kernels reference" in " ".join(shown.split())
    assert [line.split()[-2] for line in shown.splitlines() if line.endswith(" rank")] == list("4321")
    assert shown.count("frozen_a sums") == 4

    storage = open_storage(None, installed / "plait-runs")
    trials = optuna.load_study(study_name="outside", storage=storage).get_trials()
    assert [trial.params["adapter.rank"] for trial in trials] == [4, 3, 2, 1]
    assert [trial.state for trial in trials] == [TrialState.COMPLETE, TrialState.PRUNED] * 2

    found = load_search(TrackingSettings(root=installed / "plait-runs"), "outside")
    reasons = {record.trial: record.reason for record in found.records}
    assert reasons[1].startswith("number 1, loss ")
    assert {record.parameters["data.source"] for record in found.records} == {"sums"}
    assert main(["export", "outside", "--to", str(installed / "best")]) == 0
    check_frozen(installed / "best")


def check_frozen(folder: Path) -> None:
    """A has its first values, B has learnt."""
    stored = stored_pairs(folder)
    assert stored
    for module, (a, b) in stored.items():
        spec, _ = Lora().tensors(a.shape[1], b.shape[0], len(a))
        assert torch.equal(a, Lora().initial(spec, 0, module, Tensor))
        assert b.abs().max() > 0
