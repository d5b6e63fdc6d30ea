"""Runs a benchmark or a simulation: the function that a file of sweeps/ names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from plait.bench.figures import Report
from plait.config import Config
from plait.config_fields import unknown_key
from plait.errors import EXIT_DONE, ConfigError
from plait.jobs import JobSpec
from plait.search.command import SearchCommand
from plait.search.draw import draw_jobs
from plait.settings import RunSettings

HOME = "plait.bench."  # benchmarks are looked for here and nowhere else

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
    benchmark = find_benchmark(section.get("run"), str(composed["mode"]))
    report = benchmark(command.settings, draw_jobs(command), _options(composed))
    Console().print(report.table())
    return EXIT_DONE


def find_benchmark(path: Any, mode: str) -> Benchmark:
    """The function at a dotted path under ``plait.bench``.

    Raises:
        ConfigError: there is none.
    """
    rule = f"mode={mode} needs the dotted path of a function under plait.bench."
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


def _options(composed: Config) -> dict[str, object]:
    """``bench.options``, with the file's published figures beside them."""
    options = dict(composed["bench"].get("options") or {})
    return options | ({"published": composed["published"]} if composed.get("published") else {})
