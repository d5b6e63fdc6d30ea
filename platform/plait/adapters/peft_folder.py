"""Adapters as PEFT folders: ``adapter_config.json`` and ``adapter_model.safetensors``.

The format is PEFT's (``peft.utils.save_and_load``): tensors ``base_model.model.<module>.lora_A.weight``
(rank, in) and ``.lora_B.weight`` (out, rank).
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

from plait.core.errors import ConfigError, InputError, ModelError, StorageError
from plait.core.jobs import AdapterSpec
from plait.models.targets import LinearInfo, resolve_targets
from plait.utils.files import new_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
Pair = tuple[Tensor, Tensor]

# Settings that must have these values, or be absent: anything else is another method than plain LoRA.
_PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
}


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """What a PEFT folder holds.

    Attributes:
        spec: rank, alpha, dropout, targets.
        weights: module name to (A (rank, in), B (out, rank)).
        base: the base model's name.
    """

    spec: AdapterSpec
    weights: dict[str, Pair]
    base: str | None


def tensor_names(module: str) -> tuple[str, str]:
    """PEFT's names of a module's A and B."""
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def named_tensors(weights: Mapping[str, Pair]) -> dict[str, Tensor]:
    """A and B of every module under PEFT's names."""
    return {
        name: tensor
        for module, pair in weights.items()
        for name, tensor in zip(tensor_names(module), pair, strict=True)
    }


def export_adapter(
    directory: Path,
    spec: AdapterSpec,
    weights: Mapping[str, Pair],
    *,
    base: str,
    linears: Sequence[LinearInfo],
    revision: str | None = None,
    kept_step: int | None = None,
) -> None:
    """Write an adapter as a PEFT folder, whole or not at all, and through to the disk: of a finished job
    nothing else is kept.

    Args:
        directory: an earlier one is replaced.
        spec: of the adapter.
        weights: module name to (A (rank, in), B (out, rank)), as ``Bank.weights`` gives them.
        base: the base model's hub id, folder or name.
        linears: of the base model.
        revision: hub revision of the base model.
        kept_step: step whose weights these are, where they are not the last; the file's metadata say so.

    Raises:
        StorageError: the folder cannot be written.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named_tensors(weights).items()}
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
    }


def _shortest_targets(modules: Sequence[str], linears: Sequence[LinearInfo]) -> list[str]:
    """Last parts of the names where they mean exactly these modules, else the whole names."""
    parts = sorted({module.rpartition(".")[2] for module in modules})
    return parts if set(resolve_targets(parts, linears)) == set(modules) else sorted(modules)


def import_adapter(directory: Path) -> StoredAdapter:
    """Read a PEFT folder.

    Raises:
        InputError: a file is missing or damaged, or the adapter is not plain LoRA.
    """
    try:
        config = json.loads((directory / CONFIG).read_text())
        tensors = load_file(directory / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{directory}: {error}", f"A PEFT folder holds {CONFIG} and {WEIGHTS}.") from error
    for key, allowed in _PLAIN.items():
        if key in config and config[key] not in allowed:
            raise ModelError(
                f"{directory}: {key}={config[key]!r}",
                "Only plain LoRA adapters can be read: LoRA and rsLoRA, one rank, no bias.",
            )
    return StoredAdapter(
        _spec(directory, config), _pairs(directory, tensors), config.get("base_model_name_or_path")
    )


def _spec(directory: Path, config: dict[str, Any]) -> AdapterSpec:
    targets = config.get("target_modules") or ()
    try:
        return AdapterSpec(
            rank=config["r"],
            alpha=config["lora_alpha"],
            dropout=config.get("lora_dropout", 0.0),
            target_modules=targets if isinstance(targets, str) else tuple(targets),
            rslora=config.get("use_rslora", False),
        )
    except (KeyError, ConfigError) as error:
        raise InputError(
            f"{directory / CONFIG}: {error}", "It must give r, lora_alpha and targets."
        ) from error


def _pairs(directory: Path, tensors: Mapping[str, Tensor]) -> dict[str, Pair]:
    modules = dict.fromkeys(
        name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors if name.startswith(PREFIX)
    )
    expected = {name for module in modules for name in tensor_names(module)}
    if expected != set(tensors):
        odd = sorted(expected.symmetric_difference(tensors))[0]
        raise InputError(f"{directory / WEIGHTS}: {odd}", "Every module has one lora_A and one lora_B.")
    return {
        module: (tensors[tensor_names(module)[0]], tensors[tensor_names(module)[1]]) for module in modules
    }
