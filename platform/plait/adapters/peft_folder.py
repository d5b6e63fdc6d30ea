"""Adapters as PEFT folders: ``adapter_config.json`` and ``adapter_model.safetensors``.

The format is PEFT's (``peft.utils.save_and_load``): tensors ``base_model.model.<module>.<tensor>``, of plain
LoRA ``lora_A.weight`` (rank, in) and ``lora_B.weight`` (out, rank).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.adapters.variants import PREFIX, VARIANTS, AdapterVariant
from plait.core.errors import ConfigError, InputError, ModelError, StorageError, choices
from plait.core.jobs import AdapterSpec
from plait.models.targets import LinearInfo, resolve_targets
from plait.utils.files import new_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """What a PEFT folder holds.

    Attributes:
        spec: variant, rank, alpha, dropout, targets.
        weights: module name to its tensors in the variant's order (plain LoRA: A, B).
        base: the base model's name.
    """

    spec: AdapterSpec
    weights: dict[str, Tensors]
    base: str | None


def _names(variant: AdapterVariant, module: str) -> list[str]:
    """PEFT's names of a module's tensors."""
    return [f"{PREFIX}{module}.{tensor.name}" for tensor in variant.tensors(1, 1, 1)]


def export_adapter(
    directory: Path,
    spec: AdapterSpec,
    weights: Mapping[str, Tensors],
    *,
    base: str,
    linears: Sequence[LinearInfo],
    revision: str | None = None,
    kept_step: int | None = None,
) -> None:
    """Write an adapter as a PEFT folder, whole or not at all, and through to the disk: it is all that is kept
    of a finished job.

    Args:
        directory: an earlier one is replaced.
        spec: of the adapter.
        weights: module name to its tensors, as ``Bank.weights`` gives them.
        base: the base model's hub id, folder or name.
        linears: of the base model.
        revision: hub revision of the base model.
        kept_step: step whose weights these are, where they are not the last; the file's metadata say so.

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
    training = {} if kept_step is None else {"step": str(kept_step)}
    try:
        with new_folder(directory) as folder:
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"} | training)
            (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"{directory}: {error}", "An adapter's folder must be writable and have room."
        ) from error


def adapter_config(
    spec: AdapterSpec,
    modules: Sequence[str],
    *,
    base: str,
    linears: Sequence[LinearInfo],
    revision: str | None = None,
) -> dict[str, Any]:
    """PEFT's configuration of an adapter that sits on ``modules``."""
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
    """Last parts of the names where they mean exactly these modules, else the whole names."""
    parts = sorted({module.rpartition(".")[2] for module in modules})
    return parts if set(resolve_targets(parts, linears)) == set(modules) else sorted(modules)


def import_adapter(directory: Path) -> StoredAdapter:
    """Read a PEFT folder.

    Raises:
        InputError: a file is missing or damaged.
        ModelError: the adapter is of no registered variant.
    """
    try:
        config = json.loads((directory / CONFIG).read_text())
        tensors = load_file(directory / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{directory}: {error}", f"A PEFT folder holds {CONFIG} and {WEIGHTS}.") from error
    reasons = {name: VARIANTS.get(name).rejects(config) for name in VARIANTS}
    name = next((name for name, reason in reasons.items() if not reason), None)
    if name is None:
        raise ModelError(
            f"{directory}: {reasons['lora']}",
            f"Adapters with one rank and no bias can be read, of variant {choices(reasons)}.",
        )
    weights = _modules(directory, tensors, VARIANTS.get(name))
    return StoredAdapter(_spec(directory, config, name), weights, config.get("base_model_name_or_path"))


def _spec(directory: Path, config: dict[str, Any], variant: str) -> AdapterSpec:
    targets = config.get("target_modules") or ()
    try:
        return AdapterSpec(
            rank=config["r"],
            alpha=config["lora_alpha"],
            dropout=config.get("lora_dropout", 0.0),
            target_modules=targets if isinstance(targets, str) else tuple(targets),
            rslora=config.get("use_rslora", False),
            variant=variant,
        )
    except (KeyError, ConfigError) as error:
        raise InputError(
            f"{directory / CONFIG}: {error}", "It must give r, lora_alpha and targets."
        ) from error


def _modules(directory: Path, tensors: Mapping[str, Tensor], variant: AdapterVariant) -> dict[str, Tensors]:
    """The tensors by module."""
    ends = _names(variant, "")
    modules = dict.fromkeys(
        name.removeprefix(PREFIX).removesuffix(end.removeprefix(PREFIX))
        for name in tensors
        for end in ends
        if name.startswith(PREFIX) and name.endswith(end.removeprefix(PREFIX))
    )
    expected = {name for module in modules for name in _names(variant, module)}
    if expected != set(tensors):
        odd = sorted(expected.symmetric_difference(tensors))[0]
        parts = " and ".join(end.removeprefix(PREFIX + ".") for end in ends)
        raise InputError(f"{directory / WEIGHTS}: {odd}", f"Every module has one {parts}.")
    return {module: tuple(tensors[name] for name in _names(variant, module)) for module in modules}
