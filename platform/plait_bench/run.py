"""Runs a benchmark of a file of sweeps/, and shows its figures beside the published ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch

from plait.config.build import Config
from plait.config.fields import build, unknown_key
from plait.core.errors import ConfigError, choices
from plait.engine.build import settle_dtype
from plait.engine.devices import usual_threads
from plait.search.study import suggest_jobs
from plait.search.trials import SearchCommand
from plait.terminal.console import wide_console
from plait.utils.benchmarks import RUNNERS
from plait_bench.benchmarks import BENCHMARKS
from plait_bench.figures import Benchmark, Figure, Published, Report, Sense, Weak
from plait_bench.inputs import lacks
from plait_bench.progress import shown
from plait_bench.table import show, to_json

LOG_WIDTH = 180  # columns if output is not a terminal
DETAILS, JSON = "--details", "--json"


@RUNNERS.register("bench")
@RUNNERS.register("simulate")
def run_benchmark(command: SearchCommand, composed: Config, flags: Mapping[str, str]) -> None:
    """Run the benchmark ``bench.run`` on the search's jobs, and print its figures.

    Published names without a figure are named on standard error: an override may have removed it.

    Args:
        flags: --details prints all figures, --json the whole report for programs.

    Raises:
        ConfigError: the benchmark or a key of ``bench`` is unknown.
    """
    report, unmatched = compared(command, composed)
    if JSON in flags:
        print(to_json(report))
    else:
        show(report, wide_console(LOG_WIDTH), details=DETAILS in flags)
    if unmatched:
        print(
            f"Not among the figures, so nothing is compared with published: {', '.join(unmatched)}. "
            f"The figures are {choices([figure.name for figure in report.figures])}.",
            file=sys.stderr,
        )


def compared(command: SearchCommand, composed: Config) -> tuple[Report, list[str]]:
    """The report of the benchmark of a file, next to what is published, and published names without a figure.

    Raises:
        ConfigError: the benchmark or a key of ``bench`` or ``paper`` is unknown, or the file needs another
            device.
    """
    section, paper = composed["bench"], build(Paper, composed.get("paper") or {}, "paper")
    for key in section:
        if key not in ("run", "needs", "options"):
            raise unknown_key(f"bench.{key}", ["bench.run", "bench.needs", "bench.options"])
    if lacks(needs := section.get("needs", ""), command.settings.engine.device):
        raise ConfigError(
            f"engine.device={command.settings.engine.device}",
            f"This benchmark needs {needs}.",
            "`plait bench` lists the others.",
        )
    published = _published(composed)  # before the benchmark, which may take an hour
    name = section.get("run")
    benchmark = find_benchmark(name, str(composed["mode"]))
    options = dict(section.get("options") or {})
    with shown(name), _threads(command.settings.engine.threads):
        report = benchmark(settle_dtype(command.settings), suggest_jobs(command), options)
    report, unmatched = beside_published(report, published)
    assumed = tuple(f"The paper leaves open: {each}" for each in paper.leaves_open)
    return replace(report, assumptions=(*report.assumptions, *assumed)), unmatched


@contextmanager
def _threads(asked: int | None) -> Iterator[None]:
    """Give torch the threads that ``engine.threads`` asks for, and afterwards as many as before.

    A worker does so by itself; not every benchmark has one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(asked or usual_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    return BENCHMARKS.get(name)


@dataclass(frozen=True, slots=True)
class PublishedEntry:
    """An entry of ``published:`` in a file of sweeps/: the figure's name, and the fields of ``Published``.

    Attributes:
        alternatives: names, or patterns of names, of the figures that give ours under other assumptions.

    Raises:
        ConfigError: an assumption was chosen, and nothing shows what another one gives.
    """

    name: str
    unit: str
    value: float
    source: str
    tolerance: float | None = None
    sense: Sense = "near"
    why: str = ""
    weak: Weak | None = None
    alternatives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.weak == "assumed" and not self.alternatives:
            raise ConfigError(
                f"published: {self.name}: weak=assumed",
                "`alternatives` must name figures that give ours under other assumptions.",
            )

    def others(self, figures: Sequence[Figure]) -> dict[str, tuple[float, ...]]:
        """Our values by alternative, of the same unit; those of the figure itself are left out."""
        return {
            pattern: tuple(
                each.ours
                for each in figures
                if each.unit == self.unit and each.name != self.name and fnmatchcase(each.name, pattern)
            )
            for pattern in self.alternatives
        }

    def published(self, others: tuple[float, ...]) -> Published:
        """The published value, beside which ours under other assumptions stand."""
        return Published(
            *(self.value, self.source, self.tolerance, self.sense, self.why), weak=self.weak, others=others
        )


@dataclass(frozen=True, slots=True)
class Paper:
    """The section ``paper`` of a file of sweeps/: which of a paper's figures it is for.

    Attributes:
        name: of the paper; "" for other files.
        figures: figures, tables and sections, as the paper numbers them.
        leaves_open: what the paper does not say and the file assumes.
    """

    name: str = ""
    figures: tuple[str, ...] = ()
    leaves_open: tuple[str, ...] = ()


def beside_published(report: Report, entries: Sequence[PublishedEntry]) -> tuple[Report, list[str]]:
    """The report with each published value attached to our figure of the same name and unit; names without a
    figure, those of alternatives among them. If only the unit differs, ours is named, too."""
    given = {(item.name, item.unit): item for item in entries}
    others = {key: item.others(report.figures) for key, item in given.items()}
    lost = [name for each in others.values() for name, values in each.items() if not values]
    figures = tuple(
        figure
        if (entry := given.pop((figure.name, figure.unit), None)) is None
        else _beside(figure, entry, tuple(chain(*others[entry.name, entry.unit].values())))
        for figure in report.figures
    )
    units = {each.name: each.unit for each in report.figures}
    left = [f"{name} in {unit} (ours is in {units[name]})" if name in units else name for name, unit in given]
    return replace(report, figures=figures), [*left, *lost]


def _beside(figure: Figure, entry: PublishedEntry, others: tuple[float, ...]) -> Figure:
    fitted = entry.weak == "fitted"  # of many, one line says how far they are off
    return replace(figure, target=entry.published(others), detail=figure.detail or fitted)


def _published(composed: Config) -> list[PublishedEntry]:
    entries = composed.get("published") or []
    return [build(PublishedEntry, item, f"published[{index}]") for index, item in enumerate(entries)]
