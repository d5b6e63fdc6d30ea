"""`plait plan` through the command: the arguments of a search, nothing trained, nothing left behind."""

import json
from pathlib import Path
from typing import Any

import pytest

from plait.cli.main import main
from plait.cost.profiles import cluster_profile
from plait.cost.time import MicrobatchShape
from plait.planning import model_memory
from plait.utils.paths import conf_dir

Short = tuple[str, ...]
SEARCH = ("adapter.rank=1,2,3", "search.sampler=grid", "search.trials=3")


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in which loading a model's weights is an error."""

    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("plait.models.load.load_model", loaded)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_a_plan_for_this_machine(empty: Path, short: Short, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *short, *SEARCH)
    (group,) = found["groups"]
    assert group["jobs"] == ["trial-0000", "trial-0001", "trial-0002"]
    assert group["steps"] == 9
    assert group["microbatches"] == 3
    assert found["microbatches_alone"] == 9
    assert found["predicted_seconds"] is None
    assert found["device_seconds"] is None
    assert found["replicas"][0]["predicted_bytes"] == group["predicted_bytes"] > 0
    assert found["replicas"][0]["bytes_source"] == "estimated from the model's shape"
    assert list(empty.iterdir()) == []


def test_jobs_that_may_not_train_together_make_waves(
    short: Short, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, *short, *SEARCH, "planner.max_jobs=2")
    assert [(group["wave"], len(group["jobs"])) for group in found["groups"]] == [(1, 2), (2, 1)]


