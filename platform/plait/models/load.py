"""Loads a base model from its settings: with its weights, or only the shape if none are needed."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from plait.core.errors import ConfigError, ModelError
from plait.core.settings import WHOLE, ModelSettings
from plait.models.base import BaseModel, Identity
from plait.models.blocks import DECODERS, ONE_MODEL, find_parts, several_models, unusable
from plait.models.context import MicrobatchContext
from plait.models.lora import GroupedLinear, find_linears, find_outside
from plait.models.parts import Part, PartReader, WeightFiles, cast_weights, lacks, sketch
from plait.models.quiet import quiet
from plait.models.sources import SMOLLM2_NAME, Source, find_source
from plait.models.targets import LinearInfo, read_together
from plait.models.tiny import byte_tokeniser, check_family, tiny_config, tiny_name, tiny_named
from plait.utils.progress import say
from plait_kernels import Quantised

CORRECT = "Correct its config.json, or download the model again."
# Keys of a configuration that do not change what it computes.
_INCIDENTAL = (
    "transformers_version",
    "_name_or_path",
    "_model_name_or_path",
    "dtype",
    "torch_dtype",
    "use_cache",
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What is known about a model without its weights.

    Attributes:
        linears: every linear layer that an adapter may target, in the model's order.
        together: these layers by the input that they read; of a model that is not quantised, by their names.
        outside: what PEFT would also adapt if it is named, and Plait cannot: output head, routed experts.
        max_length: longest sample in tokens.
        parameters: number of frozen weights, tied ones counted once.
        digest: same as :attr:`Identity.digest`.
        config: what all this was computed from.
    """

    linears: tuple[LinearInfo, ...]
    together: tuple[tuple[LinearInfo, ...], ...]
    outside: tuple[str, ...]
    layer_count: int
    hidden_size: int
    heads: int
    vocabulary: int
    max_length: int
    parameters: int
    digest: str
    config: PreTrainedConfig = field(repr=False, compare=False)


def load_model(settings: ModelSettings, *, cache: Path, device: torch.device | str = "cpu") -> BaseModel:
    """The frozen base model in its settings' dtype, with its blocks checked against the whole model; then its
    layers' weights are quantised, if they are to be.

    Raises:
        ModelError: the model is missing, cannot be fetched or cannot be run as blocks.
        StorageError: the cache cannot be written.
    """
    found = _find(settings, cache)
    model = cast(Any, _dense_model(settings, cache)).to(device)
    base = BaseModel(model, load_tokeniser(settings, cache=cache), found.identity, found.max_length)
    return _quantised(base, settings)


@torch.no_grad()
def _quantised(base: BaseModel, settings: ModelSettings) -> BaseModel:
    """The model with its linear layers' weights quantised, if they are to be.

    Raises:
        ModelError: the model's own code reads these weights.
    """
    if settings.quantise == WHOLE:
        return base
    for group in base.groups:
        group.quantise(settings.quantise)
    context = MicrobatchContext.of(torch.zeros(2, dtype=torch.int64, device=base.device), (0, 2))
    hidden = torch.ones(2, base.hidden_size, dtype=base.dtype, device=base.device)
    for index in base.own:
        layer = base.layers[index]
        for module in layer.modules():
            if isinstance(module, GroupedLinear):
                module.bind()
        try:
            base.layer(index, hidden, context)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # any error of code that takes an empty weight
            raise unusable(layer, f"model.quantise={settings.quantise}: {error}") from error
    return base


def load_part(
    settings: ModelSettings, part: Part, *, cache: Path, device: torch.device | str = "cpu"
) -> BaseModel:
    """A process's part of the model, which is all that it reads of it and keeps.

    A model without safetensors, or of a family that transformers cannot run without weights, is read whole,
    and the rest is freed.

    Raises:
        ModelError, StorageError: as :func:`load_model`.
        LostProcessError: a process that has a part of the same layers died.
    """
    found = _find(settings, cache)
    model = _without_weights(found)
    reader = _reader(settings, model, part, cache=cache, device=torch.device(device))
    if reader is not None:
        tokeniser = load_tokeniser(settings, cache=cache)
        base = BaseModel(model, tokeniser, found.identity, found.max_length, part, reader)
        return _quantised(base, settings)
    base = load_model(settings, cache=cache, device=device)
    if len(part.layers) < base.layer_count:
        base.keep(part.layers)
    if part.slicing is not None:
        base.take_slice(part.slicing)
    if part.sharding is not None:
        base.shard(part.sharding)
    return base


