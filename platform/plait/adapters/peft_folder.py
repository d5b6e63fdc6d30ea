"""Adapters as PEFT folders: ``adapter_config.json`` and ``adapter_model.safetensors``.

The format is PEFT's (``peft.utils.save_and_load``): tensors ``base_model.model.<module>.<tensor>``, which for
plain LoRA are ``lora_A.weight`` (rank, in) and ``lora_B.weight`` (out, rank).
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from plait.adapters.facts import CONFIG, WEIGHTS
from plait.adapters.tensor_file import Bounds, locate_tensors, read_tensors
from plait.adapters.variants import PREFIX, VARIANTS, AdapterVariant
from plait.core.errors import ModelError, StorageError
from plait.core.jobs import AdapterSpec
from plait.models.targets import LinearInfo, resolve_targets
from plait.utils.files import disk_errors, new_folder

MOST_ALPHA = 1e30  # with more, or NaN, products would fail, and with them all requests of a batch
Tensors = tuple[Tensor, ...]


def _names(variant: AdapterVariant, module: str) -> list[str]:
    """PEFT's names of a module's tensors."""
    return [f"{PREFIX}{module}.{tensor.name}" for tensor in variant.tensors(1, 1, 1)]


@functools.cache
def _lora_names(module: str) -> tuple[str, str]:
    """PEFT's names of plain LoRA's A and B."""
    a, b = _names(VARIANTS.get("lora"), module)
    return a, b


def export_adapter(
    directory: Path,
    spec: AdapterSpec,
    weights: Mapping[str, Tensors],
    *,
    base: str,
    linears: Sequence[LinearInfo],
    revision: str | None = None,
    kept_step: int | None = None,
    quantise: str = "none",
) -> None:
    """Write an adapter as a PEFT folder, completely or not at all, and sync it to the disk: it is all that is
    kept of a finished job.

    Args:
        directory: the folder to write; an earlier one is replaced.
        weights: tensors by module name, as ``Bank.weights`` returns them.
        base: the base model's hub id, folder or name.
        kept_step: step whose weights these are, if not the last; it is written to the file's metadata.
        quantise: how the base model was quantised; it is written there, too, because PEFT has no key for it.

    Raises:
        StorageError: the folder cannot be written.
    """
    variant = VARIANTS.get(spec.variant)
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for module, own in weights.items()
        for name, tensor in zip(_names(variant, module), own, strict=True)
    }
    config = adapter_config(spec, tuple(weights), base=base, linears=linears, revision=revision)
    training = {"quantise": quantise} | ({} if kept_step is None else {"step": str(kept_step)})
    with exported_folder(directory) as folder:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"} | training)
        _order_metadata(folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _order_metadata(file: Path) -> None:
    """Sort the metadata of a file's header: safetensors writes it in any order, and equal adapters shall be
    equal files."""
    with file.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        stream.seek(8)
        stream.write(json.dumps(header, separators=(",", ":")).encode().ljust(size))


@contextmanager
def exported_folder(target: Path) -> Iterator[Path]:
    """A new folder to fill; see ``new_folder``.

    Raises:
        StorageError: it cannot be written.
    """
    rule = "The folder must be writable, on a disk that is not full."
    try:
        with disk_errors(target, rule), new_folder(target) as folder:
            yield folder
    except SafetensorError as error:
        raise StorageError(f"{target}: {error}", rule) from error


def adapter_config(
    spec: AdapterSpec,
    modules: Sequence[str],
    *,
    base: str,
    linears: Sequence[LinearInfo],
    revision: str | None = None,
) -> dict[str, Any]:
    """PEFT's configuration of an adapter on ``modules``."""
    stored = {linear.name: linear.fan_in_fan_out for linear in linears}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": spec.rank,
        "lora_alpha": 2.0 * spec.rank if spec.alpha is None else spec.alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": spec.rslora,
        "target_modules": _shortest_targets(modules, linears),
        "fan_in_fan_out": all(stored[module] for module in modules),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
    } | VARIANTS.get(spec.variant).peft_config(spec)


def _shortest_targets(modules: Sequence[str], linears: Sequence[LinearInfo]) -> list[str]:
    """The last parts of the names if they match exactly these modules, else the full names."""
    parts = sorted({module.rpartition(".")[2] for module in modules})
    return parts if set(resolve_targets(parts, linears)) == set(modules) else sorted(modules)


