"""lm-eval's tasks: what all adapters answer together is what lm-eval finds with PEFT, one after another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from plait.adapters.peft_folder import export_adapter
from plait.adapters.variants import attach
from plait.cli.evaluate import main as eval_command
from plait.core.errors import EXIT_FAILED_JOBS, ConfigError, InputError, StorageError
from plait.core.jobs import AdapterSpec
from plait.core.settings import ModelSettings
from plait.models.load import load_model, transformers_model
from plait.models.targets import resolve_targets
from plait.serve.engine import Engine
from plait.serve.folders import FolderAdapters
from plait.serve.requests import Request, Sampling
from plait_kernels import Bank

pytest.importorskip("lm_eval")
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from plait.serve.harness import JointModel, _metrics, evaluate, load_tasks

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k" / "test.jsonl"
RANKS = (1, 4, 9)
ROWS = """import json
from datasets import Dataset

def rows(**_):
    with open({path!r}) as file:
        return {{"test": Dataset.from_list([json.loads(line) for line in file])}}
"""
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "A long question, whose beginning all four answers share: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "num_fewshot": 2,
        "fewshot_split": "test",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "sums": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_tasks(folder: Path, tasks: Mapping[str, Any], rows: Path) -> Path:
    """A folder of tasks over the rows of a file."""
    folder.mkdir()
    (folder / "own_rows.py").write_text(ROWS.format(path=str(rows)))
    for name, own in tasks.items():
        known = {"task": name, "test_split": "test", **own}
        lines = [f"{key}: {json.dumps(value)}" for key, value in known.items()]
        (folder / f"{name}.yaml").write_text("\n".join([*lines, "custom_dataset: !function own_rows.rows"]))
    return folder


class Laboratory:
    """A tiny Llama in float32 with adapters in folders, and rows of a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = ModelSettings(kind="tiny", family="llama", dtype="float32", seed=2)
        self.base = load_model(self.settings, cache=folder)
        bank = Bank(self.base.sites, device="cpu", compute_dtype=torch.float32)
        self.folders = {}
        for rank in RANKS:
            spec = AdapterSpec(rank, target_modules="all-linear")
            sites = resolve_targets(spec.target_modules, self.base.linears)
            attach(bank, f"rank{rank}", spec, sites, seed=rank, weight_of=self.base.frozen_weight)
            weights = bank.weights(f"rank{rank}")
            for _, b in weights.values():
                b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(rank)) * 0.3)
            self.folders[f"rank{rank}"] = folder / f"rank{rank}"
            export_adapter(folder / f"rank{rank}", spec, weights, base="tiny", linears=self.base.linears)
        rows = [
            {
                "question": f"What is {number} plus {number * 7 % 5}?",
                "choices": [str(number), "a longer answer, 12", "seven", "it is " + "so " * (number % 4)],
                "answer": number % 4,
                "text": "one two three " * (1 + 40 * (number == 1)) + str(number),
            }
            for number in range(4)
        ]
        file = folder / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        self.tasks = write_tasks(folder / "tasks", TASKS, file)

    def engine(self) -> Engine:
        return Engine(self.base, FolderAdapters(self.base, self.folders), pool_tokens=4096)

    def pefts(self) -> dict[str | None, Any]:
        """lm-eval's own results, with PEFT's model."""
        model: Any = transformers_model(self.settings, cache=self.folder)
        found: dict[str | None, Any] = {}
        for name, folder in [(None, None), *self.folders.items()]:
            if folder is not None:
                plain = model.unload() if isinstance(model, PeftModel) else model
                model = PeftModel.from_pretrained(plain, folder)
            own = HFLM(pretrained=model.eval(), tokenizer=self.base.tokeniser, batch_size=3)
            manager = TaskManager(include_path=str(self.tasks), include_defaults=False)
            found[name] = simple_evaluate(own, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
        return found


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("harness"))


