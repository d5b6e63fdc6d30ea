"""Rows become samples: labels, ends, splits, limits, the cache, and errors before any model loads."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym import factory
from tokenisers import CHATML, byte_tokeniser
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from plait.core.errors import ConfigError, DataError, InputError, StorageError
from plait.core.jobs import DataSpec
from plait.core.samples import RowCounts, Sample, Split
from plait.data import tokenising
from plait.data.loading import check_data, describe_rows, generation_limit, load_data
from plait.data.scoring import named_function, score
from plait.data.sources import parse_options
from plait.data.tasks import HASH_DEPENDENT, TaskOptions, generate_task
from plait.data.tokenising import Rendered, tokenise

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k" / "train.jsonl"


@pytest.fixture(scope="module")
def tokeniser():
    return byte_tokeniser()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def labelled_text(sample, tokeniser):
    return tokeniser.decode(sample.tokens[sample.labels])


def load_rows(rows, tmp_path, tokeniser, **options):
    spec = DataSpec.of("file", path=write(tmp_path / "rows.jsonl", rows), validation=0, **options)
    check_data(spec)
    return load_data(spec, tokeniser, max_length=200, cache=tmp_path / "cache").train


USER = {"role": "user", "content": "2+2? "}
ANSWER = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("row", "options", "text", "labelled"),
    [
        pytest.param({"text": "ab"}, {}, "ab<|im_end|>", "b<|im_end|>", id="text"),
        pytest.param({"prompt": "a b", "completion": " c"}, {}, "a b c<|im_end|>", " c<|im_end|>", id="pair"),
        pytest.param(
            {"prompt": "é", "completion": "ü"},
            {"separator": " = "},
            "é = ü<|im_end|>",
            "ü<|im_end|>",
            id="bytes",
        ),
        pytest.param(
            {"prompt": "ab", "completion": "c"},
            {"completion_only_loss": False},
            "abc<|im_end|>",
            "bc<|im_end|>",
            id="all",
        ),
        pytest.param(
            {"q": "a", "r": "b"},
            {"prompt_field": "q", "completion_field": "r"},
            "a\nb<|im_end|>",
            "b<|im_end|>",
            id="named",
        ),
        pytest.param(
            {"messages": [USER, ANSWER, USER, ANSWER]},
            {"template": "plain", "separator": "|", "assistant_only_loss": True},
            "User: 2+2? |Assistant: 4<|im_end|>|User: 2+2? |Assistant: 4<|im_end|>",
            "4<|im_end|>4<|im_end|>",
            id="plain-turns",
        ),
        pytest.param(
            {"messages": [USER, ANSWER, USER]},
            {"template": "plain", "separator": "|", "assistant_only_loss": True},
            "User: 2+2? |Assistant: 4<|im_end|>|User: 2+2? <|im_end|>",
            "4<|im_end|>",
            id="plain-unanswered-end",
        ),
        pytest.param(
            {"prompt": [USER], "completion": [ANSWER]},
            {"template": "plain", "separator": "|"},
            "User: 2+2? |Assistant: 4<|im_end|>",
            "4<|im_end|>",
            id="plain-prompt",
        ),
        pytest.param(
            {"messages": [USER, ANSWER]},
            {},
            "<|im_start|>user\n2+2? <|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n",
            "user\n2+2? <|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n",
            id="chat",
        ),
        pytest.param(
            {"prompt": "p", "completion": "c"},
            {"template": "chat"},
            "<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n",
            "c<|im_end|>\n",
            id="chat-pair",
        ),
        pytest.param(
            {"messages": [USER, ANSWER]},
            {"chat_template": "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}"},
            "[u]2+2? [a]4",
            "u]2+2? [a]4",
            id="own-template",
        ),
    ],
)
def test_text_and_labels_of_each_kind_of_row(row, options, text, labelled, tmp_path, tokeniser):
    split = load_rows([row], tmp_path, tokeniser, **options)
    assert tokeniser.decode(split[0].tokens) == text
    assert labelled_text(split[0], tokeniser) == labelled


def test_plain_and_templated_rows_keep_their_order(tmp_path, tokeniser):
    rows = [{"text": "aa"}, {"messages": [USER, ANSWER]}, {"text": "bb"}]
    split = load_rows(rows, tmp_path, tokeniser)
    assert [tokeniser.decode(split[i].tokens)[:3] for i in range(3)] == ["aa<", "<|i", "bb<"]


@given(
    st.lists(st.tuples(st.text(max_size=12), st.booleans()), min_size=1, max_size=5),
    st.lists(st.tuples(st.sampled_from("abc Ġ"), st.sampled_from("abc")), max_size=4),
)
def test_a_token_is_labelled_exactly_when_it_holds_a_labelled_character(pieces, pairs):
    merges = [(left.replace(" ", "Ġ"), right) for left, right in dict.fromkeys(pairs)]
    tokeniser = byte_tokeniser(merges)
    text, spans, bytes_labelled = "", [], []
    for piece, counts in pieces:
        if counts and piece:
            spans.append((len(text), len(text) + len(piece)))
        text += piece
        bytes_labelled += [counts] * len(piece.encode())
    (sample,) = tokenise([Rendered(text, spans=tuple(spans))], tokeniser)
    at = 0
    for index, token in enumerate(sample.tokens[:-1]):
        size = len(tokeniser.convert_ids_to_tokens(int(token)))  # one character a byte in this alphabet
        assert sample.labels[index] == (index > 0 and any(bytes_labelled[at : at + size]))
        at += size
    assert at == len(bytes_labelled)


@pytest.mark.parametrize("completion_only", [True, False])
@pytest.mark.parametrize("added", ["<s> $A", "$A </s>", "<s> $A </s>", "$A"])
def test_special_tokens_that_a_tokeniser_adds_itself_occur_once(added, completion_only, tmp_path):
    words = {word: index for index, word in enumerate(["<s>", "</s>", "▁a", "▁b", "▁c"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single=added, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokeniser = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    split = load_rows(
        [{"prompt": "a b", "completion": " c"}], tmp_path, tokeniser, completion_only_loss=completion_only
    )
    begin = [0] if added.startswith("<s>") else []
    assert split[0].tokens.tolist() == [*begin, 2, 3, 4, 1]
    prompt = (
        [not completion_only] * 2 if begin else [False, not completion_only]
    )  # nothing stands before the first token
    assert split[0].labels.tolist() == [False] * len(begin) + prompt + [True, True]


@pytest.mark.parametrize(("validation", "kept"), [(0, 0), (3, 3), (0.25, 5), (0.01, 1), (None, 2)])
def test_the_split_takes_a_count_or_a_share_and_loses_no_row(validation, kept, tmp_path, tokeniser):
    path = write(tmp_path / "rows.jsonl", [{"text": f"row {i}"} for i in range(20)])
    specs = [DataSpec.of("file", path=path, validation=validation, seed=seed) for seed in (1, 2)]
    loaded = [load_data(spec, tokeniser, max_length=20, cache=tmp_path) for spec in specs]
    for data in loaded:
        assert len(data.validation) == kept
        assert sorted([*data.train.rows, *data.validation.rows]) == list(range(20))
        for split in (data.train, data.validation):
            for i in range(len(split)):
                assert tokeniser.decode(split[i].tokens) == f"row {split.rows[i]}<|im_end|>"
    if kept > 1:
        assert loaded[0].validation.rows.tolist() != loaded[1].validation.rows.tolist()
        assert loaded[0].digest != loaded[1].digest


def test_a_validation_file_leaves_every_row_of_the_other_for_training(tmp_path, tokeniser):
    path = write(tmp_path / "a.jsonl", [{"text": f"a{i}"} for i in range(6)])
    own = write(tmp_path / "b.jsonl", [{"text": f"b{i}"} for i in range(4)])
    sizes = {}
    for validation in (None, 2):
        spec = DataSpec.of("file", path=path, validation_path=own, validation=validation, size=5)
        data = load_data(spec, tokeniser, max_length=20, cache=tmp_path)
        sizes[validation] = (len(data.train), len(data.validation))
        assert all(tokeniser.decode(data.validation[i].tokens).startswith("b") for i in range(2))
    assert sizes == {None: (5, 4), 2: (5, 2)}
    with pytest.raises(DataError, match=r"validation=9\n.*4 rows"):
        check_data(DataSpec.of("file", path=path, validation_path=own, validation=9))


def test_too_long_samples_are_truncated_dropped_or_refused(tmp_path, tokeniser):
    rows = [
        {"prompt": "a", "completion": "b"},
        {"prompt": "aaa", "completion": "b" * 30},
        {"text": "ccc"},
        {"prompt": "a" * 12, "completion": "b"},
        {"text": ""},
    ]
    path = write(tmp_path / "rows.jsonl", rows)

    def load(path=path, **options):
        spec = DataSpec.of("file", path=path, validation=0, **options)
        return load_data(spec, tokeniser, max_length=10, cache=tmp_path).train

    for _ in range(2):  # the second time from the cache
        cut = load()
        assert cut.lengths.tolist() == [3, 10, 4]
        assert cut.rows.tolist() == [0, 1, 2]
        assert tokeniser.decode(cut[1].tokens) == "aaa" + "b" * 7
        assert cut.counts == RowCounts(rows=5, truncated=1, dropped=0, unlabelled=2)
    dropped = load(overlong="drop")
    assert dropped.rows.tolist() == [0, 2]
    assert dropped.counts == RowCounts(rows=5, truncated=0, dropped=2, unlabelled=1)
    assert dropped.summary()["unlabelled"] == 1
    with pytest.raises(DataError) as caught:
        load(overlong="refuse")
    assert caught.value.value == "rows.jsonl, line 2: 34 tokens"
    assert "at most 10 tokens (model.max_length)" in caught.value.rule
    assert "data.overlong=truncate or data.overlong=drop" in caught.value.remedy
    with pytest.raises(DataError, match=r"line 1: no labelled tokens in 1\n.*\n.*data\.overlong=drop"):
        load(path=write(tmp_path / "none.jsonl", [{"text": ""}]), overlong="refuse")


def test_data_without_a_usable_row_are_refused_with_the_reasons(tmp_path, tokeniser):
    rows = [{"text": "a" * 40}, {"text": ""}]
    spec = DataSpec.of("file", path=write(tmp_path / "r.jsonl", rows), validation=0, overlong="drop")
    words = (
        r"no training row of 2 is left: 1 longer than 10 tokens and 1 without.*\n.*shortest of these has 1\."
    )
    with pytest.raises(DataError, match=words):
        load_data(spec, tokeniser, max_length=10, cache=tmp_path)


def test_empty_rows_alone_in_a_split_are_refused_with_the_split_and_not_as_too_long(tmp_path, tokeniser):
    rows, empty = write(tmp_path / "r.jsonl", [{"text": "abc"}]), write(tmp_path / "e.jsonl", [{"text": ""}])
    spec = DataSpec.of("file", path=rows, validation_path=empty)
    with pytest.raises(DataError, match="no validation row of 1 is left: 1 without a token") as caught:
        load_data(spec, tokeniser, max_length=10, cache=tmp_path)
    assert "max_length if" not in caught.value.remedy
    assert "data.validation" in caught.value.remedy


def test_rows_that_are_not_trained_on_are_reported(tmp_path, tokeniser):
    rows = [{"text": "a" * 40}, {"text": ""}, {"text": "abc"}]
    spec = DataSpec.of("file", path=write(tmp_path / "r.jsonl", rows), validation=0)
    data = load_data(spec, tokeniser, max_length=10, cache=tmp_path)
    said = describe_rows(spec, data, 10)
    assert "r.jsonl: of 3 rows, 1 truncated to 10 tokens" in said
    assert "1 dropped, nothing in the first 10 tokens" in said
    whole = load_data(DataSpec.of("reasoning_gym", size=40), tokeniser, max_length=2000, cache=tmp_path)
    assert describe_rows(DataSpec("reasoning_gym"), whole, 2000) == ""


@pytest.mark.parametrize("overlong", ["truncate", "drop", "refuse"])
def test_the_capacity_changes_no_sample(overlong, tmp_path, tokeniser):
    path = write(tmp_path / "r.jsonl", [{"text": "a" * 30}, {"text": "b"}])
    spec = DataSpec.of("file", path=path, validation=0, overlong=overlong)
    for _ in range(2):  # the second time from the cache
        with pytest.raises(
            DataError, match=r"31 tokens\n.*engine\.capacity=8 .*\nRaise engine\.capacity to 31 or more"
        ):
            load_data(spec, tokeniser, max_length=40, capacity=8, cache=tmp_path)
    with pytest.raises(DataError, match="at most 8 tokens on 4 devices"):
        load_data(spec, tokeniser, max_length=40, capacity=8, cluster="4 devices", cache=tmp_path)
    data = load_data(spec, tokeniser, max_length=40, capacity=31, cache=tmp_path)
    assert data.train.lengths.tolist() == [31, 2]


@pytest.mark.parametrize("overlong", ["truncate", "drop", "refuse"])
def test_texts_are_cut_to_what_the_model_can_take_before_tokenising(overlong, tmp_path):
    seen = []

    class Counting(PreTrainedTokenizerFast):
        def __call__(self, texts, **options):
            seen.append(max(map(len, texts)))
            return super().__call__(texts, **options)

    counting = Counting(tokenizer_object=byte_tokeniser().backend_tokenizer, eos_token="<|im_end|>")
    rows = [{"text": "a" * 1_000_000}, {"prompt": "b" * 5000, "completion": "c"}, {"text": "d"}]
    spec = DataSpec.of("file", path=write(tmp_path / "r.jsonl", rows), validation=0, overlong=overlong)
    if overlong == "refuse":
        with pytest.raises(DataError, match="line 1: 1,000,000 characters"):
            load_data(spec, counting, max_length=10, cache=tmp_path)
    else:
        data = load_data(spec, counting, max_length=10, cache=tmp_path)
        assert data.train.lengths.tolist() == ([10, 2] if overlong == "truncate" else [2])
    assert max(seen) <= 640


def test_a_folder_without_data_files_is_named_as_one(tmp_path):
    with pytest.raises(DataError, match="this folder has no data files"):
        check_data(DataSpec.of("file", path=str(tmp_path)))


def test_a_line_may_hold_any_unicode_line_break(tmp_path, tokeniser):
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"text": "a\u2028b"}\r\n{"text": "c"}'.encode())
    spec = DataSpec.of("file", path=str(path), validation=0)
    check_data(spec)
    data = load_data(spec, tokeniser, max_length=100, cache=tmp_path)
    texts = {tokeniser.decode(data.train[index].tokens, skip_special_tokens=True) for index in range(2)}
    assert texts == {"a\u2028b", "c"}


def test_a_chat_template_that_is_missing_or_refuses_or_rewrites_history_is_named(tmp_path):
    spec = DataSpec.of(
        "file",
        path=write(tmp_path / "r.jsonl", [{"messages": [USER, ANSWER, USER, ANSWER]}]),
        assistant_only_loss=True,
        validation=0,
    )
    for template, words in [
        (None, r"line 1: messages\n.*tokeniser has none\.\n.*data\.chat_template=FILE\.jinja"),
        ("{{ raise_exception('only users') }}", "line 1: only users"),
        ("{{ messages | length }}" + CHATML, "message 2 of 4"),
    ]:
        with pytest.raises(DataError, match=words):
            load_data(spec, byte_tokeniser(template=template), max_length=100, cache=tmp_path)


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "assistant_only"),
    [
        (ENDLESS, False),
        (ENDLESS + "{% generation %}{% endgeneration %}", True),
        ("{{ 'x' * 10**15 }}", False),
    ],
)
def test_a_chat_template_that_does_not_end_is_refused(template, assistant_only, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenising, "TEMPLATE_SECONDS", 0.3)
    rows = [{"messages": [USER, ANSWER]}]
    with pytest.raises(DataError, match=r"line 1: the chat template is (not done after 0\.3 s|too large)"):
        load_rows(rows, tmp_path, byte_tokeniser(template=template), assistant_only_loss=assistant_only)


NO_PROMPT = CHATML[: CHATML.index("{% if add_generation_prompt %}")]
INST = (
    "{% for m in messages %}{{ '[%s]' % m.content if m.role == 'user' else ' %s$' % m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("messages", "template", "number"),
    [
        ([USER, ANSWER], NO_PROMPT, 2),
        ([ANSWER, USER, ANSWER], NO_PROMPT, 1),
        ([USER, ANSWER], NO_PROMPT + "{% if not add_generation_prompt %}<|im_end|>{% endif %}", 2),
    ],
)
def test_a_template_that_hides_where_an_answer_begins_is_refused(messages, template, number, tmp_path):
    tokeniser = byte_tokeniser(template=template)
    words = rf"message {number} of {len(messages)}\n.*no generation prompt.*\n.*assistant_only_loss=false"
    with pytest.raises(DataError, match=words):
        load_rows([{"messages": messages}], tmp_path, tokeniser, assistant_only_loss=True)


def test_a_template_whose_answers_have_no_header_needs_no_prompt_for_generation(tmp_path):
    tokeniser = byte_tokeniser(template=INST)
    split = load_rows([{"messages": [USER, ANSWER] * 2}], tmp_path, tokeniser, assistant_only_loss=True)
    assert labelled_text(split[0], tokeniser) == " 4$ 4$"


def test_a_call_that_the_template_leaves_out_is_refused(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add_up"}}]}
    rows = [{"messages": [USER, call, ANSWER]}]
    without = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"line 1: message 2 calls the function 'add_up'\n.*leaves"):
        load_rows(rows, tmp_path, byte_tokeniser(template=without))
    writing = "{% for m in messages %}{{ m.content }}{{ m.tool_calls | default([]) | tojson }}{% endfor %}"
    tokeniser = byte_tokeniser(template=writing)
    assert "add_up" in labelled_text(load_rows(rows, tmp_path, tokeniser)[0], tokeniser)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"messages": [USER, ANSWER], "tools": [{"name": "f"}]}, "tools"),
        ({"messages": [USER, ANSWER | {"tool_calls": [{"name": "f"}]}]}, "tool_calls"),
    ],
)
def test_functions_are_refused_where_no_template_writes_them(row, named, tmp_path, tokeniser):
    with pytest.raises(DataError, match=rf"line 1: {named}, with data\.template=plain\n"):
        load_rows([row], tmp_path, tokeniser, template="plain")


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"messages": [USER, ANSWER], "tools": [{"name": "\ud83d"}]}, {}),
        ({"messages": [USER, ANSWER]}, {"chat_template": "{{ messages[0].content }}\udcff"}),
        ({"instruction": "a", "output": "b"}, {"separator": "\udcff"}),
    ],
)
def test_text_that_is_no_unicode_is_refused(row, options, tmp_path):
    tokeniser = byte_tokeniser(template="{{ tools | tojson }}")
    with pytest.raises(DataError, match=r"line 1: its text has '\\ud.* at character \d+\n.*valid Unicode"):
        load_rows([row], tmp_path, tokeniser, **options)


def test_the_chat_template_may_be_a_file_whose_content_counts(tmp_path, tokeniser):
    rows = [{"messages": [USER, ANSWER]}]
    file = tmp_path / "chat.jinja"
    for text in ("{{ messages[1].content }}!", "{{ messages[0].content }}?"):
        file.write_text(text)
        split = load_rows(rows, tmp_path, tokeniser, chat_template=str(file))
        assert tokeniser.decode(split[0].tokens) == {"!": "4!", "?": "2+2? ?"}[text[-1]]
    for wrong, words in [("chat.txt", "a Jinja template, or a file"), ("none.jinja", "No such file")]:
        with pytest.raises(ConfigError, match=words):
            load_rows(rows, tmp_path, tokeniser, chat_template=wrong)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "completion": "b"}, r"line 1: no messages, with data\.assistant_only_loss=true"),
        ({"messages": [USER]}, "line 1: roles user\n.*this row has none"),
        ({"prompt": [USER, ANSWER], "completion": [USER]}, "this row has none"),
    ],
)
def test_every_row_needs_an_assistant_if_only_that_counts(row, words, tmp_path, tokeniser):
    with pytest.raises(DataError, match=words):
        load_rows([row], tmp_path, tokeniser, assistant_only_loss=True)


def test_the_cache_is_used_rebuilt_when_damaged_and_never_stale(tmp_path, tokeniser):
    path = tmp_path / "rows.jsonl"
    write(path, [{"text": f"row {i}"} for i in range(4)])
    spec = DataSpec.of("file", path=str(path), validation=1)
    cache = tmp_path / "cache"

    def load(**options):
        asked = DataSpec.of("file", **(spec.mapping() | options))
        return load_data(asked, options.pop("tokeniser", tokeniser), max_length=20, cache=cache)

    first = load()
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    written = file.stat().st_ino
    assert load().digest == first.digest
    assert file.stat().st_ino == written
    for damaged in (whole[: len(whole) // 2], b"", whole.replace(b"PK", b"QK")):
        file.write_bytes(damaged)
        again = load()
        assert again.digest == first.digest
        assert np.array_equal(again.train.tokens, first.train.tokens)
        assert zipfile.is_zipfile(file)
    assert (
        load(completion_only_loss=False).digest == first.digest
    )  # the same samples: text rows are labelled whole
    assert load(seed=1).digest != first.digest or load(seed=2).digest != first.digest
    write(path, [{"text": f"rom {i}"} for i in range(4)])
    assert load().digest != first.digest
    assert not list(cache.glob(".*"))


def test_a_cache_with_another_content_than_it_says_is_rebuilt(tmp_path, tokeniser):
    spec = DataSpec.of("file", path=write(tmp_path / "r.jsonl", [{"text": "abc"}] * 3), validation=1)
    first = load_data(spec, tokeniser, max_length=20, cache=tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    with np.load(file) as archive:
        arrays = dict(archive)
    arrays["train.tokens"] = arrays["train.tokens"] + 1
    np.savez(file, **arrays)
    again = load_data(spec, tokeniser, max_length=20, cache=tmp_path / "cache")
    assert np.array_equal(again.train.tokens, first.train.tokens)


def test_another_tokeniser_or_template_makes_other_samples(tmp_path):
    spec = DataSpec.of(
        "file",
        path=write(tmp_path / "r.jsonl", [{"prompt": "ab", "completion": "ab"}] * 2),
        validation=1,
        template="chat",
    )
    tokenisers = [
        byte_tokeniser(),
        byte_tokeniser([("a", "b")]),
        byte_tokeniser(template=CHATML.replace("user", "u")),
    ]
    tokenisers[2].chat_template = "S" + CHATML
    digests = {load_data(spec, each, max_length=99, cache=tmp_path / "c").digest for each in tokenisers}
    assert len(digests) == 3


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path, tokeniser):
    (tmp_path / "file").write_text("")
    spec = DataSpec.of("file", path=write(tmp_path / "r.jsonl", [{"text": "abc"}] * 2), validation=1)
    with pytest.raises(StorageError, match="cache folder"):
        load_data(spec, tokeniser, max_length=20, cache=tmp_path / "file" / "cache")


def test_a_generated_task_is_repeatable_scored_and_divided(tmp_path, tokeniser):
    spec = DataSpec.of(
        "reasoning_gym",
        task="chain_sum",
        size=12,
        validation=4,
        difficulty=1,
        task_options={"max_terms": 3},
        generate=True,
        max_new_tokens=7,
    )
    check_data(spec)
    data = load_data(spec, tokeniser, max_length=200, cache=tmp_path)
    again = load_data(spec, tokeniser, max_length=200, cache=tmp_path / "other")
    assert data.digest == again.digest
    assert (len(data.train), len(data.validation)) == (8, 4)
    answers = [labelled_text(data.validation[i], tokeniser).removesuffix("<|im_end|>") for i in range(4)]
    rows = data.validation.rows.tolist()
    assert score(spec, rows, [f" {answer}\n" for answer in answers]) == (1.0, 1.0, 1.0, 1.0)
    assert max(score(spec, rows, ["nothing"] * 4)) < 1.0
    assert generation_limit(spec) == 7
    assert generation_limit(DataSpec("reasoning_gym")) is None


@pytest.mark.parametrize(("seed", "status"), [("0", 0), ("random", 1)])
def test_a_task_whose_rows_depend_on_the_hash_seed_needs_a_fixed_one(seed, status):
    task = "ransom_note"
    assert task in HASH_DEPENDENT
    program = (
        "from plait.data.tasks import TaskOptions, generate_task\n"
        f"print(generate_task(TaskOptions(task={task!r}, size=5, validation=1)).digest)"
    )
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    made = [
        subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
        for _ in range(2)
    ]
    assert [done.returncode for done in made] == [status, status]
    assert made[0].stdout == made[1].stdout
    assert (b"Set PYTHONHASHSEED=0" in made[0].stderr) == bool(status)


def test_difficulty_is_the_level_of_the_tasks_curriculum(tmp_path, tokeniser):
    lengths = []
    for difficulty in (0, 3):
        spec = DataSpec.of("reasoning_gym", task="chain_sum", size=40, validation=0, difficulty=difficulty)
        lengths.append(load_data(spec, tokeniser, max_length=500, cache=tmp_path).train.lengths.mean())
    assert lengths[1] > lengths[0] + 3


def test_a_task_without_written_answers_and_too_few_rows_are_refused():
    with pytest.raises(DataError, match="has a verifier but no answers"):
        check_data(DataSpec.of("reasoning_gym", task="rubiks_cube"))
    with pytest.raises(DataError, match="5 rows, 32 of them"):
        check_data(DataSpec.of("reasoning_gym", size=5))


def test_every_task_can_be_trained_on_and_scored_or_says_why_not(monkeypatch):
    monkeypatch.setattr("plait.data.tasks.HASH_DEPENDENT", ())  # in this process, whatever its rows are
    refused, accepted = {}, 0
    for task in factory.DATASETS:
        options = TaskOptions(task=task, size=2, validation=1)
        try:
            made = generate_task(options)
        except InputError as error:
            refused[task] = error.value
            continue
        right, wrong = made.score([0, 0], [made.rows[0]["answer"], "?}{ no answer"])
        assert wrong <= right <= 1.0, task
        accepted += right == 1.0
    assert all(task in said for task, said in refused.items())
    assert len(refused) < 0.1 * len(factory.DATASETS), refused
    assert accepted > 0.9 * (
        len(factory.DATASETS) - len(refused)
    )  # a few verifiers dispute their own answers


def test_a_file_has_no_verifier():
    with pytest.raises(ConfigError, match="no verifier"):
        score(DataSpec.of("file", path="x"), [0], ["a"])


def test_generated_answers_are_options_that_do_not_change_the_samples(tmp_path, tokeniser):
    specs = [DataSpec.of("reasoning_gym", size=40, generate=generate) for generate in (False, True)]
    assert specs[0] != specs[1]
    for spec in specs:
        load_data(spec, tokeniser, max_length=2000, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert parse_options(specs[1]).generate


def test_the_summary_of_lengths():
    lengths = [3, 5, 5, 7]
    split = Split.of([Sample(np.arange(n, dtype=np.int32), np.arange(n) >= n - 2) for n in lengths])
    figures = split.summary()
    assert (figures["samples"], figures["tokens"]) == (4, 20)
    assert (figures["shortest"], figures["mean"], figures["p50"], figures["longest"]) == (3, 5, 5, 7)
    assert figures["labelled_share"] == 8 / 20
    assert Split.of([]).summary() == {"samples": 0, "tokens": 0}


def test_gsm8k_is_read_with_named_fields(tmp_path, tokeniser):
    if not GSM8K.is_file():
        pytest.skip(f"no {GSM8K.name} beside the repository")
    spec = DataSpec.of(
        "file", path=str(GSM8K), prompt_field="question", completion_field="answer", size=64, validation=0.25
    )
    check_data(spec)
    data = load_data(spec, tokeniser, max_length=3000, cache=tmp_path)
    assert (len(data.train), len(data.validation)) == (48, 16)
    assert all("#### " in labelled_text(data.train[i], tokeniser) for i in range(48))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def score(texts, rows) return 1", r"SyntaxError: .*\(faulty_scorer\.py, line 1\)"),
        ("\nx = unknown", r"NameError: name 'unknown' is not defined \(.*faulty_scorer\.py, line 2\)"),
        ("import nowhere_at_all", r"No module named 'nowhere_at_all' \(.*faulty_scorer\.py, line 1\)"),
        ("raise SystemExit(3)", r"SystemExit: 3 \(.*faulty_scorer\.py, line 1\)"),
    ],
)
def test_a_faulty_module_of_a_scorer_is_named_with_its_line(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "faulty_scorer", raising=False)
    (tmp_path / "faulty_scorer.py").write_text(code)
    with pytest.raises(ConfigError, match=said) as caught:
        named_function("faulty_scorer:score")
    assert "python -c 'import faulty_scorer'" in caught.value.remedy


def test_a_scorer_with_a_dot_for_the_colon_is_answered_with_the_colon() -> None:
    with pytest.raises(ConfigError) as caught:
        named_function("my_package.scorers.last_number")
    assert "data.scorer=my_package.scorers:last_number" in caught.value.remedy


def test_a_named_function_scores_the_answers_to_a_file_s_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_scorer.py").write_text(
        "def same(texts, rows):\n    return [text == row['completion'] for text, row in zip(texts, rows)]\n"
        "def one(texts, rows):\n    return [1.0]\n"
        "def none(texts, rows):\n    return texts[9]\n"
        "def ends(texts, rows):\n    raise SystemExit(3)\n"
        "def interrupted(texts, rows):\n    raise KeyboardInterrupt\n"
    )
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}=", "completion": f"{n}"}) + "\n" for n in range(9)))

    def spec(**options: Any) -> DataSpec:
        return DataSpec.of("file", path=str(file), validation=3, generate=True, **options)

    whole = spec(scorer="own_scorer:same", max_new_tokens=5)
    check_data(whole)
    assert generation_limit(whole) == 5
    tokeniser = byte_tokeniser()
    rows = load_data(whole, tokeniser, max_length=50, cache=tmp_path / "cache").validation.rows
    right = [str(row) for row in rows]
    assert score(whole, rows.tolist(), right) == (1.0, 1.0, 1.0)
    assert score(whole, rows.tolist(), ["no", *right[1:]]) == (0.0, 1.0, 1.0)
    for name in ("one", "none", "ends"):
        with pytest.raises(ConfigError, match="one finite number for each text"):
            score(spec(scorer=f"own_scorer:{name}"), rows.tolist(), right)
    with pytest.raises(KeyboardInterrupt):
        score(spec(scorer="own_scorer:interrupted"), rows.tolist(), right)
    for wrong, said in (
        ({}, "has no verifier"),
        ({"scorer": "own_scorer:other"}, "other"),
        ({"scorer": "nowhere:same"}, "nowhere"),
        ({"scorer": "own_scorer"}, "package.module:function"),
        (
            {"scorer": "own_scorer:__name__"},
            "'__name__' is not a function of <module 'own_scorer' from",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            check_data(spec(**wrong))


def test_samples_that_no_search_has_used_for_a_month_leave_the_cache(tmp_path: Path, tokeniser: Any) -> None:
    cache = tmp_path / "cache"

    def load(number: int) -> Path:
        before = {*cache.glob("*")}
        load_rows([{"text": "ab" * number}], tmp_path, tokeniser)
        return next(iter({*cache.glob("*")} - before), cache)

    old, used = load(1), load(2)
    others = cache / "profile.json", cache / "measured.npz"  # the second is a file of the user's own
    for file in others:
        file.touch()
    for file in (old, used, *others):
        os.utime(file, (0, 0))
    load(2)
    new = load(3)
    assert {*cache.iterdir()} == {used, new, *others}
