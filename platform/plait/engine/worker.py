"""The contract between the coordinator and the owner of the tensors.

A seam: the in-process worker (:mod:`plait.engine.local_worker`) is one implementation; a worker in another
process, or one that represents several, is another. Commands, events and facts are picklable and contain no
tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from plait.core.messages import Command, WorkerEvent
from plait.core.spans import ReplicaSpans
from plait.models.targets import LinearInfo

if TYPE_CHECKING:
    from plait.models.base import BaseModel
    from plait.models.load import ModelShape


@dataclass(frozen=True, slots=True)
class ActivationShape:
    """What the memory of a base model and of its activations depends on.

    Attributes:
        layers: decoder layers.
        hidden: size of the residual stream.
        heads: attention heads.
        vocabulary: rows of the output head.
        linear_features: in + out of every linear of all layers, summed.
        weight_bytes: bytes of the frozen weights that are always here.
        element_bytes: bytes of one number in the arithmetic.
        logit_rows: labelled rows whose logits exist at the same time (the chunk of the loss).
        keep_up_to: longest samples that keep their attention probabilities for backward.
        made_bytes: most bytes while a quantised weight is made for a product.
        gathered_bytes: most bytes of a sharded base's layers while they are gathered.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    linear_features: int
    weight_bytes: int
    element_bytes: int
    logit_rows: int
    keep_up_to: int
    made_bytes: int = field(default=0, repr=False)  # follows from the others, whose words are stored
    gathered_bytes: int = field(default=0, repr=False)

    @classmethod
    def of(
        cls,
        model: BaseModel | ModelShape,
        *,
        weight_bytes: int,
        element_bytes: int,
        made_bytes: int,
        gathered_bytes: int = 0,
    ) -> ActivationShape:
        """The sizes of a model, loaded or not."""
        from plait.models.attention import KEEP_UP_TO  # imports torch, which the coordinator does not
        from plait_kernels.loss import chunk_rows

        return cls(
            layers=model.layer_count,
            hidden=model.hidden_size,
            heads=model.heads,
            vocabulary=model.vocabulary,
            linear_features=_features(model.linears),
            weight_bytes=weight_bytes,
            element_bytes=element_bytes,
            logit_rows=chunk_rows(model.vocabulary),
            keep_up_to=KEEP_UP_TO,
            made_bytes=made_bytes,
            gathered_bytes=gathered_bytes,
        )

    def features(self, linears: Sequence[LinearInfo] = ()) -> float:
        """Inputs and outputs of a layer's linears, and its residual stream, where all linears have these
        sizes; none: where they are whole."""
        return (_features(linears) or self.linear_features) / self.layers + 2 * self.hidden

    def rows_at_once(self, slices: int) -> int:
        """``logit_rows`` of each of so many slices: a chunk has about as many logits, each row a part of
        them."""
        from plait_kernels.loss import chunk_rows

        return self.logit_rows if slices == 1 else chunk_rows(-(-self.vocabulary // slices))


def _features(linears: Sequence[LinearInfo]) -> int:
    return sum(linear.in_features + linear.out_features for linear in linears)


Portion = tuple[range, int]  # layers, and how many slices they are cut into


@dataclass(frozen=True, slots=True)
class HeldPart:
    """What one process of a replica holds of the base model, and the memory that it has for it.

    Attributes:
        layers: all of the model's, or those of its stage.
        weight_bytes, made_bytes, gathered_bytes: as in :class:`ActivationShape`, of these layers and what is
            beside them.
        tensor: how many processes hold these layers together, each a slice of every one.
        linears: all of the model's with their sizes in such a slice; empty: they are whole.
    """

    layers: range
    weight_bytes: int
    memory_bytes: int
    made_bytes: int = 0
    tensor: int = 1
    gathered_bytes: int = 0
    linears: tuple[LinearInfo, ...] = field(default=(), repr=False, compare=False)  # follows from tensor

    @property
    def portion(self) -> Portion:
        """What it holds of the model: processes that hold as much need as much memory."""
        return self.layers, self.tensor


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker reports about its model and its device.

    Attributes:
        shape: sizes that memory depends on.
        linears: every layer that an adapter may target.
        outside: modules that PEFT would also adapt if they are named, and Plait cannot.
        max_length: longest sample of the model in tokens.
        memory_bytes: total memory of the device; of several, of the one with the least.
        chosen: what was chosen for this device (kernel backend, threads), as recorded in the plan.
        model: digest of the base model.
        devices: of its replicas of the base model, by their number.
        kinds: what these devices are.
        held: what each process of each replica holds; empty: all of the model, with ``memory_bytes``.
        speeds: how fast they are, relative to each other; empty: all alike.
        capacities: most tokens of a microbatch of each, if they are given.
        inputs: the linears' inputs: names of the linears that read the same one, and its features. Empty:
            none is known to be shared.
    """

    shape: ActivationShape
    linears: tuple[LinearInfo, ...]
    max_length: int
    memory_bytes: int
    chosen: dict[str, str] = field(default_factory=dict, hash=False)
    inputs: tuple[tuple[frozenset[str], int], ...] = ()
    outside: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    kinds: tuple[str, ...] = ()
    held: tuple[tuple[HeldPart, ...], ...] = ()
    speeds: tuple[float, ...] = ()
    model: str = ""
    capacities: tuple[int, ...] = ()

    @property
    def stages(self) -> tuple[int, ...]:
        """How many processes hold each replica together."""
        return tuple(map(len, self.parts))

    @property
    def staged(self) -> bool:
        """Whether a replica is cut into stages."""
        return max(self.stages) > 1

    @property
    def replica_bytes(self) -> tuple[int, ...]:
        """Memory of each replica: of slices of the same layers, that of one counts."""
        return tuple(sum(part.memory_bytes for part in own[:: own[0].tensor]) for own in self.parts)

    @property
    def parts(self) -> tuple[tuple[HeldPart, ...], ...]:
        """What each process of each replica holds."""
        return self.held or (self.whole(self.memory_bytes),) * len(self.devices)

    @property
    def splits(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each stage of each replica."""
        return tuple(tuple(len(part.layers) for part in own[:: own[0].tensor]) for own in self.parts)

    def whole(self, memory_bytes: int) -> tuple[HeldPart, ...]:
        """What a process holds that is a replica by itself."""
        shape = self.shape
        part = HeldPart(range(shape.layers), shape.weight_bytes, memory_bytes, shape.made_bytes)
        return (replace(part, gathered_bytes=shape.gathered_bytes),)

    def of(self, held: tuple[HeldPart, ...]) -> WorkerFacts:
        """The facts if there were one replica, with these parts."""
        least = min(part.memory_bytes for part in held)
        return replace(self, memory_bytes=least, held=(held,), devices=self.devices[:1])

    def inputs_read(self, names: Collection[str]) -> float:
        """Share of all input features of the linears that these linears read."""
        inputs = self.inputs or tuple((frozenset({each.name}), each.in_features) for each in self.linears)
        read = sum(features for readers, features in inputs if not readers.isdisjoint(names))
        return read / sum(features for _, features in inputs)


class Worker(Protocol):
    """Owns the base model and the adapters' tensors, and carries out commands.

    ``tests/support/worker_contract.py`` holds every worker to this:

    - A job is attached from ``Attached`` to ``Detach``. If ``Attach`` gives ``OutOfMemory``, nothing of
      the job is left; if it gives ``JobFailed``, the job is attached and must be detached.
    - ``RunSchedule`` adds gradients in the order given, with one ``MicrobatchDone`` for each microbatch; a
      step takes them and zeroes them, with one ``StepDone``. After ``OutOfMemory`` no gradient is left, and
      no further step was taken.
    - ``JobFailed`` concerns only its own job: the others' losses and gradients are as without it.
    - Running jobs together changes only rounding: losses and steps are those of each job alone.
    - Every second of the device is in exactly one event's ``seconds``.
    - ``SaveCheckpoint`` and ``Export`` write a folder completely or not at all, and do not change the job.
    """

    @property
    def facts(self) -> WorkerFacts:
        """Its model and its device."""

    def execute(self, command: Command) -> Sequence[WorkerEvent]:
        """Carry out one command to its end.

        Raises:
            StorageError: a checkpoint or an adapter cannot be written.
        """

    def take_spans(self) -> Sequence[ReplicaSpans]:
        """What each replica did since the last call, by its number."""
