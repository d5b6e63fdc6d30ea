"""A data source that only this file knows: registered, asked for by name, loaded, scored and planned with."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import pytest

from plait.cli.main import main
from plait.core.checks import at_least
from plait.core.errors import ConfigError, DataError, ModelError
from plait.core.jobs import DataSpec
from plait.core.settings import ModelSettings
from plait.data.examples import Pair
from plait.data.loading import check_data, generation_limit, load_data
from plait.data.scoring import score
from plait.data.sources import SOURCES, CommonOptions, Rows, Source, VerifiedOptions
from plait.models.load import load_tokeniser


@dataclass(frozen=True, slots=True, kw_only=True)
class SumOptions(VerifiedOptions):
    start: Annotated[int, at_least(1)] = 1
    rows: int = 12


def read_sums(options: SumOptions) -> list[tuple[str, Pair]]:
    numbers = range(options.start, options.start + options.rows)
    return [(f"sums, row {i}", Pair(f"{n}+{n}=", str(2 * n), "")) for i, n in enumerate(numbers)]


def open_sums(options: SumOptions) -> Rows:
    return Rows("sums", f"{options.start} {options.rows}", partial(read_sums, options))


def score_sums(options: SumOptions, rows: Sequence[int], texts: Sequence[str]) -> tuple[float, ...]:
    answers = [example.completion for _, example in read_sums(options)]
    return tuple(float(answers[row] == text) for row, text in zip(rows, texts, strict=True))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    SOURCES.add("sums", Source(SumOptions, open_sums, score=score_sums))
    yield
    SOURCES.remove("sums")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_model_without_a_tokeniser_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="the folder has no tokeniser"):
        load_tokeniser(ModelSettings(kind="hf", id=str(tmp_path)), cache=tmp_path)


def test_its_rows_become_samples_and_its_verifier_scores_answers(cache: Path) -> None:
    spec = DataSpec.of("sums", start=7, validation=4, generate=True, max_new_tokens=3)
    check_data(spec)
    tokeniser = load_tokeniser(ModelSettings(kind="tiny"), cache=cache)
    data = load_data(spec, tokeniser, max_length=64, cache=cache)
    assert (len(data.train), len(data.validation)) == (8, 4)
    assert tokeniser.decode(data.train[0].tokens).startswith(f"{7 + data.train.rows[0]}+")
    rows = data.validation.rows.tolist()
    assert score(spec, rows, [str(2 * (7 + row)) for row in rows]) == (1.0,) * 4
    assert score(spec, rows, ["?"] * 4) == (0.0,) * 4
    assert generation_limit(spec) == 3
    assert generation_limit(DataSpec("sums")) is None


def test_its_options_are_checked_like_those_of_any_source() -> None:
    with pytest.raises(ConfigError, match=r"data\.start=0\n.*at least 1\.\nThe default is 1\."):
        check_data(DataSpec.of("sums", start=0))
    with pytest.raises(ConfigError, match=r"unknown key data\.strat\n.*\nDid you mean data\.start\?"):
        check_data(DataSpec.of("sums", strat=0))
    with pytest.raises(DataError, match="sums: 12 rows, 12 of them for validation"):
        check_data(DataSpec.of("sums", validation=12))


def test_without_a_check_every_row_is_read_before_a_model_loads() -> None:
    def broken() -> list[tuple[str, Pair]]:
        raise DataError("sums, row 3", "no sum")

    SOURCES.add("sums", Source(CommonOptions, lambda _: Rows("sums", "", broken)))
    with pytest.raises(DataError, match="row 3"):
        check_data(DataSpec("sums"))


@pytest.mark.usefixtures("cache")
def test_a_command_names_it_and_gives_its_options_with_a_plus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["plan", "--json", "model=tiny", "train.steps=2", "adapter.rank=1,2", "data.source=sums"]
    assert main([*command, "+data.start=choice(3,4)", "+data.rows=10", "data.validation=2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["groups"][0]["jobs"]) == 4
    assert main([*command, "+data.start=0"]) == 2
    assert "data.start=0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("data=csv", ["data=csv", "Unknown data source 'csv'", "file, hub, jsonl, mixture, reasoning_gym"]),
        (
            "data.source=csv",
            ["data.source=csv", "Unknown data source 'csv'", "file, hub, mixture, reasoning_gym, sums"],
        ),
        ("data=sums", ["data=sums", "data.source=sums", "+data.KEY=VALUE"]),
        ("data.start=2", ["unknown key data.start"]),
    ],
)
def test_unknown_tasks_and_options_are_refused_with_the_known_ones(
    asked: str,
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "model=tiny", "adapter.rank=1,2", asked]) == 2
    error = capsys.readouterr().err
    assert all(words in error for words in said), error
