"""Reads a process's part of a base model from its safetensors: the layers of its stage.

Processes that hold layers together, in slices or shards, each read an equal part of the rows of every tensor
and gather the rest, a layer at a time. So the files are read once by all of them together, and none ever has
more of the model than its own part and one whole layer. Names and conversions are those of transformers.

A seam: a model that is prepared in parts knows nothing of files.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.hub import cached_file

from plait.core.errors import ModelError
from plait.models.blocks import Observed, Parts, observe
from plait.models.lora import find_linears
from plait.models.quiet import quiet
from plait.models.shards import Sharding
from plait.models.slices import Sharing, Slicing, vocabulary_slice
from plait.models.sources import Source


@dataclass(frozen=True, slots=True)
class Part:
    """What one process holds of a model.

    Attributes:
        layers: of its stage.
        slicing: the processes that have slices of them, if there are any.
        sharding: or those that have shards of them.
    """

    layers: range
    slicing: Slicing | None = None
    sharding: Sharding | None = None

    @property
    def sharing(self) -> Sharing | None:
        """The processes that hold the same layers."""
        return self.slicing or self.sharding


class WeightFiles:
    """The safetensors of a model, which are opened, and of a hub fetched, when they are needed."""

    def __init__(self, source: Source, files: dict[str, str]) -> None:
        self.source = source
        self.names = tuple(sorted(files))
        self._files = files
        self._opened: dict[str, Any] = {}

    @classmethod
    def find(cls, source: Source) -> WeightFiles | None:
        """The safetensors of a source; None if it has none."""
        single = _fetched(source, "model.safetensors", needed=False)  # first, as in transformers
        if single is not None:
            with safe_open(single, framework="pt") as file:
                return cls(source, dict.fromkeys(file.keys(), "model.safetensors"))
        index = _fetched(source, "model.safetensors.index.json", needed=False)
        if index is None:
            return None
        return cls(source, json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"])

    def read(self, name: str, sharing: Sharing | None) -> Tensor:
        """A tensor, of which this process reads its part of the rows."""
        file = self._files[name]
        if file not in self._opened:
            self._opened[file] = safe_open(_fetched(self.source, file), framework="pt")
        found = self._opened[file].get_slice(name)
        shape = found.get_shape()
        if sharing is None or len(shape) < 2 or shape[0] < sharing.count:
            return cast(Tensor, found[...])
        parts = [vocabulary_slice(shape[0], number, sharing.count) for number in range(sharing.count)]
        rows = parts[sharing.number]
        read: Tensor = found[rows] if rows.start < rows.stop else found[:1][:0]
        flat = read.contiguous().view(torch.uint8).flatten(1)  # any dtype can be sent
        padded = nn.functional.pad(flat, (0, 0, 0, parts[0].stop - len(flat)))
        gathered = zip(sharing.gather(padded), parts, strict=True)
        whole = torch.cat([each[: own.stop - own.start] for each, own in gathered])
        return whole.view(-1).view(read.dtype).view(shape)


def _fetched(source: Source, name: str, *, needed: bool = True) -> str | None:
    """The path of one of a source's files."""
    path: str | None = cached_file(
        source.location,
        name,
        revision=source.revision or "main",
        _raise_exceptions_for_missing_entries=needed,
    )
    return path


def sketch(model: PreTrainedModel, parts: Parts) -> Observed:
    """What is observed of a model on the meta device: shapes, and which linear layers read the same."""
    cast_weights(model, torch.bfloat16)  # the only dtype of some products of experts there
    model.set_attn_implementation("eager")
    names = [each.name for each in find_linears(model, parts.prefix)]
    return observe(model, list(parts.layers), names, torch.arange(1, 10, device="meta"))


