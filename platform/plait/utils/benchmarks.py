"""The registry of benchmarks: the functions that ``bench.run`` in files of sweeps/ names."""

from __future__ import annotations

from plait.core.figures import Benchmark
from plait.utils.registry import Registry

GROUP = "plait.benchmarks"  # of the entry points; each names a module whose import registers benchmarks

BENCHMARKS: Registry[Benchmark] = Registry("benchmark", key="bench.run", group=GROUP)
