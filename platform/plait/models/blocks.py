"""The parts of a transformers causal language model, and what they do when it runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from plait.core.errors import ModelError
from plait.models.attention import AttentionRule, Heads
from plait.models.context import now_running
from plait.models.flash import attend

ATTENTION = "plait"  # the name under which transformers finds packed attention
DECODERS = "Use a decoder-only model such as Llama, Qwen3, Mistral, Gemma, Phi-3, GPT-NeoX or GPT-2."
CHANGED = "embeddings that its own code changes: normalised, or with computed positions"
ONE_MODEL = "The model must consist of an embedding, one list of layers, a final norm and a linear head."


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a model.

    Attributes:
        prefix: name of the list of layers, with a dot at the end.
        positions: learnt position embeddings, or None.
        rotary: makes cos and sin from positions, or None.
        embedding_scale: factor by which the model (not its embedding) multiplies embeddings.
        logit_scale: factor of the logits before the softcap, or None.
    """

    prefix: str
    embedding: nn.Module
    positions: nn.Module | None
    layers: nn.ModuleList
    rotary: nn.Module | None
    norm: nn.Module
    head: nn.Linear
    softcap: float | None
    embedding_scale: float | None
    logit_scale: float | None


def find_parts(model: PreTrainedModel) -> Parts:
    """The parts of a causal language model.

    Raises:
        ModelError: a part is missing or ambiguous.
    """
    children = dict(model.base_model.named_children())
    embedding = model.get_input_embeddings()
    head = cast(Any, model).get_output_embeddings()
    lists = {name: child for name, child in children.items() if isinstance(child, nn.ModuleList)}
    norms = [
        child
        for name, child in children.items()
        if "norm" in type(child).__name__.lower() and "embed" not in name
    ]
    tables = [
        child for child in children.values() if isinstance(child, nn.Embedding) and child is not embedding
    ]
    wrong = [] if len(lists) == 1 else [f"{len(lists) or 'no'} lists of layers"]
    wrong += [] if len(norms) == 1 else [f"{len(norms) or 'no'} final norms"]
    wrong += [] if len(tables) <= 1 else [f"{len(tables)} tables of positions"]
    if wrong or not isinstance(head, nn.Linear):
        inside = next((words for name, words in _INSIDE.items() if name in children), "")
        why = ", ".join(wrong) or "no linear head"
        raise unusable(model, f"its parts are {', '.join(children)}: {why}", inside)
    if tables and type(tables[0]).forward is not nn.Embedding.forward:
        raise unusable(model, f"not supported: positions with code of their own ({type(tables[0]).__name__})")
    name, layers = next(iter(lists.items()))
    config = model.config
    divisor = getattr(config, "logits_scaling", None)  # Granite divides, Cohere multiplies
    return Parts(
        prefix=f"{model.base_model_prefix}.{name}.",
        embedding=embedding,
        positions=tables[0] if tables else None,
        layers=layers,
        rotary=children.get("rotary_emb"),
        norm=norms[0],
        head=head,
        softcap=getattr(config, "final_logit_softcapping", None),
        embedding_scale=getattr(config, "embedding_multiplier", None),
        logit_scale=getattr(config, "logit_scale", None) if divisor is None else 1.0 / divisor,
    )


_INSIDE = {  # features, by the name of the part that has the layers
    "encoder": "layers in an encoder, as of BERT",
    "decoder": "layers in a decoder of its own, as of an encoder-decoder model",
    "embed_tokens_per_layer": "embeddings of each layer",
}
# Unsupported features, by the name of a module's class, of its parameters or of its forward's arguments.
_UNSUPPORTED = (
    (
        r"mamba|xlstm|rwkv|\brecurrent(?!_)|recurrent_\w*state|rglru|\ba_log\b|deltanet|lightning"
        r"|linearattention|kimidelta",
        "state-space, recurrent or linear-attention layers",
    ),
    (r"shortconv", "convolutions over tokens"),
    (r"alibi", "alibi position biases"),
    (r"position_bias", "position biases"),
    (r"\bsinks\b", "attention sinks"),
    (r"hyperconnection|hyper_connection", "hyper-connections"),
    (r"\bdt_states\b", "attention masks that depend on the values"),
    (r"indexer", "sparse attention with an indexer"),
    (r"freqs_cis", "rotations as complex numbers"),
    (r"shared_kv_states", "keys and values of another layer or model"),
)