class PartReader:
    """Fills a model on the meta device with what is read, part by part.

    Args:
        model: its layers are filled in place.
        sharing: the processes that read each layer together.

    Attributes:
        sketch: what was observed of the whole model without weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        parts: Parts,
        files: WeightFiles,
        sketch: Observed,
        *,
        dtype: torch.dtype,
        device: torch.device,
        sharing: Sharing | None,
    ) -> None:
        cast_weights(model, dtype)
        self._model, self._parts, self._files = cast(Any, model), parts, files
        self.sketch = sketch
        self._dtype, self._device, self._sharing = dtype, device, sharing
        self._conversions = get_model_conversion_mapping(model)
        self._keys = self._targets()  # names in the files by name in the model
        names = {module: name for name, module in model.named_modules()}
        self._embedding, self._head = (f"{names[each]}.weight" for each in (parts.embedding, parts.head))
        self._positions = f"{names[parts.positions]}." if parts.positions is not None else None
        self._tied = parts.head.weight is cast(Any, parts.embedding).weight

    def _targets(self) -> dict[str, list[str]]:
        known: dict[str, Any] = self._model.state_dict()
        renamings = [each for each in self._conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in self._conversions if isinstance(each, WeightConverter)]
        prefix, found = self._model.base_model_prefix, defaultdict[str, list[str]](list)
        for name in self._files.names:
            target, _ = rename_source_key(name, renamings, converters, prefix, known)
            if target not in known and name in known:
                target = name
            found[target].append(name)
        return found

    def outside(self, *, embedding: bool, head: bool) -> None:
        """Read all but the layers; an embedding or a head that is not wanted is replaced by noise that takes
        no memory, so that the model still runs."""
        wanted = [name for name in self._keys if not name.startswith(self._parts.prefix)]
        source, weight = self._parts.embedding, self._parts.head
        borrowed = self._tied and head and self._head not in self._keys
        lent = self._tied and embedding and self._embedding not in self._keys
        if not embedding and not borrowed:
            wanted = [name for name in wanted if name != self._embedding]
            _stand_in(source, self._dtype, self._device)
        if not embedding and self._positions is not None:
            wanted = [name for name in wanted if not name.startswith(self._positions)]
            assert self._parts.positions is not None
            _stand_in(self._parts.positions, self._dtype, self._device)
        if not head and not lent:
            wanted = [name for name in wanted if name != self._head]
            _no_head(weight, self._dtype, self._device)
        self._fill(wanted)
        if self._tied and (embedding or borrowed) and (head or lent):
            self._tie(borrowed=borrowed, lent=lent)
        self._finish("")

    def _tie(self, *, borrowed: bool, lent: bool) -> None:
        embedding, head = cast(Any, self._parts.embedding), self._parts.head
        if lent:
            embedding.weight = head.weight
        elif borrowed or torch.equal(embedding.weight, head.weight):
            head.weight = embedding.weight

    def layer(self, index: int) -> None:
        """Read one layer, which must be in its place.

        Raises:
            ModelError: the files lack weights of it, or cannot be read.
        """
        prefix = f"{self._parts.prefix}{index}."
        self._fill([name for name in self._keys if name.startswith(prefix)])
        self._finish(prefix)

    def _fill(self, targets: Sequence[str]) -> None:
        """Put what is read where it belongs, converted as transformers says."""
        names = sorted(name for target in targets for name in self._keys[target])
        try:
            read = {name: self._files.read(name, self._sharing) for name in names}  # in all in this order
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"model {self._files.source.name!r}: {error}",
                "Each process must be able to read the layers that it holds.",
                "Download the model again, to a folder that all hosts can read.",
            ) from error
        options = LoadStateDictConfig(
            dtype=self._dtype, device_map={"": self._device}, weight_mapping=cast(Any, self._conversions)
        )
        with quiet():
            convert_and_load_state_dict_in_model(self._model, read, options)

    def _finish(self, prefix: str) -> None:
        """Make what files do not hold, such as tables of rotations; refuse weights that are missing."""
        model = self._model
        empty = ((name, weight) for name, weight in model.named_parameters() if weight.is_meta)
        lacking = [name for name, weight in empty if not getattr(weight, "_is_hf_initialized", False)]
        if lacking:
            raise lacks(self._files.source, sorted(lacking))
        for name, buffer in list(model.named_buffers()):
            if buffer.is_meta:
                owner, _, last = name.rpartition(".")
                model.get_submodule(owner)._buffers[last] = torch.empty_like(buffer, device="cpu")
        model.initialize_weights()
        place = model.get_submodule(prefix.removesuffix(".")) if prefix else model
        cast_weights(place, self._dtype)
        place.to(self._device)


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert a model's weights. What is computed from its configuration keeps its type, as when transformers
    loads a model: with frequencies of rotations in bfloat16, positions would be others."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(dtype)


def lacks(source: Source, missing: Sequence[str]) -> ModelError:
    """The error for files without some weights, which transformers would fill in with random numbers."""
    return ModelError(
        f"model {source.name!r}: its files lack {len(missing)} weights, such as {missing[0]}",
        "The files must contain every weight of the model.",
        "Download the model again, or use a copy that was saved with its output head.",
    )


def _stand_in(table: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Rows of noise that overlap: each is the one before, moved by one."""
    rows, size = cast(Tensor, table.weight).shape
    noise = torch.randn(rows + size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    _set(table, noise.as_strided((rows, size), (1, 1)))


def _no_head(head: nn.Linear, dtype: torch.dtype, device: torch.device) -> None:
    """A head that returns a few features of its input, under a weight of one number."""
    _set(head, torch.ones((), dtype=dtype, device=device).expand(head.weight.shape))
    head.register_parameter("bias", None)
    cast(Any, head).forward = lambda rows: rows[..., :STAND_IN_LOGITS]


STAND_IN_LOGITS = 8


def _set(module: nn.Module, weight: Tensor) -> None:
    parameter = nn.Parameter(weight, requires_grad=False)
    cast(Any, parameter)._is_hf_initialized = True  # transformers leaves it alone
    module.weight = parameter


def free(module: nn.Module) -> None:
    """Free a module's weights."""
    for name, weight in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(weight.new_empty(0), requires_grad=False))


class Through(nn.Module):
    """Stands where a layer is not read: returns hidden states as they are.

    Args:
        pair: whether layers of this family return a tuple.
    """

    def __init__(self, *, pair: bool) -> None:
        super().__init__()
        self._pair = pair

    def forward(self, hidden_states: Tensor, *_given: Any, **_options: Any) -> Tensor | tuple[Tensor]:
        """Hidden states."""
        return (hidden_states,) if self._pair else hidden_states
