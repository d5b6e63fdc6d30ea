"""Named searches and benchmarks: each file of sweeps/ composes, its benchmark is registered and shown."""

import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

import plait_bench
from plait.cli import bench
from plait.cli.bench import named_sweeps, run_benchmark, sweep_arguments
from plait.cli.main import main
from plait.cli.sweeping import _run
from plait.config.build import job_of, plain, settings_of
from plait.config.fields import build
from plait.config.overrides import read_request
from plait.core.checks import check
from plait.core.errors import ConfigError
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.data.sources import parse_options
from plait.utils.benchmarks import GROUP
from plait.utils.paths import conf_dir, sweeps_dir
from plait.utils.registry import Registry
from plait_bench import benchmarks
from plait_bench.benchmarks import BENCHMARKS
from plait_bench.figures import Figure, Published, Report
from plait_bench.register import MODULES
from plait_bench.run import PublishedEntry, beside_published, find_benchmark

NAMES = [named.name for named in named_sweeps(sweeps_dir())]
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@pytest.fixture(scope="module")
def registered() -> None:
    """What the entry points of this checkout register, whether or not it was installed since they changed."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    for module in project["entry-points"][GROUP].values():
        import_module(module)


@pytest.mark.usefixtures("registered")
def test_each_benchmark_is_in_the_module_that_the_table_names() -> None:
    found: dict[str, set[str]] = {}
    for module in pkgutil.iter_modules(plait_bench.__path__, "plait_bench."):
        import_module(module.name)
    for name in BENCHMARKS:
        found.setdefault(BENCHMARKS.get(name).__module__, set()).add(name)
    assert found == {f"plait_bench.{module}": set(names) for module, names in MODULES.items()}


def test_the_table_is_read_without_what_benchmarks_import() -> None:
    program = (
        "import plait_bench.register, sys; print({'torch', 'optuna', 'plait_bench.run'} & {*sys.modules})"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


def test_a_search_has_no_report_that_flags_could_ask_for() -> None:
    command: Any = None
    with pytest.raises(ConfigError, match=r"--json with mode=train\n.*\nLeave --json out"):
        _run("train", command, {}, {"--json": ""})


@pytest.fixture
def added() -> Iterator[str]:
    """The name of a benchmark that comes from no package."""
    BENCHMARKS.add("ranks", ranks)
    yield "ranks"
    BENCHMARKS.remove("ranks")


def ranks(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    figures = tuple(Figure(job.name, job.adapter.rank, "rank", "computed") for job in jobs)
    return Report(f"{settings.model.kind} {options['word']}{torch.get_num_threads()}", figures)


def composed(name: str) -> dict[str, Any]:
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        config = compose("config", [f"+sweeps={name}"])
    OmegaConf.set_struct(config, False)
    with open_dict(config):
        config.pop("sweeps", None)
    return plain(config)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", NAMES)
def test_every_file_composes_and_says_what_it_is_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed(name)
    settings = settings_of(config)
    assert config["description"]
    parse_options(job_of("any", config).data)
    assert re.fullmatch(r"[1-9]\d* (s|min|h)|GPU", config["takes"])
    assert (config["takes"] == "GPU") == bool(config["bench"]["needs"])
    search = settings.search
    assert read_request([], search.params, search.default_params).space.dimensions
    published = [build(PublishedEntry, item, "published").published for item in config["published"]]
    assert len({(item["name"], item["unit"]) for item in config["published"]}) == len(published)
    if config["mode"] != "train":
        monkeypatch.setattr(benchmarks, "check", checked)
        with pytest.raises(CheckedError):
            find_benchmark(config["bench"]["run"], config["mode"])(settings, (), config["bench"]["options"])


class CheckedError(Exception):
    """The options of a file are those that its benchmark takes, which would begin now."""


def checked(asked: object, group: str) -> None:
    check(asked, group)
    raise CheckedError


def test_the_list_shows_mode_and_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for named in named_sweeps(sweeps_dir()):
        shown = [line for line in lines if line.split()[:2] == [named.name, named.mode]]
        assert shown
        assert all(f" {named.takes}  {named.description}" in line for line in shown)


def test_a_beginning_lists_all_benchmarks_that_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu"]) == 2
    assert capsys.readouterr().err.endswith(
        "  Available there: gpu/counts, gpu/graphs (GPU), gpu/step (GPU).\n"
    )
    assert main(["bench", "lora"]) == 2
    assert (
        "Available: dropout_cost, gpu/counts, gpu/graphs (GPU), gpu/step (GPU), " in capsys.readouterr().err
    )


def test_a_file_of_ones_own_is_run_by_its_name() -> None:
    arguments = ["mine", "--config-dir", "conf", "search.trials=2"]
    assert sweep_arguments(arguments) == ["+sweeps=mine", *arguments[1:]]


def test_an_unknown_option_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 2
    assert "`plait bench` has no such option" in (shown := capsys.readouterr().err)
    assert "--papers; without a name it lists the benchmarks" in shown


def test_help_of_papers_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--papers", "--help"]) == 0
    assert "usage: plait bench --papers [--json] [tracking.root=FOLDER]" in capsys.readouterr().out
    assert main(["bench", "--papers", "--detail"]) == 2
    assert "`plait bench --papers --help` explains them." in capsys.readouterr().err


def test_sweep_files_without_a_valid_mode_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("description: x")
    with pytest.raises(ConfigError, match="must set mode"):
        named_sweeps(tmp_path)
    (tmp_path / "a.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        named_sweeps(tmp_path)


@pytest.mark.parametrize("name", [None, 3, "os.system", "rank"])
def test_only_a_registered_benchmark_is_run(name: object, added: str) -> None:
    with pytest.raises(ConfigError, match=r"bench\.run") as error:
        find_benchmark(name, "bench")
    if name == "rank":
        assert f"Did you mean {added}?" in str(error.value)


def test_a_package_installed_without_its_entry_points_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    command: Any = None
    monkeypatch.setattr(bench, "RUNNERS", Registry("mode", key="mode"))
    with pytest.raises(ConfigError, match="make install"):
        run_benchmark(command, {"mode": "bench"}, {})


def test_published_figures_are_attached_to_ours() -> None:
    report = Report("r", (Figure("speed", 2.0, "x", "measured"), Figure("speed", 9.0, "s", "measured")))
    beside, unmatched = beside_published(
        report,
        [
            PublishedEntry("speed", "x", 3.0, "paper", 0.5),
            PublishedEntry("size", "x", 1.0, "paper"),
            PublishedEntry("speed", "min", 1.0, "paper"),
        ],
    )
    assert beside.figures[0] == Figure("speed", 2.0, "x", "measured", Published(3.0, "paper", 0.5))
    assert beside.figures[1] == report.figures[1]
    assert unmatched == ["size", "speed in min (ours is in s)"]


def test_a_benchmark_gets_settings_jobs_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], added: str
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(2)
    arguments = [
        "mode=bench",
        f"bench.run={added}",
        "+bench.options.word=hello",
        "model=tiny",
        "engine.threads=1",
    ]
    arguments += ["adapter.rank=3,5,7", "search.sampler=grid"]
    assert main(["sweep", *arguments]) == 0
    out = capsys.readouterr().out
    assert "tiny hello1" in out
    assert torch.get_num_threads() == 2
    shown = [line.split() for line in out.splitlines() if line.startswith("trial-")]
    assert [name for name, *_ in shown] == ["trial-0000", "trial-0001", "trial-0002"]
    assert sorted(rank for _, rank, _ in shown) == ["3", "5", "7"]


def test_a_mistake_in_what_is_published_is_found_before_the_benchmark_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], added: str
) -> None:
    monkeypatch.chdir(tmp_path)
    published = "published=[{name: none, unit: s, source: paper}]"
    assert main(["sweep", "mode=bench", f"bench.run={added}", "adapter.rank=3,5", published]) == 2
    assert "published[0] has no value" in (err := capsys.readouterr().err)
    assert "started" not in err


def test_a_published_figure_without_a_match_is_named_after_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], added: str
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [
        "mode=bench",
        f"bench.run={added}",
        "+bench.options.word=hello",
        "adapter.rank=3,5",
    ]
    published = "published=[{name: none, value: 1, unit: s, source: paper}]"
    assert main(["sweep", *arguments, published]) == 0  # an override may have removed the figure
    printed = capsys.readouterr()
    assert "trial-0001" in printed.out
    assert "compared with published: none" in printed.err