# What PEFT can store and `read_adapter` does not load, with the values that leave it out.
_LEFT_OUT: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "lora_bias": (None, False),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None, False),
    "use_qalora": (None, False),
}
# Beginnings of those that take the initial A and B out of the base model's weights: PEFT changes these again
# when it loads the adapter.
_BASE_CHANGED = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter as a PEFT folder has it: A (rank, in) and B (out, rank) by module, without dropout."""

    rank: int
    scale: float
    weights: Mapping[str, Tensors]


def read_adapter(folder: Path, sites: Mapping[str, tuple[int, int]], *, values: bool = True) -> StoredAdapter:
    """The adapter of a PEFT folder, for generation.

    Args:
        sites: features in and out of the base model's linear layers by name.
        values: False: the tensors are on the meta device, and of the file's its header alone is read.

    Raises:
        StorageError: the folder cannot be read.
        ModelError: it is not a LoRA, has options that Plait does not compute, or belongs to another model.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        stored = read_tensors(folder / WEIGHTS, values=values)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        if rank < 1 or not abs(alpha) < MOST_ALPHA:
            raise ValueError(f"r={rank}, lora_alpha={alpha:g}")
    except (OSError, ValueError, OverflowError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise unreadable(folder, error) from error
    given = {key: config.get(key) for key, values in _LEFT_OUT.items() if config.get(key) not in values}
    if str(initial := config.get("init_lora_weights")).lower().startswith(_BASE_CHANGED):
        given["init_lora_weights"] = initial
    if config.get("peft_type") != "LORA" or given:
        named = ", ".join(f"{key}={value!r}" for key, value in given.items())
        raise ModelError(
            f"{folder}: {named or 'peft_type=' + repr(config.get('peft_type'))}",
            "Only plain LoRA with one rank, on the base model's own weights, is loaded from a folder.",
        )
    modules = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in stored}
    unknown = sorted(modules - sites.keys())
    if unknown or not modules:
        raise ModelError(
            f"{folder}: {unknown[0] if unknown else 'no module'} is not a linear layer of the base model",
            "An adapter must belong to the base model.",
        )
    names = {module: _lora_names(module) for module in sorted(modules)}
    expected = {name for own in names.values() for name in own}
    if stored.keys() != expected or not all(
        stored[a].shape == (rank, sites[module][0]) and stored[b].shape == (sites[module][1], rank)
        for module, (a, b) in names.items()
    ):
        raise ModelError(
            f"{folder}: its tensors are not those of a LoRA of rank {rank} on the base model",
            "An adapter must belong to the base model.",
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    weights = {module: (stored[a], stored[b]) for module, (a, b) in names.items()}
    return StoredAdapter(rank, scale, weights)


@dataclass(frozen=True, slots=True, eq=False)
class LocatedAdapter:
    """Where the tensors of an adapter lie in its file.

    Attributes:
        dtype: of all of them.
        numbers: of each tensor (int64), twice the number of its module among all sites, plus 1 for B.
        bounds: its bytes, as :class:`~plait.adapters.tensor_file.Located` has them.
    """

    dtype: torch.dtype
    numbers: Bounds
    bounds: Bounds


def locate_adapter(folder: Path, sites: Sequence[str]) -> LocatedAdapter | None:
    """Where the tensors lie in a folder that :func:`read_adapter` has accepted; None if they must be read as
    a whole.

    Args:
        sites: the base model's linear layers, in their order.

    Raises:
        StorageError: the folder cannot be read.
    """
    try:
        found = locate_tensors(folder / WEIGHTS)
        if found is None:
            return None
        numbers = operator.itemgetter(*found.names)(_lora_numbers(tuple(sites)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise unreadable(folder, error) from error
    return LocatedAdapter(found.dtype, np.array(numbers, dtype=np.int64), found.bounds)


@functools.lru_cache(maxsize=2)
def _lora_numbers(sites: tuple[str, ...]) -> dict[str, int]:
    names = (name for site in sites for name in _lora_names(site))
    return {name: number for number, name in enumerate(names)}


def unreadable(folder: Path, error: Exception) -> StorageError:
    """That an adapter's folder cannot be read."""
    return StorageError(
        f"{folder}: {type(error).__name__}: {error}",
        f"An adapter is a folder in PEFT's format with {CONFIG} and {WEIGHTS}.",
        "Write or copy it again. A folder in Plait's cache may be removed: it is then fetched again.",
    )