def _reader(
    settings: ModelSettings, model: PreTrainedModel, part: Part, *, cache: Path, device: torch.device
) -> PartReader | None:
    """What reads the part; None where the model must be read whole."""
    parts = find_parts(model)
    whole = part.sharing is None and len(part.layers) == len(parts.layers)
    if whole or settings.kind == "tiny" or getattr(model.config, "quantization_config", None):
        return None
    source = find_source(settings, cache)
    files = _ask(lambda *_given, **_options: WeightFiles.find(source), source)
    if files is None:
        say(f"{source.name} has no safetensors, so each process reads the whole model.")
        return None
    try:
        observed = sketch(model, parts)
    except Exception as error:  # the model's code looks at values
        why = next(iter(str(error).splitlines()), type(error).__name__)[:200]
        say(f"{source.name} does not run without weights ({why}), so each process reads the whole model.")
        return None
    dtype: torch.dtype = getattr(torch, settings.dtype)
    return PartReader(model, parts, files, observed, dtype=dtype, device=device, sharing=part.sharing)


def named_model(name: str, revision: str | None = None, quantise: str = WHOLE) -> ModelSettings:
    """The settings of a base model by the name that adapters' folders have (``base_model_name_or_path``)."""
    if name == SMOLLM2_NAME:
        return ModelSettings(quantise=quantise)
    if tiny := tiny_named(name):
        family, seed = tiny
        return ModelSettings(kind="tiny", family=family, seed=seed, dtype="float32", quantise=quantise)
    if name.endswith(".gguf"):
        return ModelSettings(kind="gguf", path=name, quantise=quantise)
    return ModelSettings(kind="hf", id=name, revision=revision, quantise=quantise)


def inspect_model(settings: ModelSettings, *, cache: Path) -> ModelShape:
    """The model's shape, computed from its configuration only.

    Raises:
        ModelError, StorageError: as :func:`load_model`.
    """
    found = _find(settings, cache)
    model = _without_weights(found)
    parts = find_parts(model)
    try:
        hidden, heads = int(found.config.hidden_size), int(found.config.num_attention_heads)
    except (AttributeError, RuntimeError) as error:  # no attention, a text part's own, or layers that differ
        raise unusable(model, str(error)) from error
    linears = find_linears(model, parts.prefix)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelShape(
        linears=linears,
        together=_together(model, linears, settings),
        outside=find_outside(model, linears),
        layer_count=len(parts.layers),
        hidden_size=hidden,
        heads=heads,
        vocabulary=int(parts.head.weight.shape[0]),
        max_length=found.max_length,
        parameters=parameters,
        digest=found.identity.digest,
        config=found.config,
    )


def _together(
    model: PreTrainedModel, linears: Sequence[LinearInfo], settings: ModelSettings
) -> tuple[tuple[LinearInfo, ...], ...]:
    """Linear layers by the input that they read: the weights of each part are made together if quantised.

    Then it is observed in a run without weights; of a model that cannot run so, and of others, names say it.
    """
    if settings.quantise != WHOLE:
        by_name = {each.name: each for each in linears}
        with contextlib.suppress(Exception):  # the model's code looks at values
            siblings = sketch(model, find_parts(model)).siblings
            return tuple(tuple(by_name[name] for name in group) for group in siblings)
    return tuple(tuple(group) for group in read_together(linears).values())


def _without_weights(found: _Found) -> PreTrainedModel:
    """The model on the meta device."""
    try:
        with torch.device("meta"), quiet():
            model: PreTrainedModel = cast(Any, AutoModelForCausalLM).from_config(
                found.config, trust_remote_code=False
            )
    except MemoryError:
        raise
    except Exception as error:  # each model's code has errors of its own for values that make no sense
        name = f"model {found.identity.name!r}"
        if several := several_models(found.config):
            raise ModelError(f"{name}: not supported: {several}", ONE_MODEL, DECODERS) from error
        if type(found.config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ModelError(
                f"{name}: {type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:200]}",
                "Its config.json must describe a model that this version of transformers can build.",
                CORRECT,
            ) from error
        raise ModelError(
            f"{name}: a model of type {found.config.model_type!r}",
            "transformers has no causal language model of this type.",
            DECODERS,
        ) from error
    return model


def model_config(settings: ModelSettings, *, cache: Path) -> PreTrainedConfig:
    """The model's configuration, without its weights.

    Raises:
        ModelError, StorageError: as :func:`load_model`.
    """
    return _find(settings, cache).config


def load_tokeniser(settings: ModelSettings, *, cache: Path) -> PreTrainedTokenizerBase:
    """The model's tokeniser, without the model."""
    if settings.kind == "tiny":
        return byte_tokeniser()
    source = find_source(settings, cache)
    _check_tokeniser_files(source)
    tokeniser: PreTrainedTokenizerBase = _ask(AutoTokenizer.from_pretrained, source)
    return tokeniser


def _check_tokeniser_files(source: Source) -> None:
    """Refuse a folder without a tokeniser, as a program leaves it that saves the model alone."""
    folder = Path(source.location)
    files = ("tokenizer*", "*.model", "vocab*", "spiece*", "tekken.json")
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in files):
        raise ModelError(
            f"model {source.name!r}: the folder has no tokeniser",
            "It must hold the tokeniser's files next to the model's, such as tokenizer.json.",
            f"Save it there: AutoTokenizer.from_pretrained(BASE).save_pretrained({source.name!r}).",
        )


