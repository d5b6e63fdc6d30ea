"""What runs the files of sweeps/ that are benchmarks: functions of other packages, by the file's mode."""

from __future__ import annotations

from collections.abc import Callable

from plait.utils.registry import Registry

PAPERS = "papers"  # not a mode: the runner of all files for papers' figures
GROUP = "plait.benchmarks"  # of the entry points; each names a module whose import registers

# Each takes the search's command, the composed configuration and the verb's flags; it prints its figures.
RUNNERS: Registry[Callable[..., None]] = Registry("mode", key="mode", group=GROUP)