def test_the_capacity_is_that_of_the_search_whatever_is_suggested(
    short: Short, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search chooses it for all ranks that may come, and so does its plan."""

    def by_rank(*given: Any, **_: object) -> int:
        return 60 * max(adapter.rank for adapter, *_ in given[3])

    monkeypatch.setattr("plait.engine.build.choose_capacity", by_rank)
    one = ("search.trials=1", "search.enqueue=[{adapter.rank: 1}]")
    found = planned(capsys, *short, "adapter.rank=1,32", *one)
    assert found["replicas"][0]["capacity"] == 60 * 32


def test_stages_get_fewer_layers_where_memory_requires_it(
    short: Short, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a little less memory than balanced stages need, others are planned; with far less, none."""
    monkeypatch.setattr("plait.engine.devices.device_bytes", lambda _: 2 * 2**30)  # of two processes
    task = [each for each in short if not each.startswith("train.batch_size")]
    two = (*task, "train.batch_size=16", "engine.capacity=128", "cluster.processes=2", "cluster.pipeline=2")
    one = ("adapter.rank=2", "search.trials=1")
    balanced = planned(capsys, *two, *one)["replicas"][0]
    assert balanced["layer_split"] == [2, 2]
    less = f"planner.memory_share={0.95 * balanced['predicted_bytes'] / 2**30:.3e}"
    for deployment in ((), ("cluster.deployment=auto",)):
        stages = two if not deployment else (*two[:-1], *deployment, "engine.schedule=1f1b")
        limited = planned(capsys, *stages, *one, less)["replicas"][0]
        assert limited["layer_split"] == [1, 3]
        assert limited["predicted_bytes"] <= 0.95 * balanced["predicted_bytes"]
    assert main(["plan", *two, *one, less]) == 0
    shown = capsys.readouterr()
    assert "The stages have cluster.layer_split=[1,3] layers by their memory" in shown.err
    needed = balanced["predicted_bytes"] / 2**30
    assert f"would need {needed:.2f} GiB of the {0.95 * needed:.2f} GiB that may be used" in shown.err
    few = f"planner.memory_share={0.5 * balanced['predicted_bytes'] / 2**30:.3e}"
    assert main(["plan", *two, *one, few]) == 2
    said = capsys.readouterr().err
    assert "stage 1 of 2 needs about 0.01 GiB for its 2 layers" in said
    assert "of 1.00 GiB" in said
    assert "more stages" in said


@pytest.mark.slow
def test_each_described_cluster(
    short: Short, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What microbatches of a model take is observed of the first model alone, which takes seconds."""
    observed, kept = model_memory._observed, list[Any]()

    def observe_first(*given: Any) -> Any:
        kept.extend([] if kept else [observed(*given)])
        return kept[0]

    monkeypatch.setattr(model_memory, "_observed", observe_first)
    names = {path.stem for path in (conf_dir() / "cluster").glob("*.yaml")} - {"local"}
    assert len(names) >= 4
    for name in sorted(names, key=lambda each: (each != "h100_llama31_8b", each)):  # other tests use this one
        found = planned(capsys, *short, *SEARCH, f"cluster={name}")
        assert found["cluster"] == name
        assert 0 < found["device_seconds"] <= found["device_seconds_alone"]
        assert sum(group["steps"] for group in found["groups"]) == 9
        assert all(replica["predicted_bytes"] > 2**30 for replica in found["replicas"])
        assert all(group["predicted_bytes"] > 2**30 for group in found["groups"])
        assert len(found["simulated"]) == 1


def test_seconds_are_those_of_the_profile(short: Short, capsys: pytest.CaptureFixture[str]) -> None:
    """One device and one job whose every step is one microbatch: steps × its seconds, within its sizes."""
    import yaml

    options = yaml.safe_load((conf_dir() / "cluster/h100_llama31_8b.yaml").read_text())["options"]
    time = cluster_profile(options).time
    found = planned(capsys, *short, "adapter.rank=1", "cluster=h100_llama31_8b", "search.trials=1")
    least = time.microbatch(MicrobatchShape.of([2, 2], labelled=1))
    most = time.microbatch(MicrobatchShape.of([256, 256]))
    assert 3 * least < found["predicted_seconds"] < 3 * most
    assert found["predicted_seconds"] == pytest.approx(found["device_seconds"])
    assert found["device_seconds"] == pytest.approx(found["device_seconds_alone"])


def test_the_tables_say_what_is_unknown(short: Short, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *short, *SEARCH]) == 0
    out = capsys.readouterr().out
    assert "trial-0002" in out
    assert "unknown" in out
    assert "Seconds are unknown: run `plait profile` on this machine first" in " ".join(out.split())
    assert "trained on" not in out  # there is one replica


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("engine.capacity=8",), "tokens"),
        (("adapter.target_modules=[nothing]",), "nothing"),
        (("cluster.kind=moon",), "local or described"),
        (
            ("search.sampler=random", "train.lr=interval(1e-5,1e-3)", "search.trials=1000000"),
            "at most 10,000",
        ),
        (("search/stopping=median", "search.stopping.rungs=[9]"), "rungs=9 with a budget of 3 steps"),
        (
            ("search/stopping=median", "search.stopping.rungs=[500]", "train.epochs=1", "train.steps=null"),
            "rungs=500 with a budget of",
        ),
        (
            (
                *("search/stopping=median", "search.stopping.rungs=[500]", "cluster=h100_llama31_8b"),
                *("train.epochs=1", "train.steps=null"),
            ),
            "rungs=500 with a budget of",
        ),
        (("search.metric=eval/accuracy", "search.direction=maximize"), "eval/accuracy"),
        (("train.keep=best",), "train.keep=best with train.eval_every=0"),
        (("train.batch_size=100000",), "train.batch_size=100000"),
        (
            (
                *("search.sampler=random", "train.lr=interval(1e-5,1)"),
                "search.constraints={train.lr: '<= 2e-5'}",
            ),
            "Of 100 suggestions, none satisfies them",
        ),
        (("search.sampler=tpe", "+search.sampler_options.n_startups=3"), "does not take them"),
    ],
)
def test_a_plan_of_an_impossible_search_is_refused(
    short: Short,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    """As `plait sweep` refuses it."""
    assert main(["plan", *short, *SEARCH, *arguments]) == 2
    assert said in capsys.readouterr().err
