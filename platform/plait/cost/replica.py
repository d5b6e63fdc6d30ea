"""Seconds of one optimiser step on one replica, given how many sequences of each length it gets.

Sequences are packed together as Plait's engine packs: nothing is padded, and sequences of all buckets share
microbatches. With n microbatches of at most M tokens in 1F1B order over pp stages,

    T(d) = max over stages of [ fixed·n + Σ_j each_j·d_j ]  +  (pp − 1)·(seconds of the longest microbatch).

Stages may have different numbers of layers, and the last one also runs head and loss; then the second term
counts what the slowest stage really waits for. n is bounded from below
by dual feasible functions, and packing nearly always reaches this bound; a pipeline may use more microbatches
than necessary, so that none is long. So the seconds here are a proved lower bound for every packing. The
seconds of an actual packing are in ``plait.planner.packed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt

from plait.core.checks import at_least, check
from plait.core.errors import ConfigError
from plait.cost.time import HeadTime, LayerTime, MicrobatchShape, StageTime, TimeModel

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

MOST_PARTS = 8  # largest k of the functions u_k, which count long sequences
WHOLE = 1e-9  # an excess over a whole number of microbatches below this is rounding


@dataclass(frozen=True, slots=True, order=True)
class Configuration:
    """How one replica is parallelised: tp × pp devices, at most ``max_tokens`` tokens a microbatch.

    Attributes:
        kind: kind of its devices, if a cluster has several.
        layer_split: layers of each stage; empty: even.
        shards: how many such replicas share the weights of one base model's layers.
    """

    tp: Annotated[int, at_least(1)]
    pp: Annotated[int, at_least(1)]
    max_tokens: Annotated[int, at_least(1)]
    kind: str = ""
    layer_split: tuple[int, ...] = ()
    shards: Annotated[int, at_least(1)] = 1

    def __post_init__(self) -> None:
        check(self, "configuration")

    @property
    def devices(self) -> int:
        """Number of devices of one replica."""
        return self.tp * self.pp

    def __str__(self) -> str:
        sharded = "sharded " if self.shards > 1 else ""
        return f"{self.kind} {sharded}⟨{self.tp},{self.pp}⟩".lstrip()


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as equal as possible; earlier stages take the remainder."""
    if stages > layers:
        raise ConfigError(f"pp={stages}", f"A model of {layers} layers has at most {layers} stages.")
    base, extra = divmod(layers, stages)
    return tuple(base + (stage < extra) for stage in range(stages))


