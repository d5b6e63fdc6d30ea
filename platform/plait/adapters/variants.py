"""Adapter variants: which tensors an adapter has, and how they are initialised, trained and stored.

Each variant is one module that registers one object under its name in ``adapter.variant``. All other code
asks that object: the bank and the kernels, initial weights, checkpoints, PEFT folders, memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.adapters.slices import AdapterSlices
from plait.core.jobs import AdapterSpec
from plait.models.targets import LinearInfo
from plait.utils.registry import Registry
from plait_kernels import Bank, Layout, Site, TensorSpec, Variant
from plait_kernels.bank import parts_of

PREFIX = "base_model.model."  # begins every tensor's name in a PEFT folder
MASTER_BYTES = 4  # float32
WHOLE = AdapterSlices()


class AdapterVariant(Variant, Protocol):
    """One variant. :class:`plait_kernels.Variant` defines its tensors, forward and backward; each tensor has
    the name under which PEFT stores it after the layer's name ("lora_A.weight").
    """

    def initial(self, tensor: TensorSpec, seed: int, module: str, weight: Callable[[], Tensor], /) -> Tensor:
        """A tensor's initial values, float32. They do not depend on other adapters or modules.

        Args:
            weight: returns the frozen layer's weight (out, in).
        """

    def peft_config(self, spec: AdapterSpec, /) -> dict[str, Any]:
        """Entries of PEFT's configuration in addition to those of every LoRA."""


VARIANTS: Registry[AdapterVariant] = Registry(
    "adapter variant",
    key="adapter.variant",
    modules=("plait.adapters.lora",),
    group="plait.adapter_variants",
)


def adapter_bytes(
    spec: AdapterSpec, sites: Iterable[LinearInfo], element_bytes: int, *, parts: int = 1
) -> int:
    """The exact number of bytes of an adapter while it trains.

    It has float32 weights, gradients and two moments of the trained tensors, float32 weights of the others
    and, if the arithmetic is not float32, a copy of all weights in its type.

    Args:
        parts: into which the moments are cut, of which it has one.
    """
    placed = [Site(site.name, 0, site.in_features, site.out_features) for site in sites]
    layout = Layout.of(VARIANTS.get(spec.variant), placed, spec.rank)
    copy = 0 if element_bytes == MASTER_BYTES else element_bytes
    moments: int = 2 * MASTER_BYTES * parts_of(layout.trained, parts)[0].stop
    return moments + layout.trained * (2 * MASTER_BYTES + copy) + layout.frozen * (MASTER_BYTES + copy)


def attach(
    bank: Bank,
    adapter: str,
    spec: AdapterSpec,
    sites: Sequence[str],
    *,
    seed: int,
    weight_of: Callable[[str], Tensor],
    partly: bool = False,
    slices: AdapterSlices = WHOLE,
) -> None:
    """Add an adapter to the bank with its initial weights.

    Args:
        partly: whether other banks have its other sites.
        slices: what the bank has of each tensor.
    """
    variant = VARIANTS.get(spec.variant)
    bank.attach(
        adapter,
        rank=spec.rank,
        scale=spec.scale,
        dropout=spec.dropout,
        seed=seed,
        sites=sites,
        variant=variant,
        partly=partly,
    )
    with torch.no_grad():
        for module, tensors in bank.weights(adapter).items():
            specs = bank.block(adapter).layout.specs[module]
            for tensor, each in zip(tensors, specs, strict=True):
                name = f"{PREFIX}{module}.{each.name}"
                whole = slices.whole_spec(name, each)
                initial = variant.initial(whole, seed, module, partial(weight_of, module))
                tensor.copy_(slices.own(name, initial))
    bank.refresh([adapter])


def named_tensors(bank: Bank, adapter: str) -> dict[str, Tensor]:
    """An adapter's weights under PEFT's names: views of the bank."""
    return _named(bank, adapter, bank.weights(adapter))


def checkpoint_tensors(bank: Bank, adapter: str) -> dict[str, Tensor]:
    """Tensors of an adapter that a checkpoint stores, as views of the bank: weights, and both moments of the
    trained ones."""
    moments = bank.moments(adapter)
    first = {module: pair[0] for module, pair in moments.items()}
    second = {module: pair[1] for module, pair in moments.items()}
    kinds = {
        "": named_tensors(bank, adapter),
        "exp_avg.": _named(bank, adapter, first, trained=True),
        "exp_avg_sq.": _named(bank, adapter, second, trained=True),
    }
    return {kind + name: tensor for kind, named in kinds.items() for name, tensor in named.items()}


def _named(
    bank: Bank, adapter: str, tensors: Mapping[str, Sequence[Tensor]], *, trained: bool = False
) -> dict[str, Tensor]:
    """Tensors of every module by name: all of the variant's, or only the trained ones."""
    layout = bank.block(adapter).layout
    names = {
        module: [spec.name for spec in specs if spec.trains or not trained]
        for module, specs in layout.specs.items()
    }
    return {
        f"{PREFIX}{module}.{name}": tensor
        for module, own in tensors.items()
        for name, tensor in zip(names[module], own, strict=True)
    }
