"""Token ids and labels equal those of TRL's SFTTrainer, whose rules are stated here again.

Read from TRL 1.16.0 (`SFTTrainer._prepare_dataset`): text and completions end with the end-of-sequence token,
conversations are the chat template's; the completion begins where the tokens of prompt and of both differ;
masks of completion and of assistant hold together; the beginning of a long sample is kept; samples without
labels are dropped. TRL shifts labels later, so that the first token's is not used; Plait's is never set.
"""

import json
from itertools import takewhile

import numpy as np
import pytest
from tokenisers import CHATML, byte_tokeniser

from plait.core.jobs import DataSpec
from plait.data.loading import load_data

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A prompt that is rendered otherwise alone than with what follows, and a token that ends every conversation.
ENDING = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'][0] }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a(think){% else %}{{ eos_token }}{% endif %}"
)
MERGES = [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("Ċ", "Ċ"), ("b", "c")]

USER = {"role": "user", "content": "what is abc ab?"}
SYSTEM = {"role": "system", "content": "be short"}
ANSWER = {"role": "assistant", "content": "abc, ünd c "}
TALK = [SYSTEM, USER, ANSWER, USER, ANSWER]
TEXTS = [{"text": "abc ab"}, {"text": "ended<|im_end|>"}, {"text": "x" * 60}]
PAIRS = [
    {"prompt": "a question\n\n", "completion": "an answer"},
    {"prompt": "x ab", "completion": "c b"},  # "abc" merges over the boundary
    {"prompt": "a", "completion": "bc"},
    {"prompt": "x", "completion": ""},
    {"prompt": "long " * 20, "completion": "lost"},
    {"prompt": "p", "completion": "long " * 20},
]
MESSAGES = [{"messages": TALK}, {"messages": TALK[:3]}, {"messages": [USER, ANSWER, USER]}]
PROMPTED = [
    {"prompt": TALK[:2], "completion": [ANSWER]},
    {"prompt": TALK[:1], "completion": [USER, ANSWER, USER, ANSWER]},
]
TOOLS = [{"messages": TALK, "tools": [{"type": "function", "function": {"name": "add"}}]}]


def conversation(messages, tokeniser, row, **options):
    tools = {"tools": row["tools"]} if "tools" in row else {}
    return tokeniser.apply_chat_template(messages, tokenize=True, return_dict=True, **tools, **options)


def trl_rules(row, tokeniser, *, assistant_only, completion_only, max_length):
    """Ids and labels of a row; None if it is dropped."""
    eos, masks = tokeniser.eos_token, []

    def ended(text):
        return text if text.endswith(eos) else text + eos

    prompt = None
    if "text" in row:
        ids = tokeniser(ended(row["text"]))["input_ids"]
    elif "messages" in row or isinstance(row["prompt"], list):
        messages = row["messages"] if "messages" in row else row["prompt"] + row["completion"]
        whole = conversation(messages, tokeniser, row, return_assistant_tokens_mask=assistant_only)
        ids = whole["input_ids"]
        if assistant_only:
            masks.append(whole["assistant_masks"])
        if "prompt" in row:
            prompt = conversation(row["prompt"], tokeniser, row, add_generation_prompt=True)["input_ids"]
    else:
        prompt = tokeniser(row["prompt"])["input_ids"]
        ids = tokeniser(row["prompt"] + ended(row["completion"]))["input_ids"]
    if prompt is not None and completion_only is not False:
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(prompt, ids, strict=False))))
        masks.append([0] * same + [1] * (len(ids) - same))
    labels = np.array([all(bits) for bits in zip(*masks, strict=True)] if masks else [True] * len(ids))
    ids, labels = ids[:max_length], labels[:max_length]
    return (ids, labels) if labels[1:].any() else None


def samples(rows, tokeniser, folder, max_length, **options):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    spec = DataSpec.of("file", path=str(path), validation=0, **options)
    split = load_data(spec, tokeniser, max_length=max_length, cache=folder / "cache").train
    return {int(split.rows[i]): split[i] for i in range(len(split))}


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("max_length", [75, 500])
@pytest.mark.parametrize(
    ("rows", "template", "options"),
    [
        pytest.param(TEXTS, CHATML, {}, id="text"),
        pytest.param(PAIRS, CHATML, {}, id="pair"),
        pytest.param(PAIRS, CHATML, {"completion_only_loss": False}, id="pair-all"),
        pytest.param(MESSAGES, CHATML, {}, id="messages"),
        pytest.param(MESSAGES, MARKED, {"assistant_only_loss": True}, id="messages-assistant"),
        pytest.param(PROMPTED, CHATML, {}, id="prompted"),
        pytest.param(PROMPTED, ENDING, {}, id="prompt-rendered-otherwise"),
        pytest.param(PROMPTED, MARKED, {"assistant_only_loss": True}, id="prompted-assistant"),
        pytest.param(PROMPTED, CHATML, {"completion_only_loss": False}, id="prompted-all"),
        pytest.param(TOOLS, ENDING, {}, id="tools"),
        pytest.param(TEXTS + PAIRS + MESSAGES + PROMPTED, CHATML, {}, id="mixed"),
    ],
)
def test_ids_and_labels_equal_trls(rows, template, options, max_length, begin, tmp_path):
    tokeniser = byte_tokeniser(MERGES, template, begin=begin)
    found = samples(rows, tokeniser, tmp_path, max_length, **options)
    for number, row in enumerate(rows):
        expected = trl_rules(
            row,
            tokeniser,
            assistant_only=options.get("assistant_only_loss", False),
            completion_only=options.get("completion_only_loss"),
            max_length=max_length,
        )
        if expected is None:
            assert number not in found
            continue
        ids, labels = expected
        assert found[number].tokens.tolist() == list(ids)
        assert found[number].labels[1:].tolist() == labels[1:].tolist()


@pytest.mark.parametrize("rows", [MESSAGES, PROMPTED, [{"messages": [ANSWER, USER, ANSWER]}]])
def test_a_template_without_marks_counts_what_it_would_with_them(rows, tmp_path):
    """TRL replaces such a template by one with marks around all that belongs to an assistant's message."""
    plain, marked = (
        samples(rows, byte_tokeniser(MERGES, template), tmp_path, 500, assistant_only_loss=True)
        for template in (CHATML, MARKED)
    )
    for number in range(len(rows)):
        assert plain[number].tokens.tolist() == marked[number].tokens.tolist()
        assert plain[number].labels.tolist() == marked[number].labels.tolist()


def test_a_token_that_ends_every_conversation_is_part_of_its_last_message(tmp_path):
    ending = CHATML.replace(
        "{% if add_generation_prompt %}", "{% if not add_generation_prompt %}E<|im_end|>{% else %}"
    )
    tokeniser = byte_tokeniser(template=ending.replace("E", ""))
    (sample,) = samples([MESSAGES[0]], tokeniser, tmp_path, 500, assistant_only_loss=True).values()
    counted = tokeniser.decode(sample.tokens[sample.labels])
    assert counted == "abc, ünd c <|im_end|>\n" * 2 + "<|im_end|>"
