"""Decides by predicted memory which jobs may train together, and how large a microbatch may be.

Static memory is computed exactly: weights, adapters, their gradients and moments. The memory of a microbatch
is predicted by a fitted model, with its margin: from a stored profile, or learnt in training. Before there is
either, it is estimated from the model's shape.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from plait.core.errors import CapacityError, ProcessError
from plait.core.jobs import AdapterSpec
from plait.core.plans import Replica
from plait.core.settings import GPU_CAPACITIES, USUAL_CAPACITY, RunSettings
from plait.cost.memory import FEATURES, MemoryModel, MemoryShape
from plait.cost.profile_store import Profile
from plait.engine.worker import ActivationShape, HeldPart, Portion, WorkerFacts
from plait.models.targets import LinearInfo, layer_of, resolve_targets

GIB = 2**30
USUAL_RANK = 16
LEAST_CAPACITY = 128  # smaller microbatches are not tried, however little memory there is
SAVED_COPIES = 2.0  # copies that backward keeps and passes on, of each input and output of a linear
GPU_SHARE = 0.75  # of the memory, for one job of a capacity chosen without a profile; others have the rest
UNBOUNDED = ("gpipe", "mlora")  # schedules of which stages keep all microbatches of an iteration
ROWS_AHEAD = 4  # of each neighbour: two receives posted ahead, one message sent, one being packed
LOSS_COPIES = 3  # logits, their softmax and its gradient, in float32


@dataclass(frozen=True, slots=True)
class Demand:
    """What one job needs.

    Attributes:
        adapter_bytes: exact bytes of weights, gradients, moments and copies.
        longest: tokens of its longest sample; 0: not known. samples: of its global batch.
        names: linears that it targets, by the last parts of their names.
        linears: the same linears, by their full names.
        up_to: ``adapter_bytes`` of the layers before each layer, and of all, by slices of a layer; empty: not
            known by layers.
    """

    adapter_bytes: int
    longest: int
    rank: int = 0
    names: frozenset[str] = frozenset()
    linears: frozenset[str] = frozenset()
    up_to: Mapping[int, tuple[int, ...]] = field(default_factory=dict, repr=False, hash=False)
    samples: int = 1

    def bytes_on(self, layers: range, slices: int = 1) -> int:
        """``adapter_bytes`` of some layers in one of so many slices; all, where that is not known."""
        up_to = self.up_to.get(slices) or self.up_to.get(1)
        return up_to[layers.stop] - up_to[layers.start] if up_to else self.adapter_bytes


Sized = tuple[MemoryShape, int]  # a microbatch, with the tokens of its longest sample


@dataclass(frozen=True, slots=True)
class _Room:
    """One process of a replica, with the most that it may be given.

    Attributes:
        capacity: most tokens of a microbatch.
        flights: most microbatches between forward and backward; None: all of an iteration.
        neighbours: stages with which it exchanges rows.
    """

    capacity: int
    part: HeldPart
    flights: int | None
    neighbours: int


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
        self._sharded = settings.cluster.optimiser == "sharded"
        self._profile = profile
        self._learnt: dict[Portion, MemoryModel] = {}
        self._overhead: dict[Portion, float] = {}  # static bytes for each byte of the adapters themselves
        # By process, models that there are not, longest sample, rank, microbatches in flight.
        self._activations: dict[tuple[_Room, bool, bool, int, int, float], int] = {}
        self._use([self._rooms_of(own, self._capacity) for own in facts.parts])

    def demand(self, adapter: AdapterSpec, longest: int, samples: int = 1) -> Demand:
        """What a job needs.

        Args:
            samples: of its global batch.

        Raises:
            ModelError: a target matches nothing, or something outside the decoder layers.
            CapacityError: its longest sample does not fit, or the job does not fit into memory alone.
            ProcessError: its longest sample fits only into a replica that is missing.
        """
        demand = self._demand(adapter, longest, samples)
        if self.predicted([demand]) > self.budget:
            raise self._too_much(demand)
        return demand

    def _too_much(self, demand: Demand) -> CapacityError:
        """The error of a job that does not fit alone: it names the fullest stage."""
        rooms = max(self._replicas, key=lambda own: max(self._beyond(room, [demand]) for room in own))
        process = max(range(len(rooms)), key=lambda place: self._beyond(rooms[place], [demand]))
        tensor, layers = rooms[0].part.tensor, len(rooms[process].part.layers)
        stages = len(rooms) // tensor
        where = "" if stages == 1 else f" on stage {process // tensor + 1} of {stages}, with {layers} layers"
        return self.refusal(
            f"one job needs about {self.predicted([demand]) / GIB:.2f} GiB{where}", stages > 1
        )

    def refusal(self, needed: str, staged: bool, rule: str = "") -> CapacityError:
        """The error of what needs more than the budget."""
        fewer = "use more stages or a smaller model" if staged else "use a smaller model"
        return CapacityError(
            needed,
            f"{self.budget / GIB:.2f} GiB may be used: planner.memory_share={self._memory_share} "
            f"of {self._facts.memory_bytes / GIB:.2f} GiB.{rule}",
            f"Lower engine.capacity or adapter.rank, set engine.checkpointing, or {fewer}.",
        )

    def demand_again(self, adapter: AdapterSpec, before: Demand) -> Demand:
        """What a job needs with the replicas that are here, also if it needs more memory than there is: a job
        that was accepted can always train alone.

        Raises:
            ModelError, CapacityError, ProcessError: as :meth:`demand`, but not because of memory.
        """
        return self._demand(adapter, before.longest, before.samples)

    def _demand(self, adapter: AdapterSpec, longest: int, samples: int) -> Demand:
        self._check_fits(longest)
        names = frozenset(resolve_targets(adapter.target_modules, self._facts.linears, self._facts.outside))
        sites = [linear for linear in self._facts.linears if linear.name in names]
        size = self._adapter_bytes(adapter, sites)
        up_to = self._up_to(adapter, sites)
        return Demand(size, longest, adapter.rank, _last_parts(sites), names, up_to, samples)

    def _up_to(self, adapter: AdapterSpec, sites: Sequence[LinearInfo]) -> dict[int, tuple[int, ...]]:
        """As :attr:`Demand.up_to`."""
        if not self._facts.staged:
            return {}
        found, shape = {}, self._facts.shape
        here = {part.tensor: part.linears for own in self._facts.parts for part in own}
        for slices, linears in ({1: ()} | here).items():
            local = {linear.name: linear for linear in linears}
            layers: list[list[LinearInfo]] = [[] for _ in range(shape.layers)]
            for site in sites:
                layers[layer_of(site.name)].append(local.get(site.name, site))
            found[slices] = (0, *accumulate(self._adapter_bytes(adapter, each) for each in layers))
        return found

    def _rooms_of(self, parts: Sequence[HeldPart], capacity: int) -> tuple[_Room, ...]:
        """The processes of a replica."""
        tensor = parts[0].tensor
        stages = len(parts) // tensor
        return tuple(
            self._room_of(part, place // tensor, stages, capacity) for place, part in enumerate(parts)
        )

    def _room_of(self, part: HeldPart, stage: int, stages: int, capacity: int) -> _Room:
        bounded = self._engine.schedule not in UNBOUNDED
        flights = stages - stage if bounded or stages == 1 else None
        return _Room(capacity, part, flights, (stage > 0) + (stage < stages - 1))

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

    def take_replicas(self, facts: WorkerFacts, replicas: Sequence[Replica], widest: int = 0) -> None:
        """Count with these replicas, whose capacities and memory may differ, from now on.

        Args:
            facts: what their worker says of the same model and its own memory.
            widest: most tokens of a microbatch on replicas that the same processes could make.
        """
        self._facts, self._widest = facts, widest
        self._capacity = max(each.capacity or self._capacity for each in replicas)
        self._use(
            [self._rooms_of(facts.parts[each.id], each.capacity or self._capacity) for each in replicas]
        )
        self._activations.clear()

    def _use(self, replicas: list[tuple[_Room, ...]]) -> None:
        self._replicas = replicas
        self._rooms = frozenset(room for own in replicas for room in own)

    @property
    def valid_for(self) -> str:
        """Model, device and options for which observed peaks are valid, in words."""
        chosen = sorted(self._facts.chosen.items())
        return repr((self._facts.shape, chosen, self._engine.checkpointing, FEATURES))

    @property
    def usual(self) -> Demand:
        """The demand assumed if no job is known yet: rank 16 on every linear layer, and batches that fill a
        microbatch for each stage."""
        linears, adapter = self._facts.linears, AdapterSpec(USUAL_RANK)
        up_to = self._up_to(adapter, linears)
        size = self._adapter_bytes(adapter, linears)
        stages = max(map(len, self._facts.splits))
        return Demand(size, 0, USUAL_RANK, _last_parts(linears), up_to=up_to, samples=stages)

    @property
    def budget(self) -> int:
        """Bytes that may be used, including the base model's weights."""
        return int(self._memory_share * self._facts.memory_bytes)

    def fits(self, demands: Sequence[Demand]) -> bool:
        """Whether these jobs fit into memory together."""
        return self.predicted(demands) <= self.budget

    def predicted(self, demands: Sequence[Demand]) -> int:
        """Bytes of the base model and these jobs at the peak of the heaviest microbatches that may come: in
        the process with the least memory, or in another, less the memory that it has more.
        """
        return max(self._beyond(room, demands) for room in self._rooms)

    def _beyond(self, room: _Room, demands: Sequence[Demand]) -> int:
        more = max(0, room.part.memory_bytes - self._facts.memory_bytes)
        return self._need(room, demands) - int(self._memory_share * more)

    def needed_by(self, part: HeldPart, stage: int, stages: int, demands: Sequence[Demand]) -> int:
        """Bytes that these jobs need in a process of so many stages, if it holds this part."""
        return self._need(self._room_of(part, stage, stages, self._capacity), demands)

    def predicted_on(self, replica: Replica, demands: Sequence[Demand]) -> int:
        """The same on the fullest process of one replica."""
        return max(self._need(room, demands) for room in self._replicas[replica.id])

    def _need(self, room: _Room, demands: Sequence[Demand]) -> int:
        longest = min(max((demand.longest for demand in demands), default=0) or room.capacity, room.capacity)
        rank = max((demand.rank for demand in demands), default=0)
        own, model = self._learnt_for(room, demands), self._model_on(room.part, demands)
        # Whatever the order, at most one global batch of each job is between forward and backward.
        every = sum(each.samples * min(each.longest or longest, longest) for each in demands) / room.capacity
        flights = max(1.0, every if room.flights is None else min(every, room.flights))
        key = (room, own is None, model is None, longest, rank, flights)
        if key not in self._activations:  # asked again for every slot
            self._activations[key] = self._activation(room, own, model, longest, rank, flights)
        return self.static(demands, room.part) + self._activations[key]

    def static(self, demands: Iterable[Demand], part: HeldPart | None = None) -> int:
        """Bytes of the base model and of these jobs' adapters with everything kept for them, in a process."""
        (whole,) = self._facts.whole(0)
        held = part or whole
        adapters = sum(demand.bytes_on(*held.portion) for demand in demands)
        return held.weight_bytes + int(self._overhead.get(held.portion, 1.0) * adapters)

    def _activation(
        self,
        room: _Room,
        own: MemoryModel | None,
        model: MemoryModel | None,
        longest: int,
        rank: int,
        flights: float,
    ) -> int:
        """The most bytes that microbatches take: full, all labelled, of the largest rank, with the longest
        samples that still keep their attention probabilities; and the rows that neighbours exchange."""
        shape, capacity = self._facts.shape, room.capacity
        rows = ROWS_AHEAD * room.neighbours * capacity * shape.hidden * shape.element_bytes
        if own is None and model is None:
            return rows + self.estimate(capacity, longest, room.part, flights)
        length = min(longest, shape.keep_up_to)
        full, rest = divmod(capacity, length)
        lengths = [length] * full + ([rest] if rest else [])
        heaviest = MemoryShape.of(lengths, ranks=rank, keep_up_to=shape.keep_up_to)
        if own is not None:
            return rows + int(own.safe_in_flight(heaviest, flights))
        assert model is not None
        share, last = self._share(room.part)
        passing = model.part(
            heaviest, share=share, flights=flights, last=last, safe=True, sliced=self._sliced(room.part)
        )
        return rows + int(passing) + room.part.gathered_bytes

    def _learnt_for(self, room: _Room, demands: Iterable[Demand]) -> MemoryModel | None:
        """The model that was fitted to this stage's peaks; not one of a time when no job had adapters on its
        layers, so that it kept nothing, if these have."""
        own = self._learnt.get(room.part.portion)
        if own is None or own.keeps or room.flights == 1:
            return own
        return None if any(demand.bytes_on(*room.part.portion) for demand in demands) else own

    def _sliced(self, part: HeldPart) -> tuple[int, int] | None:
        """Among how many its vocabulary is cut, and the rows of logits that each makes at once."""
        count = part.tensor
        return (count, self._facts.shape.rows_at_once(count)) if count > 1 else None

    def _share(self, part: HeldPart) -> tuple[float, bool]:
        """Its share of what the layers keep, and whether it has the head."""
        shape = self._facts.shape
        sliced = shape.features(part.linears) / shape.features()
        return len(part.layers) / shape.layers * sliced, part.layers.stop == shape.layers

    def expected(
        self,
        replica: int,
        microbatches: Sequence[Sized],
        demands: Sequence[Demand],
        before: Sequence[Sized] = (),
        after: Sequence[Sized] = (),
    ) -> list[int]:
        """Bytes of each process of a replica at the highest moment of these microbatches, without margins.

        Args:
            microbatches: in their order, no-ops included.
            before, after: what a pipeline that is not drained works on before they are done.
        """
        found = []
        for room in self._replicas[replica]:
            model = self._model_on(room.part, demands)
            beside = (room.flights or 1) - 1
            sizes = [*before[max(0, len(before) - beside) :], *microbatches, *after[:beside]]
            shapes = [shape for shape, _ in sizes]
            share, last = self._share(room.part)
            filled = sum(shape.tokens > 0 for shape in shapes)
            flights = min(room.flights or filled, filled)
            if own := self._learnt_for(room, demands):
                passing = own.in_flight(shapes, room.flights)
            elif model is not None:
                parts = (
                    model.part(each, share=share, flights=flights, last=last, sliced=self._sliced(room.part))
                    for each in shapes
                )
                passing = max(parts, default=0.0) + room.part.gathered_bytes
            else:
                tokens = ((shape.tokens, longest) for shape, longest in sizes)
                passing = max((self.estimate(*each, room.part, flights) for each in tokens), default=0)
            found.append(self.static(demands, room.part) + int(passing))
        return found

    def estimate(self, tokens: int, longest: int, part: HeldPart | None = None, flights: float = 1.0) -> int:
        """Bytes of microbatches' activations from the model's shape alone."""
        (whole,) = self._facts.whole(0)
        return activation_bytes(
            self._facts.shape,
            capacity=tokens,
            longest=longest,
            checkpointing=self._engine.checkpointing,
            part=part or whole,
            flights=flights,
        )

    def model_for(self, demands: Iterable[Demand]) -> MemoryModel | None:
        """The fitted model of these jobs' microbatches through the whole model, if there is one: learnt in
        training, else from the profile if its adapters targeted all linears that these target."""
        if learnt := self._learnt.get(self._whole):
            return learnt
        names = {name for demand in demands for name in demand.names}
        return self._profile.memory if self._profile is not None and self._profile.covers(names) else None

    def _model_on(self, part: HeldPart, demands: Iterable[Demand]) -> MemoryModel | None:
        """The same where it holds for a part: a whole model's loss may be fused, that of slices never is."""
        model, shape = self.model_for(demands), self._facts.shape
        if model is None or part.tensor == 1 or part.layers.stop < shape.layers:
            return model
        fused = self._facts.chosen.get("kernels") == "triton" or model.logit_rows > shape.logit_rows
        return None if fused else model

    def learnt_of(self, replica: int) -> bool:
        """Whether there is a model of each process of a replica."""
        return all(room.part.portion in self._learnt for room in self._replicas[replica])

    def learn(self, model: MemoryModel, portion: Portion | None = None) -> None:
        """Predict with this model from now on what passes through a portion of the model, or through all."""
        self._learnt[portion or self._whole] = model
        self._activations.clear()

    def learn_overhead(self, static: int, part: HeldPart, demands: Iterable[Demand]) -> None:
        """Learn from the static bytes that were observed with these jobs in a process: kernels may keep more
        than the adapters' own."""
        if adapters := sum(demand.bytes_on(*part.portion) for demand in demands):
            self._overhead[part.portion] = max(1.0, (static - part.weight_bytes) / adapters)

    @property
    def _whole(self) -> Portion:
        return range(self._facts.shape.layers), 1

    def _adapter_bytes(self, adapter: AdapterSpec, sites: Iterable[LinearInfo]) -> int:
        from plait.adapters.variants import adapter_bytes  # imports torch, which the coordinator does not

        parts = len(self._facts.devices) if self._sharded else 1
        return adapter_bytes(adapter, sites, self._facts.shape.element_bytes, parts=parts)


