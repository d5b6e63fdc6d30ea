"""S-LoRA's arithmetic: bytes that tensor parallelism sends for adapters beside the base model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.config.fields import build
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait_bench.benchmarks import BENCHMARKS
from plait_bench.figures import Figure, Report
from plait_bench.inputs import OPTIONS, at_least_one

GATHERS, REDUCES = (
    3,
    1,
)  # of low-rank values in a block, beside one all-reduce of the base's


@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """Options of ``slora/communication``: features of the model, ranks, devices and tokens."""

    hidden: tuple[int, ...]
    ranks: tuple[int, ...]
    devices: int
    tokens: int

    def __post_init__(self) -> None:
        at_least_one(self, "devices", "tokens")


def gathered(values: int, devices: int) -> float:
    """Values that a device sends in an all-gather, by a ring."""
    return values * (devices - 1) / devices


@BENCHMARKS.register("slora/communication")
def communication(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """What an adapter sends over what the base sends; an all-reduce sends twice what an all-gather does.

    Raises:
        ConfigError: a wrong option.
    """
    del settings, jobs
    asked = build(CommunicationOptions, options, OPTIONS)
    figures = []
    for hidden in asked.hidden:
        base = 2 * gathered(asked.tokens * hidden, asked.devices)
        for rank in asked.ranks:
            adapter = (GATHERS + 2 * REDUCES) * gathered(asked.tokens * rank, asked.devices)
            name = f"{hidden} features, rank {rank}"
            note = f"beside {2 * base / 2**20:.1f} MiB; values of 16 bits"
            figures.append(Figure(name, 100 * adapter / base, "%", "computed"))
            figures.append(Figure(f"{name}: sent", 2 * adapter / 2**20, "MiB", "computed", note=note))
    return Report("S-LoRA, bytes of adapters over the base model's", tuple(figures))