def _unsupported(model: nn.Module) -> list[str]:
    """Features of the model that the blocks do not compute, in words, as far as its names reveal them."""
    names = {type(module).__name__ for module in model.modules()}
    names |= {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    called: set[str] = set()
    for forward in {type(module).forward for module in model.modules()}:
        code = getattr(inspect.unwrap(forward), "__code__", _unsupported.__code__)  # under decorators
        names |= set(code.co_varnames)
        called |= set(code.co_names)
    text = " ".join(sorted(names)).lower()
    if getattr(getattr(model, "config", None), "alibi", None) is False:  # Falcon's layers are given none then
        text = text.replace("alibi", "")
    found = [words for pattern, words in _UNSUPPORTED if re.search(pattern, text)]
    if several := several_models(getattr(model, "config", None)):
        found.append(several)
    if not found and "ALL_ATTENTION_FUNCTIONS" not in called:
        return ["attention that does not go through transformers' attention interface"]
    return found


def several_models(config: Any) -> str:
    """The models of a configuration that joins several, as for images or sound, in words; else ""."""
    parts = getattr(config, "sub_configs", {})
    named = [name for name, kind in parts.items() if getattr(kind, "model_type", None) != ""]
    return f"several models in one ({', '.join(named)})" if named else ""


def not_separable(model: nn.Module, error: Exception) -> ModelError:
    """The error for a model of which a part has another signature, shape or result. Python's words are shown
    only if no feature is known to be missing."""
    why = "its parts cannot be run separately"
    if not _unsupported(model):
        first = next(iter(str(error).strip().splitlines()), "")
        why = f"{why}: {type(error).__name__}: {first[:200]}"
    return unusable(model, why)


def unusable(model: nn.Module, why: str, feature: str = "") -> ModelError:
    """The error for a model that cannot be run as blocks.

    Args:
        feature: what is missing in Plait where names reveal nothing.
    """
    named = ", ".join(_unsupported(model)) or feature
    return ModelError(
        f"{type(model).__name__}: {why}{f'; not supported: {named}' if named else ''}",
        ONE_MODEL,
        DECODERS,
    )


SHRUNK = 4  # keys of a window or chunk during the check


def windows(model: nn.Module) -> list[tuple[Any, str, int]]:
    """Each setting and attribute that names a window or a chunk of tokens: its object, name and value."""
    owners: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else None
        owners |= {id(owner): owner for owner in (module, config, text) if owner is not None}
    return [
        (owner, name, value)
        for owner in owners.values()
        for name, value in vars(owner).items()
        if re.search("window|chunk", name) and not re.search("layer|pattern|feed_forward", name)
        if isinstance(value, int) and not isinstance(value, bool) and value > SHRUNK
    ]


@contextmanager
def shrunk(found: Sequence[tuple[Any, str, int]]) -> Iterator[None]:
    """Shrink each window to a few tokens within the context; windows that differ by one or two still
    differ."""
    small: dict[int, int] = {}
    last = -3
    for value in sorted({value for _, _, value in found}):
        small[value] = small[last] + value - last if value - last <= 2 and last in small else SHRUNK
        last = value
    try:
        for owner, name, value in found:
            setattr(owner, name, small[value])
        yield
    finally:
        for owner, name, value in found:
            setattr(owner, name, value)


@dataclass(frozen=True, slots=True)
class Observed:
    """What was observed of the blocks in one run of the whole model.

    Attributes:
        siblings: groups of linear layers that read the same tensor, in the model's order.
        inputs, outputs: hidden states (tokens, hidden) before and after each layer.
        logits: (tokens, vocabulary).
        pairs: whether layers return a tuple.
    """

    siblings: tuple[tuple[str, ...], ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    logits: Tensor
    pairs: bool


def observe(
    model: PreTrainedModel, layers: Sequence[nn.Module], linears: Sequence[str], tokens: Tensor
) -> Observed:
    """Run the whole model once on one sample of ``tokens``; nothing else calls a whole model.

    A model without weights (on the meta device) is given a mask, as it could not look whether it needs one.
    """
    calls: list[tuple[str, Tensor]] = []  # keeps every input alive, so that no id is used twice
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    pairs: list[bool] = []
    given: dict[str, Tensor] = {}
    if tokens.is_meta:
        given["attention_mask"] = torch.zeros(1, 1, len(tokens), len(tokens), device="meta")
        given["position_ids"] = torch.arange(len(tokens), device="meta").unsqueeze(0)

    def linear_hook(name: str) -> Callable[..., None]:
        def note(_module: nn.Module, given: tuple[Tensor, ...]) -> None:
            calls.append((name, given[0]))

        return note

    def layer_hook(_module: nn.Module, given: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
        inputs.append((given[0] if given else options["hidden_states"])[0])
        outputs.append((out[0] if isinstance(out, tuple) else out)[0])
        pairs.append(isinstance(out, tuple))

    hooks = [model.get_submodule(name).register_forward_pre_hook(linear_hook(name)) for name in linears]
    hooks += [layer.register_forward_hook(layer_hook, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            logits = model(tokens.unsqueeze(0), use_cache=False, **given).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return Observed(_siblings(calls, linears), tuple(inputs), tuple(outputs), logits, any(pairs))


def _siblings(calls: Sequence[tuple[str, Tensor]], linears: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Linear layers grouped by the tensor they read; one that did not run exactly once forms its own
    group."""
    names = [name for name, _ in calls]
    readers: dict[int, list[str]] = {}
    for name, given in calls:
        if names.count(name) == 1:
            readers.setdefault(id(given), []).append(name)
    group_of = {name: tuple(group) for group in readers.values() for name in group}
    return tuple(dict.fromkeys(group_of.get(name, (name,)) for name in linears))


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_other: Any,
) -> tuple[Tensor, None]:
    """Packed attention with the signature that transformers' attention modules call; q and k are already
    rotated.

    The context's sample boundaries replace the mask.

    Args:
        query: (1, heads, tokens, head size).
        key, value: (1, key heads, tokens, head size); values may have another size (DeepSeek-V3).
        scaling: factor of the scores; None: 1/sqrt(head size).
        sliding_window: number of keys that a query sees, including its own.

    Returns:
        (1, tokens, heads, head size), and None for the probabilities.
    """
    now = now_running()
    packed = now.context
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    rule = AttentionRule(scale, sliding_window, softcap)
    heads = Heads(query.shape[1], key.shape[1])
    size, wanted = max(query.shape[-1], value.shape[-1]), value.shape[-1]
    padded = [  # padding by nothing would still copy
        part if part.shape[-1] == size else nn.functional.pad(part, (0, size - part.shape[-1]))
        for part in (query, key, value)
    ]
    qkv = torch.cat(padded, dim=1).squeeze(0).transpose(0, 1).flatten(1)
    if packed.cache is None:
        out = attend(qkv, heads, packed, rule, now.backend)
    else:
        out = packed.cache.attend(cast(int, module.layer_idx), qkv, heads, rule, packed)
    return out.view(1, len(out), heads.query, -1)[..., :wanted], None


AttentionInterface.register(ATTENTION, attention_forward)
