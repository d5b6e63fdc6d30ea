"""Decides by predicted memory which jobs may train together, and how large a microbatch may be.

Static memory is computed exactly: weights, adapters, their gradients and moments. The memory of a microbatch
is predicted by a fitted model, with its margin: from a stored profile, or learnt in training. Before there is
either, it is estimated from the model's shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from plait.core.errors import CapacityError, ProcessError
from plait.core.jobs import AdapterSpec
from plait.core.plans import Replica
from plait.core.settings import GPU_CAPACITIES, USUAL_CAPACITY, RunSettings
from plait.cost.memory import FEATURES, MemoryModel, MemoryShape
from plait.cost.profile_store import Profile
from plait.engine.worker import ActivationShape, WorkerFacts
from plait.models.targets import LinearInfo, resolve_targets

GIB = 2**30
USUAL_RANK = 16
LEAST_CAPACITY = 128  # smaller microbatches are not tried, however little memory there is
SAVED_COPIES = 2.0  # copies that backward keeps and passes on, of each input and output of a linear
GPU_SHARE = 0.75  # of the memory, for one job of a capacity chosen without a profile; others have the rest
LOSS_COPIES = 3  # logits, their softmax and its gradient, in float32


@dataclass(frozen=True, slots=True)
class Demand:
    """What one job needs.

    Attributes:
        adapter_bytes: exact bytes of weights, gradients, moments and copies.
        longest: tokens of its longest sample.
        names: linears that it targets, by the last parts of their names.
        linears: the same linears, by their full names.
    """

    adapter_bytes: int
    longest: int
    rank: int = 0
    names: frozenset[str] = frozenset()
    linears: frozenset[str] = frozenset()


class Admission:
    """Answers whether jobs fit together into the worker's memory.

    Args:
        profile: stored profile of this model, device, dtype and engine options; None if there is none.
    """

    def __init__(self, facts: WorkerFacts, settings: RunSettings, profile: Profile | None = None) -> None:
        self._facts = facts
        self._engine = settings.engine
        self._capacity = settings.engine.capacity_or_usual
        self._widest = 0
        self._key = settings.capacity_key
        self._memory_share = settings.planner.memory_share
        self._rooms = {(self._capacity, 0)}  # of replicas: capacity, and bytes beyond the least one's budget
        self._sharded = settings.cluster.optimiser == "sharded"
        self._profile = profile
        self._learnt: MemoryModel | None = None
        self._overhead = 1.0  # static bytes for each byte of the adapters themselves
        self._activations: dict[tuple[bool, int, int], int] = {}  # by whether fitted, longest sample, rank

    def demand(self, adapter: AdapterSpec, longest: int) -> Demand:
        """What a job needs.

        Raises:
            ModelError: a target matches nothing, or something outside the decoder layers.
            CapacityError: its longest sample does not fit, or the job does not fit into memory alone.
            ProcessError: its longest sample fits only into a replica that is missing.
        """
        demand = self.demand_here(adapter, longest)
        if (needed := self.predicted([demand])) > self.budget:
            raise CapacityError(
                f"one job needs about {needed / GIB:.2f} GiB",
                f"{self.budget / GIB:.2f} GiB may be used: planner.memory_share={self._memory_share} "
                f"of {self._facts.memory_bytes / GIB:.2f} GiB.",
                "Lower engine.capacity or adapter.rank, set engine.checkpointing, or use a smaller model.",
            )
        return demand

    def demand_here(self, adapter: AdapterSpec, longest: int) -> Demand:
        """What a job needs with the replicas that are here, also if it needs more memory than there is: a job
        that was accepted can always train alone.

        Raises:
            ModelError, CapacityError, ProcessError: as :meth:`demand`, but not because of memory.
        """
        self._check_fits(longest)
        names = frozenset(resolve_targets(adapter.target_modules, self._facts.linears, self._facts.outside))
        sites = [linear for linear in self._facts.linears if linear.name in names]
        return Demand(self._adapter_bytes(adapter, sites), longest, adapter.rank, _last_parts(sites), names)

    def _check_fits(self, longest: int) -> None:
        """Check that a sample fits into a microbatch."""
        if longest <= min(max(self._capacity, self._widest), self._facts.max_length):
            return
        if longest <= min(self._engine.capacity_or_usual, self._facts.max_length):
            raise ProcessError(
                f"a sample of {longest} tokens, but the processes here take at most {self._capacity}",
                "The process with the larger capacity is missing.",
                "The same command resumes when it is back.",
            )
        raise CapacityError(
            f"a sample of {longest} tokens",
            f"{self._key}={self._capacity}; the model takes {self._facts.max_length} tokens.",
            f"Raise {self._key}, or truncate long samples (model.max_length).",
        )

    def take_facts(self, facts: WorkerFacts) -> None:
        """Count with what another worker says of the same model and its own memory."""
        self._facts = facts
        self._activations.clear()

    def take_replicas(self, replicas: Sequence[Replica], widest: int = 0) -> None:
        """Count with these replicas, whose capacities and memory may differ, from now on.

        Args:
            widest: most tokens of a microbatch on replicas that the same processes could make.
        """
        self._widest = widest
        memory = self._facts.replica_bytes or (self._facts.memory_bytes,) * len(replicas)
        least = self._facts.memory_bytes
        self._capacity = max(each.capacity or self._capacity for each in replicas)
        self._rooms = {
            (each.capacity or self._capacity, int(self._memory_share * max(0, memory[each.id] - least)))
            for each in replicas
        }
        self._activations.clear()

    @property
    def valid_for(self) -> str:
        """Model, device and options for which observed peaks are valid, in words."""
        chosen = sorted(self._facts.chosen.items())
        return repr((self._facts.shape, chosen, self._engine.checkpointing, FEATURES))

    @property
    def usual(self) -> Demand:
        """The demand assumed if no job is known yet: rank 16 on every linear layer."""
        linears = self._facts.linears
        size = self._adapter_bytes(AdapterSpec(USUAL_RANK), linears)
        return Demand(size, 0, USUAL_RANK, _last_parts(linears))

    @property
    def budget(self) -> int:
        """Bytes that may be used, including the base model's weights."""
        return int(self._memory_share * self._facts.memory_bytes)

    def fits(self, demands: Sequence[Demand]) -> bool:
        """Whether these jobs fit into memory together."""
        return self.predicted(demands) <= self.budget

    def predicted(self, demands: Sequence[Demand]) -> int:
        """Bytes of the base model and these jobs at the peak of the heaviest microbatch that may come: on the
        replica with the least memory, or on another, less the memory that it has more.
        """
        longest = max((demand.longest for demand in demands), default=0) or self._capacity
        rank = max((demand.rank for demand in demands), default=0)
        model = self.model_for(demands)
        key = (model is None, longest, rank)
        if key not in self._activations:  # asked again for every slot
            self._activations[key] = max(
                self._activation(model, capacity, min(longest, capacity), rank) - spare
                for capacity, spare in self._rooms
            )
        return self.static(demands) + self._activations[key]

    def predicted_on(self, replica: Replica, demands: Sequence[Demand]) -> int:
        """The same on one replica, by its own capacity."""
        capacity = replica.capacity or self._capacity
        longest = max((demand.longest for demand in demands), default=0) or capacity
        rank = max((demand.rank for demand in demands), default=0)
        model = self.model_for(demands)
        return self.static(demands) + self._activation(model, capacity, min(longest, capacity), rank)

    def static(self, demands: Iterable[Demand]) -> int:
        """Bytes of the base model and of these jobs' adapters with everything kept for them."""
        adapters = sum(demand.adapter_bytes for demand in demands)
        return self._facts.shape.weight_bytes + int(self._overhead * adapters)

    def _activation(self, model: MemoryModel | None, capacity: int, longest: int, rank: int) -> int:
        """The most bytes that a microbatch takes: full, all labelled, of the largest rank, with the longest
        samples that still keep their attention probabilities."""
        if model is None:
            return self.estimate(capacity, longest)
        keep_up_to = self._facts.shape.keep_up_to
        length = min(longest, keep_up_to)
        full, rest = divmod(capacity, length)
        lengths = [length] * full + ([rest] if rest else [])
        return int(model.safe_peak(MemoryShape.of(lengths, ranks=rank, keep_up_to=keep_up_to), static=0))

    def estimate(self, tokens: int, longest: int) -> int:
        """Bytes of a microbatch's activations from the model's shape alone."""
        return activation_bytes(
            self._facts.shape, capacity=tokens, longest=longest, checkpointing=self._engine.checkpointing
        )

    def model_for(self, demands: Sequence[Demand]) -> MemoryModel | None:
        """The fitted model of these jobs' microbatches, if there is one: learnt in training, else from the
        profile if its adapters targeted all linears that these target."""
        if self._learnt is not None:
            return self._learnt
        names = {name for demand in demands for name in demand.names}
        return self._profile.memory if self._profile is not None and self._profile.covers(names) else None

    def learn(self, model: MemoryModel) -> None:
        """Predict with this model from now on."""
        self._learnt = model
        self._activations.clear()

    def learn_overhead(self, static: int, *, adapters: int) -> None:
        """Learn from the static bytes observed with ``adapters`` bytes of adapters, for which kernels may
        keep more."""
        if adapters:
            self._overhead = max(1.0, (static - self._facts.shape.weight_bytes) / adapters)

    def _adapter_bytes(self, adapter: AdapterSpec, sites: Iterable[LinearInfo]) -> int:
        from plait.adapters.variants import adapter_bytes  # imports torch, which the coordinator does not

        parts = len(self._facts.devices) if self._sharded else 1
        return adapter_bytes(adapter, sites, self._facts.shape.element_bytes, parts=parts)


