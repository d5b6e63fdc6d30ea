"""The registry of benchmarks: the functions that ``bench.run`` in files of sweeps/ names."""

from __future__ import annotations

from plait.utils.benchmarks import GROUP
from plait.utils.registry import Registry
from plait_bench.figures import Benchmark

BENCHMARKS: Registry[Benchmark] = Registry("benchmark", key="bench.run", group=GROUP)