@dataclass(frozen=True)
class ReplicaCost:
    """T of one configuration for sequences of given lengths, in the linear pieces that a solver needs.

    Attributes:
        lengths: s_j, ascending (R,).
        batch: b_j = ⌊M / s_j⌋ (R,); 0 if the bucket does not fit.
        fixed: seconds of every microbatch, independent of its size, by stage kind (K,).
        each: seconds of every sequence, by stage kind and bucket (K, R).
        waits: how long the slowest stage waits for the others, relative to what a microbatch takes it; None:
            all stages are alike.
        drained: whether a pipeline drains after the step; else the next one fills it, and it has no ramp.
    """

    configuration: Configuration
    lengths: Int64
    batch: Int64
    fixed: Float64
    each: Float64
    waits: float | None = None
    drained: bool = True

    @classmethod
    def of(
        cls,
        configuration: Configuration,
        lengths: Sequence[int] | Int64,
        time: TimeModel,
        *,
        labelled_share: float = 1.0,
    ) -> Self:
        """The cost of ``configuration`` for sequences of these lengths.

        Args:
            labelled_share: share of a sequence's tokens that reach head and loss.

        Raises:
            InputError: no profile for this tensor-parallel degree.
        """
        s = np.asarray(lengths, dtype=np.int64)
        split = configuration.layer_split or even_split(time.layers, configuration.pp)
        layer, head = time.layer_time(configuration.tp), time.head_time(configuration.tp)
        kinds = sorted({(count, False) for count in split[:-1]} | {(split[-1], True)})
        kinds = [kinds[-1]] if configuration.pp == 1 else _worst(kinds)
        token_seconds = layer.token * s + layer.square * s.astype(np.float64) ** 2
        head_seconds = np.asarray(head.labelled * labelled_share * s, dtype=np.float64)
        if time.gather:
            fixed, each = _gathering(time, layer, head, token_seconds, head_seconds)
        else:
            fixed = np.array([count * layer.fixed + last * head.fixed for count, last in kinds])
            each = np.array([count * token_seconds + last * head_seconds for count, last in kinds])
        waits = None
        if configuration.layer_split:
            longest = MicrobatchShape.of([int(s[-1])], labelled=round(labelled_share * int(s[-1])))
            last = len(split) - 1
            waits = _waits(
                [
                    time.stage(longest, tp=configuration.tp, layers=count, last=stage == last)
                    for stage, count in enumerate(split)
                ]
            )
        return cls(configuration, s, configuration.max_tokens // s, fixed, each, waits)

    @cached_property
    def supported(self) -> int:
        """r_i: how many buckets fit; lengths ascend, so these are the first ones."""
        return int(np.count_nonzero(self.batch))

    @cached_property
    def room(self) -> Float64:
        """Share of a microbatch that a sequence of each bucket takes (n, R); by every row, a microbatch holds
        at most 1.

        The rows are dual feasible functions: tokens, and u_k of Fekete and Schepers (2001), by which a
        sequence of more than 1/(k + 1) of the capacity takes 1/k.
        """
        most = self.configuration.max_tokens
        share = np.where(self.batch > 0, self.lengths / most, 0.0)
        rows = [share]
        for k in range(1, MOST_PARTS + 1):
            parts, rest = np.divmod((k + 1) * self.lengths, most)
            rows.append(np.where(self.batch > 0, np.where(rest == 0, share, parts / k), 0.0))
        every = np.unique(np.array(rows), axis=0)
        return np.array([row for row in every if not _below(row, every)])

    @cached_property
    def linear(self) -> Float64:
        """Seconds a sequence of each bucket (n, R): by every row, T is at least Σ_j row_j·d_j."""
        rows = self.each[:, None, :] + self.fixed[:, None, None] * self.room[None]
        return np.asarray(rows.reshape(-1, len(self.lengths)))

    @cached_property
    def per_sequence(self) -> Float64:
        """Seconds that a sequence of each bucket adds to the slowest stage (R,); inf if it does not fit."""
        return np.where(self.batch > 0, self.linear.max(axis=0), np.inf)

    @property
    def ramp(self) -> float:
        """How often the longest microbatch counts again while the pipeline fills and drains: pp − 1 times if
        all stages are alike."""
        if not self.drained:
            return 0.0
        return self.configuration.pp - 1 if self.waits is None else self.waits

    def seconds(self, counts: Sequence[int] | Int64) -> float:
        """T for counts[j] sequences of bucket j (R,); inf if one of them does not fit."""
        return float(self.seconds_many(np.asarray(counts, dtype=np.int64)[None, :])[0])

    def microbatches(self, counts: Int64) -> Float64:
        """A lower bound on the microbatches that each row of ``counts`` (rows, R) needs: (rows,)."""
        return np.asarray(np.ceil((counts @ self.room.T).max(axis=1) - WHOLE))

    def seconds_many(self, counts: Int64) -> Float64:
        """T of each row of ``counts`` (rows, R), which no packing can beat; inf if a sequence does not
        fit."""
        unsupported = (counts[:, self.supported :] > 0).any(axis=1)
        least = self.microbatches(counts)[:, None]
        work = counts @ self.each.T
        seconds = (least * self.fixed + work).max(axis=1)
        if self.ramp:
            # The longest microbatch takes at least as long as the longest sequence alone, and as the mean.
            alone = np.where(counts > 0, (self.fixed[:, None] + self.each).max(axis=0), 0.0).max(axis=1)
            best = np.sqrt(self.ramp * work / np.maximum(self.fixed, 1e-300))
            number = np.maximum(np.maximum(least, best), 1.0)
            even = ((self.fixed * number + work) * (1.0 + self.ramp / number)).max(axis=1)
            seconds = np.where(least[:, 0] > 0, np.maximum(seconds + self.ramp * alone, even), 0.0)
        return np.where(unsupported, np.inf, seconds)

    def seconds_with(self, counts: Int64, buckets: Int64, more: Int64) -> Float64:
        """T of each row of ``counts`` (T, R) with ``more[m, t]`` further sequences of bucket ``buckets[m]``:
        (M, T)."""
        rows = np.repeat(counts[None], len(buckets), axis=0)
        rows[np.arange(len(buckets))[:, None], np.arange(len(counts))[None], buckets[:, None]] += more
        return self.seconds_many(rows.reshape(-1, counts.shape[1])).reshape(more.shape)


def _gathering(
    time: TimeModel, layer: LayerTime, head: HeadTime, token_seconds: Float64, head_seconds: Float64
) -> tuple[Float64, Float64]:
    """Fixed seconds of a microbatch and those of each sequence, of all layers whose weights are gathered: a
    row for each way in which forward and backward may take longest, computing or gathering."""
    fixed, each = [], []
    for there, back in product(time.gathered(time.layers), repeat=2):
        runs = time.forward_share * there[0] + (1 - time.forward_share) * back[0]
        fixed.append(runs * layer.fixed + there[1] + back[1] + head.fixed)
        each.append(runs * token_seconds + head_seconds)
    return np.array(fixed), np.array(each)


def _below(row: Float64, every: Float64) -> bool:
    """Whether another row is at least as large everywhere, so that this one is redundant."""
    return bool(((every >= row).all(axis=1) & (every > row).any(axis=1)).any())


def _worst(kinds: list[tuple[int, bool]]) -> list[tuple[int, bool]]:
    """The stage kinds that can be the slowest: the one with most layers and no head, and the last stage."""
    last = next(kind for kind in kinds if kind[1])
    body = max(kind for kind in kinds if not kind[1])
    return [last] if last[0] >= body[0] else [body, last]


def _waits(stages: Sequence[StageTime]) -> float:
    """How long the slowest stage waits for the others in 1F1B order, by what a microbatch takes it, with at
    least as many microbatches as stages, all alike.

    The stages before it run once before it begins, and once after it ends. Those behind it run while it takes
    up further microbatches and, at the end, while it gives them back; it waits for the rest.
    """
    slowest = max(each.total for each in stages)
    seconds = []
    for place, each in enumerate(stages):
        before = sum(other.total for other in stages[:place])
        behind = sum(other.total for other in stages[place + 1 :])
        further = len(stages) - place - 1
        filling, draining = behind - further * each.forward, behind - further * each.backward
        seconds.append(len(stages) * each.total + before + max(0.0, filling) + max(0.0, draining))
    return max(0.0, max(seconds) / slowest - len(stages)) if slowest else 0.0


def balanced_split(
    time: TimeModel, stages: int, shape: MicrobatchShape, *, tp: int = 1, most_layers: Sequence[int] = ()
) -> tuple[int, ...]:
    """Layers of each stage such that the slowest stage is as fast as possible.

    If the stages could hold more than the model's layers, the widest ones get fewer, earlier ones first,
    because early stages have the most microbatches in flight.

    Args:
        most_layers: most layers that fit into each stage's memory; empty if all do.

    Raises:
        ConfigError: there are more stages than layers, or not all layers fit into memory.
    """
    room = tuple(most_layers) or (time.layers,) * stages
    if stages > time.layers or len(room) != stages or sum(room) < time.layers or min(room) < 1:
        raise ConfigError(
            f"pp={stages}", f"Each stage must hold at least one of {time.layers} layers, and all must fit."
        )

    def seconds(layers: int, last: bool) -> float:
        return time.stage(shape, tp=tp, layers=layers, last=last).total

    taken = [[seconds(layers, last) for layers in range(1, time.layers + 1)] for last in (False, True)]
    costs = sorted({*taken[False], *taken[True]})
    for limit in costs:  # the slowest stage's seconds are one of these
        most = [
            max(
                (n for n, each in enumerate(taken[s == stages - 1][: room[s]], 1) if each <= limit), default=0
            )
            for s in range(stages)
        ]
        if min(most) >= 1 and sum(most) >= time.layers:
            return _narrowed(most, time.layers)
    raise AssertionError("the whole model on one stage is among the limits")


def _narrowed(most: Sequence[int], layers: int) -> tuple[int, ...]:
    """Take layers from the widest stage, the earliest of equal ones, until ``layers`` are left."""
    split = list(most)
    for _ in range(sum(split) - layers):
        widest = max(range(len(split)), key=lambda s: (split[s], -s))
        split[widest] -= 1
    return tuple(split)