def activation_bytes(model: ActivationShape, *, capacity: int, longest: int, checkpointing: bool) -> int:
    """An estimate of the bytes that a full microbatch needs at its peak.

    Args:
        longest: tokens of the longest sample; bounds Σℓ² of those that keep their attention probabilities.
        checkpointing: whether only the layers' inputs, and the activations inside one layer, are kept.
    """
    tokens = capacity * model.element_bytes
    insides = SAVED_COPIES * (model.linear_features + 2 * model.layers * model.hidden) * tokens
    insides += SAVED_COPIES * model.layers * model.heads * min(longest, model.keep_up_to) * tokens
    if checkpointing:
        insides = insides / model.layers + model.layers * model.hidden * tokens
    loss = min(capacity, model.logit_rows) * model.vocabulary * 4 * LOSS_COPIES
    return int(insides) + loss + model.made_bytes


def choose_capacity(
    settings: RunSettings,
    facts: WorkerFacts,
    profile: Profile | None,
    jobs: Collection[tuple[AdapterSpec, int]],
    recorded: int | None = None,
    *,
    on_gpu: bool = False,
) -> int:
    """The capacity of a run: the given one, else the recorded one, else the profile's, else the usual one.

    On a GPU the usual one follows its memory, since it takes thousands of tokens to keep it busy.

    Unless given, it is at least the longest sample, and is halved while a job does not fit into memory.

    Args:
        jobs: each adapter with the tokens of its longest sample.
        recorded: the capacity with which the search was started.
    """
    if settings.engine.capacity is not None:
        return settings.engine.capacity
    longest = max((length for _, length in jobs), default=0)
    if recorded is not None:
        return max(recorded, longest)
    least = max(longest, LEAST_CAPACITY)
    usual = USUAL_CAPACITY
    if on_gpu and profile is None:
        share = settings.planner.memory_share * GPU_SHARE
        roomy = replace(settings, planner=replace(settings.planner, memory_share=share))
        fitting = (each for each in GPU_CAPACITIES if _each_fits(each, roomy, facts, None, jobs))
        usual = next(fitting, USUAL_CAPACITY)
    tried = max(profile.capacity if profile is not None else usual, longest)
    while tried > least and not _each_fits(tried, settings, facts, profile, jobs):
        tried = max(tried // 2, least)
    return tried


def _each_fits(
    capacity: int,
    settings: RunSettings,
    facts: WorkerFacts,
    profile: Profile | None,
    jobs: Collection[tuple[AdapterSpec, int]],
) -> bool:
    """Whether each job fits into memory alone."""
    engine = replace(settings.engine, capacity=capacity)
    admission = Admission(facts, replace(settings, engine=engine), profile)
    try:
        for adapter, longest in jobs:
            admission.demand(adapter, longest)
    except CapacityError:
        return False
    return True


def _last_parts(linears: Iterable[LinearInfo]) -> frozenset[str]:
    return frozenset(linear.name.rpartition(".")[2] for linear in linears)
