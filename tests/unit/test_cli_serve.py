"""`plait serve` of adapters' folders: what is served, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mlflow_server import free_port

from plait.adapters.facts import CONFIG
from plait.adapters.peft_folder import export_adapter
from plait.cli.main import main
from plait.core.errors import SearchError
from plait.core.jobs import AdapterSpec
from plait.core.lifecycle import JobState
from plait.core.settings import ModelSettings
from plait.models.load import inspect_model, load_model, named_model
from plait.models.targets import resolve_targets
from plait.serve import server
from plait.tracking import results
from plait.tracking.leaderboard import JobRecord


def adapter(folder: Path) -> Path:
    linears = inspect_model(named_model("tiny-llama"), cache=folder).linears
    sizes = {linear.name: (linear.in_features, linear.out_features) for linear in linears}
    spec = AdapterSpec(2, target_modules=("q_proj",))
    weights = {
        name: (torch.zeros(2, sizes[name][0]), torch.zeros(sizes[name][1], 2))
        for name in resolve_targets(("q_proj",), linears)
    }
    export_adapter(folder, spec, weights, base="tiny-llama", linears=linears)
    return folder


def test_folders_are_models_of_the_base_that_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = []
    monkeypatch.setattr(server, "run", lambda app, address, _: (served.append(app), address.close()))
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "many" / "two")
    (two.parent / "linked").symlink_to(one)
    words = ["--port", str(free_port()), "--pool-tokens", "100"]
    assert main(["serve", str(one), "--adapters", str(two.parent), *words]) == 0
    assert len(served) == 1
    assert "serves base, one, linked, two;" in capsys.readouterr().out
    monkeypatch.chdir(two)
    assert main(["serve", ".", *words]) == 0
    assert "serves base, two;" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["chat", "serve", "generate", "eval"])
def test_the_chat_template_is_that_with_which_the_search_trained(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If its file is gone, only texts without messages are made."""
    record = JobRecord("trial-0000", trial=0, state=JobState.FINISHED)
    found = SimpleNamespace(name="mine", records=[record], best=record)
    config = {"data": {"chat_template": str(tmp_path / "own.jinja")}}
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    given = []

    def load(*_: object, template: str | None = None, **__: object) -> None:
        given.append(template)
        raise SearchError("no further")

    module = {"eval": "evaluate"}.get(verb, verb)
    monkeypatch.setattr(results, "load_search", lambda *_: found)
    monkeypatch.setattr(results, "leading", lambda *_: [record])
    monkeypatch.setattr("plait.tracking.trained.recorded_config", lambda *_: config)
    monkeypatch.setattr("plait.tracking.trained.base_model", lambda *_: ModelSettings())
    monkeypatch.setattr(f"plait.cli.{module}.fetched_adapters", lambda *_: {"trial-0000": tmp_path})
    monkeypatch.setattr(f"plait.cli.{module}.load_base", load)
    usual = {"generate": ["--prompt", "a", "--chat"], "serve": ["--port", str(free_port())]}
    more = usual.get(verb, [])
    if verb == "eval":
        monkeypatch.setattr(pytest.importorskip("plait.serve.harness"), "load_tasks", lambda *_, **__: None)
        more = ["--tasks", "a", "--chat"]
    assert main([verb, "mine", *more]) == 2
    assert given == ["{{ messages }}"]
    (tmp_path / "own.jinja").unlink()
    capsys.readouterr()
    assert main([verb, "mine", *more]) == 2
    assert "Put the file with which the search was trained there" in capsys.readouterr().err
    assert main([verb, "mine", *(word for word in more if word != "--chat")]) == 2
    assert given[1:] == ([None] if verb in ("generate", "eval") else [])


def test_a_pool_that_is_larger_than_the_free_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its memory is taken at the start, so the system would end the process without a word."""
    one = adapter(tmp_path / "one")
    monkeypatch.setattr("plait.engine.devices.free_bytes", lambda: 2**10)
    monkeypatch.setattr(server, "run", lambda _, address, __: address.close())
    assert main(["serve", str(one), "--port", str(free_port()), "--pool-tokens", "100"]) == 2
    said = capsys.readouterr().err
    assert "plait: a pool of 0.00 GiB" in said
    assert "Give the pool fewer tokens." in said


def test_what_cannot_be_served_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = adapter(tmp_path / "one")
    other = adapter(tmp_path / "other")
    config = json.loads((other / CONFIG).read_text())
    (other / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": "another"}))
    port = ["--port", str(free_port())]
    for words, said in (
        ([str(one), str(other)], "belong to one base model"),
        ([str(one), str(adapter(tmp_path / "again" / "one"))], "another folder named one"),
        (["--adapters", str(tmp_path / "none")], "contains adapters' folders"),
        (["./typo"], "not a folder that contains"),
        (["a", "b"], "One search can be served"),
        ([str(one), "--wait", "-1"], "at least 0"),
        ([str(one), "--wait", "nan"], "at least 0"),
        ([str(one), "--max-adapters", "0"], "at least 1"),
        ([str(one), str(adapter(tmp_path / "more")), "--max-adapters", "1"], "2 adapters"),
        (["postgresql://me:secret@host/name"], "a path, not an address"),
    ):
        assert main(["serve", *words, *port]) == 2
        printed = capsys.readouterr().err
        assert said in printed
        assert "secret" not in printed


def test_a_chat_begins_with_a_trial_that_has_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        JobRecord(f"trial-{trial:04}", trial=trial, state=state)
        for trial, state in enumerate((JobState.FINISHED, JobState.RUNNING))
    ]
    found = SimpleNamespace(name="mine", records=records)
    monkeypatch.setattr(results, "load_search", lambda *_: found)
    assert main(["chat", "--trial", "1"]) == 2
    assert "trial-0001 of search 'mine' has not finished" in capsys.readouterr().err


def test_a_base_model_is_found_by_the_name_in_a_folder(tmp_path: Path) -> None:
    assert named_model("HuggingFaceTB/SmolLM2-135M-Instruct") == ModelSettings()
    assert named_model("tiny-gpt2").family == "gpt2"
    seeded = ModelSettings(kind="tiny", family="gpt_neox", seed=13, dtype="float32")
    assert named_model(load_model(seeded, cache=tmp_path).identity.name) == seeded
    assert named_model("a/b", "main") == ModelSettings(kind="hf", id="a/b", revision="main")
    assert named_model("a/b.gguf") == ModelSettings(kind="gguf", path="a/b.gguf")


@pytest.mark.parametrize("key", ["schlüssel", "padded ", "a\n"])
def test_a_key_that_no_client_can_send_is_refused(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLAIT_SERVE_KEY", key)
    assert main(["serve"]) == 2
    said = capsys.readouterr().err
    assert "ASCII letters" in said
    assert key not in said
