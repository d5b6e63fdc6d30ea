"""Linear layers with adapters; those that read the same tensor share one frozen product.

q, k and v (gate and up) of a layer become one :class:`LinearGroup` with one weight; transformers' modules
stay in place, and each returns its columns. Sibling layers are found by observation, not from a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from plait.models.slices import LayerSlice, Slicing, enter, leave
from plait.models.targets import LinearInfo, layer_of
from plait_kernels import Quantised, Routing, Site, dense, frozen_linear, multi_lora_linear
from plait_kernels.gated_mlp import Frozen, multi_lora_gated_mlp
from plait_kernels.pooled import PooledRows, pooled_linear
from plait_kernels.quantised import made_bytes

FUSED = {"gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"), "down_proj": ("w2",)}  # parts of experts


@dataclass(slots=True)
class Binding:
    """Routing and backend that a model's linear layers use; set before a layer runs."""

    routing: Routing | PooledRows | None = None
    backend: str = "reference"


class LinearGroup:
    """One or more linear layers over the same input, with one frozen weight (sum of out, in).

    ``separate``: each output is a separate copy, for layers that change outputs in place (OLMo's clamps),
    which autograd forbids for the views of a split.
    """

    separate = False

    def __init__(self, sites: Sequence[Site], weight: Tensor, bias: Tensor | None, binding: Binding) -> None:
        self.sites = tuple(sites)
        self.names = tuple(site.name for site in sites)
        self.widths = [site.out_features for site in sites]
        self.weight: Tensor | Quantised = weight
        self.bias = bias
        self.binding = binding
        self._slicing: Slicing | None = None
        self._reads_slice = False  # its input is one, and its output is added up
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def merged(self, x: Tensor) -> Tensor:
        """All siblings' outputs side by side: (..., in) to (..., sum of out)."""
        if self._slicing is None:
            return self._own(x)
        if self._reads_slice:
            return leave(self._own(x), self._slicing)
        return self._own(enter(x, self._slicing))

    def _own(self, x: Tensor) -> Tensor:
        """The part of the outputs that this process computes."""
        routing = self.binding.routing
        if routing is None:
            return frozen_linear(x, self.weight, self.bias)
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        backend = self.binding.backend
        if isinstance(routing, PooledRows):
            out = pooled_linear(rows, self.weight, self.bias, self.names, routing, backend=backend)
        else:
            out = multi_lora_linear(
                rows, self.weight, self.bias, self.names, routing.bank, routing, backend=backend
            )
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])

    def gated_mlp(self, x: Tensor, down: LinearGroup, kind: int) -> Tensor | None:
        """down(act(gate x) · (up x)), of which these are gate and up, as one operation; None if it is not one
        here, see `multi_lora_gated_mlp`."""
        binding, sliced = self.binding, self._slicing is not None or down._slicing is not None
        routing = binding.routing
        if sliced or not isinstance(routing, Routing):
            return None
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        out = multi_lora_gated_mlp(
            rows, self._frozen(), down._frozen(), kind, routing.bank, routing, backend=binding.backend
        )
        return out if out is None or x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])

    def _frozen(self) -> Frozen:
        return Frozen(self.weight, self.bias, self.names)

    def tensors(self) -> list[Tensor]:
        """What is kept of frozen weight and bias."""
        weight = (self.weight,) if isinstance(self.weight, Tensor) else self.weight.tensors()
        return [*weight, *(() if self.bias is None else (self.bias,))]

    @property
    def made_bytes(self) -> int:
        """Bytes while a quantised weight is made for a product."""
        if isinstance(self.weight, Tensor):
            return 0
        return made_bytes(self.weight.sizes, self.weight.dtype.itemsize, self.weight.mode)

    def quantise(self, mode: str) -> None:
        """Keep the frozen weight quantised; their modules must be bound again."""
        self.weight = Quantised(torch.split(dense(self.weight), self.widths), mode)

    def take_slice(self, slices: Mapping[str, LayerSlice], slicing: Slicing) -> None:
        """Keep one process's part of all siblings; their modules must be bound again."""
        own = [slices[site.name] for site in self.sites]
        assert isinstance(self.weight, Tensor)  # settings refuse slices of quantised ones
        weights = torch.split(self.weight, self.widths)
        biases = [None] * len(own) if self.bias is None else torch.split(self.bias, self.widths)
        self._slicing, self._reads_slice = slicing, own[0].side == "in"
        if self._reads_slice:  # siblings read the same features
            self.weight = self.weight[:, own[0].own].clone()
            self.bias = self.bias if slicing.number == 0 else None  # added once
        else:
            self.weight = torch.cat([weight[part.own] for weight, part in zip(weights, own, strict=True)])
            kept = [bias[part.own] for bias, part in zip(biases, own, strict=True) if bias is not None]
            self.bias = torch.cat(kept) if kept else None
        self.sites = tuple(local_site(site, part) for site, part in zip(self.sites, own, strict=True))
        self.widths = [site.out_features for site in self.sites]

    def take(self, member: int, x: Tensor) -> Tensor:
        """One sibling's output; the first sibling to call computes the product, the last one frees it."""
        if len(self.sites) == 1:
            return self.merged(x)
        if self._input is not x:
            self._input = x
            parts = torch.split(self.merged(x), self.widths, dim=-1)
            self._outputs = dict(enumerate(part.clone() if self.separate else part for part in parts))
        found = self._outputs.pop(member, None)
        if found is None:  # called a second time with the same input
            self.forget()
            return self.take(member, x)
        if not self._outputs:
            self.forget()
        return found

    def forget(self) -> None:
        """Free what an interrupted pass (such as a recomputation that stopped early) left behind."""
        self._input, self._outputs = None, {}