@torch.no_grad()
def transformers_model(settings: ModelSettings, *, cache: Path) -> PreTrainedModel:
    """The plain transformers model with dense weights: of a quantised one, what these stand for."""
    model = _dense_model(settings, cache)
    if settings.quantise != WHOLE:
        for linear in find_linears(model, find_parts(model).prefix):
            weight = model.get_submodule(linear.name).get_parameter("weight")
            rows = weight.T if linear.fan_in_fan_out else weight
            rows.copy_(Quantised((rows,), settings.quantise).dense())
    return model


def _dense_model(settings: ModelSettings, cache: Path) -> PreTrainedModel:
    dtype: torch.dtype = getattr(torch, settings.dtype)
    if settings.kind == "tiny":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            with quiet():
                model = cast(Any, AutoModelForCausalLM).from_config(_find(settings, cache).config)
            _shake(model)
    else:
        source = find_source(settings, cache)
        model, report = _ask(
            AutoModelForCausalLM.from_pretrained, source, dtype=dtype, output_loading_info=True
        )
        if report["missing_keys"]:
            raise lacks(source, sorted(report["missing_keys"]))
    _check_dense(model)
    cast_weights(model, dtype)
    dense: PreTrainedModel = model.eval()
    return dense


@torch.no_grad()
def _shake(model: PreTrainedModel) -> None:
    """Move norms and biases away from their neutral values, so that a forgotten one is noticed."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)


@dataclass(frozen=True, slots=True)
class _Found:
    config: PreTrainedConfig
    identity: Identity
    max_length: int


def _find(settings: ModelSettings, cache: Path) -> _Found:
    if settings.kind == "tiny":
        check_family(settings.family)
        config = tiny_config(settings.family, len(byte_tokeniser()))
        name, version, revision = tiny_name(settings.family, settings.seed), str(settings.seed), None
    else:
        source = find_source(settings, cache)
        config = _ask(AutoConfig.from_pretrained, source)
        name, version, revision = source.name, source.version, source.revision
        commit = getattr(config, "_commit_hash", None)
        version = f"{version} {commit}" if commit else version
    described = {key: value for key, value in config.to_dict().items() if key not in _INCIDENTAL}
    facts = [described, version, settings.dtype, *({settings.quantise} - {WHOLE})]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return _Found(config, Identity(name, digest, revision, settings.quantise), _max_length(settings, config))


def _max_length(settings: ModelSettings, config: PreTrainedConfig) -> int:
    limit = int(getattr(config, "max_position_embeddings", 2**31))
    if limit < 1:
        raise ModelError(
            f"max_position_embeddings={limit}", "A model takes samples of at least one token.", CORRECT
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(kind for kind in rope.values() if isinstance(kind, dict))):  # of each kind of layer
        if each.get("rope_type") == "longrope":
            # Beyond this length the frequencies of all rows of a call change, so a long sample would change
            # the short ones packed with it.
            limit = min(limit, int(each["original_max_position_embeddings"]))
    if settings.max_length is None:
        return limit
    if settings.max_length > limit:
        raise ConfigError(
            f"model.max_length={settings.max_length}",
            f"This model takes at most {limit} tokens.",
            f"Set at most {limit}, or leave it out.",
        )
    return settings.max_length


def _ask(loader: Any, source: Source, **options: Any) -> Any:
    """Call one of transformers' loaders; a failure becomes a ModelError. Code that comes with the files is
    never run, and the user is not asked whether to run it."""
    try:
        with quiet():
            return loader(
                source.location, revision=source.revision or "main", trust_remote_code=False, **options
            )
    except Exception as error:  # the library raises many kinds for bad files
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"model {source.name!r}: it needs the Python code in its files (auto_map)",
                "Plait does not run code from a model's files; this transformers version lacks the model.",
                "Use a model whose model_type transformers knows, or a newer version that has this one.",
            ) from error
        if "Weights only load failed" in str(error):
            raise ModelError(
                f"model {source.name!r}: its weights are pickled with Python code",
                "Plait does not run code from a model's files.",
                "Use a model with safetensors.",
            ) from error
        raise ModelError(
            f"model {source.name!r}: {first}",
            "The model must be a local folder, or a hub id that is cached or can be downloaded.",
            "Check model.id and the network, or give a folder with config.json and the weights.",
        ) from error


def _check_dense(model: PreTrainedModel) -> None:
    packed = [name for name, weight in model.named_parameters() if not weight.is_floating_point()]
    if packed or getattr(model.config, "quantization_config", None):
        raise ModelError(
            f"{type(model).__name__}: {packed[0] if packed else 'a quantised configuration'}",
            "Plait quantises weights itself, and does not read files that are already quantised.",
            "Use the unquantised model with model.quantise=nf4, or a GGUF file with model=gguf.",
        )
