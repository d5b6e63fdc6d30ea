"""LoRAFusion's comparisons of one layer's call: Plait's kernels beside torch's LoRA and the frozen layer.

Measured by ``python -m plait_kernels.bench``, whose file keeps each shape, so that the same command resumes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from plait.core.errors import PlaitError
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.engine.devices import choose_device, choose_kernels
from plait_bench.benchmarks import benchmark
from plait_bench.figures import Figure, Report
from plait_bench.inputs import Count
from plait_bench.random_model import dtype_on
from plait_kernels import bench


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose figures stand together: their names in the kernels' benchmark, and rows."""

    name: str
    layers: tuple[str, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KernelsOptions:
    """Options of ``lorafusion/kernels``.

    Attributes:
        groups: layers and rows.
        adapters: numbers of adapters that share the rows; torch's LoRA has one.
        rank, dropout: of each adapter.
        repeats: measurements, of all in turn.
        file: where each shape's seconds are kept.
    """

    groups: tuple[LayerGroup, ...]
    adapters: tuple[int, ...]
    rank: Count
    dropout: float
    repeats: Count
    file: str


@benchmark("lorafusion/kernels", KernelsOptions)
def kernels(settings: RunSettings, _jobs: Sequence[JobSpec], asked: KernelsOptions) -> Report:
    """Speed of forward and backward of a layer with adapters, over that of torch's LoRA with one adapter.

    Raises:
        ConfigError: a device that is not there.
        PlaitError: a result was wrong, or a shape could not be measured.
    """
    device = choose_device(settings.engine.device)
    dtype = dtype_on(device)
    backend = choose_kernels(settings.engine.kernels, device, dtype)
    common = ["--device", str(device), "--dtype", str(dtype).removeprefix("torch."), "--backends", backend]
    common += ["--ranks", str(asked.rank), "--dropout", str(asked.dropout), "--json", asked.file]
    common += ["--repeats", str(asked.repeats), "--adapters", *map(str, sorted({1, *asked.adapters}))]
    figures: list[Figure] = []
    for group in asked.groups:
        words = [*common, "--layers", *group.layers, "--tokens", *map(str, group.tokens)]
        with redirect_stdout(sys.stderr):  # its lines are progress; standard output has the figures
            failed = bench.main(words)
        if failed:
            raise PlaitError(
                f"{asked.file}: a shape of {group.name} is wrong or could not be measured",
                "The lines above say which. Remove the file to measure all again.",
            )
        figures += _figures(group, asked, backend)
    kind = bench.environment(device)["device"] or device
    note = f"{kind}, {dtype}, {backend}, rank {asked.rank}, dropout {asked.dropout}"
    return Report("LoRAFusion, a layer's call", tuple(figures), (note,))


def _figures(group: LayerGroup, asked: KernelsOptions, backend: str) -> list[Figure]:
    """Ratios of the group's shapes, in the mean and at most."""
    rows = json.loads(Path(asked.file).read_text(encoding="utf-8"))["rows"]
    shapes = [(layer, tokens) for layer in group.layers for tokens in group.tokens]
    label, found = str(asked.rank), {}
    for row in rows:
        if row["ranks"] == label and row["dropout"] == asked.dropout:
            found[row["layer"], row["tokens"], row["adapters"]] = row["seconds"]

    def over(count: int, phase: str, subject: str) -> list[float]:
        """Speed of the kernels with so many adapters over a subject with one, by shape."""
        return [found[*shape, 1][subject][phase] / found[*shape, count][backend][phase] for shape in shapes]

    plain = [found[*shape, 1]["torch-lora"]["both"] / found[*shape, 1]["frozen"]["both"] for shape in shapes]
    figures = [
        Figure(f"{group.name}: torch's LoRA over the frozen layer", fmean(plain), "× seconds", "measured")
    ]
    for count in asked.adapters:
        name = f"{group.name}, {count} adapter{'s' * (count > 1)}"
        both = over(count, "both", "torch-lora")
        figures += [
            Figure(f"{name}: mean speed over torch's LoRA", fmean(both), "×", "measured"),
            Figure(f"{name}: largest speed over torch's LoRA", max(both), "×", "measured"),
            *(
                Figure(f"{name}: {phase}", fmean(over(count, phase, "torch-lora")), "×", "measured")
                for phase in ("forward", "backward")
            ),
            Figure(
                f"{name}: over the frozen layer",
                *(fmean(1 / each for each in over(count, "both", "frozen")), "× seconds", "measured"),
            ),
        ]
    return figures