def activation_bytes(
    model: ActivationShape,
    *,
    capacity: int,
    longest: int,
    checkpointing: bool,
    part: HeldPart,
    flights: float = 1.0,
) -> int:
    """An estimate of the bytes that full microbatches need at their peak in one process.

    Args:
        longest: tokens of the longest sample; bounds Σℓ² of those that keep their attention probabilities.
        checkpointing: whether only the layers' inputs, and the activations inside one layer, are kept.
        flights: microbatches between forward and backward.
    """
    tokens = capacity * model.element_bytes
    one = SAVED_COPIES * model.features(part.linears) * tokens
    one += SAVED_COPIES * model.heads / part.tensor * min(longest, model.keep_up_to) * tokens
    insides = flights * len(part.layers) * (model.hidden * tokens if checkpointing else one)
    insides += one if checkpointing else 0.0
    logits = math.ceil(model.vocabulary / part.tensor)
    loss = min(capacity, model.rows_at_once(part.tensor)) * logits * 4 * LOSS_COPIES
    made = part.made_bytes + part.gathered_bytes
    return int(insides) + loss * (part.layers.stop == model.layers) + made


def choose_capacity(
    settings: RunSettings,
    facts: WorkerFacts,
    profile: Profile | None,
    jobs: Collection[tuple[AdapterSpec, int, int]],
    recorded: int | None = None,
    *,
    on_gpu: bool = False,
) -> int:
    """The capacity of a run: the given one, else the recorded one, else the profile's, else the usual one.

    On a GPU the usual one follows its memory, since it takes thousands of tokens to keep it busy.

    Unless given, it is at least the longest sample, and is halved while a job does not fit into memory.

    Args:
        jobs: each adapter with the tokens of its longest sample, and the samples of its global batch.
        recorded: the capacity with which the search was started.
    """
    if settings.engine.capacity is not None:
        return settings.engine.capacity
    longest = max((length for _, length, _ in jobs), default=0)
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
    jobs: Collection[tuple[AdapterSpec, int, int]],
) -> bool:
    """Whether each job fits into memory alone."""
    engine = replace(settings.engine, capacity=capacity)
    admission = Admission(facts, replace(settings, engine=engine), profile)
    try:
        for each in jobs:
            admission.demand(*each)
    except CapacityError:
        return False
    return True


def _last_parts(linears: Iterable[LinearInfo]) -> frozenset[str]:
    return frozenset(linear.name.rpartition(".")[2] for linear in linears)
