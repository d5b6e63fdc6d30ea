"""Layers of each stage: the fastest split of those that fit into the memory of the stages.

Early stages keep more microbatches between forward and backward, the first one has the embedding and the last
one head and loss: so a split that balances seconds may be one that does not fit. Smaller microbatches cost
less than uneven stages do: a run's capacity is lowered first, if it is not given.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from plait.core.jobs import AdapterSpec
from plait.core.plans import Choices
from plait.core.settings import RunSettings
from plait.core.space import as_written
from plait.cost.profile_store import Profile
from plait.cost.replica import balanced_split
from plait.cost.time import MicrobatchShape, TimeModel
from plait.engine.admission import GIB, Admission, Demand
from plait.engine.build import worker_facts
from plait.engine.replicas import dispatch_time, part_of
from plait.engine.worker import HeldPart, WorkerFacts

if TYPE_CHECKING:
    from plait.models.load import ModelShape

Asked = Collection[tuple[AdapterSpec, int, int]]  # adapter, tokens of the longest sample, samples of a batch


def settle_split(
    settings: RunSettings,
    model: ModelShape,
    profile: Profile | None,
    jobs: Asked,
    memory_bytes: int,
    before: Choices | None = None,
) -> tuple[RunSettings, tuple[str, ...]]:
    """The settings with the layers of each stage, if those that are balanced do not fit, and a line that says
    so. Replicas of different numbers of stages stay balanced.

    Args:
        jobs: of which each must fit alone.
        memory_bytes: of each process.
        before: the choices with which the search was trained before, if it was.

    Raises:
        CapacityError: no split fits.
    """
    cluster = settings.cluster
    if cluster.layer_split or len({shape.pipeline for shape in cluster.shapes} - {1}) != 1:
        return settings, ()
    facts = worker_facts(settings, model, memory_bytes)
    splits = Splits.of(facts, settings, profile, jobs)
    balanced = splits.balanced(dispatch_time(facts, None))
    kept = tuple(map(int, str((before or {}).get("layer_split") or "0").split(",")))
    if len(kept) == splits.stages and sum(kept) == splits.layers and splits.fits(kept):
        return replace(settings, cluster=replace(cluster, layer_split=kept)), ()
    if splits.fits(balanced):
        return settings, ()
    split = splits.fastest(dispatch_time(facts, None))
    stage, needed = splits.fullest(balanced)
    said = (
        f"The stages have cluster.layer_split={as_written(split)} layers by their memory: balanced by time "
        f"({as_written(balanced)}), stage {stage + 1} would need {needed / GIB:.2f} GiB of the "
        f"{splits.admission.budget / GIB:.2f} GiB that may be used."
    )
    return replace(settings, cluster=replace(cluster, layer_split=split)), (said,)


@dataclass(frozen=True, slots=True)
class Splits:
    """The splits of a model into so many stages, and what they need.

    Attributes:
        parts: what a process would hold of some layers: for each kind of replica.
        demands: of the jobs of which each must fit alone.
        full: a full microbatch.
    """

    admission: Admission
    parts: Sequence[Callable[[range], HeldPart]]
    demands: Sequence[Demand]
    stages: int
    layers: int
    full: MicrobatchShape

    @classmethod
    def of(cls, facts: WorkerFacts, settings: RunSettings, profile: Profile | None, jobs: Asked) -> Splits:
        """The splits of replicas that all have as many stages, or one.

        Raises:
            ModelError, CapacityError, ProcessError: as for :meth:`Admission.demand_again`.
        """
        admission = Admission(facts, settings, profile)
        staged = {own[0].tensor: own for own in facts.parts if len(own) > own[0].tensor}
        parts = [
            part_of(facts, settings.model.quantise, own[0].memory_bytes, tensor, own[0].linears)
            for tensor, own in staged.items()
        ]
        demands = [
            admission.demand_again(adapter, Demand(0, longest, samples=samples))
            for adapter, longest, samples in jobs
        ]
        (stages,) = {len(own) // tensor for tensor, own in staged.items()}
        full = MicrobatchShape.of([settings.engine.capacity_or_usual])
        return cls(admission, parts, list(dict.fromkeys(demands)), stages, facts.shape.layers, full)

    def balanced(self, time: TimeModel) -> tuple[int, ...]:
        """The fastest split, whether it fits or not."""
        return balanced_split(time, self.stages, self.full)

    def fastest(self, time: TimeModel) -> tuple[int, ...]:
        """The fastest split that fits.

        Raises:
            CapacityError: none fits.
        """
        balanced = self.balanced(time)
        if self.fits(balanced):
            return balanced
        most = [self._most_layers(stage) for stage in range(self.stages)]
        if min(most) < 1 or sum(most) < self.layers:
            stage, needed = self.fullest(balanced)
            raise self.admission.refusal(
                f"stage {stage + 1} of {self.stages} needs about {needed / GIB:.2f} GiB for its "
                f"{balanced[stage]} layers and one job",
                staged=True,
                rule=f" Each stage has room for at most {as_written(most)} of {self.layers} layers.",
            )
        return balanced_split(time, self.stages, self.full, most_layers=most)

    def fits(self, split: Sequence[int]) -> bool:
        """Whether each job fits alone."""
        return self.fullest(split)[1] <= self.admission.budget

    def fullest(self, split: Sequence[int]) -> tuple[int, int]:
        """The fullest stage of a split, and its bytes with the job that needs most."""
        layers = [range(*each) for each in pairwise([0, *accumulate(split)])]
        needed = [self._needed(own, stage) for stage, own in enumerate(layers)]
        stage = max(range(self.stages), key=needed.__getitem__)
        return stage, needed[stage]

    def _needed(self, layers: range, stage: int) -> int:
        return max(
            self.admission.needed_by(part(layers), stage, self.stages, [demand])
            for part in self.parts
            for demand in self.demands
        )

    def _most_layers(self, stage: int) -> int:
        """Most layers with which a stage fits, whichever of those that it may have they are."""
        behind = self.stages - 1 - stage

        def exceeds(count: int) -> bool:
            first = 0 if stage == 0 else stage if behind else self.layers - count
            last = 0 if stage == 0 else self.layers - count - behind
            starts = range(first, last + 1)
            return any(
                self._needed(range(start, start + count), stage) > self.admission.budget for start in starts
            )

        return bisect_left(range(1, self.layers - self.stages + 2), True, key=exceeds)
