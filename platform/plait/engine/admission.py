"""Which jobs may train together: predicted memory and the limit on their number."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from plait.core.errors import CapacityError
from plait.core.jobs import AdapterSpec
from plait.core.settings import RunSettings
from plait.cost.memory import FEATURES, MemoryModel
from plait.cost.profile_store import Profile
from plait.engine.memory_estimate import ActivationShape, activation_bytes
from plait.models.targets import LinearInfo, check_rank
from plait.planner.admission import GroupMemory

GIB = 2**30
USUAL_RANK = 16


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker says of itself: its model and its device.

    Attributes:
        shape: sizes that memory depends on.
        linears: every layer that an adapter may target.
        max_length: longest sample of the model in tokens.
        memory_bytes: what the device has in all.
        chosen: what was chosen by measurement (kernel backend), as recorded in the plan.
        inputs: what the linears read: names of those that read the same, and its features. Empty: nothing is
            known to be shared.
    """

    shape: ActivationShape
    linears: tuple[LinearInfo, ...]
    max_length: int
    memory_bytes: int
    chosen: dict[str, str] = field(default_factory=dict, hash=False)
    inputs: tuple[tuple[frozenset[str], int], ...] = ()

    def inputs_read(self, names: Collection[str]) -> float:
        """Share of all input features of the linears that these linears read."""
        inputs = self.inputs or tuple((frozenset({each.name}), each.in_features) for each in self.linears)
        read = sum(features for readers, features in inputs if not readers.isdisjoint(names))
        return read / sum(features for _, features in inputs)


@dataclass(frozen=True, slots=True)
class Demand:
    """What one job asks for.

    Attributes:
        adapter_bytes: exact: weights, gradients, moments, copies.
        longest: tokens of its longest sample.
        rank: of its adapter.
        names: linears that it sits on, by the last parts of their names.
        linears: those linears, by their full names.
    """

    adapter_bytes: int
    longest: int
    rank: int = 0
    names: frozenset[str] = frozenset()
    linears: frozenset[str] = frozenset()


