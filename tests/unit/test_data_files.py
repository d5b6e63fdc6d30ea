"""Files of every format: the same rows give the same samples; what cannot be read is named, and quickly."""

import csv
import gzip
import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenisers import byte_tokeniser

from plait.core.errors import ConfigError, DataError
from plait.core.jobs import DataSpec
from plait.data.loading import check_data, load_data

PAIRS = [
    {"prompt": "a,b\n", "completion": ' "c"'},
    {"prompt": "ü\u2028\r\n", "completion": "1"},
    {"prompt": "", "completion": "=x"},
]
TALKS = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a\n\nb"}]}
    for n in range(3)
]
# Functions whose fields differ: a table gives each the fields of all, as nulls (and Arrow sorts them).
CALLS = [
    {
        "messages": [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": "a",
                "tool_calls": [{"arguments": {"deep": {name: 2}, name: 1}}],
            },
        ],
        "tools": [{"function": {"name": name, "properties": {name: {"type": "integer"}}}}],
    }
    for name in ("x", "y", "z")
]
WITH_FUNCTIONS = (
    "{{ tools | tojson }}{% for m in messages %}{{ m['content'] }}{{ (m['tool_calls'] or []) | tojson }}"
    "{% endfor %}"
)
ASKED = [
    {"prompt": talk["messages"][:1], "completion": talk["messages"][1:], "chat_template_kwargs": {"a": "b"}}
    for talk in TALKS
]


@pytest.fixture(scope="module")
def tokeniser():
    return byte_tokeniser()


def as_csv(rows, delimiter=","):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0], delimiter=delimiter)
    writer.writeheader()
    cells = ({key: v if isinstance(v, str) else json.dumps(v) for key, v in row.items()} for row in rows)
    writer.writerows(cells)
    return text.getvalue().encode()


