"""LobRA's scalability: device-seconds of a step by devices and by tasks, on its deployments and Plait's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from plait.core.errors import ConfigError
from plait.core.jobs import JobSpec
from plait.core.samples import Int64
from plait.core.settings import RunSettings
from plait.cost.profiles import ClusterProfile
from plait_bench.benchmarks import OPTIONS, benchmark
from plait_bench.figures import Figure, Report
from plait_bench.inputs import Count, read_profile
from plait_bench.lobra import SAMPLE_STEPS, SEVEN, Assumption, Rows, Task, drawn_steps, loaded_steps, planned
from plait_bench.lobra_plans import fused_figure, plan_figures
from plait_bench.lobra_steps import balanced_seconds, lobra_seconds
from plait_bench.progress import part

GAP = 0.05  # to the proved bound at which planning ends
THEIRS, OURS = "LobRA", "Plait"


@dataclass(frozen=True, slots=True)
class Case:
    """Devices and tasks, by name, with the published deployments of Task-Fused and LobRA."""

    label: str
    devices: int
    tasks: tuple[str, ...]
    fused: Rows
    deployment: Rows


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """Options of ``lobra/scaling``.

    Attributes:
        tasks: of which cases train some; one that is named twice trains twice.
        assumptions: about lengths; the first is what is compared.
        cases: the first one's Task-Fused is what all are relative to.
        steps: drawn, over which is averaged.
        crossing: factors of a token's seconds where tensor parallelism crosses nodes; the first is what is
            compared.
        plans: assumptions about lengths under which plans alone are compared, too.
    """

    tasks: tuple[Task, ...]
    assumptions: tuple[Assumption, ...]
    cases: tuple[Case, ...]
    steps: Count
    crossing: tuple[float, ...] = (1.0,)
    plans: tuple[Assumption, ...] = ()

    def __post_init__(self) -> None:
        known = {task.name for task in self.tasks}
        if lost := {name for case in self.cases for name in case.tasks} - known:
            raise ConfigError(f"{OPTIONS}.cases: {sorted(lost)}", f"The tasks are {sorted(known)}.")


@benchmark("lobra/scaling", ScalingOptions)
def scaling(settings: RunSettings, _jobs: Sequence[JobSpec], asked: ScalingOptions) -> Report:
    """Device-seconds of each case over those of the first one's Task-Fused.

    Raises:
        ConfigError: a cluster that is not described.
    """
    profile = read_profile(settings)
    figures = []
    variants = [(each, asked.crossing[0]) for each in asked.assumptions]
    variants += [(asked.assumptions[0], factor) for factor in asked.crossing[1:]]
    piece = part("cases", len(variants) * len(asked.cases))
    for number, (assumption, factor) in enumerate(variants):
        moved = f"{assumption}" if number < len(asked.assumptions) else f"between nodes × {factor:g}"
        other, first = f"; {moved}" if number else "", 0.0
        for case in asked.cases:
            piece(f"{case.label}{other}")
            sized = replace(_crossing(profile, factor), devices=replace(profile.devices, count=case.devices))
            known, steps = _drawn(case, asked, assumption)
            figures += plan_figures(sized, known, case.deployment, case.label, other, gap=GAP)
            figures.append(fused_figure(sized, known, case.fused, case.label, other))
            devices = _device_seconds(sized, case, asked, (known, steps), plan=not number)
            first = first or devices[""]
            figures += [
                Figure(f"{case.label}: Task-Fused{how}{other}", each / first, "×", "simulated")
                for how, each in devices.items()
                if how not in (THEIRS, OURS)
            ]
            ours = devices.get(OURS)
            note = (
                ""
                if ours is None
                else f"{devices['']:.1f}, {devices[THEIRS]:.1f} and, Plait, {ours:.1f} GPU s"
            )
            plait = None if ours is None else ours / first
            name = f"{case.label}: LobRA{other}"
            figures.append(Figure(name, devices[THEIRS] / first, "×", "simulated", note=note, plait=plait))
    for assumption in asked.plans:
        for case in asked.cases:
            sized = replace(profile, devices=replace(profile.devices, count=case.devices))
            known, _ = _drawn(case, asked, assumption)
            figures += plan_figures(
                *(sized, known, case.deployment, case.label, f"; {assumption}"),
                gap=GAP,
            )
    notes = (str(asked.assumptions[0]), f"Profile: {profile.source}")
    return Report("LobRA, device-seconds compared with the first Task-Fused", tuple(figures), notes)


def _crossing(profile: ClusterProfile, factor: float) -> ClusterProfile:
    """The profile with another speed of tensor parallelism between nodes."""
    layer = {
        tp: replace(each, token=each.token * factor) if tp > profile.devices.per_node else each
        for tp, each in profile.time.layer.items()
    }
    return replace(profile, time=replace(profile.time, layer=layer))


def _drawn(case: Case, asked: ScalingOptions, assumption: Assumption) -> tuple[Int64, Int64]:
    """Lengths of the steps that are planned for, and of those over which is averaged."""
    named = {task.name: task for task in asked.tasks}
    known, steps = [], []
    for place, name in enumerate(case.tasks):  # one that comes twice has other draws
        own = replace(assumption, seed=assumption.seed + case.tasks[:place].count(name))
        known.append(drawn_steps([named[name]], own, SAMPLE_STEPS))
        steps.append(loaded_steps([named[name]], own, asked.steps))
    return np.concatenate(known, axis=1), np.concatenate(steps, axis=1)


def _device_seconds(
    profile: ClusterProfile, case: Case, asked: ScalingOptions, drawn: tuple[Int64, Int64], *, plan: bool
) -> dict[str, float]:
    """Device-seconds of a step: Task-Fused by how it divides sequences, LobRA, and, with ``plan``, Plait."""
    known, steps = drawn
    by_name = {task.name: task.batch_size for task in asked.tasks}
    sizes = [by_name[name] for name in case.tasks]
    systems = {  # all with the seven fixed buckets, with which its artifact runs these
        "": [lobra_seconds(profile, case.fused, batch, sizes) for batch in steps],
        ", balanced dispatch": [
            balanced_seconds(profile, case.fused, batch, boundaries=SEVEN) for batch in steps
        ],
        THEIRS: [lobra_seconds(profile, case.deployment, batch, sizes) for batch in steps],
    }
    if plan:
        own = planned(profile, known, gap=GAP)
        systems[OURS] = [balanced_seconds(profile, own, batch) for batch in steps]
    return {name: case.devices * float(np.mean(each)) for name, each in systems.items()}
