"""Inputs of benchmarks: data files that come with the package, described clusters, kinds of options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from plait.core.checks import NOT_EMPTY, above, at_least, each
from plait.core.errors import ConfigError, choices
from plait.core.settings import RunSettings
from plait.cost.profiles import ClusterProfile, cluster_profile

DATA = Path(__file__).parent / "data"
Count = Annotated[int, at_least(1)]
Counts = Annotated[tuple[int, ...], NOT_EMPTY, each(at_least(1))]
Positive = Annotated[float, above(0)]
GPUS = {"a GPU": "", "an L40S GPU": "L40S"}  # what files need: a part of the device's name


def shipped(name: str | Path) -> Path:
    """A file that comes with the package, by its name; anything else is a path given by the user."""
    own = DATA / name
    return own if own.is_file() else Path(name).expanduser()


def read_profile(settings: RunSettings) -> ClusterProfile:
    """The described cluster of a run.

    Raises:
        ConfigError: it is this machine, or its description is wrong.
    """
    if settings.cluster.kind != "described":
        raise ConfigError(
            f"cluster.kind={settings.cluster.kind}",
            "This benchmark simulates a described cluster.",
            "Choose one, for example cluster=h100_llama31_70b.",
        )
    return cluster_profile(settings.cluster.options)


def lacks(needs: str, device: str) -> bool:
    """Whether what a file needs ("": nothing) is not there, or ``engine.device`` is another device.

    Raises:
        ConfigError: it is not one of ``GPUS``.
    """
    import torch

    from plait.engine.devices import choose_device

    if not needs:
        return False
    if needs not in GPUS:
        raise ConfigError(f"bench.needs={needs}", f"bench.needs must be one of {choices(GPUS)}.")
    found = choose_device(device)
    return found.type != "cuda" or GPUS[needs] not in torch.cuda.get_device_name(found)


def require_processor(settings: RunSettings) -> None:
    """Refuse devices other than the CPU, for benchmarks that measure its time.

    Raises:
        ConfigError: the run has another device.
    """
    from plait.engine.devices import choose_device

    if choose_device(settings.engine.device).type != "cpu":
        raise ConfigError(
            f"engine.device={settings.engine.device}",
            "This benchmark measures the processor's time.",
            "Give engine.device=cpu.",
        )