def save_all(rows, folder):
    """The rows in every format, with what ``data`` needs to find them."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    contents = {
        "r.json": json.dumps(rows, indent=1).encode(),
        "r.jsonl": lines,
        "lines.json": lines,
        "r.csv": b"\xef\xbb\xbf" + as_csv(rows),
        "r.tsv": as_csv(rows, "\t"),
    }
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "r.parquet")
    (folder / "several").mkdir()
    pq.write_table(table.slice(2), folder / "several" / "part-1.parquet")
    pq.write_table(table.slice(0, 2), folder / "several" / "part-0.parquet")
    return [*contents, "r.parquet", "several"]


@pytest.mark.parametrize("rows", [PAIRS, TALKS, CALLS, ASKED], ids=["pairs", "talks", "calls", "asked"])
def test_every_format_gives_the_same_samples(rows, tmp_path, tokeniser):
    datasets = pytest.importorskip("datasets")
    if rows is CALLS:
        tokeniser = byte_tokeniser(template=WITH_FUNCTIONS)
    names = save_all(rows, tmp_path / "rows")
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(str(tmp_path / "rows" / "saved"))
    both = datasets.DatasetDict({"train": saved, "test": saved.select([2])})
    both.save_to_disk(str(tmp_path / "rows" / "splits"))

    def digest(source="file", **options):
        spec = DataSpec.of(source, validation=0, **options)
        check_data(spec)
        return load_data(spec, tokeniser, max_length=200, cache=tmp_path / "cache").digest

    path = tmp_path / "rows"
    expected = digest(path=str(path / "r.jsonl"))
    for name in (*names, "saved", "splits"):
        assert digest(path=str(path / name)) == expected, name
    assert digest("hub", id=str(path / "several")) == expected
    (path / "unnamed").write_bytes((path / "r.parquet").read_bytes())
    assert digest(path=str(path / "unnamed"), format="parquet") == expected
    few = digest(path=str(path / "r.jsonl"), size=2)
    assert few != expected
    for name in (*names, "saved", "splits"):
        assert digest(path=str(path / name), size=2) == few, name


def test_an_empty_cell_of_a_csv_file_is_absent_where_there_is_no_text(tmp_path):
    fields = "messages,conversations,tools,chat_template_kwargs,text"
    (tmp_path / "a.csv").write_text(f"{fields}\n,,,,a\n")
    check_data(DataSpec.of("file", path=str(tmp_path / "a.csv"), validation=0))
    (tmp_path / "a.csv").write_text('prompt,completion\n"[1]","[{""a"": 2}]"\n')  # JSON, but no messages
    check_data(DataSpec.of("file", path=str(tmp_path / "a.csv"), validation=0))


def test_a_text_file_that_begins_like_a_packed_one_is_read(tmp_path):
    (tmp_path / "a.csv").write_text("BZh,text\n1,a\n")
    check_data(DataSpec.of("file", path=str(tmp_path / "a.csv"), validation=0))


def test_a_folder_may_have_a_file_state_json_and_hidden_files(tmp_path):
    (tmp_path / "state.json").write_text('{"text": "a"}')
    (tmp_path / "._state.json").write_bytes(b"\x00\xff")
    check_data(DataSpec.of("file", path=str(tmp_path), validation=0))


def test_splits_are_for_training_and_validation(tmp_path, tokeniser):
    datasets = pytest.importorskip("datasets")
    splits = {name: datasets.Dataset.from_list([{"text": name}] * 2) for name in ("train", "test", "extra")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "d"))

    def texts(**options):
        spec = DataSpec.of("file", path=str(tmp_path / "d"), **options)
        data = load_data(spec, tokeniser, max_length=99, cache=tmp_path / "cache")
        return [
            tokeniser.decode(split[0].tokens, skip_special_tokens=True)
            for split in (data.train, data.validation)
        ]

    assert texts(validation=1) == ["train", "train"]
    assert texts(split="extra", validation_split="test") == ["extra", "test"]
    with pytest.raises(
        DataError, match=r"data\.validation_split='tset'\n.*\nDid you mean test\?.*extra, test"
    ):
        texts(validation_split="tset")
    with pytest.raises(DataError, match=r"data\.split='x'\n.*has no splits"):
        check_data(DataSpec.of("file", path=str(tmp_path / "d" / "train"), split="x"))
    (tmp_path / "a.csv").write_text("text\na\n")
    with pytest.raises(DataError, match=r"data\.split='x'\n.*not saved by `datasets`"):
        check_data(DataSpec.of("file", path=str(tmp_path / "a.csv"), split="x"))


def parquet(rows=(("text", "abc"),) * 1):
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([dict([row]) for row in rows]), out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("r.xml", b"<a/>", ["unknown format", ".csv, .json", "data.format"]),
        ("r.json", b'[{"text": "a"}', ["r.json: not JSON", "line 1, column 15"]),
        ("r.json", b'[{"text": "a"}, 3]', ["element 2: int instead of an object"]),
        ("r.json", b"[]", ["r.json is empty"]),
        ("r.json", b'[{"text": "a"}, {"text": 3}]', ["r.json, element 2: text is 3"]),
        (
            "r.jsonl",
            b'{"text": "a", "x": 1, "text": "b"}',
            ["line 1: not JSON", "the field 'text' comes twice"],
        ),
        ("r.jsonl", b'{"text": {"deep": ["a"]}}', ["r.jsonl, line 1: text is {'deep': ['a']}"]),
        ("r.jsonl", b"\n  \n", ["r.jsonl is empty"]),
        ("r.jsonl", b'{"text": "a"}\n{"text": \n', ["line 2: not JSON", "value at column"]),
        ("r.jsonl", b'{"text": ' + b"1" * 10_000 + b"}", ["line 1: not JSON", "4300 digits"]),
        ("r.jsonl", b"[" * 100_000 + b"]" * 100_000, ["r.jsonl: not JSON", "recursion"]),
        ("r.jsonl", b'{"text": "a"}\n[1]\n', ["line 2: list instead of an object"]),
        ("r.jsonl", b'{"text": "a"}\n\n{"body": "a"}\n', ["line 3: fields body"]),
        ("r.jsonl", b'{"text": "\xff"}', ["r.jsonl: byte 10 is not UTF-8"]),
        ("r.csv", b"", ["r.csv is empty"]),
        ("r.csv", b"text\n", ["r.csv is empty"]),
        ("r.jsonl", gzip.compress(b'{"text": "a"}', mtime=0), ["r.jsonl: packed by gzip", "Unpack"]),
        ("r.jsonl.gz", b"", ["unknown format", "must be unpacked"]),
        ("r.jsonl", b'{"text": "a', ["Unterminated string starting at column 10"]),
        ("r.csv", b"prompt;completion\nc;d\n", ["line 1: one field", "by ',', not by ';'"]),
        ("r.tsv", b"prompt,completion\nc,d\n", ["line 1: one field", "by '\\t', not by ','"]),
        ("r.csv", b"text,text\na,b\n", ["line 1: two fields are called 'text'"]),
        ("r.csv", b"text,x\na\n", ["line 2: 1 field\n", "names 2"]),
        ("r.csv", b'text\n"a\n', ["line 2: unexpected end of data", "must be quoted"]),
        ("r.csv", b"text\n\xff\n", ["r.csv: byte 5 is not UTF-8"]),
        ("r.csv", b'messages\n"[{]"\n', ["line 2: messages is '[{]'", "list of messages"]),
        ("r.parquet", b"", ["cannot be read as Parquet"]),
        ("r.parquet", parquet()[:-9], ["cannot be read as Parquet", "incomplete"]),
        ("r.parquet", parquet().replace(b"abc", b"ab\xff"), ["cannot be read as Parquet"]),
        ("r.parquet", parquet([("text", 3)]), ["r.parquet, row 0: text is 3"]),
        ("r.parquet", parquet([("other", "x")]), ["r.parquet, row 0: fields other"]),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        check_data(DataSpec.of("file", path=str(tmp_path / name), validation=0))
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_missing_or_too_short_to_be_split_is_named(tmp_path):
    spec = DataSpec.of("file", path=str(tmp_path / "r.jsonl"))
    with pytest.raises(DataError, match=r"no such file\n.*looked for /"):
        check_data(spec)
    (tmp_path / "r.jsonl").write_text('{"text": "a"}')
    with pytest.raises(DataError, match="1 row, 1 of them for validation"):
        check_data(spec)


def test_a_path_that_is_neither_file_nor_folder_is_refused():
    with pytest.raises(DataError, match="neither a file nor a folder"):
        check_data(DataSpec.of("file", path="/dev/zero", format="csv"))


def test_a_folder_of_several_formats_is_refused(tmp_path):
    save_all(PAIRS, tmp_path / "rows")
    with pytest.raises(DataError, match=r"files of the formats csv, json, parquet, tsv\n"):
        check_data(DataSpec.of("file", path=str(tmp_path / "rows")))


def test_a_saved_folder_that_is_damaged_is_named(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(PAIRS)}).save_to_disk(str(tmp_path / "d"))
    spec = DataSpec.of("file", path=str(tmp_path / "d"), validation=0)
    check_data(spec)
    for file, content in {
        "train/data-00000-of-00001.arrow": (tmp_path / "d/train/data-00000-of-00001.arrow").read_bytes()[:60],
        "train/state.json": b"{",
        "dataset_dict.json": b"[]",
    }.items():
        (tmp_path / "d" / file).write_bytes(content)
        with pytest.raises(DataError, match=r"\nThis folder was saved by .*, but it cannot be read\.\n"):
            check_data(spec)
    shutil.rmtree(tmp_path / "d" / "train")
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(DataError):
        check_data(spec)


def test_without_the_library_only_its_own_folders_and_the_hub_need_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    save_all(PAIRS, tmp_path / "rows")
    for name in ("r.json", "r.jsonl", "r.csv", "r.parquet", "several"):
        check_data(DataSpec.of("file", path=str(tmp_path / "rows" / name)))
    (tmp_path / "saved").mkdir()
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / "saved" / name).write_text("{}")
    for spec in (DataSpec.of("file", path=str(tmp_path / "saved")), DataSpec.of("hub", id="a/b")):
        with pytest.raises(
            ConfigError, match=r"needs the library `datasets`\.\n.*pip install 'plait\[data\]'"
        ):
            check_data(spec)


def test_text_files_are_read_without_pyarrow_and_datasets(tmp_path):
    save_all(PAIRS, tmp_path / "rows")
    program = (
        "import sys\n"
        "from plait.core.jobs import DataSpec\n"
        "from plait.data.loading import check_data\n"
        "for name in ('r.json', 'r.jsonl', 'r.csv'):\n"
        f"    check_data(DataSpec.of('file', path={str(tmp_path / 'rows')!r} + '/' + name))\n"
        "print(sorted({'pyarrow', 'datasets', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_data_set_that_the_hub_does_not_give_is_named(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def away(*_, **__):
        raise ConnectionError("Couldn't reach 'a/b' on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", away)
    with pytest.raises(DataError) as caught:
        check_data(DataSpec.of("hub", id="a/b"))
    assert caught.value.value == "data.id='a/b', data.split='train': Couldn't reach 'a/b' on the Hub"
    assert "HF_TOKEN" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "size", "head", "tail"),
    [
        ("r.jsonl", 100, b'{"text": "', b'"}'),
        ("r.jsonl", 10, b'{"text": 1, "a": "', b'"}'),
        ("r.csv", 10, b'text\n"', b'"'),
        ("r.csv", 10, b"", b""),
    ],
)
def test_a_row_of_100_mb_is_refused_at_once(name, size, head, tail, tmp_path, tokeniser):
    path: Path = tmp_path / name
    path.write_bytes(head + b"a " * (size * 500_000) + tail)
    began = time.process_time()
    spec = DataSpec.of("file", path=str(path), validation=0, overlong="refuse")
    with pytest.raises(DataError) as caught:
        load_data(spec, tokeniser, max_length=100, cache=tmp_path)
    assert len(str(caught.value)) < 1000
    assert time.process_time() - began < 20
