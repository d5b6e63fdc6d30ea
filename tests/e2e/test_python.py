"""Searches from Python: interrupted, resumed, opened again, adapters loaded; and the notebook of docs/."""

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nbformat
import openai
import pytest
import torch
from forked import Forked
from forked_kernel import launch_kernel
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from mlflow import MlflowClient
from mlflow_server import free_port
from nbclient import NotebookClient
from safetensors.torch import load_file

import plait
from plait.cli.main import main
from plait.core.messages import Event, JobProgress
from plait.terminal.view import Terminal
from plait.utils.paths import cache_dir

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebook.ipynb"
STEPS = 6


@pytest.fixture
def press_interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has the next search interrupted, once, as its second step is shown."""

    def arm() -> None:
        handle = Terminal.handle

        def interrupted(view: Terminal, event: Event) -> None:
            handle(view, event)
            if isinstance(event, JobProgress) and event.step == 2:
                monkeypatch.setattr(Terminal, "handle", handle)
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(Terminal, "handle", interrupted)

    return arm


def test_a_search_is_interrupted_resumed_and_opened_and_its_adapters_load(
    folder: Path,
    short: Sequence[str],
    press_interrupt: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    overrides = dict(word.split("=", 1) for word in short) | {"train.steps": STEPS, "search.name": "mine"}
    overrides |= {"adapter.rank": [1, 2], "search.sampler": "grid"}
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    press_interrupt()
    with pytest.raises(plait.Interrupted, match=r"The same call resumes it; plait.open\('mine'\)") as caught:
        plait.sweep(overrides)
    partial = caught.value.result
    assert caught.value._render_traceback_() == [str(caught.value)]
    assert partial.state == "paused"
    assert list(partial.trials["state"]) == ["paused", "paused"]
    assert 0 < partial.trials["steps"].max() < STEPS
    with pytest.raises(plait.PlaitError, match=r"no finished trial\n.*\n.*`plait resume mine` resumes it"):
        _ = partial.best
    printed = capfd.readouterr()
    assert "Ctrl-C again exits" in printed.err
    assert "plait resume" in printed.out.split("resume with")[1]

    result = plait.sweep(overrides)
    assert "resumes from step" in capfd.readouterr().out
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert result.state == "finished"
    trials = result.trials
    assert sorted(trials.index) == [0, 1]
    assert list(trials["steps"]) == [STEPS, STEPS]
    assert trials["objective"].is_monotonic_increasing
    assert sorted(trials["adapter.rank"]) == [1, 2]
    assert result.best.trial == trials.index[0]
    assert f"best trial {result.best.trial}" in repr(result)

    monkeypatch.chdir("/")  # a result does not depend on the current folder
    for trial in (None, 0, 1):
        adapter = result.adapter(trial)
        assert adapter.trial == (result.best.trial if trial is None else trial)
        _check_loaded(adapter)
    _check_generated(result, folder / "plait-runs", capfd)
    _check_evaluated(folder / "plait-runs", capfd)
    again = plait.open("mine", root=folder / "plait-runs")
    assert again.trials.equals(trials)
    shutil.rmtree(folder / "plait-runs" / "searches" / "mine" / "adapters")
    fetched = again.adapter(0)
    assert fetched.folder == cache_dir() / "adapters" / trials["run_id"][0]
    _check_loaded(fetched)
    assert main(["leaderboard", "mine", "--root", str(folder / "plait-runs"), "--format", "csv"]) == 0
    assert trials.reset_index().to_csv(index=False) == capfd.readouterr().out


def _check_loaded(adapter: Any) -> None:
    """PEFT has the weights of the folder on the base model, and they act."""
    model, tokeniser = adapter.load()
    saved = load_file(f"{adapter.folder}/adapter_model.safetensors")
    held = model.state_dict()
    for name, weight in saved.items():
        assert torch.equal(held[name.replace(".weight", ".default.weight")], weight)
    tokens = tokeniser("1 + 2", return_tensors="pt")
    with torch.no_grad(), model.disable_adapter():
        bare = model(**tokens).logits
    with torch.no_grad():
        assert not torch.equal(model(**tokens).logits, bare)


def _check_generated(result: Any, root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`plait generate` shows what PEFT generates, for several trials and the base."""
    capfd.readouterr()
    prompt, count = "State the final answer to the following arithmetic problem: 4 + 3 =", 5
    words = ["generate", "mine", "--root", str(root), "--max-new-tokens", str(count), "--prompt", prompt]
    assert main([*words, "--trial", "1", "--trial", "0", "--json", "--plain", "--table"]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["trial"] for row in rows] == [None, 1, 0]
    for row in rows:
        model, tokeniser = result.adapter(row["trial"] or 0).load()
        tokens = tokeniser(prompt, return_tensors="pt")
        options = {"do_sample": False, "max_new_tokens": count}
        with torch.no_grad():
            if row["trial"] is None:
                with model.disable_adapter():
                    whole = model.generate(**tokens, **options)
            else:
                whole = model.generate(**tokens, **options)
        new = whole[0, tokens["input_ids"].shape[1] :]
        assert row["text"] == tokeniser.decode(new, skip_special_tokens=True)
        assert row["prompt"] == prompt
    more = ["--validation", "2", "--max-new-tokens", "2", "--table"]
    assert main(["generate", "mine", "--root", str(root), *more]) == 0
    shown = capfd.readouterr().out.splitlines()
    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    (run,) = client.search_runs(["1"], "tags.plait.search = 'mine' and tags.plait.direction = 'minimize'")
    assert {"path": "generated.json", "type": "table"} in json.loads(run.data.tags["mlflow.loggedArtifacts"])
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "generated.json")).read_text())
    listed = [dict(zip(table["columns"], each, strict=True)) for each in table["data"]]
    assert listed[:3] == rows
    best = result.best.trial
    shown_trials = [best, 1 - best]  # both, the best first
    assert [row["trial"] for row in listed[3:]] == [None, *shown_trials] * 2
    assert sum(line.startswith("prompt: ") for line in shown) == 2
    assert sum(line.startswith("base: ") for line in shown) == 2
    for trial in shown_trials:
        assert sum(line.startswith(f"trial {trial}: ") for line in shown) == 2
    _check_served(root, best, rows, count)