class Admission:
    """Answers whether jobs fit together into the worker's memory.

    What stays is exact arithmetic. What passes is predicted by a fitted model, with its margin: from a stored
    profile, or from what training has shown (:meth:`learn`). Before there is either, by the estimate of
    :mod:`plait.engine.memory_estimate`.

    Args:
        facts: of the worker.
        settings: capacity, checkpointing, memory share and the limit on jobs.
        profile: stored, of this model, device, dtype and engine options; None where there is none.
    """

    def __init__(self, facts: WorkerFacts, settings: RunSettings, profile: Profile | None = None) -> None:
        self._profile = profile
        self._learnt: MemoryModel | None = None
        self._held = 1.0  # bytes that stay for each byte of the adapters themselves
        self._passing: dict[tuple[bool, int, int], int] = {}  # what is asked again for every place
        self._facts = facts
        self._engine = settings.engine
        self._planner = settings.planner

    def demand(self, adapter: AdapterSpec, longest: int) -> Demand:
        """What a job needs.

        Raises:
            ModelError: a target matches nothing, or the rank is above a layer's size.
            CapacityError: its longest sample does not fit, or the job does not fit into memory alone.
        """
        limit = min(self._engine.capacity_or_usual, self._facts.max_length)
        if longest > limit:
            raise CapacityError(
                f"a sample of {longest} tokens",
                f"engine.capacity={self._engine.capacity_or_usual}; "
                f"the model takes {self._facts.max_length} tokens.",
                "Raise engine.capacity, or drop or cut long samples (data.overlong).",
            )
        names = set(check_rank(adapter, self._facts.linears))
        sites = [linear for linear in self._facts.linears if linear.name in names]
        size = self._adapter_bytes(adapter, sites)
        demand = Demand(size, longest, adapter.rank, _last_parts(sites), frozenset(names))
        if self.predicted([demand]) > self.budget:
            raise CapacityError(
                f"one job needs about {self.predicted([demand]) / GIB:.2f} GiB",
                f"{self.budget / GIB:.2f} GiB may be used: planner.memory_share={self._planner.memory_share} "
                f"of {self._facts.memory_bytes / GIB:.2f} GiB.",
                "Lower engine.capacity or adapter.rank, set engine.checkpointing, or take a smaller model.",
            )
        return demand

    @property
    def holds_for(self) -> str:
        """Model, device and options that observed peaks hold for, in words."""
        chosen = sorted(self._facts.chosen.items())
        return repr((self._facts.shape, chosen, self._engine.checkpointing, FEATURES))

    @property
    def usual(self) -> Demand:
        """What is assumed where no job is known yet: rank 16 on every linear layer."""
        size = self._adapter_bytes(AdapterSpec(USUAL_RANK), self._facts.linears)
        return Demand(size, 0, USUAL_RANK, _last_parts(self._facts.linears))

    def _adapter_bytes(self, adapter: AdapterSpec, sites: Iterable[LinearInfo]) -> int:
        from plait.adapters.variants import adapter_bytes

        return adapter_bytes(adapter, sites, self._facts.shape.element_bytes)

    @property
    def budget(self) -> int:
        """Bytes that may be used, the base model's weights included."""
        return int(self._planner.memory_share * self._facts.memory_bytes)

    def predicted(self, demands: Sequence[Demand]) -> int:
        """Bytes of the base model and these jobs at the peak of the heaviest microbatch that may come."""
        longest = max((demand.longest for demand in demands), default=0) or self._engine.capacity_or_usual
        rank = max((demand.rank for demand in demands), default=0)
        model = self.model_for(demands)
        key = (model is None, longest, rank)
        if key not in self._passing:
            self._passing[key] = self._passes(model, longest, rank)
        return self.staying(demands) + self._passing[key]

    def staying(self, demands: Iterable[Demand]) -> int:
        """Bytes of the base model and of these jobs' adapters with all that is kept for them."""
        adapters = sum(demand.adapter_bytes for demand in demands)
        return self._facts.shape.weight_bytes + int(self._held * adapters)

    def learn_held(self, static: int, *, adapters: int) -> None:
        """Take in what stays while adapters of so many bytes train: kernels may keep more for them."""
        if adapters:
            self._held = max(1.0, (static - self._facts.shape.weight_bytes) / adapters)

    def _passes(self, model: MemoryModel | None, longest: int, rank: int) -> int:
        """Bytes that a microbatch takes at the most."""
        capacity = self._engine.capacity_or_usual
        if model is None:
            return self.estimate(capacity, longest)
        memory = GroupMemory(model, 0, capacity, longest, self._facts.shape.keep_up_to)
        return int(memory([Demand(0, longest, rank)]))

    def estimate(self, tokens: int, longest: int) -> int:
        """Bytes of a microbatch's activations from the model's shape alone."""
        return activation_bytes(
            self._facts.shape, capacity=tokens, longest=longest, checkpointing=self._engine.checkpointing
        )

    def model_for(self, demands: Sequence[Demand]) -> MemoryModel | None:
        """The fitted model of these jobs' microbatches, if there is one: what training has shown, else the
        profile where its adapters sat on all linears that these sit on."""
        if self._learnt is not None:
            return self._learnt
        names = {name for demand in demands for name in demand.names}
        return self._profile.memory if self._profile is not None and self._profile.covers(names) else None

    def learn(self, model: MemoryModel) -> None:
        """Predict with this model from now on."""
        self._learnt = model
        self._passing.clear()

    def fits(self, demands: Sequence[Demand]) -> bool:
        """Whether these jobs may train together."""
        most = self._planner.max_jobs
        return (most is None or len(demands) <= most) and self.predicted(demands) <= self.budget

    def room(self, taken: Sequence[Demand], each: Demand, most: int) -> int:
        """How many more jobs like ``each`` fit beside ``taken``; at most ``most``."""
        number = 0
        while number < most and self.fits([*taken, *[each] * (number + 1)]):
            number += 1
        return number


def _last_parts(linears: Iterable[LinearInfo]) -> frozenset[str]:
    return frozenset(linear.name.rpartition(".")[2] for linear in linears)
