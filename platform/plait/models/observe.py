"""Run a whole model once, on a few tokens, and note what its blocks take, give and share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Observed:
    """What the blocks did.

    Attributes:
        siblings: linear layers that were given the same tensor, in the model's order.
        inputs: hidden states (tokens, hidden) that each layer took.
        outputs: and gave.
        logits: of every token.
    """

    siblings: tuple[tuple[str, ...], ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    logits: Tensor


def observe(
    model: PreTrainedModel, layers: Sequence[nn.Module], linears: Sequence[str], tokens: Tensor
) -> Observed:
    """Run the model on one sample of ``tokens``; the only call of a whole model there is."""
    calls: list[tuple[str, Tensor]] = []  # holds every input, so that no identity is used twice
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def linear_hook(name: str) -> Callable[..., None]:
        def note(_module: nn.Module, given: tuple[Tensor, ...]) -> None:
            calls.append((name, given[0]))

        return note

    def layer_hook(_module: nn.Module, given: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
        inputs.append((given[0] if given else options["hidden_states"])[0])
        outputs.append((out[0] if isinstance(out, tuple) else out)[0])

    hooks = [model.get_submodule(name).register_forward_pre_hook(linear_hook(name)) for name in linears]
    hooks += [layer.register_forward_hook(layer_hook, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            logits = model(tokens.unsqueeze(0), use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return Observed(_siblings(calls, linears), tuple(inputs), tuple(outputs), logits)


def _siblings(calls: Sequence[tuple[str, Tensor]], linears: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Linear layers by the tensor they read; one that never ran, or ran more than once, stands alone."""
    names = [name for name, _ in calls]
    readers: dict[int, list[str]] = {}
    for name, given in calls:
        if names.count(name) == 1:
            readers.setdefault(id(given), []).append(name)
    group_of = {name: tuple(group) for group in readers.values() for name in group}
    return tuple(dict.fromkeys(group_of.get(name, (name,)) for name in linears))
