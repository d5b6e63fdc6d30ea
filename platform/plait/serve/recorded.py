"""Iterations of one new token for each request as CUDA graphs: filled up, recorded, replayed.

A seam: the engine asks for the logits of such an iteration; whether its kernels are launched one by one or
replayed is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.core.errors import ConfigError
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait.serve.pages import PagedCache, by_triton
from plait_kernels.pooled import AdapterPool, PooledAdapter, PooledRows
from plait_kernels.recordings import CudaRecorder, Recorder, Recordings
from plait_kernels.tiles import power_of_two
from plait_kernels.uploads import together

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # of iterations that are filled up; then multiples
LEAST_PAGES, LEAST_RANK = 8, 8  # to which tables are filled up; then powers of two


@dataclass(frozen=True, slots=True)
class Row:
    """A request's new token, and what its row needs.

    Attributes:
        position: of the token.
        pages: of the request.
        adapter: None: the base model.
    """

    token: int
    position: int
    pages: tuple[int, ...]
    adapter: PooledAdapter | None


@dataclass(frozen=True, slots=True)
class DecodingSizes:
    """To what an iteration is filled up: all that a recording depends on, whatever is in it.

    Attributes:
        pages: of a request.
        rank: the largest that an adapter may have; 0: no row has an adapter.
    """

    rows: int
    pages: int
    rank: int

    @classmethod
    def of(cls, rows: Sequence[Row]) -> DecodingSizes:
        """The sizes of an iteration."""
        count, ranks = len(rows), [each.adapter.rank for each in rows if each.adapter is not None]
        return cls(
            next((size for size in ROWS if size >= count), -(-count // ROWS[-1]) * ROWS[-1]),
            max(LEAST_PAGES, power_of_two(max(len(each.pages) for each in rows))),
            max(LEAST_RANK, power_of_two(max(ranks))) if ranks else 0,
        )


def check_device(device: torch.device, most: int) -> None:
    """Refuse, as a ConfigError, to replay on a device that does not."""
    if device.type != "cuda":
        raise _refused(most)


def check_model(config: Any, backend: str, like: Tensor, most: int) -> None:
    """Refuse, as a ConfigError, what would be refused with the model in memory, as far as its configuration
    says: other kernels than Triton's, and heads that are too wide for these.

    Args:
        config: transformers' configuration.
        backend: the backend of the model's kernels.
        like: a tensor of its dtype and device.
    """
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 1)
    if not by_triton(backend, like, size):
        raise _refused(most)


def _refused(most: int) -> ConfigError:
    return ConfigError(
        f"{most} rows as CUDA graphs",
        "Iterations are replayed on a GPU, with Triton's kernels and heads of up to 256 features.",
        "Leave --graph-rows (graph_rows) out.",
    )


class RecordedDecoding:
    """Logits of iterations in which each request has one new token, replayed.

    An iteration is filled up the same way whether it is launched or replayed, so its bits are the same. What
    fills it up reads and writes a page of its own.

    Args:
        pool: of adapters.
        most: requests of the largest iteration that is replayed.
        spare: the number of a page that no request has.

    Raises:
        ConfigError: nothing would be recorded here, or not all of it.
    """

    def __init__(
        self,
        base: BaseModel,
        cache: PagedCache,
        pool: AdapterPool,
        *,
        most: int,
        spare: int,
        recorder: Recorder | None = None,
    ) -> None:
        if recorder is None:
            check_device(base.device, most)
        if not cache.by_triton:
            raise _refused(most)
        self._base, self._cache, self._pool, self._most = base, cache, pool, most
        self._filler = Row(0, 0, (spare,), None)
        self.recordings = Recordings(recorder or CudaRecorder(), lambda _: None, base.logits)

    def logits(self, rows: Sequence[Row]) -> Tensor | None:
        """The logits of each row, which the next call may overwrite; None if there are too many rows."""
        if len(rows) > self._most:
            return None
        sizes = DecodingSizes.of(rows)
        _, logits = self.recordings.compute(sizes, lambda: self._load(rows, sizes))
        return logits[: len(rows)]

    def forget(self) -> None:
        """Let go of all recordings, and of their memory."""
        self.recordings.forget()

    def _load(self, rows: Sequence[Row], sizes: DecodingSizes) -> MicrobatchContext:
        filled = [*rows, *[self._filler] * (sizes.rows - len(rows))]
        positions = [each.position for each in filled]
        tokens = torch.tensor([each.token for each in filled])
        sent = together([tokens, torch.tensor(positions)], self._base.device)
        placed = self._cache.placed(
            [each.pages for each in filled],
            positions,
            [1] * sizes.rows,
            sizes.rows,
            [True] * sizes.rows,
            width=sizes.pages,
        )
        routing = None
        if sizes.rank:
            single = tuple((row, each.adapter or self._pool.nothing) for row, each in enumerate(filled))
            routing = PooledRows(self._pool, single, (), most=sizes.rank)
            _ = routing.launched  # sent now: a recording sends nothing
        offsets = tuple(range(sizes.rows + 1))
        return MicrobatchContext(sent[0], sent[1], offsets, routing, cache=placed)
