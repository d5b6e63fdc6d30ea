"""Replaces the work of transformers' modules between matrix products by single passes over memory.

Families are not identified by name: a module is replaced if it looks like RMSNorm, a gated MLP or rotary
attention, and the replacement gives the same result on random input. Everything else is left alone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait.models.attention import AttentionRule, Heads, packed_attention
from plait.models.context import MicrobatchContext, Rotation, Running, now_running, running
from plait.models.elementwise import (
    FrozenNorm,
    SumNorm,
    activated,
    gated,
    rotate_heads_,
    rotated_merged,
)
from plait.models.flash import attend
from plait.models.lora import Binding, GroupedLinear, LinearGroup
from plait_kernels import KernelError, Routing, passes
from plait_kernels.chain import Chain
from plait_kernels.plain import GELU, GELU_TANH, SILU, activation

# ‖replacement − module‖ / ‖module‖ on random input from rounding alone; a real difference is far larger.
ROUNDING = {torch.float32: 5e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}
# Factors of the random input: clamps (OLMo's clip_qkv, DeepSeek's swiglu_limit) act on outliers only.
SCALES = (1.0, 30.0, 100.0)
Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Norm:
    """Forward of an RMSNorm or a LayerNorm."""

    frozen: FrozenNorm
    binding: Binding

    def __call__(self, x: Tensor) -> Tensor:
        """(..., features) to the same."""
        return self.frozen(x, backend=self.binding.backend)

    def of_sum(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of x + ``added``, and the sum."""
        return self.frozen.of_sum(x, added, backend=self.binding.backend)


def fuse_layer(
    layer: nn.Module, binding: Binding, context: MicrobatchContext, rotation: Rotation | None
) -> None:
    """Replace what can be replaced in a decoder layer; attention needs a rotation to be tried with."""
    fuse_norms(layer, binding)
    fuse_mlps(layer)
    fuse_activations(layer, binding)
    trial = Running(context, None if rotation is None else rotation.tables)
    if rotation is not None:
        fuse_attentions(layer, trial, rotation.tokens)
    fuse_residuals(layer, trial, None if rotation is None else rotation.tokens)


def fuse_norms(root: nn.Module, binding: Binding) -> None:
    """Replace the forward of every RMSNorm and LayerNorm below ``root``."""
    for module in root.modules():
        if re.search("RMSNorm|LayerNorm", type(module).__name__):
            _fuse_norm(module, binding)


def _fuse_norm(module: nn.Module, binding: Binding) -> None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None or not _takes_one(module):
        return
    x = _noise(3, len(weight), like=weight)
    bias, centred = getattr(module, "bias", None), "RMSNorm" not in type(module).__name__
    for offset in (0.0, 1.0):
        norm = Norm(FrozenNorm(weight, eps, offset, bias, centred), binding)
        # A LayerNorm rounds once, and torch's takes no input of another dtype than its weight's.
        if _same(norm, module, x) and (centred or _same(norm, module, x.float())):
            module.forward = norm
            return


def _takes_one(module: nn.Module) -> bool:
    """Whether the module's forward takes one tensor and nothing else (a gated norm takes a gate too)."""
    return len(inspect.signature(module.forward).parameters) == 1


def _same(forward: Forward, module: Forward, x: Tensor) -> bool:
    """Whether both give the same result on ``x``, outliers included."""
    return all(_close(forward(x * scale), module(x * scale)) for scale in SCALES)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Forward of a gated MLP: ``pair`` are gate and up, side by side."""

    pair: LinearGroup
    down: GroupedLinear
    kind: int

    def __call__(self, x: Tensor) -> Tensor:
        """(..., hidden) to the same."""
        found = self.pair.gated_mlp(x, self.down.group, self.kind)
        if found is not None:
            return found
        return self.down.forward(gated(self.pair.merged(x), self.kind, backend=self.pair.binding.backend))


def fuse_mlps(root: nn.Module) -> None:
    """Replace the forward of every gated MLP below ``root``."""
    for module in root.modules():
        _fuse_mlp(module)


def _merged_siblings(module: nn.Module, *names: str) -> GroupedLinear | None:
    """The first of the named children if exactly these, in this order, form one group."""
    members = [getattr(module, name, None) for name in names]
    first = members[0]
    if not isinstance(first, GroupedLinear) or len(first.group.sites) != len(names):
        return None
    same = all(
        isinstance(member, GroupedLinear) and member.group is first.group and member.member == index
        for index, member in enumerate(members)
    )
    return first if same else None


def _fuse_mlp(module: nn.Module) -> None:
    pair = _merged_siblings(module, "gate_proj", "up_proj") or _merged_siblings(module, "gate_up_proj")
    down = getattr(module, "down_proj", None)
    act = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    if pair is None or act is None or not isinstance(down, GroupedLinear) or not _takes_one(module):
        return
    kind = _activation_kind(act, SILU, GELU_TANH)
    if kind is None:
        return
    forward = GatedMlp(pair.group, down, kind)
    if _same(forward, module, _noise(3, pair.in_features, like=pair.weight)):
        module.forward = forward


def _activation_kind(act: Callable[[Tensor], Tensor], *kinds: int) -> int | None:
    """Which of these this is, compared in float32, in which GELU's two forms differ."""
    gate = torch.linspace(-6.0, 6.0, 100)
    try:
        return next((kind for kind in kinds if _same(partial(activation, kind=kind), act, gate)), None)
    except TypeError:  # it needs more than the gate, like Inkling 2's, so it is not a plain activation
        return None


