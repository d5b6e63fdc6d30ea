"""What the model knows of a microbatch in addition to the hidden states: tokens, samples, routing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from plait.core.errors import InputError
from plait.models.attention import AttentionLayout
from plait_kernels.uploads import table, upload

if TYPE_CHECKING:
    from plait.models.attention import AttentionRule, Heads
    from plait_kernels import Routing
    from plait_kernels.pooled import PooledRows


class AttentionStore(Protocol):
    """Attention that includes earlier tokens: a cache of keys and values (generation)."""

    def attend(
        self, layer: int, qkv: Tensor, heads: Heads, rule: AttentionRule, context: MicrobatchContext
    ) -> Tensor:
        """Map (tokens, (query + 2 · shared) · head size) to (tokens, query heads · head size)."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of the rotary position embedding of one kind of layer.

    Attributes:
        tokens: cos and sin for each token, (1, tokens, rotated size) each.
        tables: cos and sin by position, (longest, rotated size) each; None beside a cache, which has rows of
            any positions.
    """

    tokens: tuple[Tensor, Tensor]
    tables: tuple[Tensor, Tensor] | None


@dataclass(slots=True, eq=False)
class MicrobatchContext:
    """One microbatch of packed samples. Build it with :meth:`of`.

    Attributes:
        token_ids: (tokens,) int64, the samples end to end.
        position_ids: (tokens,) int64, counted from 0 in every sample.
        sample_offsets: sample i is rows ``sample_offsets[i]`` to ``sample_offsets[i + 1]``.
        routing: which rows belong to which adapter; None: the base model without adapters.
        checkpointing: keep only each layer's input and recompute the rest in backward.
        cache: keys and values of earlier tokens (generation only).
    """

    token_ids: Tensor
    position_ids: Tensor
    sample_offsets: tuple[int, ...]
    routing: Routing | PooledRows | None = None
    checkpointing: bool = False
    cache: AttentionStore | None = None
    _layout: AttentionLayout | None = None
    _ends: Tensor | None = None
    _longest: int = 0
    shared: dict[str, Rotation] = field(default_factory=dict)  # by kind of layer

    @classmethod
    def of(
        cls,
        token_ids: Tensor,
        sample_offsets: Sequence[int],
        *,
        routing: Routing | None = None,
        checkpointing: bool = False,
    ) -> MicrobatchContext:
        """A context whose positions start from 0 in each sample; InputError if offsets do not increase."""
        offsets = tuple(int(offset) for offset in sample_offsets)
        rising = all(low < high for low, high in pairwise(offsets))
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != token_ids.numel() or not rising:
            raise InputError(
                f"sample offsets {offsets} for {token_ids.numel()} tokens",
                "Offsets must rise from 0 to the number of tokens, without empty samples.",
            )
        positions = torch.cat([torch.arange(high - low) for low, high in pairwise(offsets)])
        return cls(token_ids, upload(positions, token_ids.device), offsets, routing, checkpointing)

    @property
    def layout(self) -> AttentionLayout:
        """How attention lays the samples out; made on first use and shared by all layers."""
        if self._layout is None:
            lengths = [high - low for low, high in pairwise(self.sample_offsets)]
            self._layout = AttentionLayout.of(lengths, self.token_ids.device)
        return self._layout

    @property
    def ends(self) -> Tensor:
        """``sample_offsets`` on the device, int32; made on first use and shared by all layers."""
        if self._ends is None:
            self._ends = table(self.sample_offsets, self.token_ids.device, torch.int32)
        return self._ends

    def fix(self, longest: int) -> None:
        """Make what attention needs of the samples now, as if the longest had so many tokens: what is
        recorded with it serves for other samples."""
        self._ends, self._longest = self.ends, longest

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        if self._longest == 0:
            self._longest = max(high - low for low, high in pairwise(self.sample_offsets))
        return self._longest


@dataclass(frozen=True, slots=True)
class Running:
    """What attention must know about the layer that is running.

    Attributes:
        tables: cos and sin by position, (longest, rotated size) each; None without rotary embedding.
        backend: the backend of the model's kernels.
    """

    context: MicrobatchContext
    tables: tuple[Tensor, Tensor] | None
    backend: str = ""


# Not passed through the layers, because not every family's layers pass keyword arguments on.
_RUNNING: ContextVar[Running] = ContextVar("running")


@contextmanager
def running(layer: Running) -> Iterator[None]:
    """Make :func:`now_running` return this layer within the context."""
    token = _RUNNING.set(layer)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def now_running() -> Running:
    """The layer that is running; LookupError if there is none."""
    return _RUNNING.get()