class GroupedLinear(nn.Module):
    """Replaces a linear layer of transformers; ``weight`` and ``bias`` are views of its group's.

    Of a quantised group ``weight`` is empty.
    """

    def __init__(self, group: LinearGroup, member: int) -> None:
        super().__init__()
        self.group = group
        self.member = member
        self.bind()

    def bind(self) -> None:
        """Take the views of what the group has now."""
        group, rows = self.group, self._rows
        self.out_features, self.in_features = group.widths[self.member], group.weight.shape[1]
        weight = group.weight
        kept = weight[rows] if isinstance(weight, Tensor) else torch.empty(0, dtype=weight.dtype)
        self.weight = nn.Parameter(kept.to(weight.device), requires_grad=False)
        bias = None if group.bias is None else nn.Parameter(group.bias[rows], requires_grad=False)
        self.register_parameter("bias", bias)

    @property
    def _rows(self) -> slice:
        """Its part of the group's outputs."""
        start = sum(self.group.widths[: self.member])
        return slice(start, start + self.group.widths[self.member])

    def frozen_weight(self) -> Tensor:
        """Its weight (out, in): of a quantised one, what it stands for."""
        return dense(self.group.weight)[self._rows]

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return self.group.take(self.member, x)


def local_site(site: Site, part: LayerSlice) -> Site:
    """A site of a whole layer as the process with this part of it has it."""
    if part.side == "out":
        return replace(site, out_features=part.stop - part.start)
    return replace(site, in_features=part.stop - part.start, first_feature=part.start)


def sites_by_layer(
    siblings: Sequence[tuple[str, ...]], linears: Sequence[LinearInfo]
) -> list[list[tuple[Site, ...]]]:
    """The sites of every layer by their groups, given which linear layers read the same."""
    sites = {each.name: _site(key, each) for key, each in enumerate(linears)}
    found: list[list[tuple[Site, ...]]] = []
    for names in sorted(siblings, key=lambda names: layer_of(names[0])):
        index = layer_of(names[0])
        found.extend([] for _ in range(index + 1 - len(found)))
        found[index].append(tuple(sites[name] for name in names))
    return found


def _site(key: int, info: LinearInfo) -> Site:
    return Site(info.name, key, info.in_features, info.out_features)


def layer_weights(
    layer: nn.Module, groups: Sequence[LinearGroup]
) -> tuple[list[Tensor], list[GroupedLinear]]:
    """The weights of a layer, those of groups first, and the modules that have views of these."""
    grouped = [module for module in layer.modules() if isinstance(module, GroupedLinear)]
    views = {id(each) for module in grouped for each in module.parameters(recurse=False)}
    own = [each for group in groups for each in group.tensors()]
    return [*own, *(each for each in layer.parameters() if id(each) not in views)], grouped


def linear_info(name: str, module: nn.Module) -> LinearInfo | None:
    """The sizes of a linear layer; None if the module is not one, or computes something else, like PhiMoE's
    router.
    """
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return LinearInfo(name, module.in_features, module.out_features)
    if isinstance(module, Conv1D):
        return LinearInfo(name, module.nx, module.nf, fan_in_fan_out=True)
    return None


def find_linears(model: nn.Module, prefix: str) -> tuple[LinearInfo, ...]:
    """All linear layers below ``prefix`` (the list of layers), in the model's order."""
    found = (linear_info(name, module) for name, module in model.named_modules() if name.startswith(prefix))
    return tuple(info for info in found if info is not None)


def find_outside(model: nn.Module, linears: Sequence[LinearInfo]) -> tuple[str, ...]:
    """Matrices that are not among ``linears``: head and embeddings, routers, and routed experts kept as one
    tensor, also under the names by which PEFT finds their parts."""
    known, found = {linear.name for linear in linears}, dict[str, None]()
    for path, parameter in model.named_parameters(remove_duplicate=False):
        name = path.removesuffix(".weight")
        if parameter.dim() > 1 and name not in known:
            parent, _, last = name.rpartition(".")
            found |= dict.fromkeys([name, *(f"{parent}.{part}" for part in FUSED.get(last, ()))])
    return tuple(found)


def merge_siblings(
    model: nn.Module, members: Sequence[tuple[int, LinearInfo]], binding: Binding
) -> LinearGroup:
    """Replace linear layers that read the same tensor by one group, which takes their weights.

    ``members`` are the layers with their dropout keys.
    """
    modules = [model.get_submodule(info.name) for _, info in members]
    sites = [_site(key, info) for key, info in members]
    group = LinearGroup(sites, *_merged_weights(modules), binding)
    for member, (_, info) in enumerate(members):
        parent, _, attribute = info.name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, GroupedLinear(group, member))
    return group


def _merged_weights(modules: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None]:
    weights = [module.get_parameter("weight").detach() for module in modules]
    rows = [
        weight.t() if isinstance(module, Conv1D) else weight
        for module, weight in zip(modules, weights, strict=True)
    ]
    merged = rows[0] if len(rows) == 1 else torch.cat(rows)
    biases = [cast("Tensor | None", module.bias) for module in modules]
    if all(bias is None for bias in biases):
        return merged, None
    parts = [
        merged.new_zeros(len(row)) if bias is None else bias.detach()
        for bias, row in zip(biases, rows, strict=True)
    ]
    return merged, torch.cat(parts)
