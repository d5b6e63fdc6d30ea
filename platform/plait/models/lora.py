"""Linear layers that read the same tensor share one frozen product and take the adapters' part with it.

q, k and v (gate and up) of a layer become one :class:`LinearGroup` with one weight; transformers' modules
stay where they are, each handing out its columns. Which layers are siblings is observed, not listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from plait_kernels import Routing, Site, multi_lora_linear
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from plait.models.targets import LinearInfo


@dataclass(slots=True)
class Binding:
    """What the linear layers of a model read while a layer runs; set on entering it."""

    routing: Routing | None = None
    backend: str = "reference"


class LinearGroup:
    """One or more linear layers over the same input, with one frozen weight (sum of out, in)."""

    def __init__(self, sites: Sequence[Site], weight: Tensor, bias: Tensor | None, binding: Binding) -> None:
        self.sites = tuple(sites)
        self.names = tuple(site.name for site in sites)
        self.widths = [site.out_features for site in sites]
        self.weight = weight
        self.bias = bias
        self.binding = binding
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def merged(self, x: Tensor) -> Tensor:
        """All siblings' outputs side by side: (..., in) to (..., sum of out)."""
        routing = self.binding.routing
        if routing is None:
            return nn.functional.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, x.shape[-1])
        backend = self.binding.backend
        out = multi_lora_linear(
            rows, self.weight, self.bias, self.names, routing.bank, routing, backend=backend
        )
        return out.view(*x.shape[:-1], out.shape[-1])

    def take(self, member: int, x: Tensor) -> Tensor:
        """One sibling's output; the first to ask makes the product, the last to ask lets go of it."""
        if len(self.sites) == 1:
            return self.merged(x)
        if self._input is not x:
            self._input = x
            self._outputs = dict(enumerate(self.merged(x).split(self.widths, dim=-1)))
        found = self._outputs.pop(member, None)
        if found is None:  # asked a second time with the same input
            self.forget()
            return self.take(member, x)
        if not self._outputs:
            self.forget()
        return found

    def forget(self) -> None:
        """Let go of what an interrupted pass (a recomputation that stopped early) left behind."""
        self._input, self._outputs = None, {}


class GroupedLinear(nn.Module):
    """Stands where transformers had a linear layer; ``weight`` and ``bias`` are views of its group's."""

    def __init__(self, group: LinearGroup, member: int) -> None:
        super().__init__()
        self.group = group
        self.member = member
        start = sum(group.widths[:member])
        stop = start + group.widths[member]
        self.out_features, self.in_features = group.widths[member], group.weight.shape[1]
        self.weight = nn.Parameter(group.weight[start:stop], requires_grad=False)
        bias = None if group.bias is None else nn.Parameter(group.bias[start:stop], requires_grad=False)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return self.group.take(self.member, x)


def linear_info(name: str, module: nn.Module) -> LinearInfo | None:
    """What an adapter must know of a module, or None where it is no linear layer."""
    if isinstance(module, nn.Linear):
        return LinearInfo(name, module.in_features, module.out_features)
    if isinstance(module, Conv1D):
        return LinearInfo(name, module.nx, module.nf, fan_in_fan_out=True)
    return None


def find_linears(model: nn.Module, prefix: str) -> tuple[LinearInfo, ...]:
    """All linear layers below ``prefix`` (the stack of layers), in the model's order."""
    found = (linear_info(name, module) for name, module in model.named_modules() if name.startswith(prefix))
    return tuple(info for info in found if info is not None)


class SiblingObserver:
    """Records, while a model runs, which of its linear layers are given the same tensor."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._seen: dict[int, list[str]] = {}
        self._alive: list[Tensor] = []  # keeps every input, so that no identity is used twice
        self._hooks = [
            model.get_submodule(name).register_forward_pre_hook(self._hook(name)) for name in names
        ]

    def _hook(self, name: str):  # type: ignore[no-untyped-def]
        def note(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._alive.append(inputs[0])
            self._seen.setdefault(id(inputs[0]), []).append(name)

        return note

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def siblings(self, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Groups of names in order; a layer that never ran, or ran twice, stands alone."""
        calls = [name for group in self._seen.values() for name in group]
        once = {name for name in calls if calls.count(name) == 1}
        of = {name: tuple(group) for group in self._seen.values() for name in group if set(group) <= once}
        done: set[str] = set()
        for name in names:
            if name not in done:
                group = of.get(name, (name,))
                done.update(group)
                yield group


def merge_siblings(
    model: nn.Module, groups: Sequence[Sequence[LinearInfo]], keys: dict[str, int], binding: Binding
) -> list[LinearGroup]:
    """Put grouped layers in the place of the model's linear layers; their weights move, none is copied twice."""
    made = []
    for infos in groups:
        modules = [model.get_submodule(info.name) for info in infos]
        sites = [Site(info.name, keys[info.name], info.in_features, info.out_features) for info in infos]
        group = LinearGroup(sites, *_merged_weights(modules), binding)
        for member, info in enumerate(infos):
            parent, _, attribute = info.name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, GroupedLinear(group, member))
        made.append(group)
    return made


def _merged_weights(modules: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None]:
    weights, biases = [], []
    for module in modules:
        weight = module.get_parameter("weight").detach()
        weights.append(weight.t() if isinstance(module, Conv1D) else weight)
        biases.append(module.bias)
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    if all(bias is None for bias in biases):
        return weight, None
    parts = [
        torch.zeros(len(weight), dtype=weight.dtype, device=weight.device) if bias is None else bias.detach()
        for bias, weight in zip(biases, weights, strict=True)
    ]
    return weight, torch.cat(parts)
