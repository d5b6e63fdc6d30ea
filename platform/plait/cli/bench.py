"""`plait bench`: the named searches and benchmarks of sweeps/, listed or run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from plait.cli.bench_table import show, to_json
from plait.cli.verbs import HELP
from plait.config.build import Config
from plait.config.fields import build, unknown_key
from plait.core.errors import EXIT_DONE, ConfigError, choices
from plait.core.figures import Benchmark, Figure, Published, Report, Sense
from plait.search.trials import SearchCommand
from plait.terminal.console import wide_console
from plait.utils.benchmarks import BENCHMARKS, GROUP
from plait.utils.paths import sweeps_dir
from plait.utils.progress import shown
from plait.utils.spelling import did_you_mean

LOG_WIDTH = 180  # columns if output is not a terminal
DETAILS, JSON = "--details", "--json"
FLAGS = {DETAILS: False, JSON: False}  # flag: whether a value follows
FOOTER = (
    "Times are rough, on two otherwise idle cores. train: a search; simulate: simulated, not measured;",
    "bench: measured or computed on this machine. `plait bench NAME` runs one, with the same",
    "arguments as `plait sweep`; `plait bench NAME --help` shows its file, with all its options.",
)


@dataclass(frozen=True, slots=True)
class Named:
    """A file of sweeps/: its name is its path without the suffix.

    Attributes:
        takes: how long it roughly takes on two cores, in words; "" if the file does not say.
    """

    name: str
    mode: str
    description: str
    takes: str = ""


def sweep_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of `plait sweep` that run the benchmark NAME, including the verb's own flags; empty if
    the list or a file is printed.

    Raises:
        ConfigError: sweeps/ has no such file.
    """
    flags = [word for word in arguments if word in FLAGS]
    words = [word for word in arguments if word not in FLAGS]
    if not words:
        entries = named_sweeps(sweeps_dir())
        print(json.dumps([asdict(each) for each in entries], indent=2) if JSON in flags else listing(entries))
        return []
    name, *rest = words
    if name.startswith("-"):
        return list(arguments)
    known = [named.name for named in named_sweeps(sweeps_dir())]
    if name not in known:
        raise ConfigError(
            f"plait bench {name}",
            "There is no such search or benchmark.",
            f"{did_you_mean(name, known)}Available: {choices(known)}.",
        )
    if set(rest) & set(HELP):
        print((sweeps_dir() / f"{name}.yaml").read_text(encoding="utf-8"), end="")
        return []
    return [f"+sweeps={name}", *rest, *flags]


def named_sweeps(folder: Path) -> list[Named]:
    """All files of a folder, by name.

    Raises:
        ConfigError: a file is not YAML, or does not say its mode.
    """
    return [_read(path, folder) for path in sorted(folder.rglob("*.yaml"))]


def _read(path: Path, folder: Path) -> Named:
    name = path.relative_to(folder).with_suffix("").as_posix()
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"sweeps/{name}.yaml", f"The file is not valid YAML: {error}") from error
    if not isinstance(content, dict) or "mode" not in content:
        raise ConfigError(f"sweeps/{name}.yaml", "The file must set mode to train, simulate or bench.")
    description = " ".join(str(content.get("description", "")).split())
    return Named(name, str(content["mode"]), description, str(content.get("takes", "")))


def listing(entries: Sequence[Named]) -> str:
    """One line for each, in columns."""
    if not entries:
        return "The folder sweeps/ is empty."
    name = max(len(item.name) for item in entries)
    takes = max(len(item.takes) for item in entries)
    lines = [
        f"  {item.name:<{name}}  {item.mode:<8}  {item.takes:>{takes}}  {item.description}"
        for item in entries
    ]
    return "\n".join([*lines, "", *FOOTER])


def run_benchmark(command: SearchCommand, composed: Config, flags: Mapping[str, str]) -> int:
    """Run the benchmark ``bench.run`` on the search's jobs, print its figures and return the exit status.

    Args:
        flags: --details prints all figures, --json the whole report for programs.

    Raises:
        ConfigError: the benchmark or a key of ``bench`` is unknown.
    """
    from plait.engine.build import settle_dtype
    from plait.search.study import suggest_jobs

    section = composed["bench"]
    for key in section:
        if key not in ("run", "options"):
            raise unknown_key(f"bench.{key}", ["bench.run", "bench.options"])
    name = section.get("run")
    benchmark = find_benchmark(name, str(composed["mode"]))
    options = dict(section.get("options") or {})
    with shown(name):
        report = benchmark(settle_dtype(command.settings), suggest_jobs(command), options)
    report, unmatched = beside_published(report, _published(composed))
    if JSON in flags:
        print(to_json(report))
    else:
        show(report, wide_console(LOG_WIDTH), details=DETAILS in flags)
    if unmatched:
        raise ConfigError(
            f"published: {', '.join(unmatched)}",
            "Each published figure must have the name of a figure of the benchmark.",
            f"Available: {choices([figure.name for figure in report.figures])}.",
        )
    return EXIT_DONE


def find_benchmark(name: Any, mode: str) -> Benchmark:
    """The benchmark registered under a name.

    Raises:
        ConfigError: there is none.
    """
    if not isinstance(name, str):
        raise ConfigError(
            f"bench.run={name!r}",
            f"mode={mode} needs the name of a benchmark.",
            "Run a named benchmark: `plait bench` lists them.",
        )
    if not BENCHMARKS.names():
        raise ConfigError(
            f"bench.run={name}",
            f"No benchmark is registered: the installed package has no entry points {GROUP}.",
            "Install Plait again: `make install`, or `pip install --editable .`.",
        )
    return BENCHMARKS.get(name)


@dataclass(frozen=True, slots=True)
class PublishedEntry:
    """An entry of ``published:`` in a file of sweeps/: the figure's name, and the fields of ``Published``."""

    name: str
    unit: str
    value: float
    source: str
    tolerance: float | None = None
    sense: Sense = "near"
    why: str = ""
    explained: bool = True

    @property
    def published(self) -> Published:
        """The published value."""
        return Published(self.value, self.source, self.tolerance, self.sense, self.why, self.explained)


def beside_published(report: Report, entries: Sequence[PublishedEntry]) -> tuple[Report, list[str]]:
    """The report with each published value attached to our figure of the same name and unit; names without a
    figure."""
    given = {(item.name, item.unit): item for item in entries}
    figures = tuple(_beside(figure, given.pop((figure.name, figure.unit), None)) for figure in report.figures)
    return replace(report, figures=figures), [item.name for item in given.values()]


def _beside(figure: Figure, entry: PublishedEntry | None) -> Figure:
    return figure if entry is None else replace(figure, beside=entry.published)


def _published(composed: Config) -> list[PublishedEntry]:
    entries = composed.get("published") or []
    return [build(PublishedEntry, item, f"published[{index}]") for index, item in enumerate(entries)]
