"""The frozen base model as blocks: the embedding, single layers, the head on chosen rows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from plait.core.errors import PlaitError
from plait.models.blocks import (
    ATTENTION,
    CHANGED,
    Observed,
    Parts,
    find_parts,
    not_separable,
    observe,
    shrunk,
    unusable,
    windows,
)
from plait.models.context import MicrobatchContext, Rotation, Running, running
from plait.models.fuse import OneNode, RotaryAttention, fuse_layer, fuse_norms
from plait.models.lora import (
    Binding,
    GroupedLinear,
    LinearGroup,
    find_linears,
    find_outside,
    layer_weights,
    local_site,
    merge_siblings,
    sites_by_layer,
)
from plait.models.parts import Part, PartReader, Through, free
from plait.models.shards import LayerShards, Sharding
from plait.models.slices import LayerSlice, Slicing, layer_slices, vocabulary_slice
from plait.models.targets import LinearInfo, layer_of
from plait_kernels import Site, VocabularySlice, labelled_cross_entropy
from plait_kernels.loss import chunk_rows

# Largest ‖block − whole‖ / ‖whole‖ of what a block adds, at load. Rounding gives about 1e-6 in float32
# and 1e-2 in bfloat16; a missing scale, a wrong position or a wrong mask gives more than 0.1.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class Identity:
    """The name of a base model in runs, exports and checkpoints.

    Attributes:
        name: hub id, folder or built-in name, as in PEFT's ``base_model_name_or_path``.
        digest: digest of configuration, source and dtype; equal digests mean equal models.
        revision: revision of the hub repository, if one was requested.
        quantise: how the layers' weights are quantised.
    """

    name: str
    digest: str
    revision: str | None = None
    quantise: str = "none"


class BaseModel:
    """A frozen causal language model, run block by block over packed samples.

    It has all layers until :meth:`keep` leaves one stage of a pipeline, and all of each until
    :meth:`take_slice` leaves one process's part.

    Args:
        model: a model of transformers with dense weights; it is changed in place.
        max_length: longest sample in tokens.
        part: what to keep of it; None: all. A part is read by ``reader`` into a model without weights.

    Attributes:
        vocabulary: number of logits of a row, of all processes together.
        backend: what computes the adapters' part of the linear layers.

    Raises:
        ModelError: the model cannot be run as blocks, or its blocks give logits other than the whole model's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokeniser: PreTrainedTokenizerBase,
        identity: Identity,
        max_length: int,
        part: Part | None = None,
        reader: PartReader | None = None,
    ) -> None:
        self.tokeniser = tokeniser
        self.identity = identity
        self.max_length = max_length
        self._model = model.requires_grad_(False)
        self._model.train(False)
        self._parts: Parts = find_parts(model)
        self._device: torch.device | None = None  # of a stage, which may have no head
        self._sites: list[list[tuple[Site, ...]]] = []  # of a stage, whose other layers are freed
        self.own = range(len(self._parts.layers))  # the layers that are here
        self.shards: LayerShards | None = None  # where other processes keep parts of the weights
        self.slicing: Slicing | None = None  # the processes that have parts of these
        self.slices: Mapping[str, LayerSlice] = {}  # what is here of each linear layer; empty: all
        self.vocabulary = int(self._parts.head.weight.shape[0])
        self._tokens = slice(0, self.vocabulary)  # that are here
        self._binding = Binding()
        self.backend = self._binding.backend
        self.linears: tuple[LinearInfo, ...] = find_linears(model, self._parts.prefix)
        self.outside = find_outside(model, self.linears)
        self._groups: list[list[LinearGroup]] = [[] for _ in self.own]
        try:
            if part is None or reader is None:
                self._prepare(self.own)
            else:
                self._read(part, reader)
        except (PlaitError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # any error of a part with another signature, shape or result
            raise not_separable(model, error) from error

    # ---- properties -----------------------------------------------------------------------------------

    @property
    def layer_count(self) -> int:
        """Number of decoder layers of the whole model."""
        return len(self._parts.layers)

    @property
    def hidden_size(self) -> int:
        """Number of features of a hidden row."""
        return int(self._model.config.hidden_size)

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        return int(self._model.config.num_attention_heads)

    def tensors(self) -> Iterator[Tensor]:
        """All frozen weights and buffers that are here."""
        shards = () if self.shards is None else self.shards.tensors()
        every = (*self._model.parameters(), *self._model.buffers(), *shards)
        merged = [each for group in self.groups for each in group.tensors()]
        return (tensor for tensor in (*every, *merged) if tensor.untyped_storage().nbytes())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all frozen weights that are always here, tied ones once."""
        found = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in self.tensors()}
        return sum(found.values())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the frozen weights and of the arithmetic."""
        return self._parts.head.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._device or self._parts.head.weight.device

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text, by the configuration and the tokeniser."""
        named = self._model.config.eos_token_id
        listed = list(named) if isinstance(named, (list, tuple)) else [named]
        found = {token for token in [*listed, self.tokeniser.eos_token_id] if token is not None}
        return tuple(sorted(found))

    # ---- adapters -------------------------------------------------------------------------------------

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every linear layer that is here as a site, siblings grouped; ``module`` is its index in
        ``linears``."""
        return self.sites_of(self.own)

    def sites_of(self, layers: range) -> tuple[Site, ...]:
        """The same of any layers of the model."""
        return tuple(site for index in layers for sites in self._all_sites[index] for site in sites)

    @property
    def inputs(self) -> tuple[tuple[frozenset[str], int], ...]:
        """Linear layers that read the same, by name, with its features; of all layers of the model."""
        groups = [sites for own in self._all_sites for sites in own]
        return tuple((frozenset(site.name for site in sites), sites[0].in_features) for sites in groups)

    @property
    def _all_sites(self) -> list[list[tuple[Site, ...]]]:
        """The sites of every layer by their groups, also of layers that are not here."""
        return self._sites or [[group.sites for group in own] for own in self._groups]

    @property
    def groups(self) -> tuple[LinearGroup, ...]:
        """The linear layers that are here in groups: siblings, which read the same input, form one group."""
        return tuple(group for groups in self._groups for group in groups)

    def frozen_weight(self, name: str) -> Tensor:
        """The frozen weight (out, in) of a linear layer."""
        return cast(GroupedLinear, self._model.get_submodule(name)).frozen_weight()

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """The decoder layers."""
        return tuple(self._parts.layers)

    def install(self, *, backend: str) -> None:
        """Choose the backend that computes the adapters' part of the linear layers."""
        self.backend = self._binding.backend = backend

    # ---- stages ---------------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        """Whether the embedding is here."""
        return self.own.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the head is here."""
        return self.own.stop == self.layer_count

    def has(self, part: Part) -> bool:
        """Whether a part is here, whole."""
        cut = part.sharing or self.slicing or self.shards
        return cut is None and set(part.layers) <= set(self.own)

    def keep(self, layers: range) -> None:
        """Keep a stage: these layers, with the embedding if they are the first, the head if the last.

        All else is freed. A weight that embedding and head share stays where one of them does.
        """
        parts, self.own = self._parts, layers
        self._device, self._sites = self.device, self._all_sites
        for index in set(range(self.layer_count)) - set(layers):
            parts.layers[index] = nn.Module()
            self._groups[index] = []
        if not self.is_first:
            free(parts.embedding)
            if parts.positions is not None:
                free(parts.positions)
        if not self.is_last:
            free(parts.head)

    # ---- slices ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def take_slice(self, slicing: Slicing) -> None:
        """Keep this process's part of every layer that is here, of embedding and head; all processes do so
        together, and check that they compute what one did.

        Raises:
            ModelError: the model cannot be sliced so, or gives other results.
        """
        slices = self._slice_sites(slicing)
        self._slice_layers(self.own, slices, slicing)
        self._slice_rest(slices, slicing)

    def _slice_sites(self, slicing: Slicing) -> dict[str, LayerSlice]:
        """What is here of each linear layer; it becomes its site's size."""
        slices = self.slices_of(slicing.number, slicing.count)
        self._sites = [
            [tuple(local_site(site, slices[site.name]) for site in sites) for sites in own]
            for own in self._all_sites
        ]
        return slices

    def slices_of(self, number: int, count: int) -> dict[str, LayerSlice]:
        """What one of so many processes has of each linear layer; ModelError where it cannot be cut."""
        return layer_slices(self.linears, self._model.config, number, count)

    def _slice_layers(self, layers: range, slices: Mapping[str, LayerSlice], slicing: Slicing) -> None:
        """Keep this process's part of layers."""
        trial = None if self.device.type == "meta" else _Trial(self, layers)
        for index in layers:
            for group in self._groups[index]:
                group.take_slice(slices, slicing)
            for module in self._parts.layers[index].modules():
                if isinstance(module, GroupedLinear):
                    module.bind()
                if isinstance(module.forward, RotaryAttention):
                    module.forward = module.forward.sliced(slicing.count)
        if trial is not None:
            trial.check()

    def _slice_rest(self, slices: Mapping[str, LayerSlice], slicing: Slicing) -> None:
        """Keep this process's part of embedding and head, once the layers are sliced."""
        trial = None if self.device.type == "meta" else _Trial(self, None)
        self.slicing, self.slices = slicing, slices
        self._tokens = vocabulary_slice(self.vocabulary, slicing.number, slicing.count)
        self._slice_vocabulary()
        if trial is not None:
            trial.check()

    def _slice_vocabulary(self) -> None:
        """Keep the rows of this process's tokens; embedding and head may be one."""
        parts, kept = self._parts, dict[int, nn.Parameter]()
        for module in (parts.embedding, parts.head):
            weight = cast(nn.Parameter, module.weight)
            if id(weight) not in kept:
                kept[id(weight)] = nn.Parameter(weight[self._tokens].clone(), requires_grad=False)
            module.weight = kept[id(weight)]
        if parts.head.bias is not None:
            parts.head.bias = nn.Parameter(parts.head.bias[self._tokens].clone(), requires_grad=False)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """The embedding's rows of tokens."""
        if self.slicing is None:
            return cast(Tensor, self._parts.embedding(tokens))
        here = (tokens >= self._tokens.start) & (tokens < self._tokens.stop)
        rows: Tensor = self._parts.embedding(torch.where(here, tokens - self._tokens.start, 0))
        rows = torch.where(here.unsqueeze(1), rows, 0.0).to(rows.dtype)
        self.slicing.add(rows)
        return rows

    # ---- shards ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def shard(self, sharding: Sharding) -> None:
        """Keep this process's part of the layers' weights; embedding and head stay whole."""
        shards = LayerShards(sharding)
        for index in self.own:
            self._shard_layer(index, shards)
        self.shards = shards

    def _shard_layer(self, index: int, shards: LayerShards) -> None:
        weights, grouped = layer_weights(self._parts.layers[index], self._groups[index])
        shard = shards.add(weights)
        for module in grouped:
            module.bind()
        shard.release()

    # ---- running --------------------------------------------------------------------------------------

    def embed(self, context: MicrobatchContext) -> Tensor:
        """Hidden states (tokens, hidden) of the microbatch's tokens."""
        hidden = self._embedded(context.token_ids)
        if self._parts.embedding_scale is not None:
            hidden = hidden * self._parts.embedding_scale
        if self._parts.positions is not None:
            hidden = hidden + self._parts.positions(context.position_ids)
        return hidden

    def layer(self, index: int, hidden: Tensor, context: MicrobatchContext) -> Tensor:
        """One decoder layer: (tokens, hidden) to (tokens, hidden)."""
        if self.shards is not None:
            return self.shards.run(index, hidden, lambda entering: self._layer(index, entering, context))
        return self._layer(index, hidden, context)

    def _layer(self, index: int, hidden: Tensor, context: MicrobatchContext) -> Tensor:
        if context.checkpointing and torch.is_grad_enabled():
            return cast(Tensor, checkpoint(self._run, index, hidden, context, use_reentrant=False))
        return self._run(index, hidden, context)

    def hidden(self, context: MicrobatchContext, entering: Tensor | None = None) -> Tensor:
        """Hidden states (tokens, hidden) after the last layer that is here, block by block.

        ``entering`` are those of the stage before; None on the first.
        """
        hidden = self.embed(context) if entering is None else entering
        if self.shards is not None and torch.is_grad_enabled():
            hidden.requires_grad_()  # every layer has a backward, as in the other processes
        for index in self.own:
            hidden = self.layer(index, hidden, context)
        return hidden

    def head(self, rows: Tensor) -> Tensor:
        """Logits softcap(scale · (norm(rows) Wᵀ + b)) (rows, vocabulary) of hidden rows."""
        logits = self._parts.head(self._parts.norm(rows))
        if self._parts.logit_scale is not None:
            logits = logits * self._parts.logit_scale
        cap = self._parts.softcap
        return cast(Tensor, logits if cap is None else cap * torch.tanh(logits / cap))

    def loss(self, hidden: Tensor, rows: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted loss of labelled rows of ``hidden``, and the loss of each row, never holding all logits.

        Args:
            hidden: (tokens, hidden), after the last layer.
            rows, targets, weights: (labelled,), the rows, the tokens that follow them and their weights.
        """
        head = self._parts.head
        return labelled_cross_entropy(
            self._parts.norm(hidden.index_select(0, rows)),
            head.weight,
            head.bias,
            targets,
            weights,
            softcap=self._parts.softcap,
            scale=self._parts.logit_scale,
            backend=self._binding.backend,
            **self._whose_logits,
        )

    @property
    def _whose_logits(self) -> dict[str, Any]:
        """How the loss is computed where each process has some tokens: in chunks that all have alike."""
        if self.slicing is None:
            return {}
        most = vocabulary_slice(self.vocabulary, 0, self.slicing.count).stop
        own = VocabularySlice(self._tokens.start, self.slicing.gather, self.slicing.add)
        return {"chunk": chunk_rows(most), "own": own}

    def logits(self, context: MicrobatchContext) -> Tensor:
        """Logits (rows, vocabulary) of all rows, block by block."""
        return self.head(self.hidden(context))

    def _run(self, index: int, hidden: Tensor, context: MicrobatchContext) -> Tensor:
        self._binding.routing = context.routing
        rotation = self._rotation(index, context)
        options: dict[str, Any] = {} if rotation is None else {"position_embeddings": rotation.tokens}
        if self._stores_keys:  # a layer that takes keys from another one finds none, and is refused
            options["shared_kv_states"] = {}
        tables = None if rotation is None else rotation.tables
        layer = self._parts.layers[index]
        with running(Running(context, tables, self._binding.backend)):
            if isinstance(layer.forward, OneNode):
                return layer.forward(hidden, **options)
            for group in self._groups[index]:
                group.forget()
            options |= {"attention_mask": None, "position_ids": context.position_ids.unsqueeze(0)}
            out = layer(hidden.unsqueeze(0), **options)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out).squeeze(0)

    def _rotation(self, index: int, context: MicrobatchContext) -> Rotation | None:
        """cos and sin for one layer, computed only once for each kind of layer."""
        rotary = self._parts.rotary
        if rotary is None:
            return None
        kind = [self._kinds[index]] if self._kinds else []
        key = kind[0] if kind else ""
        if kind and key not in getattr(rotary, "rope_type", kind):
            raise unusable(self._model, f"not supported: layers without rotation ({key}) among rotated ones")
        if key not in context.shared:
            like = torch.empty(0, dtype=self.dtype, device=self.device)
            tokens = rotary(like, context.position_ids.unsqueeze(0), *kind)
            tables = None
            if context.cache is None:
                longest = torch.arange(context.longest, device=self.device)
                cos, sin = rotary(like, longest.unsqueeze(0), *kind)
                tables = cos.squeeze(0), sin.squeeze(0)
            context.shared[key] = Rotation(tokens, tables)
        return context.shared[key]

    # ---- preparing the model --------------------------------------------------------------------------

    @torch.no_grad()
    def _read(self, part: Part, reader: PartReader) -> None:
        """Read a part of the model; layers that are shared are read, checked and cut one after another."""
        parts, sketch, slices = self._parts, reader.sketch, dict[str, LayerSlice]()
        unread = list(parts.layers)
        self._sites, self.own = sites_by_layer(sketch.siblings, self.linears), part.layers
        if part.slicing is not None:
            slices = self._slice_sites(part.slicing)
        for index in range(len(unread)):
            parts.layers[index] = Through(pair=sketch.pairs)
        reader.outside(embedding=self.is_first, head=self.is_last)
        shards = None if part.sharding is None else LayerShards(part.sharding)
        portions = [range(each, each + 1) for each in part.layers] if part.sharing else [part.layers]
        for portion in portions:
            for index in portion:
                parts.layers[index] = unread[index]
                reader.layer(index)
            self._prepare(portion)
            if part.slicing is not None:
                self._slice_layers(portion, slices, part.slicing)
            for index in portion:
                if shards is not None:
                    self._shard_layer(index, shards)
                parts.layers[index] = Through(pair=sketch.pairs)
        for index in part.layers:
            parts.layers[index] = unread[index]
        self.shards = shards
        self.keep(part.layers)
        if part.slicing is not None:
            self._slice_rest(slices, part.slicing)

    @torch.no_grad()
    def _prepare(self, layers: range) -> None:
        """Merge siblings, plug in packed attention, and check blocks against the whole model, whose other
        layers change nothing."""
        model, parts = self._model, self._parts
        rotary = parts.rotary
        by_kind = rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters
        # kept, since transformers takes long to look it up
        self._kinds: list[str] = list(getattr(model.config, "layer_types", None) or ()) if by_kind else []
        here = [parts.layers[index] for index in layers]
        accepted = {name for layer in here for name in inspect.signature(layer.forward).parameters}
        self._stores_keys = "shared_kv_states" in accepted  # Gemma 4
        tokens = torch.arange(1, 10, device=self.device) % self.vocabulary
        model.set_attn_implementation("eager")  # the reference: sdpa ignores Gemma 2's softcap
        names = [linear.name for linear in self.linears if layer_of(linear.name) in layers]
        observed = observe(model, here, names, tokens)
        if len(observed.inputs) != len(here):
            raise unusable(model, f"its {len(here)} layers run {len(observed.inputs)} times")
        announced = windows(model)
        with shrunk(announced):
            windowed = observe(model, here, [], tokens) if announced else None
        model.set_attn_implementation(ATTENTION)
        infos = {linear.name: (key, linear) for key, linear in enumerate(self.linears)}
        for siblings in observed.siblings:
            group = merge_siblings(model, [infos[name] for name in siblings], self._binding)
            self._groups[layer_of(siblings[0])].append(group)
        if self.device.type == "meta":  # nothing has a value that could be checked
            return
        context = MicrobatchContext.of(tokens.repeat(2), (0, len(tokens), 2 * len(tokens)))
        if windowed is not None:  # before fusing, which copies the real windows
            with shrunk(announced):
                self._check(layers, context, windowed, "beyond its window or chunk, ")
        self._fuse(layers, context)
        self._check(layers, context, observed)
        self._try_gradients(layers, context, observed)

    def _fuse(self, layers: range, context: MicrobatchContext) -> None:
        """Replace slow parts by fused ones that prove to be exact."""
        fuse_norms(self._parts.norm, self._binding)
        for index in layers:
            fuse_layer(self._parts.layers[index], self._binding, context, self._rotation(index, context))

    def _check(self, layers: range, context: MicrobatchContext, observed: Observed, where: str = "") -> None:
        """Check that each block returns what it returned in the whole model, given the same input."""
        window = "a window or chunk that its attention function is not given" if where else ""
        self.compare(f"{where}embed", self.embed(context), observed.inputs[0].repeat(2, 1), CHANGED)
        for index, given, returned in zip(layers, observed.inputs, observed.outputs, strict=True):
            hidden = self.layer(index, given.repeat(2, 1), context)
            added = hidden - given.repeat(2, 1)
            self.compare(f"{where}layer {index}", added, (returned - given).repeat(2, 1), window)
        logits = self.head(observed.outputs[-1].repeat(2, 1))
        self.compare(f"{where}head", logits, observed.logits.repeat(2, 1))

    @torch.enable_grad()
    def _try_gradients(self, layers: range, context: MicrobatchContext, observed: Observed) -> None:
        """Differentiate each layer once; one that changes linear outputs in place gets copies of them."""
        for index, given in zip(layers, observed.inputs, strict=True):
            start = given.repeat(2, 1).requires_grad_()
            for separate in (False, True):
                for group in self._groups[index]:
                    group.separate = separate
                try:
                    torch.autograd.grad(self.layer(index, start * 1.0, context).sum(), start)
                    break
                except RuntimeError:
                    if separate:
                        raise

    def compare(self, block: str, found: Tensor, expected: Tensor, feature: str = "") -> None:
        """Check what a block makes.

        Args:
            feature: what is missing in Plait if it differs.

        Raises:
            ModelError: it differs by more than rounding.
        """
        wanted = expected.float()
        error = float((found.float() - wanted).norm() / wanted.norm())
        if not error <= TOLERANCE[self.dtype]:
            raise unusable(self._model, f"{block} differs from the whole model's (by {error:.1e})", feature)


class _Trial:
    """What layers make of random hidden states before they are sliced; without layers, embedding and head."""

    def __init__(self, model: BaseModel, layers: range | None) -> None:
        self.model = model
        self.layers = layers
        generator = torch.Generator().manual_seed(0)
        offsets = (0, 5, 16)
        tokens = torch.randint(0, model.vocabulary, (offsets[-1],), generator=generator).to(model.device)
        self.context = MicrobatchContext.of(tokens, offsets)
        noise = torch.randn(offsets[-1], model.hidden_size, generator=generator)
        self.hidden = noise.to(model.device, model.dtype)
        self.expected = self._results()

    def _results(self) -> list[tuple[str, Tensor]]:
        model, hidden, found = self.model, self.hidden, list[tuple[str, Tensor]]()
        if self.layers is not None:
            run = ((index, model.layer(index, hidden, self.context)) for index in self.layers)
            return [(f"layer {index}", out - hidden) for index, out in run]
        if model.is_first:
            found.append(("embedding", model.embed(self.context)))
        if model.is_last:
            rows = torch.arange(len(hidden), device=model.device)
            weights = torch.ones(len(hidden), device=model.device)
            found.append(("head", model.loss(hidden, rows, self.context.token_ids, weights)[1]))
        return found

    def check(self) -> None:
        """Compare with what the slices make of them together."""
        for (name, expected), (_, found) in zip(self.expected, self._results(), strict=True):
            self.model.compare(f"{name} in slices", found, expected)
