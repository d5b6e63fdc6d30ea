"""A source's options: what is wrong is refused with the right answers; the YAML says what the code says."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from plait.core.errors import ConfigError
from plait.core.jobs import DataSpec
from plait.data.loading import check_data
from plait.data.sources import SOURCES, parse_options

CONF = Path(__file__).parents[2] / "conf" / "data"


@pytest.mark.parametrize("source", SOURCES.names())
def test_the_config_group_has_every_option_with_the_codes_default(source):
    written = yaml.safe_load((CONF / f"{source}.yaml").read_text())
    assert written.pop("source") == source
    needed = {"file": {"path": "a.jsonl"}, "hub": {"id": "a/b"}, "mixture": {"sources": [{"path": "a"}]}}
    minimal = needed.get(source, {})
    for key in minimal:
        assert written.pop(key) == "???"
    written |= minimal
    assert json.loads(json.dumps(asdict(parse_options(DataSpec.of(source, **written))))) == written
    assert parse_options(DataSpec.of(source, **written)) == parse_options(DataSpec.of(source, **minimal))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        pytest.param(DataSpec("parquet"), ["'parquet'", "file, hub, mixture, reasoning_gym"], id="source"),
        pytest.param(
            DataSpec.of("file", path="x", tsak=1), ["data.tsak", "data.separator, data.size"], id="option"
        ),
        pytest.param(DataSpec.of("reasoning_gym", tsk="x"), ["Did you mean data.task?"], id="close-option"),
        pytest.param(DataSpec("file"), ["data has no path"], id="no-path"),
        pytest.param(DataSpec.of("file", path="???"), ["data.path is not set"], id="path-not-set"),
        pytest.param(DataSpec.of("reasoning_gym", size="many"), ["'many'", "a whole number"], id="type"),
        pytest.param(
            DataSpec.of("reasoning_gym", size=True), ["data.size=true", "a whole number"], id="bool"
        ),
        pytest.param(DataSpec.of("reasoning_gym", size=0), ["data.size=0", "at least 1"], id="size"),
        pytest.param(
            DataSpec.of("reasoning_gym", completion_only_loss=False, generate=True),
            ["data.completion_only_loss=false", "data.generate=true"],
            id="nothing-to-go-on-from",
        ),
        pytest.param(
            DataSpec.of("file", path="x", format="xml"), ["'xml'", "csv, json, parquet"], id="format"
        ),
        pytest.param(
            DataSpec.of("file", path="x", validation_path="y", validation_split="z"),
            ["Leave one out"],
            id="both",
        ),
        pytest.param(DataSpec.of("reasoning_gym", overlong="cut"), ["drop, refuse, truncate"], id="overlong"),
        pytest.param(DataSpec.of("reasoning_gym", template="x"), ["auto, chat, plain"], id="template"),
        pytest.param(
            DataSpec.of("reasoning_gym", template="plain", chat_template="a.jinja"),
            ["data.chat_template with data.template=plain", "Leave one out"],
            id="template-without-use",
        ),
        pytest.param(
            DataSpec.of("reasoning_gym", validation=1.5), ["data.validation=1.5", "share"], id="validation"
        ),
        pytest.param(DataSpec.of("reasoning_gym", validation=-1), ["data.validation=-1"], id="negative"),
        pytest.param(DataSpec.of("reasoning_gym", seed=-1), ["data.seed=-1", "between 0"], id="seed"),
        pytest.param(DataSpec.of("reasoning_gym", difficulty=-1), ["data.difficulty=-1"], id="difficulty"),
        pytest.param(
            DataSpec.of("reasoning_gym", size=None), ["data.size=null", "a whole number"], id="no-size"
        ),
        pytest.param(
            DataSpec.of("file", path="x", prompt_field="q"), ["completion_field=null"], id="one-field"
        ),
        pytest.param(DataSpec.of("reasoning_gym", task_options={"seed": 1}), ["data.seed"], id="task-seed"),
        pytest.param(
            DataSpec.of("reasoning_gym", task="gsm_symbolik"),
            ["Did you mean gsm_symbolic", "chain_sum"],
            id="task",
        ),
        pytest.param(
            DataSpec.of("reasoning_gym", task="gsm"),
            ["Did you mean gsm_symbolic? Choose one of"],
            id="task-begun",
        ),
        pytest.param(
            DataSpec.of("reasoning_gym", task="chain_sum", task_options={"min_term": 1}),
            ["data.task_options.min_term=1", "Did you mean min_term", "max_digits"],
            id="task-option",
        ),
        pytest.param(
            DataSpec.of("reasoning_gym", task="chain_sum", task_options={"min_terms": 0}),
            ["min_terms must be positive", "max_terms"],
            id="task-refuses",
        ),
        pytest.param(
            DataSpec.of("reasoning_gym", task="chain_sum", difficulty=99),
            ["data.difficulty=99", "0 to"],
            id="level",
        ),
        pytest.param(
            DataSpec.of("reasoning_gym", task="composite", difficulty=0),
            ["no curriculum"],
            id="no-curriculum",
        ),
    ],
)
def test_wrong_options_are_refused(spec, words):
    with pytest.raises(ConfigError) as caught:
        check_data(spec)
    for word in words:
        assert word in str(caught.value)