@dataclass(frozen=True, slots=True)
class Activation:
    """Forward of an activation between two products."""

    kind: int
    binding: Binding

    def __call__(self, x: Tensor) -> Tensor:
        """Any shape to the same."""
        return activated(x, self.kind, backend=self.binding.backend)


def fuse_activations(root: nn.Module, binding: Binding) -> None:
    """Replace the forward of every GELU and SiLU below ``root``."""
    for module in root.modules():
        if re.search("GELU|SiLU", type(module).__name__):
            kind = _activation_kind(module, SILU, GELU_TANH, GELU)
            if kind is not None:
                module.forward = Activation(kind, binding)


@dataclass(frozen=True, slots=True)
class RotaryAttention:
    """Forward of an attention module: one product for q, k and v, rotation and attention in one pass.

    Attributes:
        group: the linear layers of q, k and v, side by side.
        layer: its index in the cache.
    """

    group: LinearGroup
    output: nn.Module
    heads: Heads
    rule: AttentionRule
    layer: int

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **_other: Any,
    ) -> tuple[Tensor, None]:
        """(1, tokens, hidden) or (tokens, hidden) to the same, and None for the probabilities."""
        flat = hidden_states.dim() == 2
        qkv = self.group.merged(hidden_states if flat else hidden_states.squeeze(0))
        now = now_running()
        packed = now.context
        by_triton = passes.by_triton(now.backend, qkv)
        if by_triton:
            qkv = rotated_merged(qkv, self.heads.turned, position_embeddings)
        elif packed.cache is not None:
            qkv = self.rotated(qkv, position_embeddings)
        if packed.cache is not None:
            out = packed.cache.attend(self.layer, qkv, self.heads, self.rule, packed)
        elif by_triton:
            out = attend(qkv, self.heads, packed, self.rule, now.backend)
        else:
            out = packed_attention(qkv, self.heads, packed.layout, self.rule, now.tables)
        out = self.output.forward(out)
        return out if flat else out.unsqueeze(0), None

    def sliced(self, count: int) -> RotaryAttention:
        """The same in one of so many processes, each with some of the heads."""
        heads = Heads(self.heads.query // count, max(1, self.heads.shared // count))
        return replace(self, heads=heads)

    def rotated(self, qkv: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate q and k row by row, in place, for rows whose positions do not start from 0."""
        tables = (table.view(len(qkv), -1) for table in position_embeddings)
        rotate_heads_(qkv.view(len(qkv), self.heads.total, -1), self.heads.turned[0], *tables)
        return qkv


class _Observer:
    """A fake cache that records how an attention module calls it."""

    def __init__(self) -> None:
        self.asked: tuple[int, Heads, AttentionRule] | None = None
        self.qkv = self.answer = torch.empty(0)

    def attend(
        self, layer: int, qkv: Tensor, heads: Heads, rule: AttentionRule, context: MicrobatchContext
    ) -> Tensor:
        """Record the call, and answer it."""
        self.asked, self.qkv = (layer, heads, rule), qkv
        self.answer = packed_attention(qkv, heads, context.layout, rule)
        return self.answer


def fuse_attentions(root: nn.Module, trial: Running, position_embeddings: tuple[Tensor, Tensor]) -> None:
    """Replace the forward of every rotary attention below ``root``, a decoder layer."""
    for module in root.modules():
        _fuse_attention(module, trial, position_embeddings)


def _fuse_attention(module: nn.Module, trial: Running, position_embeddings: tuple[Tensor, Tensor]) -> None:
    project = _merged_siblings(module, "q_proj", "k_proj", "v_proj") or _merged_siblings(module, "qkv_proj")
    output = getattr(module, "o_proj", None)
    if project is None or not isinstance(output, GroupedLinear):
        return
    x = _noise(1, len(trial.context.token_ids), project.in_features, like=project.weight)
    observer = _Observer()
    observed = replace(trial.context, cache=observer)
    with running(Running(observed, trial.tables)):
        try:
            given = module(hidden_states=x, attention_mask=None, position_embeddings=position_embeddings)
        except TypeError:  # it needs more arguments (Ministral 3: positions), so what it computes is unknown
            return
    if observer.asked is None:
        return
    expected = given[0]
    layer, heads, rule = observer.asked
    forward = RotaryAttention(project.group, output, heads, rule, layer)
    for scale in SCALES:  # the call and the use of its result: the softmax between rounds, too
        with running(Running(observed, trial.tables)):
            given = module(
                hidden_states=x * scale, attention_mask=None, position_embeddings=position_embeddings
            )
        qkv = forward.rotated(project.group.merged(x.squeeze(0) * scale), position_embeddings)
        if not _close(qkv, observer.qkv) or not _close(output(observer.answer), given[0].squeeze(0)):
            return
    for tried in (trial.context, observed):
        with running(Running(tried, trial.tables)):
            if not _close(forward(x, position_embeddings)[0], expected):
                return
    module.forward = forward


@dataclass(frozen=True, slots=True)
class Residual:
    """x + attention(norm(x)) + MLP(norm(x + attention(norm(x)))), with the sums made by the norms."""

    first: Norm
    attention: nn.Module
    second: Norm
    mlp: nn.Module

    def terms(self, x: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """What the output is the sum of: what enters the second norm, and what the MLP makes of it."""
        normed, total = self.first.of_sum(x, None)
        attended = self.attention.forward(hidden_states=normed, **options)[0]
        normed, total = self.second.of_sum(total, attended)
        return total, self.mlp.forward(normed)

    def __call__(self, x: Tensor, **options: Any) -> Tensor:
        """Hidden states after the layer."""
        total, added = self.terms(x, options)
        return total + added


@dataclass(frozen=True, slots=True)
class OneNode:
    """Forward of a decoder layer on rows, (tokens, hidden), as one node of autograd's graph."""

    layer: Residual

    def __call__(self, x: Tensor, **options: Any) -> Tensor:
        """(tokens, hidden) to the same."""
        if not torch.is_grad_enabled():
            return self.layer(x, **options)
        routing = self.layer.first.binding.routing
        anchor = routing.bank.anchor if isinstance(routing, Routing) else None
        return cast("Callable[..., Tensor]", _Layer.apply)(x, anchor, self.layer, options)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _anchor: Tensor | None, layer: Residual, options: dict[str, Any]
    ) -> Tensor:
        with Chain(x, needs=ctx.needs_input_grad[0]) as chain:
            total, added = layer.terms(x, options)
        chain.end(added)
        out = total + added
        if not chain.steps:
            ctx.mark_non_differentiable(out)
        chain.save(ctx)
        ctx.chain = chain
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        ctx.chain.restore(ctx)
        found: Tensor | None = grad
        more = grad  # the gradient of the sum that passes what is added to it
        for step in reversed(ctx.chain.steps):
            if step.function is SumNorm:
                found = more = step.back(found, more)
            else:
                found = step.back(found)
        return found, None, None, None


# Names of the first norm, attention, the second norm and the MLP of layers in which one follows another.
_SEQUENCES = (
    ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    ("ln_1", "attn", "ln_2", "mlp"),
)


def fuse_residuals(
    layer: nn.Module, trial: Running, position_embeddings: tuple[Tensor, Tensor] | None
) -> None:
    """Have the sums of a decoder layer that is a :class:`Residual`, and those of their gradients, made by its
    norms."""
    parts = {name: part for name, part in layer.named_children() if not isinstance(part, nn.Dropout)}
    names = next((names for names in _SEQUENCES if parts.keys() == set(names)), None)
    if names is None:
        return
    norm, attention, other, mlp = (parts[name] for name in names)
    first, second = norm.forward, other.forward
    if not isinstance(first, Norm) or not isinstance(second, Norm) or not _takes_one(mlp):
        return
    residual = Residual(first, attention, second, mlp)
    x = _noise(1, len(trial.context.token_ids), len(first.frozen.weight), like=first.frozen.weight)
    given = {
        "attention_mask": None,
        "position_ids": trial.context.position_ids.unsqueeze(0),
    } | ({} if position_embeddings is None else {"position_embeddings": position_embeddings})

    def forward(hidden_states: Tensor, **options: Any) -> Any:
        out = residual(hidden_states, **options)
        return (out,) if is_tuple else out

    with running(trial):
        try:
            expected = layer(x, **given)
            is_tuple = isinstance(expected, tuple)
            found = forward(x, **given)
        except TypeError:  # the layer or its attention needs more arguments
            return
    pair = (found[0], expected[0]) if is_tuple else (found, expected)
    if not torch.equal(*pair):  # the same operations in the same order
        return
    node = OneNode(residual)
    chained = position_embeddings is not None and _has_steps(node, x.squeeze(0), trial, position_embeddings)
    layer.forward = node if chained else forward


def _has_steps(node: OneNode, x: Tensor, trial: Running, position_embeddings: tuple[Tensor, Tensor]) -> bool:
    """Whether all of a layer are steps of a chain, whose gradient is that of its functions one by one."""
    parts = node.layer.attention.forward, node.layer.mlp.forward
    if not isinstance(parts[0], RotaryAttention) or not isinstance(parts[1], GatedMlp):
        return False  # it may not even take rows
    grads: list[Tensor] = []
    for forward in (node.layer, node):
        given = x.clone().requires_grad_()
        with torch.enable_grad(), running(trial):
            try:
                out = forward(given, position_embeddings=position_embeddings)
            except KernelError:  # something else stands between them
                return False
            grads += torch.autograd.grad(out, given, x)
    return torch.equal(*grads)


def _noise(*shape: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator).to(like)


def _close(found: Tensor, expected: Tensor) -> bool:
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    return error <= ROUNDING[expected.dtype]
