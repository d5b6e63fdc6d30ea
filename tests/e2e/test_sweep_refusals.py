"""Bad input ends with status 2, value, rule and remedy, before the model loads."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from studies import space_of, study_of

from plait.cli.main import main
from plait.core.settings import SearchSettings
from plait.search import checks
from plait.search.storage import open_storage
from plait.utils.paths import search_folder

# Keys that are wrong by what the data says.
READS_DATA = {"planner.memory_share", "engine.capacity", "data.task", "train.epochs"}
Short = tuple[str, ...]


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["adapter.target_modules='.*(q_proj|lm_head)'"],
            ["lm_head", "inside the decoder layers", "all-linear"],
        ),
        (["adapter.target_modules=[nothing],[q_proj]"], ["nothing", "q_proj"]),
        (["adapter.rank=1,2", "planner.memory_share=1e-9"], ["one job needs", "planner.memory_share"]),
        (["adapter.rank=1,2", "engine.capacity=16"], ["engine.capacity"]),
        (["adapter.rank=1,2", "data.task=no_such_task"], ["no_such_task"]),
        (["train.batch_size=1,0"], ["train.batch_size=0", "at least 1"]),
        (["train.lr=interval(-1,1)"], ["train.lr=-1", "above 0"]),
        (
            ["adapter.rank=1,2", "search.storage=postgresql://u:secret@127.0.0.1:1/x"],
            ["search.storage", "***"],
        ),
        (["adapter.rank=1,2", "tracking.uri=http://127.0.0.1:1"], ["tracking.uri"]),
        (["adapter.rank=1,2", "tracking.root=file/runs"], ["tracking.root", "file/runs"]),
        (["adapter.rank=1,2", "hydra.sweep.dir=file/sweep"], ["file/sweep", "hydra.sweep.dir"]),
        (["adapter.rank=1,2", "cluster=h100_llama31_8b"], ["h100_llama31_8b", "plait plan"]),
        (["adapter.rank=1,2", "cluster.pipeline=2"], ["cluster.pipeline=2", "cluster.processes=1"]),
        (
            ["adapter.rank=1,2", "cluster.processes=2", "cluster.pipeline=2", "cluster.optimiser=sharded"],
            ["cluster.optimiser=sharded", "stages"],
        ),
        (
            ["adapter.rank=1,2", "cluster.processes=2", "cluster.redeploy=true", "cluster.optimiser=sharded"],
            ["cluster.optimiser=sharded", "cluster.redeploy=true"],
        ),
        (
            ["adapter.rank=1,2", "cluster.processes=2", "cluster.redeploy=true", "data.generate=true"],
            ["data.generate=true", "cluster.redeploy=true"],
        ),
        (
            ["adapter.rank=1,2", "cluster.processes=2", "cluster.deployment=[1,2]"],
            ["cluster.deployment=[1,2]", "cluster.processes=2"],
        ),
        (
            ["adapter.rank=1,2", "cluster.processes=2", "cluster.pipeline=2", "cluster.shard_base=true"],
            ["cluster.shard_base=true with cluster.pipeline=2", "no stages and no slices"],
        ),
        (
            [
                "cluster.processes=2",
                "cluster.tensor=2",
                "model.family=gpt2",
                "adapter.target_modules=all-linear",
            ],
            ["cluster.tensor", "gpt2", "cluster.pipeline"],
        ),
        (
            ["adapter.rank=1,2", "cluster.processes=2", "cluster.pipeline=2", "cluster.layer_split=[4]"],
            ["cluster.layer_split=[4]", "each stage"],
        ),
        (
            ["adapter.rank=1,2", "cluster.processes=2", "cluster.pipeline=2", "cluster.layer_split=[4,4]"],
            ["cluster.layer_split=[4,4] with cluster.pipeline=2", "all 4 layers"],
        ),
        (
            ["adapter.rank=1,2", "cluster.processes=2", "cluster.pipeline=2", "data.generate=true"],
            ["data.generate=true with cluster.pipeline=2"],
        ),
        (["adapter.rank=1,2", "engine.schedule=gpipe"], ["engine.schedule=gpipe", "replicas of one process"]),
        (["adapter.rank=1,2", "engine.schedule=best"], ["engine.schedule='best'", "gpipe"]),
        (["adapter.rank=1,2", "engine.device=cuda"], ["engine.device=cuda"]),
        (
            ["adapter.rank=1,2", "engine.kernels=triton"],
            ["engine.kernels=triton", "auto, grouped, reference"],
        ),
        (["adapter.rank=1,2", "engine.kernels=fast"], ["engine.kernels=fast", "auto, grouped, reference"]),
        (["adapter.rank=1,2", "adapter.variant=lorra"], ["adapter.variant=lorra", "Did you mean lora"]),
        (["adapter.rank=1,2", "+search.sampler_options.n_startups=3"], ["n_startups", "does not take them"]),
        (
            ["adapter.rank=1,2", "+search.sampler_options.n_startup_trials=few"],
            ["n_startup_trials", "does not take them"],
        ),
        (
            ["adapter.rank=1,2", "search/stopping=optuna", "search.stopping.pruner=Median"],
            ["search.stopping.pruner", "MedianPruner"],
        ),
        (["adapter.rank=1,2", "search.stopping.rungs=[2]"], ["search.stopping.rungs=[2]", "kind=none"]),
        (["adapter.rank=1,2", "search.enqueue=[{adapter.rank: 3}]"], ["search.enqueue[0]: adapter.rank=3"]),
        (["adapter.rank=1,2", "search.name=' '"], ["search.name=' '", "must be more than blanks"]),
        (["adapter.rank=1,2", "search.prior=none"], ["search.prior=none", "There is no other study"]),
        (
            ["adapter.rank=1,2", "search.storage=mysq://host/db"],
            ["search.storage=mysq://host/db", "not installed"],
        ),
        (["adapter.rank=1,2", "search.storage=file/study.db"], ["search.storage", "file/study.db"]),
        (
            ["adapter.rank=1,2", "search/stopping=median", "search.stopping.rungs=[9]"],
            ["search.stopping.rungs=9 with a budget of 3 steps"],
        ),
        (
            [
                "adapter.rank=1,2",
                "search/stopping=median",
                "search.stopping.rungs=[500]",
                "train.epochs=1",
                "train.steps=null",
            ],
            ["search.stopping.rungs=500 with a budget of"],
        ),
    ],
    ids=lambda value: value[-1].split("=")[0] + value[0][-8:] if value[0].count("=") else None,
)
def test_bad_input_is_refused_before_the_model_loads(
    arguments: list[str],
    said: list[str],
    folder: Path,
    short: Short,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "engine.device=cuda" in arguments or "engine.kernels=triton" in arguments:
        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device here")
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (folder / "file").write_text("")
    before = {path for path in folder.rglob("*") if "mlflow" not in path.name}
    if not READS_DATA & {argument.partition("=")[0] for argument in arguments}:
        monkeypatch.setattr(checks, "open_data", lambda *_, **__: pytest.fail("data was tokenised"))
    assert main(["sweep", *short, *arguments]) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert "secret" not in err
    for words in said:
        assert words in err
    for line in err.partition("plait: ")[2].splitlines()[1:]:  # rule and remedy are sentences
        assert re.match(r" +([^a-z]|[a-z_]+\.[a-z_]+)", line), line
    if "target_modules" in arguments[0]:
        assert "Opening" not in out, "what the model's configuration shows to be wrong needs no store"
    assert {path for path in folder.rglob("*") if "mlflow" not in path.name} == before
    assert main(["resume"]) == 0
    assert "There are no unfinished searches in" in capsys.readouterr().out


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("", "empty"),
        ('{"text": "a"}\nnot json\n', "line 2"),
        ('{"text": "a"}\n{"other": "b"}\n', "line 2"),
        ('{"text": "' + "long " * 400 + '"}\n{"text": "b"}\n', "tokens"),
    ],
    ids=["missing", "empty", "no JSON", "no fields", "too long"],
)
def test_a_faulty_file_is_refused_before_the_model_loads(
    content: str | None, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (folder / "rows.jsonl").write_text(content)
    arguments = [
        "data=jsonl",
        "data.path=rows.jsonl",
        "data.validation=1",
        "data.overlong=refuse",
        "adapter.rank=1,2",
    ]
    assert main(["sweep", "model=tiny", *arguments]) == 2
    assert said in capsys.readouterr().err


def refused_early(*commands: tuple[Path, Sequence[str]]) -> list[str]:
    """The errors of commands, each in its folder, that are refused before large libraries are imported.

    One process runs them all, since a start takes most of the time: none may have imported one.
    """
    program = (
        "import os, sys; from plait.cli.main import main\n"
        f"for folder, words in {[(str(folder), list(words)) for folder, words in commands]!r}:\n"
        "    os.chdir(folder); status = main(words); print(end='\\0', file=sys.stderr, flush=True)\n"
        "    print(status, {'mlflow', 'torch', 'transformers', 'pandas'} & set(sys.modules), *words)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ends = [line for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert ends == [f"2 set() {' '.join(words)}" for _, words in commands]
    return done.stderr.split("\0")[:-1]


def test_what_settings_and_files_show_is_refused_before_large_libraries_are_imported(folder: Path) -> None:
    cases = [
        ("data=file", "data.path=none.jsonl", "no such file"),
        ("model=hf", "model.id=empty", "must contain config.json"),
        ("model.family=lama", "must be one of cohere"),
        ("model=gguf", "model.path=none.gguf", "path of an existing file"),
        ("tracking.root=file/runs", "tracking.root"),
        ("search.metric=eval/accuracy", "search.direction=maximize", "data.generate=true"),
    ]
    (folder / "file").write_text("")
    (folder / "empty").mkdir()
    commands = [(folder, ("sweep", "model=tiny", *arguments)) for *arguments, _ in cases]
    plan = ("plan", "data=file", "data.path=none.jsonl")
    errors = refused_early(*commands, (folder, plan))
    for said, error in zip([said for *_, said in cases] + ["no such file"], errors, strict=True):
        assert said in error
    assert [path.name for path in (folder / "plait-runs").iterdir()] == ["mlflow.db"], "nothing is left"


def test_what_the_study_shows_is_refused_before_large_libraries_are_imported(
    finished_search: tuple[Path, list[str]], folder: Path, short: Short
) -> None:
    root = folder / "plait-runs"
    trials = study_of(
        space_of("adapter.rank=1,2"),
        SearchSettings(name="mine"),
        open_storage(None, root),
        folder=lambda name: search_folder(root, name),
    )
    trials.ask()
    command = ["sweep", *short, "adapter.rank=1,2", "search.name=mine", "search.fresh=true"]
    finished, began = finished_search
    taken, changed = refused_early((folder, command), (finished, [*began, "train.lr=1e-3"]))
    trials.close()
    assert "is being trained by another process" in taken
    assert "train.lr: was" in changed


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("adapter.dropout=0.5", "adapter.dropout: was 0.0, now 0.5"),
        ("model.quantise=nf4", "model.quantise: was none, now nf4"),
    ],
)
def test_a_study_of_another_search_is_refused(
    argument: str,
    said: str,
    finished_search: tuple[Path, list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, command = finished_search
    monkeypatch.chdir(folder)
    assert main([*command, argument]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("no_model")
def test_a_file_that_changed_under_a_search_is_refused_with_both_digests(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = '{"prompt": "1+1=", "completion": "2"}\n{"prompt": "2+2=", "completion": "4"}\n'
    (folder / "train.jsonl").write_text(rows)
    command = [
        "sweep", "model=tiny", "data=jsonl", "data.path=train.jsonl", "data.validation=0", "adapter.rank=1,2",
        "search.metric=train/loss", "search.name=mine", "engine.threads=1",
    ]  # fmt: skip
    with pytest.raises(AssertionError, match="the model was loaded"):
        main(command)
    (folder / "train.jsonl").write_text(rows.replace("4", "5"))
    capsys.readouterr()
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "search.name=mine: it was started with other data" in err
    assert "The content changed of train.jsonl with 2 rows to train on, 0 for validation." in err
    (folder / "train.jsonl").write_text(rows + rows.splitlines()[0])
    assert main(command) == 2
    changed = (
        "It was train.jsonl with 2 rows to train on, 0 for validation; now it is train.jsonl with 3 rows"
    )
    assert changed in capsys.readouterr().err
    assert main(["resume", "mine"]) == 2
    assert "it was started with other data" in capsys.readouterr().err
    (folder / "train.jsonl").write_text(rows)
    monkeypatch.chdir(folder.parent)
    with pytest.raises(AssertionError, match="the model was loaded"):
        main(["resume", "mine", f"tracking.root={folder / 'plait-runs'}", "engine.threads=2"])
    assert main(["resume", "mine", f"tracking.root={folder / 'plait-runs'}", "train.lr=1e-5"]) == 2
    assert "train.lr: was 0.0002, now 1e-05" in capsys.readouterr().err
