"""The registry of benchmarks: the functions that ``bench.run`` in files of sweeps/ names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TypeVar

from plait.config.fields import build
from plait.core.checks import check
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.utils.benchmarks import GROUP
from plait.utils.registry import Registry
from plait_bench.figures import Benchmark, Report

OPTIONS = "bench.options"
BENCHMARKS: Registry[Benchmark] = Registry("benchmark", key="bench.run", group=GROUP)
Options = TypeVar("Options")


def benchmark(
    name: str, kind: type[Options]
) -> Callable[[Callable[[RunSettings, Sequence[JobSpec], Options], Report]], Benchmark]:
    """Register a function of the run's settings, the jobs of its search, and ``bench.options``.

    Args:
        kind: the dataclass of the options. The rules in its fields are checked; a wrong option is a
            ConfigError before the function is called.
    """

    def registered(run: Callable[[RunSettings, Sequence[JobSpec], Options], Report]) -> Benchmark:
        @wraps(run)
        def built(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
            asked = build(kind, options, OPTIONS)
            check(asked, OPTIONS)
            return run(settings, jobs, asked)

        return BENCHMARKS.add(name, built, run.__module__)

    return registered
