"""Builds frozen dataclasses from plain mappings, by the type hints of their fields.

This is the only place that decides what a YAML value may become, so every key of every group is checked
alike, and an error names the key, what was found and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from plait.core.errors import ConfigError, choices
from plait.core.space import as_given, as_written
from plait.utils.spelling import ALIKE, alike

T = TypeVar("T")
MISSING = "???"
# Keys by their names in TRL, transformers, PEFT, axolotl and Optuna.
NAMED_ELSEWHERE = {
    "train.lr": "learning_rate max_lr",
    "train.epochs": "num_train_epochs num_epochs n_epochs",
    "train.steps": "max_steps num_steps num_train_steps",
    "train.batch_size": "per_device_train_batch_size micro_batch_size",
    "train.accumulation": "gradient_accumulation_steps grad_accum",
    "train.warmup_steps": "warmup_ratio num_warmup_steps",
    "train.schedule": "lr_scheduler_type lr_scheduler",
    "train.clip_norm": "max_grad_norm gradient_clipping",
    "train.eval_every": "eval_steps eval_interval",
    "train.betas": "adam_beta1 adam_beta2",
    "train.eps": "adam_epsilon adam_eps",
    "train.lora_plus_ratio": "loraplus_lr_ratio",
    "adapter.rank": "r lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.target_modules": "lora_target_modules lora_target_linear lora_modules",
    "adapter.rslora": "use_rslora",
    "adapter.variant": "use_dora",
    "data.path": "train_file dataset_path dataset_name train_data",
    "data.validation_path": "validation_file eval_file val_file test_file",
    "data.chat_template": "chat_template_path",
    "data.completion_only_loss": "train_on_inputs train_on_prompt",
    "model.id": "model_name_or_path model_name base_model pretrained_model",
    "model.max_length": "max_seq_length max_seq_len sequence_len cutoff_len max_length",
    "model.dtype": "torch_dtype bf16 fp16",
    "engine.checkpointing": "gradient_checkpointing",
    "tracking.root": "output_dir logging_dir",
    "tracking.uri": "tracking_uri",
    "tracking.experiment": "experiment_name",
    "search.name": "study_name",
}
ELSEWHERE = {name: key for key, names in NAMED_ELSEWHERE.items() for name in names.split()}
# Keys of other libraries for which Plait has none, and what to say.
WITHOUT_KEY = dict.fromkeys(
    ("optimiser", "optimizer", "optim"),
    "Plait trains with AdamW, whose settings are train.lr, train.betas, train.eps and train.weight_decay.",
)
SEARCHED = ("adapter.", "train.", "data.")  # keys that may have several values
WRITTEN = {  # how values of a kind are written
    "a whole number": "Write it in digits, such as 8.",
    "a number": "Write it in digits, such as 0.5 or 1e-4.",
    "a list": "Write it in brackets, such as [1,2].",
    "a mapping": "Write it in braces, such as {KEY: VALUE}.",
}
MOST = 1e300  # whole numbers above it cannot be converted to floats


def build(cls: type[T], values: Mapping[str, object], path: str) -> T:
    """An instance of the dataclass ``cls``; keys that ``values`` leaves out keep their defaults.

    ``path`` is the config key of the dataclass, such as "train".

    Raises:
        ConfigError: an unknown key, a missing value or a value of another type. Errors of ``cls`` pass
            through.
    """
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # any dataclass
    required = [field.name for field in fields(cls) if _is_required(field)]  # type: ignore[arg-type]  # any dataclass
    if missing := [name for name in required if name not in values]:
        raise ConfigError(f"{path} has no {missing[0]}", f"{path} must have {', '.join(required)}.")
    for name in values:
        if name not in names:
            raise unknown_key(f"{path}.{name}", [f"{path}.{known}" for known in names])
    return cls(**{name: convert(hints[name], value, f"{path}.{name}") for name, value in values.items()})


def _is_required(field: Field[Any]) -> bool:
    return field.default is NO_DEFAULT and field.default_factory is NO_DEFAULT


def unknown_key(key: str, known: Sequence[str], elsewhere: Sequence[str] = ()) -> ConfigError:
    """The error for a key that does not exist, with the nearest right one first. Keys in
    ``elsewhere`` may be meant, too, but are not listed."""
    meant = meant_by(key, [*known, *elsewhere])
    return ConfigError(f"unknown key {key}", "There is no such key.", f"{meant}Available: {choices(known)}.")


def meant_by(key: str, known: Iterable[str]) -> str:
    """A sentence about what an unknown key most likely means, and a blank; "" if nothing is like it."""
    if said := WITHOUT_KEY.get(key.rpartition(".")[2]):
        return f"{said} "
    near = likely(key, known)
    return f"Did you mean {' or '.join(near)}? " if near else ""


def likely(key: str, known: Iterable[str], *, cutoff: float = ALIKE) -> list[str]:
    """The keys that an unknown one most likely means: by its name in other libraries, or by spelling."""
    named = ELSEWHERE.get(key.rpartition(".")[2])
    return [named] if named else alike(key, known, cutoff=cutoff)


def convert(hint: Any, value: object, key: str) -> Any:
    """``value`` as the type ``hint``. Whole numbers are accepted as floats; nothing else changes its type.

    Raises:
        ConfigError: the value is of another type, or missing.
    """
    if value == MISSING:
        raise ConfigError(f"{key} is not set", f"{key} needs a value.", f"Set it: {key}=...")
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        return _union(get_args(hint), value, key)
    if origin is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{key}={as_given(value)}", f"{key} must be one of {choices(get_args(hint))}.")
        return value
    if origin is tuple:
        return _tuple(get_args(hint), value, key)
    if origin in (dict, Mapping):
        return _dict(get_args(hint), value, key)
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            named = "kind" in (field.name for field in fields(hint))
            meant = f"Did you mean {key}.kind={value}? " if named and isinstance(value, str) else ""
            raise ConfigError(
                f"{key}={as_given(value)}",
                f"{key} is a group of keys.",
                f"{meant}Change one: {key}.KEY=VALUE.",
            )
        return build(hint, {str(name): item for name, item in value.items()}, key)
    return _scalar(hint, value, key)


def _union(members: tuple[Any, ...], value: object, key: str) -> Any:
    if value is None and NoneType in members:
        return None
    present = [member for member in members if member is not NoneType]
    for member in present:
        try:
            return convert(member, value, key)
        except ConfigError:
            if len(present) == 1 or (get_origin(member) is tuple and isinstance(value, (list, tuple))):
                raise
    raise _wrong(key, value, " or ".join(_describe(member) for member in present))


def _tuple(members: tuple[Any, ...], value: object, key: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise _wrong(key, value, "a list")
    if members[-1] is Ellipsis:
        members = (members[0],) * len(value)
    if len(members) != len(value):
        raise _wrong(key, value, f"a list of {len(members)}")
    return tuple(
        convert(member, item, f"{key}[{i}]")
        for i, (member, item) in enumerate(zip(members, value, strict=True))
    )


def _dict(members: tuple[Any, ...], value: object, key: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(key, value, "a mapping")
    whole = members[0] is int
    if whole and not all(str(name).isdigit() for name in value):
        raise _wrong(key, value, "a mapping with whole numbers as keys")
    return {
        (int(name) if whole else str(name)): convert(members[1], item, f"{key}.{name}")
        for name, item in value.items()
    }


def _scalar(hint: Any, value: object, key: str) -> Any:
    if hint is Path and isinstance(value, (str, Path)) and str(value).strip() and "://" not in str(value):
        return Path(value)
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not abs(value) <= MOST:
            raise ConfigError(f"{key}={value!r}", f"{key} must be a finite number.")
        return float(value)
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise _wrong(key, value, _describe(hint))


def _describe(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    words[Path] = "a path, neither empty nor an address"
    return words.get(hint) or ("a list" if get_origin(hint) is tuple else str(hint))


def _wrong(key: str, value: object, wanted: str) -> ConfigError:
    remedy = WRITTEN.get(wanted, "")
    listed = "[" in key or wanted.startswith("a list")  # a list is right, but not this one
    if isinstance(value, (list, tuple)) and len(value) > 1 and key.startswith(SEARCHED) and not listed:
        remedy = f"To try several values, leave out the brackets: {key}={as_written(value)[1:-1]}"
    if wanted == "text" and isinstance(value, (int, float)):
        written = str(value).lower() if isinstance(value, bool) else value
        remedy = f"Quote it: {key}=\"'{written}'\""
    return ConfigError(f"{key}={as_given(value)}", f"{key} must be {wanted}.", remedy)
