"""Which jobs may train together: predicted memory and the limit on their number (DESIGN §5.8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from plait.engine.memory_estimate import ActivationShape, activation_bytes, adapter_bytes
from plait.errors import CapacityError
from plait.jobs import AdapterSpec
from plait.models.targets import LinearInfo, check_rank
from plait.settings import RunSettings

GIB = 2**30


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker says of itself: its model and its device.

    Attributes:
        shape: sizes that memory depends on.
        linears: every layer that an adapter may target.
        max_length: longest sample of the model in tokens.
        memory_bytes: what the device has in all.
        tile: padding multiple P of the kernels.
        chosen: what was chosen by measurement (kernel backend), as recorded in the plan.
    """

    shape: ActivationShape
    linears: tuple[LinearInfo, ...]
    max_length: int
    memory_bytes: int
    tile: int = 1
    chosen: dict[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Demand:
    """What one job asks for: its adapter's bytes, and the tokens of its longest sample."""

    bytes: int
    longest: int


class Admission:
    """Answers whether jobs fit together into the worker's memory.

    Args:
        facts: of the worker.
        settings: capacity, checkpointing, memory share and the limit on jobs.
    """

    def __init__(self, facts: WorkerFacts, settings: RunSettings) -> None:
        self._facts = facts
        self._engine = settings.engine
        self._planner = settings.planner

    def demand(self, adapter: AdapterSpec, longest: int) -> Demand:
        """What a job needs.

        Raises:
            ModelError: a target matches nothing, or the rank is above a layer's size.
            CapacityError: its longest sample does not fit, or the job does not fit into memory alone.
        """
        limit = min(self._engine.capacity, self._facts.max_length)
        if -(-longest // self._facts.tile) * self._facts.tile > limit:
            raise CapacityError(
                f"a sample of {longest} tokens",
                f"engine.capacity={self._engine.capacity}; the model takes {self._facts.max_length} tokens.",
                "Raise engine.capacity, or drop or cut long samples (data.overlong).",
            )
        names = set(check_rank(adapter, self._facts.linears))
        sites = [linear for linear in self._facts.linears if linear.name in names]
        demand = Demand(adapter_bytes(adapter.rank, sites, self._facts.shape.element_bytes), longest)
        if self.predicted([demand]) > self.budget:
            raise CapacityError(
                f"one job needs about {self.predicted([demand]) / GIB:.2f} GiB",
                f"{self.budget / GIB:.2f} GiB may be used: planner.memory_share={self._planner.memory_share} "
                f"of {self._facts.memory_bytes / GIB:.2f} GiB.",
                "Lower engine.capacity or adapter.rank, set engine.checkpointing, or take a smaller model.",
            )
        return demand

    @property
    def usual(self) -> Demand:
        """What is assumed where no job is known yet: rank 16 on every linear layer."""
        return Demand(adapter_bytes(16, self._facts.linears, self._facts.shape.element_bytes), 0)

    @property
    def budget(self) -> int:
        """Bytes that may be used, the base model's weights included."""
        return int(self._planner.memory_share * self._facts.memory_bytes)

    def predicted(self, demands: Sequence[Demand]) -> int:
        """Bytes of the base model and these jobs at the peak of a full microbatch."""
        activations = activation_bytes(
            self._facts.shape,
            capacity=self._engine.capacity,
            longest=max((demand.longest for demand in demands), default=0),
            checkpointing=self._engine.checkpointing,
        )
        return self._facts.shape.weight_bytes + activations + sum(demand.bytes for demand in demands)

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
