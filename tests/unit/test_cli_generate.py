"""What `plait generate` and `plait serve` take: prompts of files, errors before anything is loaded."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.cli import generate
from plait.cli.main import main
from plait.cli.serve import _bound
from plait.core.errors import ConfigError, SearchError, StorageError
from plait.core.lifecycle import JobState
from plait.core.objectives import Objective
from plait.core.settings import ModelSettings
from plait.engine import devices
from plait.tracking.location import Location
from plait.tracking.results import SearchResult, leading


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["generate", *arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "There is no prompt"),
        (["--prompt", "a", "--temperature", "-1"], "temperature=-1.0"),
        (["--prompt", "a", "--top-p", "0"], "top_p=0.0"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--prompt", "a", "--stop", ""], "stop=('',)"),
        (["--prompt", "a\udcff"], "'a\\udcff'\n  A prompt and a stop text are valid UTF-8."),
        (["--prompt", "a", "--stop", "\udcff"], "valid UTF-8"),
        (["--validation", "-1"], "--validation -1"),
        (["--prompt", "a", "--best", "0"], "--best 0"),
        (["--prompt", "a", "--best", "2", "--trial", "1"], "not allowed with argument"),
        (["--file", "none.txt"], "none.txt"),
    ],
)
def test_bad_input_is_refused_before_anything_is_read(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused(arguments, capsys)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_tasks_that_is_none_is_refused_before_anything_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["eval", "--tasks", "a", "--include", "none"]) == 2
    assert "--include none\n  It must be a folder that contains tasks." in capsys.readouterr().err


@pytest.mark.parametrize("row", ["text", '{"text": "a"}', '{"prompt": 3}', "[1]"])
def test_a_row_without_a_prompt_is_named(
    row: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a"}) + f"\n\n{row}\n")
    assert f"{path}, row 3" in refused(["--file", str(path)], capsys)


def test_rows_of_prompts_end_where_lines_do_and_are_in_utf8(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [json.dumps({"prompt": text}, ensure_ascii=False) for text in ("a\u2028b", "\x85", "c")]
    path.write_text("\ufeff" + "\r\n".join(rows), encoding="utf-8")
    assert generate._file_prompts(path) == ["a\u2028b", "\x85", "c"]
    path.write_bytes(b"ab\xff")
    assert f"{path}, byte 2" in refused(["--file", str(path)], capsys)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "needs an API key"),
        (["--host", "example.org"], "PLAIT_SERVE_KEY"),
        (["--port", "0"], "--port 0"),
        (["--port", "70000"], "at most 65535"),
        (["--queue", "0"], "--queue 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--model", "Qwen/Qwen2.5-0.5B"], "its own base model"),
    ],
)
def test_a_server_is_refused_before_anything_is_read(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PLAIT_SERVE_KEY", raising=False)
    assert main(["serve", "mine", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_trial_is_refused_where_folders_are_served(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--trial", "3"]) == 2
    assert "--trial 3" in capsys.readouterr().err


def test_a_port_in_use_is_refused_before_anything_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "mine", "--port", str(taken.getsockname()[1])]) == 2
    assert "Choose another --port" in capsys.readouterr().err


def test_an_unknown_search_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    said = refused(["nothing", "--prompt", "a", "--root", str(tmp_path)], capsys)
    assert "nothing" in said


def test_an_address_is_taken_while_the_model_still_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with _bound("127.0.0.1", port), pytest.raises(ConfigError, match="no other program uses"):
        _bound("127.0.0.1", port)


def record(trial: int, *values: float, **given: Any) -> Any:
    facts = {"state": JobState.FINISHED, "feasible": True, "on_front": False, **given}
    return SimpleNamespace(trial=trial, values=values, **facts)


def test_the_best_trials_are_finished_and_keep_constraints_and_of_a_front_its_own() -> None:
    def found(objectives: int, *records: Any) -> SearchResult:
        kinds = tuple(Objective(f"m{number}", "minimize") for number in range(objectives))
        place = Location("sqlite:///x.db", Path("/x"), None)
        return SearchResult("mine", JobState.FINISHED, kinds, "run", "1", place, records)

    records = (
        record(0, 0.1, state=JobState.PRUNED),
        record(1, 0.2, feasible=False),
        record(2, 0.4),
        record(3, 0.3),
        record(4, 0.4),
        record(5),
    )
    assert [each.trial for each in leading(found(1, *records), 2)] == [3, 2]
    assert [each.trial for each in leading(found(1, *records), 9)] == [3, 2, 4]
    with pytest.raises(SearchError, match=r"no finished trial\n.*\n.*`plait resume mine tracking.root=/x`"):
        leading(found(1, records[0]), 3)
    both = (record(0, 1.0, 2.0, on_front=True), record(1, 3.0, 3.0), record(2, 2.0, 1.0, on_front=True))
    assert [each.trial for each in leading(found(2, *both), 3)] == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [([], 0), (["--best", "3"], 3), (["--trial", "0", "--trial", "1", "--trial", "2"], 3)],
)
def test_a_default_trial_that_cannot_be_fetched_is_left_out(
    arguments: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [SimpleNamespace(name=f"trial-{number}", trial=number) for number in range(3)]
    search = SimpleNamespace(name="mine")

    def fetch(_: Any, one: Any, __: Any) -> Path:
        if one.trial == 1:
            raise StorageError("the store has no file")
        return Path(one.name)

    def answers(_: Any, __: Any, prompts: Any, adapters: Any, ___: Any) -> Any:
        for _prompt in prompts:
            yield {name: SimpleNamespace(text=f"by {name}", tokens=(1,), reason="stop") for name in adapters}

    monkeypatch.setattr("plait.tracking.results.load_search", lambda *_: search)
    monkeypatch.setattr("plait.tracking.results.leading", lambda _, count: records[:count])
    monkeypatch.setattr("plait.tracking.results.chosen", lambda _, trial: records[trial])
    monkeypatch.setattr("plait.tracking.trained.recorded_config", lambda *_: {})
    monkeypatch.setattr("plait.tracking.trained.base_model", lambda *_: None)
    monkeypatch.setattr("plait.tracking.trained.adapter_folder", fetch)
    monkeypatch.setattr(
        generate, "load_base", lambda _, folders, **__: (None, SimpleNamespace(names=[*folders]))
    )
    monkeypatch.setattr(generate, "_answers", answers)
    assert main(["generate", "--prompt", "a", *arguments]) == status
    told = capsys.readouterr()
    assert "trial-1: the store has no file" in told.err
    assert [line.partition(":")[0] for line in told.out.splitlines()[1:4]] == ["base", "trial 0", "trial 2"]


@pytest.mark.parametrize(
    ("text", "tokens", "reason", "said"),
    [
        ("", 0, "stop", "base: (no text: it ends at once)"),
        (" \n", 3, "stop", "base: (no text: 3 tokens, all blank)"),
        ("", 0, "not finite", "base: (no text: its logits are not finite)"),
        ("seven", 1, "not finite", "base: seven (here its logits are not finite)"),
        ("seven", 1, "stop", "base: seven"),
    ],
)
def test_an_empty_text_says_why(
    text: str, tokens: int, reason: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "4 + 3 =", "trial": None, "text": text, "reason": reason, "tokens": tokens}
    generate._show([row], as_json=False)
    assert capsys.readouterr().out.splitlines() == ["prompt: 4 + 3 =", said, ""]


def test_answers_use_the_cores_that_the_container_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    monkeypatch.setattr(devices, "allowed_cores", lambda: 1)
    generate.load_base(ModelSettings("tiny"), {})
    assert torch.get_num_threads() == 1
