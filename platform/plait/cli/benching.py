"""Runs a benchmark or a simulation: the function that a file of sweeps/ names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from plait.config.build import Config
from plait.config.fields import build, unknown_key
from plait.core.errors import EXIT_DONE, ConfigError, choices
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.search.command import SearchCommand
from plait.search.draw import draw_jobs
from plait_bench.figures import Figure, Report
from plait_bench.progress import shown

HOME = "plait_bench."  # benchmarks are looked for here and nowhere else
LOG_WIDTH = 180  # columns where output is not a terminal

Benchmark = Callable[[RunSettings, Sequence[JobSpec], Mapping[str, object]], Report]


def run_benchmark(command: SearchCommand, composed: Config) -> int:
    """Run the function ``bench.run`` on the search's jobs and print its figures; the exit status.

    Args:
        command: the search whose jobs are used.
        composed: the configuration, with ``bench.run`` and ``bench.options``.

    Raises:
        ConfigError: no such function, or an unknown key of ``bench``.
    """
    section = composed["bench"]
    for key in section:
        if key not in ("run", "options"):
            raise unknown_key(f"bench.{key}", ["bench.run", "bench.options"])
    path = section.get("run")
    benchmark = find_benchmark(path, str(composed["mode"]))
    options = dict(section.get("options") or {})
    with shown(str(path).removeprefix(HOME).removesuffix(".run")):
        report = benchmark(command.settings, draw_jobs(command), options)
    report, unmatched = beside_published(report, _published(composed))
    console = Console()
    # A table cut to 80 columns cannot be read in a log.
    (console if console.is_terminal else Console(width=LOG_WIDTH)).print(report.table())
    if unmatched:
        raise ConfigError(
            f"published: {', '.join(unmatched)}",
            "Each published figure must bear the name of a figure that the benchmark gives.",
            f"There are: {choices([figure.name for figure in report.figures])}.",
        )
    return EXIT_DONE


@dataclass(frozen=True, slots=True)
class Published:
    """A paper's figure, as ``published:`` in a file of sweeps/ gives it."""

    name: str
    value: float
    unit: str
    source: str
    tolerance: float | None = None


def beside_published(report: Report, published: Sequence[Published]) -> tuple[Report, list[str]]:
    """The report with each published figure beside ours of the same name and unit; names without one."""
    given = {(item.name, item.unit): item for item in published}
    figures = tuple(_beside(figure, given.pop((figure.name, figure.unit), None)) for figure in report.figures)
    return replace(report, figures=figures), [item.name for item in given.values()]


def _beside(figure: Figure, item: Published | None) -> Figure:
    if item is None:
        return figure
    return replace(figure, published=item.value, source=item.source, tolerance=item.tolerance)


def _published(composed: Config) -> list[Published]:
    entries = composed.get("published") or []
    return [build(Published, item, f"published[{index}]") for index, item in enumerate(entries)]


def find_benchmark(path: Any, mode: str) -> Benchmark:
    """The function at a dotted path under ``plait_bench``.

    Raises:
        ConfigError: there is none.
    """
    rule = f"mode={mode} needs the dotted path of a function under plait_bench."
    if not isinstance(path, str) or not path.startswith(HOME):
        raise ConfigError(f"bench.run={path!r}", rule, "Run a file of sweeps/: `plait bench` lists them.")
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"bench.run={path!r}", f"There is no such function: {error}.") from error
    if not callable(function):
        raise ConfigError(f"bench.run={path!r}", rule)
    benchmark: Benchmark = function
    return benchmark
