"""LoRAFusion's workload: adapters on mixed data, a committed trace of lengths, a described cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from plait.config.fields import build
from plait.core.errors import ConfigError
from plait.core.settings import RunSettings
from plait.cost.lengths import Family, LengthGenerator
from plait.cost.profiles import ClusterProfile, cluster_profile
from plait.cost.time import LayerTime, TimeModel
from plait.simulate.forecast import Machine
from plait_bench.pipelines import in_batches, mixed_lengths, read_trace

TRACES = Path(__file__).parent / "traces"
Lengths = dict[str, list[list[int]]]  # by adapter: the lengths of each global batch


@dataclass(frozen=True, slots=True)
class DataSet:
    """Lengths assumed for one data set of the mixture."""

    name: str
    family: Family
    mean: float
    sigma: float


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another assumption, to show how the figures move with it.

    Attributes:
        label: of its figures.
        means: by data set; those left out keep theirs.
        seed: of the draws; None keeps it.
        square: seconds a layer takes for each squared token of a sample (attention), forward and
            backward, beside the profile's own.
    """

    label: str
    means: dict[str, float]
    seed: int | None = None
    square: float = 0.0


@dataclass(frozen=True, slots=True)
class Options:
    """Of the benchmarks on this workload.

    Attributes:
        trace: name of a trace that comes with Plait, or a file.
        data_sets: what the trace was drawn from.
        clip: longest length.
        seed: of the draws.
        adapters: how many.
        steps: global batches of each adapter.
        global_batch: samples of one of them.
        stages: pipeline stages.
        capacity: most tokens of a microbatch.
        tile: padding multiple of LoRAFusion.
        samples: of one microbatch, where a system does not pack.
        alternatives: other assumptions.
        timeline: where to write Plait's schedule as a Chrome trace; None writes none.
        workers: processes that pack.
        batches: global batches of one adapter, where planning itself is timed.
        remarks: what explains the differences from the published figures.
    """

    trace: str
    data_sets: tuple[DataSet, ...]
    clip: int
    seed: int
    adapters: int
    steps: int
    global_batch: int
    stages: int
    capacity: int
    tile: int
    samples: int
    alternatives: tuple[Alternative, ...] = ()
    timeline: str | None = None
    workers: int = 2
    batches: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = ("clip", "adapters", "steps", "global_batch", "stages", "capacity", "tile", "samples")
        for name in (*names, "workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"bench.options.{name}={getattr(self, name)}", "It must be at least 1.")

    def lengths(self) -> Lengths:
        """The trace.

        Raises:
            DataError: it cannot be read.
        """
        shipped = TRACES / f"{self.trace}.json"
        return read_trace(shipped if shipped.exists() else Path(self.trace))

    def drawn(self, alternative: Alternative | None = None, steps: int | None = None) -> Lengths:
        """Lengths drawn anew under these assumptions, or an alternative's."""
        means = alternative.means if alternative else {}
        seed = self.seed if alternative is None or alternative.seed is None else alternative.seed
        generators = {
            each.name: LengthGenerator(
                each.family, means.get(each.name, each.mean), each.sigma, self.clip, seed
            )
            for each in self.data_sets
        }
        count = (steps or self.steps) * self.global_batch
        return {
            f"adapter{a}": in_batches(
                mixed_lengths(generators, count, seed=seed, job=f"adapter{a}"), self.global_batch
            )
            for a in range(self.adapters)
        }

    def assumptions(self) -> tuple[str, ...]:
        """What is assumed, in words."""
        sets = "; ".join(f"{d.name} {d.family}, mean {d.mean:g}, sigma {d.sigma:g}" for d in self.data_sets)
        return (
            f"Lengths are assumed, not published: equal shares of {sets}; "
            f"clipped at {self.clip}, seed {self.seed}.",
        )


def read_options(options: Mapping[str, object]) -> Options:
    """``bench.options`` as :class:`Options`.

    Raises:
        ConfigError: an unknown or missing key, or a value out of range.
    """
    path = "bench.options"
    values: dict[str, Any] = dict(options)
    for name, cls in (("data_sets", DataSet), ("alternatives", Alternative)):
        rows = cast("Sequence[Mapping[str, object]]", values.pop(name, ()))
        values[name] = tuple(build(cls, row, f"{path}.{name}[{place}]") for place, row in enumerate(rows))
    parts = {name: values.pop(name) for name in ("data_sets", "alternatives")}
    return replace(build(Options, {**values, "data_sets": ()}, path), **parts)


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


def machine(profile: ClusterProfile, split: Sequence[int], *, square: float = 0.0) -> Machine:
    """A pipeline of single devices with this many layers each."""
    return Machine(with_attention(profile.time, square), tuple(split))


def with_attention(time: TimeModel, square: float) -> TimeModel:
    """The time model with ``square`` more seconds a squared token in every layer."""
    layers = {
        tp: LayerTime(layer.fixed, layer.token, layer.square + square) for tp, layer in time.layer.items()
    }
    return replace(time, layer=layers)
