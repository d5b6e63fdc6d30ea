"""Rows of every format become examples; rows that cannot be used say why and where."""

import pytest

from plait.core.errors import DataError
from plait.data.examples import Conversation, NamedFields, Pair, Text, Turn, read_example

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
TALK = Conversation((Turn("user", "2+2?", False), Turn("assistant", "4", True)))


@pytest.mark.parametrize(
    ("row", "example"),
    [
        pytest.param({"text": "abc", "id": 3}, Text("abc"), id="text"),
        pytest.param({"prompt": "a ", "completion": "b"}, Pair("a ", "b", ""), id="prompt-completion"),
        pytest.param({"prompt": [USER], "completion": [ANSWER]}, TALK, id="conversational"),
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
                (Turn("system", "be brief", False), Turn("user", "q", False), Turn("assistant", "a", True))
            ),
            id="sharegpt-system",
        ),
    ],
)
def test_each_format_is_read(row, example):
    assert read_example(row, "here") == example


def test_only_the_completions_assistant_turns_of_a_conversational_pair_are_answers():
    row = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    assert [turn.answer for turn in read_example(row, "here").turns] == [False, False, False, True]


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
        pytest.param({"messages": [USER]}, None, ["roles user", "this row has none"], id="no-answer"),
        pytest.param(
            {"messages": [{"role": "robot", "content": "x"}]},
            None,
            ["'robot'", "assistant, system, tool, user"],
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
