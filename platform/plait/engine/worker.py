"""The contract between the coordinator and the owner of the tensors.

A seam: the in-process worker (:mod:`plait.engine.local_worker`) is one side of it; a worker in another
process, or one that stands for several, is another. Commands, events and facts are picklable and hold no
tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
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
        weight_bytes: of the frozen weights.
        element_bytes: of one number of the arithmetic.
        logit_rows: labelled rows whose logits live at once (the chunk of the loss).
        keep_up_to: longest samples that keep their attention probabilities for backward.
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

    @classmethod
    def of(cls, model: BaseModel | ModelShape, *, weight_bytes: int, element_bytes: int) -> ActivationShape:
        """The sizes of a model, loaded or not."""
        from plait.models.attention import KEEP_UP_TO  # imports torch, which the coordinator does not
        from plait_kernels.loss import CHUNK_LOGITS

        return cls(
            layers=model.layer_count,
            hidden=model.hidden_size,
            heads=model.heads,
            vocabulary=model.vocabulary,
            linear_features=sum(linear.in_features + linear.out_features for linear in model.linears),
            weight_bytes=weight_bytes,
            element_bytes=element_bytes,
            logit_rows=max(1, CHUNK_LOGITS // model.vocabulary),
            keep_up_to=KEEP_UP_TO,
        )


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker reports about its model and its device.

    Attributes:
        shape: sizes that memory depends on.
        linears: every layer that an adapter may target.
        outside: what PEFT would adapt too if it is named, and Plait cannot.
        max_length: longest sample of the model in tokens.
        memory_bytes: what the device has in all.
        chosen: what was chosen by measurement (kernel backend), as recorded in the plan.
        model: digest of the base model.
        devices: of its replicas of the base model, by their number.
        kinds: what these devices are.
        replica_bytes: what each of them has; empty: ``memory_bytes``.
        speeds: how fast they are, relative to each other; empty: all alike.
        capacities: most tokens of a microbatch of each, if they are given.
        inputs: what the linears read: names of those that read the same, and its features. Empty: nothing is
            known to be shared.
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
    replica_bytes: tuple[int, ...] = ()
    speeds: tuple[float, ...] = ()
    model: str = ""
    capacities: tuple[int, ...] = ()

    def inputs_read(self, names: Collection[str]) -> float:
        """Share of all input features of the linears that these linears read."""
        inputs = self.inputs or tuple((frozenset({each.name}), each.in_features) for each in self.linears)
        read = sum(features for readers, features in inputs if not readers.isdisjoint(names))
        return read / sum(features for _, features in inputs)


class Worker(Protocol):
    """Owns the base model and the adapters' tensors, and carries out commands.

    ``tests/support/worker_contract.py`` holds every worker to this:

    - A job is in from ``Attached`` to ``Detach``. Where ``Attach`` brings ``OutOfMemory``, nothing of the job
      is left; if it brings ``JobFailed``, the job is in, to be detached.
    - ``RunSchedule`` adds gradients in the order given, with one ``MicrobatchDone`` for each microbatch; a
      step takes them and zeroes them, with one ``StepDone``. After ``OutOfMemory`` no gradient is left, and
      no further step was taken.
    - ``JobFailed`` concerns its own job: the others' losses and gradients are what they were without it.
    - What goes through together is a matter of rounding: losses and steps are those of the job alone.
    - Every second of the device is in one event's ``seconds``, and in no other's.
    - ``SaveCheckpoint`` and ``Export`` write a folder whole or not at all, and leave the job as it was.
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
