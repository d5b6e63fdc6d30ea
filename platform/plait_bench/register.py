"""Imports every module of the package, so that its benchmarks register: what the entry point names."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import plait_bench

for _module in pkgutil.iter_modules(plait_bench.__path__):
    import_module(f"plait_bench.{_module.name}")