def _check_evaluated(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`plait eval` prints each adapter's results of a task of a folder, and logs them to the trials' runs."""
    pytest.importorskip("lm_eval")
    folder = root.parent / "tasks"
    folder.mkdir()
    (folder / "own_rows.py").write_text(
        "from datasets import Dataset\n"
        "def rows(**_): return {'test': Dataset.from_list([{'q': '1 + 2 =', 'c': [' 3', ' 7'], 'a': 0}] * 2)}"
    )
    (folder / "own_sums.yaml").write_text(
        "task: own_sums\ncustom_dataset: !function own_rows.rows\noutput_type: multiple_choice\n"
        "test_split: test\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{c}}'\ndoc_to_target: '{{a}}'\n"
        "metric_list: [{metric: acc}]\n"
    )
    words = ["eval", "mine", "--root", str(root), "--tasks", "own_sums", "--include", str(folder)]
    assert main([*words, "--json"]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert {row["trial"] for row in rows} == {None, 0, 1}
    logged = plait.open("mine", root=root).trials["run_id"]
    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    for row in rows:
        accuracy = row["results"]["own_sums"]["acc"]
        assert accuracy in (0.0, 1.0)
        if row["trial"] is not None:
            run = client.get_run(logged[row["trial"]])
            assert run.data.metrics["eval/own_sums/acc"] == accuracy
    assert main([*words, "--trial", "1", "--no-base"]) == 0
    shown = capfd.readouterr().out.splitlines()
    assert shown[0] == "own_sums: acc"
    assert shown[1].startswith("  trial 1 ")
    assert main(["eval", "mine", "--root", str(root), "--tasks", "own_sums", "--limit", "0"]) == 2
    assert "--limit 0" in capfd.readouterr().err


def _check_served(root: Path, best: int, rows: Sequence[Any], count: int) -> None:
    """`plait serve`, in a process of its own, gives OpenAI's client the same texts, and ends by Ctrl-C."""
    port = free_port()
    words = ["serve", "mine", "--root", str(root), "--port", str(port), "--max-new-tokens", "99"]
    process = Forked(words, root.parent, environment={"PLAIT_SERVE_KEY": "a secret"})
    try:
        process.until(f"127.0.0.1:{port}")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="a secret", max_retries=20)
        for row in rows:
            names = ["base"] if row["trial"] is None else [f"trial-{row['trial']:04d}"]
            for name in names + (["best"] if row["trial"] == best else []):
                asked: Any = {"model": name, "prompt": row["prompt"], "max_tokens": count, "temperature": 0}
                assert client.completions.create(**asked).choices[0].text == row["text"]
                pieces = client.completions.create(**asked, stream=True)
                assert "".join(piece.choices[0].text for piece in pieces) == row["text"]
        assert {"base", "best"} < {model.id for model in client.models.list()}
        _check_chat(client)
        process.signal(signal.SIGINT)
        assert process.end() in (0, 130)
    finally:
        process.kill()


def _check_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions
    asked: Any = {"messages": [{"role": "user", "content": "4 + 3 ="}], "max_tokens": 9, "seed": 3}
    whole = chat.create(model="best", **asked).choices[0].message.content
    pieces = chat.create(model="best", **asked, stream=True)
    assert whole == "".join(piece.choices[0].delta.content or "" for piece in pieces)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.list()
    with pytest.raises(openai.NotFoundError, match="'other'"):
        chat.create(model="other", **asked)
    with pytest.raises(openai.UnprocessableEntityError, match="max_tokens=100"):
        chat.create(model="best", **asked | {"max_tokens": 100})


def test_the_notebook_runs_and_plots_its_search(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setattr(LocalProvisioner, "launch_kernel", launch_kernel)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=None, startup_timeout=240, resources=place).execute()
    search, table, plot, text = (cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    said = "".join(output.text for output in search if output.output_type == "stream")
    assert "4 of 4 ended" in said
    assert table[-1].data["text/html"].count("finished") == 4
    drawn = plot[-1].data["application/vnd.plotly.v1+json"]["data"]
    result = plait.open("notebook", root=folder / "plait-runs")
    assert drawn[0]["type"] == "scatter"
    assert sorted(result.trials["adapter.rank"].unique()) == [2, 8]
    assert "2 + 3 =" in text[-1].data["text/plain"]
    assert not [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.get("outputs")]
