"""`plait plan --timeline`: the simulated run as a trace; and bad clusters, refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.cli.main import main

Short = tuple[str, ...]
SEARCH = ("adapter.rank=1,2", "search.sampler=grid", "search.trials=2")
CLUSTER = "cluster=h100_llama31_70b"


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_trace(empty: Path, short: Short) -> None:
    assert main(["plan", *short, *SEARCH, CLUSTER, "--timeline=run.json", "--json"]) == 0
    events = json.loads((empty / "run.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {1, 2, 3, 4}
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"forward", "backward"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((CLUSTER, "--timeline"), "--timeline"),
        ((CLUSTER, "--timeline", "run.html"), ".json"),
        (("--timeline", "run.json"), "described"),
        ((CLUSTER, "cluster.options.time.layer=[{tp: 1, fixed: -1.0, token: 1e-6}]"), "fixed=-1"),
        ((CLUSTER, "cluster.options.time.layer=[{tp: 1, fixed: 1.0}]"), "has no token"),
        (
            (CLUSTER, "cluster.options.max_tokens=xsum", "cluster.options.device.count=1"),
            "'xsum' has no replica for so few devices: ⟨1,4⟩ takes 4",
        ),
        ((CLUSTER, "engine.capacity=100000"), "takes at most 6144 tokens (table 'mixed')"),
        ((CLUSTER, "cluster.options.device.memory_gib=1"), "At most 0.8 GiB may be used of each of"),
        ((CLUSTER, "cluster.options.max_tokens_tables={mixed: []}"), "most tokens] for each kind of replica"),
        ((CLUSTER, "cluster.options.max_tokens_tables={mixed: [[1, 4, 8]]}"), "8 tokens"),
        ((CLUSTER, "cluster.options.max_tokens_tables={mixed: [[1, 4, -8]]}"), "max_tokens=-8"),
    ],
)
def test_bad_input_is_refused(
    arguments: tuple[str, ...], message: str, short: Short, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *short, *SEARCH, *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_a_profile_of_another_model_is_refused(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from plait.core.settings import ModelSettings
    from plait.models.load import load_tokeniser, model_config

    tiny = ModelSettings(kind="tiny")
    model_config(tiny, cache=empty).save_pretrained(empty / "other")
    load_tokeniser(tiny, cache=empty).save_pretrained(empty / "other")
    assert main(["plan", CLUSTER, "model=hf", "model.id=other", "search.trials=2"]) == 2
    said = capsys.readouterr().err
    assert "is of Llama-3.1-70B" in said
    assert "plait profile" in said
