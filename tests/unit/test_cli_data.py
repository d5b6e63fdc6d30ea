"""`plait data`: the text that would be trained on, with what counts in the loss, and without a model."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenisers import byte_tokeniser

import plait.cli.data
import plait.models.load
from plait.cli.data import lines, pieces
from plait.cli.main import main
from plait.core.jobs import JobSpec
from plait.core.samples import Sample
from plait.core.settings import ModelSettings
from plait.models.load import ModelShape
from plait.search.checks import check_model

TALK = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four\nü"}]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(plait.models.load, "load_model", refused)
    monkeypatch.setattr(plait.models.load, "transformers_model", refused)
    rows = [{"messages": TALK}, {"messages": [TALK[0]] * 3 + TALK}, {"messages": TALK}, {"messages": TALK}]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


COMMAND = ["data", "model=tiny", "data=file", "data.path=r.jsonl", "data.validation=1", "adapter.rank=1,2"]


def test_the_text_of_three_rows_is_shown_with_what_counts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, "data.assistant_only_loss=true"]) == 0
    out = capsys.readouterr().out
    assert out.count("count in the loss") == 3
    assert "  read  | <|im_start|>user\\n\n        | 2+2?<|im_end|>\\n\n" in out
    assert "  train | four\\n\n        | ü<|im_end|>\\n\n" in out
    assert sorted(path.name for path in folder.iterdir()) == ["cache", "r.jsonl"], "nothing else is written"


def test_counts_are_shown_and_a_sweep_over_data_shows_each(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "r.jsonl").write_text('{"text": "abc"}\n{"text": "abcdefghijkl"}\n{"text": ""}\n')
    command = [*COMMAND, "data.validation=0", "model.max_length=10", "--json"]
    assert main([*command, "data.overlong=truncate,drop"]) == 0
    cut, dropped = json.loads(capsys.readouterr().out)["data"]
    assert [cut["train"][key] for key in ("rows", "truncated", "dropped", "unlabelled")] == [3, 1, 0, 1]
    assert [dropped["train"][key] for key in ("rows", "truncated", "dropped", "unlabelled")] == [3, 0, 1, 1]
    assert dropped["rows"] == [
        {
            "row": 0,
            "tokens": 4,
            "counted": 3,
            "text": [{"text": "a", "counted": False}, {"text": "bc<|im_end|>", "counted": True}],
        }
    ]
    assert main([*command[:-1]]) == 0
    assert "of 3 rows, 1 truncated to 10 tokens" in capsys.readouterr().out


def test_a_searched_key_needs_no_other_value(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "other.jsonl").write_text('{"text": "abc"}\n{"text": "d"}\n')
    command = [word for word in COMMAND if not word.startswith("data.path=")]
    for words in (["data.path=r.jsonl,other.jsonl"], ["++search.params={data.path: 'r.jsonl,other.jsonl'}"]):
        assert main([*command, *words, "--json"]) == 0
        assert [each["train"]["rows"] for each in json.loads(capsys.readouterr().out)["data"]] == [3, 1]
    assert main(command) == 2
    assert "data.path is not set" in capsys.readouterr().err


def test_the_models_type_is_settled_before_its_files_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def check(settings: ModelSettings, jobs: Sequence[JobSpec]) -> ModelShape:
        seen.append(settings.dtype)
        return check_model(settings, jobs)

    monkeypatch.setattr(plait.cli.data, "check_model", check)
    assert main([*COMMAND, "model.dtype=auto", "--json"]) == 0
    assert seen in (["float32"], ["bfloat16"])


def test_errors_are_reported_as_by_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "data.path=none.csv"]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main([*COMMAND, "data.loss=all"]) == 2
    assert "unknown key data.loss" in capsys.readouterr().err


def test_a_character_that_is_divided_and_what_cannot_be_seen_are_shown() -> None:
    tokeniser = byte_tokeniser()
    tokens = np.array(tokeniser("aü\x1b[2J")["input_ids"], np.int32)
    labels = np.arange(len(tokens)) >= 2
    (head, tail) = pieces(Sample(tokens, labels), tokeniser)
    assert head == ("a\ufffd", False)
    assert tail[1]
    shown = list(lines("a\tb\x1b[2J\n\nc", trained=True))
    assert shown == [
        "  train | a\\tb\\x1b[2J\\n",
        "        | \\n",
        "        | c",
    ]
    assert len("".join(lines("x" * 9000, trained=False))) < 2000
