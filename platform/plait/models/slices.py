"""How a model's layers are sliced among processes that hold them together (tensor parallelism).

Linear layers that read hidden states are sliced by outputs, those that add to hidden states by inputs, as
transformers' plan of the family says. An adapter follows its layer: of the first kind A is whole and B
sliced, of the second A is sliced and B whole. So what is added up for the base model completes the adapters'
part, too, and only the gradients of whole sides are added up before a step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from plait.core.errors import ModelError
from plait.models.targets import LinearInfo
from plait_kernels.chain import apply

STEP = 8  # features of one call of the random function: slices of inputs begin at a multiple
SIDES: dict[str, Literal["in", "out"]] = {"colwise": "out", "rowwise": "in"}
KEYS = re.compile(r"(^|\.)[kv]_proj$")  # have as many heads as keys, others as many as queries


class Sharing(Protocol):
    """The processes that hold the same layers together, as one of them sees them.

    Attributes:
        number: of this one.
        count: how many there are.
    """

    number: int
    count: int

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """This tensor of each, in their order."""


class Slicing(Sharing, Protocol):
    """Processes that each hold a slice of every layer."""

    def add(self, tensor: Tensor) -> None:
        """Put the sum over all into a contiguous tensor; the same bits in all."""


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """The part of one linear layer that a process has.

    Attributes:
        side: whose features are sliced: the layer's inputs or its outputs.
        start, stop: the features that are here.
        whole: how many there are.
        holders: numbers of the processes that have these; several where a head of keys is repeated.
    """

    side: Literal["in", "out"]
    start: int
    stop: int
    whole: int
    holders: range

    @property
    def own(self) -> slice:
        """The features that are here."""
        return slice(self.start, self.stop)

    def local(self, linear: LinearInfo) -> LinearInfo:
        """The layer's sizes here."""
        size = self.stop - self.start
        inputs = size if self.side == "in" else linear.in_features
        outputs = size if self.side == "out" else linear.out_features
        return LinearInfo(linear.name, inputs, outputs, linear.fan_in_fan_out)


def vocabulary_slice(size: int, number: int, count: int) -> slice:
    """The tokens of one process; the last ones may have fewer."""
    length = -(-size // count)
    return slice(min(number * length, size), min((number + 1) * length, size))


def layer_slices(
    linears: Sequence[LinearInfo], config: PreTrainedConfig, number: int, count: int, asked: str = ""
) -> dict[str, LayerSlice]:
    """What process ``number`` of ``count`` has of every linear layer, by name.

    Args:
        asked: the setting that asks for slices, for errors; "": ``cluster.tensor``.

    Raises:
        ModelError: the family has no plan for it, or its sizes do not divide.
    """
    asked = asked or f"cluster.tensor={count}"
    sides = _sides(linears, config, asked)
    heads = int(config.num_attention_heads)
    keys = int(getattr(config, "num_key_value_heads", None) or heads)
    if heads % count or (keys % count and count % keys):
        raise _indivisible(
            f"{heads} heads of queries and {keys} of keys",
            "They must divide; of keys there may also be fewer, if each is repeated equally often.",
            count,
            asked,
        )
    return {each.name: _slice(each, sides[each.name], keys, number, count, asked) for each in linears}


def local_linears(linears: Sequence[LinearInfo], slices: Mapping[str, LayerSlice]) -> tuple[LinearInfo, ...]:
    """The sizes of every linear layer in a process that has these slices."""
    return tuple(slices[each.name].local(each) for each in linears)


def _slice(
    linear: LinearInfo, side: Literal["in", "out"], keys: int, number: int, count: int, asked: str
) -> LayerSlice:
    whole = linear.in_features if side == "in" else linear.out_features
    repeats = count // keys if KEYS.search(linear.name) and keys < count else 1
    parts = count // repeats
    size, rest = divmod(whole, parts)
    if rest or (side == "in" and size % STEP):
        of = f"a multiple of {STEP} of its inputs" if side == "in" else "as many of its outputs"
        raise _indivisible(
            f"{linear.name} with {whole} features", f"Each process must have {of}.", count, asked
        )
    part = number // repeats
    holders = range(part * repeats, (part + 1) * repeats)
    return LayerSlice(side, part * size, (part + 1) * size, whole, holders)


def _indivisible(what: str, rule: str, count: int, asked: str) -> ModelError:
    return ModelError(
        f"{asked}: {what}, in {count} slices", rule, "Use fewer slices, or stages (cluster.pipeline)."
    )


def _sides(
    linears: Sequence[LinearInfo], config: PreTrainedConfig, asked: str
) -> dict[str, Literal["in", "out"]]:
    """The side by which each layer is sliced, by transformers' plan of the family."""
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    patterns = [
        (re.compile(r"(.*\.)?" + re.escape(key).replace(r"\*", r"\d+")), style) for key, style in plan.items()
    ]
    found: dict[str, Literal["in", "out"]] = {}
    for linear in linears:
        style = next((style for pattern, style in patterns if pattern.fullmatch(linear.name)), "none")
        if style not in SIDES or linear.fan_in_fan_out:
            raise ModelError(
                f"{asked} with a model of type {config.model_type!r}: {linear.name} ({style})",
                "Layers are sliced by the family's plan in transformers, which must say colwise or rowwise.",
                "Use cluster.pipeline, or a model such as Llama, Qwen3, Mistral or Gemma.",
            )
        found[linear.name] = SIDES[style]
    return found


# ---- what is added up where ----------------------------------------------------------------------------


def enter(x: Tensor, slicing: Slicing) -> Tensor:
    """The input of layers sliced by outputs: its gradient is the sum over all processes."""
    return cast(Tensor, apply(_Enter, x, slicing))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slicing: Slicing) -> Tensor:
        ctx.slicing = slicing
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        whole = grad.contiguous()
        ctx.slicing.add(whole)
        return whole, None


def leave(out: Tensor, slicing: Slicing) -> Tensor:
    """The output of a layer sliced by inputs: the sum over all processes, in place."""
    return cast(Tensor, apply(_Leave, out, slicing))


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, slicing: Slicing) -> Tensor:
        ctx.mark_dirty(out)
        slicing.add(out)
        return out

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