def likelihoods(samples: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [answer for sample in samples for answers in sample["resps"] for answer in answers]


def test_joint_answers_and_results_are_those_of_lm_eval_with_peft(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)  # it runs commands for seconds
    tasks = load_tasks(list(TASKS), laboratory.tasks, shots=None, limit=None, chat=False)
    names: list[str | None] = [None, *laboratory.folders]
    model = JointModel(laboratory.base, laboratory.engine(), names)
    joint = dict(evaluate(laboratory.base, laboratory.engine(), tasks, names))
    for name, alone in laboratory.pefts().items():
        model.adapter = name
        own = joint[name]
        assert isinstance(own, dict)
        for task, metrics in own.items():
            for metric, value in metrics.items():
                if "_stderr" not in metric:
                    assert value == pytest.approx(alone["results"][task][f"{metric},none"], rel=1e-4)
        for task in ("choices", "texts"):
            requests = [each for sample in alone["samples"][task] for each in requests_of(sample)]
            ask = model.loglikelihood if task == "choices" else model.loglikelihood_rolling
            added = 0.0 if task == "choices" else 3e-7  # lm-eval adds a text's hundreds of tokens in float32
            for found, expected in zip(ask(requests), likelihoods(alone["samples"][task]), strict=True):
                assert found == pytest.approx(expected, abs=1e-4, rel=added)
        texts = [each for sample in alone["samples"]["sums"] for each in requests_of(sample)]
        assert model.generate_until(texts) == likelihoods(alone["samples"]["sums"])
        assert any(model.generate_until(texts))


class Asked:
    """A request as lm-eval gives it to a model."""

    def __init__(self, arguments: Any) -> None:
        self.args = arguments


def requests_of(sample: Mapping[str, Any]) -> list[Asked]:
    return [Asked(arguments) for arguments in sample["arguments"]]


def test_all_adapters_are_asked_at_once_and_a_shared_beginning_is_run_once(laboratory: Laboratory) -> None:
    engine, rows = laboratory.engine(), []
    hidden = engine._hidden

    def watched(batch: Any) -> Any:
        rows.append(sum(len(each.rows) for each in batch))
        return hidden(batch)

    engine._hidden = watched  # type: ignore[method-assign]
    names = list(laboratory.folders)
    model = JointModel(laboratory.base, engine, names)
    beginning = "a beginning that all continuations share " * 8
    asked = [Asked((beginning, f" and {end}")) for end in ("one", "two", "three", "four")]
    answers = []
    for name in names:
        model.adapter = name
        answers.append(model.loglikelihood(asked))
    begun = len(model.tok_encode(beginning)) // engine.page_tokens * engine.page_tokens
    whole = sum(len(model.tok_encode("".join(each.args))) - 1 for each in asked)
    assert sum(rows) == len(names) * (whole - 3 * (begun - (begun == len(model.tok_encode(beginning)))))
    assert len({str(each) for each in answers}) == len(names)


def test_an_adapter_that_is_not_finite_or_unreadable_has_no_results_and_changes_no_other(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    base, name = laboratory.base, "rank4"
    tasks = load_tasks(["choices"], laboratory.tasks, shots=0, limit=2, chat=True)
    whole = dict(evaluate(base, laboratory.engine(), tasks, list(laboratory.folders)))
    spec = AdapterSpec(4, target_modules="all-linear")
    bank = Bank(base.sites, device="cpu", compute_dtype=torch.float32)
    sites = resolve_targets(spec.target_modules, base.linears)
    attach(bank, name, spec, sites, seed=4, weight_of=base.frozen_weight)
    for _, b in bank.weights(name).values():
        b.fill_(float("nan"))
    export_adapter(tmp_path / name, spec, bank.weights(name), base="tiny", linears=base.linears)
    adapters = FolderAdapters(base, {**laboratory.folders, name: tmp_path / name})
    for fault in ("rank4: its logits are not finite", "rank4 has changed"):
        engine = Engine(base, adapters, pool_tokens=4096)
        found = dict(evaluate(base, engine, tasks, list(laboratory.folders)))
        assert isinstance(found[name], InputError)
        assert fault in str(found[name])
        assert found == {**whole, name: found[name]}
        assert engine.idle
        (tmp_path / name / "adapter_model.safetensors").write_bytes(b"cut off")


@pytest.mark.parametrize("name", ["no_such_task", "no.yaml"])
def test_an_unknown_task_is_refused(
    laboratory: Laboratory, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_defaults(include_path: str, **_: Any) -> TaskManager:  # lm-eval's own take ten seconds
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("plait.serve.harness.TaskManager", without_defaults)
    with pytest.raises(ConfigError, match=name):
        load_tasks(["choices", name], laboratory.tasks, shots=None, limit=None, chat=False)
    with pytest.raises(ConfigError, match=r"choises\n.*Did you mean choices\?"):
        load_tasks(["choises"], laboratory.tasks, shots=None, limit=None, chat=False)


def test_a_file_is_a_task(laboratory: Laboratory) -> None:
    file = str(laboratory.tasks / "choices.yaml")
    named = load_tasks(["choices"], laboratory.tasks, shots=None, limit=None, chat=False)
    given = load_tasks([file], laboratory.tasks, shots=None, limit=None, chat=False)
    assert list(given.loaded["tasks"]) == list(named.loaded["tasks"]) == ["choices"]
    found = [dict(evaluate(laboratory.base, laboratory.engine(), each, ["rank9"])) for each in (named, given)]
    assert found[0] == found[1]


def test_data_out_of_reach_is_told_from_an_unknown_task(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreached(*_: Any) -> Any:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(TaskManager, "load", unreached)
    with pytest.raises(ConfigError, match="Couldn't reach 'openai/gsm8k'") as raised:
        load_tasks(["choices"], laboratory.tasks, shots=None, limit=None, chat=False)
    assert "Reading the tasks' rows; without a network" in capsys.readouterr().err
    assert "its data is not on this machine and could not be fetched" in raised.value.rule
    assert "lm-eval ls tasks" not in str(raised.value)


def test_a_task_whose_own_file_is_missing_is_not_blamed_on_the_network(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks", {"sums": TASKS["sums"]}, tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match=r"No such file or directory: .*rows.jsonl") as raised:
        load_tasks(["sums"], tasks, shots=None, limit=None, chat=False)
    assert "its rows must have the fields that the task uses" in raised.value.rule
    assert "network" not in str(raised.value)


def test_options_that_would_change_the_text_and_are_not_supported_are_refused(laboratory: Laboratory) -> None:
    model = JointModel(laboratory.base, laboratory.engine(), [None])
    with pytest.raises(ConfigError, match="num_beams"):
        model.generate_until([Asked(("a", {"num_beams": 4}))])
    model.generate_until([Asked(("a", {"max_gen_toks": 1, "top_k": 3}))])  # greedy: of no effect
    with pytest.raises(ConfigError, match="top_k"):
        model.generate_until([Asked(("a", {"do_sample": True, "temperature": 1.0, "top_k": 3}))])


def test_sampling_without_a_temperature_and_too_long_answers_are_refused(laboratory: Laboratory) -> None:
    model = JointModel(laboratory.base, laboratory.engine(), [None], 64)
    with pytest.raises(ConfigError, match="do_sample without temperature"):
        model.generate_until([Asked(("a", {"do_sample": True, "max_gen_toks": 1}))])
    with pytest.raises(ConfigError, match=r"max_gen_toks=64\n.*at most 64 tokens"):
        model.generate_until([Asked(("a", {"max_gen_toks": 64}))])


def test_cut_prompts_are_counted(laboratory: Laboratory, capfd: pytest.CaptureFixture[str]) -> None:
    model = JointModel(laboratory.base, laboratory.engine(), ["rank1", None], 64)
    options = {"max_gen_toks": 60}
    long = "so " * 40 + "abcd"
    kept = tuple(model.tok_encode(long))[-4:]
    (text, _) = model.generate_until([Asked((long, options)), Asked(("a", options))])
    assert "1 of 2 prompts lose their beginning: with the answer, a prompt may have 64 tokens" in (
        capfd.readouterr().err
    )
    assert text == model._engine.complete([Request(kept, "rank1", Sampling(60))])[0].text
    model.loglikelihood([Asked(("a", " b")), Asked((long, " b")), Asked((long, " c"))])
    assert "2 of 3 prompts lose" in capfd.readouterr().err
    model.loglikelihood([Asked(("a", " b"))])
    assert not capfd.readouterr().err


def test_messages_that_the_template_refuses_are_a_fault_of_the_task(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Gemma 2's refuses a system's message."""
    tasks = load_tasks(["choices"], laboratory.tasks, shots=0, limit=1, chat=True)
    monkeypatch.setattr(laboratory.base.tokeniser, "chat_template", "{{ raise_exception('no system') }}")
    with pytest.raises(ConfigError, match=r"--chat: messages: no system\nThe chat template refuses them"):
        list(evaluate(laboratory.base, laboratory.engine(), tasks, [None]))


@pytest.mark.parametrize("texts", [("a question", ""), ("", "")])
def test_an_empty_answer_is_refused(laboratory: Laboratory, texts: tuple[str, str]) -> None:
    model = JointModel(laboratory.base, laboratory.engine(), [None])
    with pytest.raises(ConfigError, match=r"the answer '' after .* has no tokens"):
        model.loglikelihood([Asked(("a", " b")), Asked(texts)])


def test_only_what_lm_eval_refuses_is_a_fault_of_the_task(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(shots: int) -> None:
        tasks = load_tasks(["choices"], laboratory.tasks, shots=shots, limit=1, chat=False)
        list(evaluate(laboratory.base, laboratory.engine(), tasks, [None]))

    with pytest.raises(ConfigError, match="lm-eval refuses"):
        run(100)
    monkeypatch.setattr("plait.serve.engine.needed_tokens", lambda *_: int("a bug"))
    with pytest.raises(ValueError, match="a bug") as caught:
        run(0)
    assert not isinstance(caught.value, ConfigError)


def test_metrics_are_real_and_finite_and_others_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    values = {
        "alias": "x",
        "acc,none": np.float32(0.5),
        "acc_stderr,none": "N/A",
        "f1,strict": float("nan"),
        "bleu,none": [1],
    }
    assert _metrics("rank1: t", values) == {"acc": 0.5}
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(" is left out")[0] for line in lines] == [
        "rank1: t: f1/strict",
        "rank1: t: bleu",
    ]


def test_results_are_shown_though_the_store_fails_and_the_limit_of_training_is_lifted(
    laboratory: Laboratory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    unreadable = tmp_path / "unreadable"
    copytree(laboratory.folders["rank1"], unreadable)
    (unreadable / "adapter_model.safetensors").write_bytes(b"cut off")
    folders = {**laboratory.folders, "unreadable": unreadable}
    names = [*folders, "unfetched"]
    records = [SimpleNamespace(name=name, trial=trial, state="finished") for trial, name in enumerate(names)]
    search = SimpleNamespace(name="mine", records=records)
    logged = []

    def record(_: Any, __: Any, record: Any, values: Mapping[str, float]) -> None:
        if record.trial == 0:
            raise StorageError("the store is down")
        logged.append((record.trial, list(values)))

    def load(model: ModelSettings, folders: Mapping[str, Path], **_: Any) -> Any:
        base = load_model(model, cache=laboratory.folder)
        assert base.max_length == laboratory.base.max_length
        return base, FolderAdapters(base, folders)

    def fetch(_: Any, one: Any, __: Any) -> Path:
        if one.name == "unfetched":
            raise StorageError("the store has no file")
        return folders[one.name]

    monkeypatch.setattr("plait.tracking.results.load_search", lambda *_: search)
    monkeypatch.setattr("plait.tracking.results.record_values", record)
    monkeypatch.setattr("plait.tracking.trained.adapter_folder", fetch)
    limited = replace(laboratory.settings, max_length=16)
    monkeypatch.setattr("plait.tracking.trained.base_model", lambda *_: limited)
    monkeypatch.setattr("plait.cli.evaluate.load_base", load)
    monkeypatch.setattr("plait.tracking.trained.recorded_config", lambda *_: {})
    words = ["mine", "--tasks", " choices, ", "--include", str(laboratory.tasks), "--no-base", "--limit", "1"]
    assert eval_command(words) == EXIT_FAILED_JOBS
    shown = capfd.readouterr()
    assert [line.split()[1] for line in shown.out.splitlines() if line.startswith("  trial")] == [
        "0",
        "1",
        "2",
    ] * 2
    assert "trial 0: its results are not in the store: the store is down" in shown.err
    assert f"unreadable: {unreadable}" in shown.err
    assert "unfetched: the store has no file" in shown.err
    assert "lose their beginning" not in shown.err
    with pytest.raises(StorageError, match="unreadable"):
        eval_command([*words, "--trial", "3"])
    assert logged == [(trial, ["eval/choices/acc", "eval/choices/acc_norm"]) for trial in (1, 2)]


@pytest.mark.skipif(not GSM8K.exists(), reason=f"needs {GSM8K}")
def test_gsm8k_from_its_file(laboratory: Laboratory, tmp_path: Path) -> None:
    sums = {
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["Question:"], "max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match"}],
        "filter_list": [
            {
                "name": "strict",
                "filter": [{"function": "regex", "regex_pattern": "#### (\\d+)"}, {"function": "take_first"}],
            }
        ],
    }
    folder = write_tasks(tmp_path / "tasks", {"own_gsm8k": sums}, GSM8K)
    tasks = load_tasks(["own_gsm8k"], folder, shots=1, limit=2, chat=False)
    ((_, found),) = evaluate(laboratory.base, laboratory.engine(), tasks, ["rank9"])
    assert isinstance(found, dict)
    assert found["own_gsm8k"]["exact_match/strict"] == 0.0
