"""Rows of every format become examples; rows that cannot be used say why and where."""

import json

import pytest

from plait.core.errors import DataError
from plait.data.examples import Conversation, NamedFields, Pair, Text, read_example

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
TALK = Conversation((USER, ANSWER))
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("row", "example"),
    [
        pytest.param({"text": "abc", "id": 3}, Text("abc"), id="text"),
        pytest.param({"prompt": "a ", "completion": "b"}, Pair("a ", "b", ""), id="prompt-completion"),
        pytest.param(
            {"prompt": [USER], "completion": [ANSWER]},
            Conversation((USER, ANSWER), prompt=1),
            id="conversational",
        ),
        pytest.param({"messages": [USER, ANSWER]}, TALK, id="messages"),
        pytest.param({"instruction": "do", "input": "", "output": "x"}, Pair("do", "x", "\n\n"), id="alpaca"),
        pytest.param(
            {"instruction": "do", "input": "it", "output": "x"},
            Pair("do\n\nit", "x", "\n\n"),
            id="alpaca-input",
        ),
        pytest.param(
            {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
            TALK,
            id="sharegpt",
        ),
        pytest.param(
            {
                "system": "be brief",
                "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
            },
            Conversation(
                (
                    {"role": "system", "content": "be brief"},
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "a"},
                )
            ),
            id="sharegpt-system",
        ),
        pytest.param({"messages": json.dumps([USER, ANSWER])}, TALK, id="json-in-a-cell"),
        pytest.param(
            {"messages": [USER | {"name": None}, CALL | {"content": None}], "tools": [TOOL]},
            Conversation((USER, CALL), tools=(TOOL,)),
            id="tools",
        ),
        pytest.param(
            {"messages": [USER, ANSWER], "chat_template_kwargs": {"thinking": False, "other": None}},
            Conversation((USER, ANSWER), settings={"thinking": False}),
            id="settings",
        ),
        pytest.param({"messages": None, "prompt": None, "text": "abc"}, Text("abc"), id="nulls-of-a-table"),
        pytest.param({"prompt": "[{", "completion": "[{}]"}, Pair("[{", "[{}]", ""), id="text-like-a-list"),
    ],
)
def test_each_format_is_read(row, example):
    assert read_example(row, "here") == example


def test_named_fields_come_before_known_formats():
    row = {"question": "q", "answer": "a", "text": "t"}
    assert read_example(row, "here", NamedFields("question", "answer")) == Pair("q", "a", "\n")


@pytest.mark.parametrize(
    ("row", "named", "words"),
    [
        pytest.param(
            {"frage": "q", "antwort": "a"},
            None,
            ["antwort, frage", "{messages}", "prompt_field"],
            id="unknown",
        ),
        pytest.param({}, None, ["(none)"], id="no-fields"),
        pytest.param(
            {"q": "x"}, NamedFields("q", "reply"), ["'reply'", "fields q"], id="named-field-missing"
        ),
        pytest.param({"prompt": "x", "completion": 4}, None, ["completion is 4", "text"], id="not-a-text"),
        pytest.param(
            {"prompt": "x", "completion": "y \ud83d"},
            None,
            ["completion has '\\ud83d' at character 3", "half of a surrogate pair"],
            id="half-a-character",
        ),
        pytest.param({"messages": []}, None, ["messages is []", "list of messages"], id="no-messages"),
        pytest.param(
            {"messages": [USER | {"content": ["a", "b"]}]}, None, ["content is ['a', 'b']"], id="parts"
        ),
        pytest.param({"messages": "[{"}, None, ["messages is '[{'", "list of messages"], id="no-json"),
        pytest.param({"prompt": [USER]}, None, ["fields prompt", "but no completion."], id="half"),
        pytest.param(
            {"propmt": "x", "completion": "y"},
            None,
            ["It has propmt. Did you mean prompt? A row must"],
            id="misspelled",
        ),
        pytest.param(
            {"question": "x"},
            NamedFields("qestion", "reply"),
            ["no field 'qestion'. Did you mean question?"],
            id="named-field-misspelled",
        ),
        pytest.param({"prompt": [USER], "completion": "x"}, None, ["completion is 'x'"], id="mixed"),
        pytest.param({"messages": [USER], "tools": "x"}, None, ["tools is 'x'", "functions"], id="tools"),
        pytest.param(
            {"messages": [USER], "chat_template_kwargs": 3},
            None,
            ["chat_template_kwargs is 3"],
            id="settings",
        ),
        pytest.param(
            {"messages": [{"role": "robot", "content": "x"}]},
            None,
            ["'robot'", "assistant, developer, system, tool, user"],
            id="role",
        ),
        pytest.param(
            {"conversations": [{"from": "alien", "value": "x"}]},
            None,
            ["'alien'", "gpt", "human"],
            id="sharegpt-role",
        ),
        pytest.param({"messages": [{"role": "user"}]}, None, ["content", "fields role"], id="no-content"),
    ],
)
def test_a_row_that_cannot_be_used_says_why_and_where(row, named, words):
    with pytest.raises(DataError) as caught:
        read_example(row, "train.jsonl, line 7", named)
    assert str(caught.value).startswith("train.jsonl, line 7: ")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "row",
    [
        {"text": ["x" * 9_000_000]},
        {"text": [0] * 9_000_000},
        {"prompt": "x", "completion": b"x" * 9_000_000},
        {"x" * 9_000_000: 1},
        {f"field {number}": number for number in range(100_000)},
        {"messages": "x" * 9_000_000},
        {"messages": [{"role": "x" * 9_000_000, "content": ""}]},
    ],
)
def test_an_error_does_not_repeat_a_long_row(row):
    with pytest.raises(DataError) as caught:
        read_example(row, "here")
    assert len(str(caught.value)) < 1000


def test_fields_of_another_format_are_not_taken_for_misspelled_ones() -> None:
    with pytest.raises(DataError) as caught:
        read_example({"question": "x", "response": "y"}, "a.jsonl, line 1")
    assert "Did you mean" not in str(caught.value)
