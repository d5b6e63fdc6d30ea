"""Seconds of a microbatch: decoder layers, head and loss, with tensor and pipeline parallelism.

A layer takes fixed + token·Σℓ + square·Σℓ² seconds; an empty microbatch takes none. LobRA's t(b, s)
(appendix D, per layer and tensor-parallel degree, b sequences of length s) is the case Σℓ = b·s,
Σℓ² = b·s², with the launch overhead as a constant instead of being divided by b.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeVar

from plait.config.fields import MISSING, build, convert
from plait.core.checks import NOT_EMPTY, Rule, at_least, check
from plait.core.errors import ConfigError, InputError, choices
from plait.core.plans import Microbatch
from plait.cost.fitting import Fit, fit_relative

_LAYER = ("fixed", "tokens", "squares")
_HEAD = ("fixed", "labelled")
T = TypeVar("T")
ASSUMED_OVERHEAD = 16  # tokens whose time a microbatch takes beyond that of its own, where none was measured
NotNegative = Annotated[float, at_least(0)]
InnerShare = Annotated[float, Rule("between 0 and 1", lambda share: 0 < share < 1)]


@dataclass(frozen=True, slots=True)
class MicrobatchShape:
    """Sums over the samples of one microbatch.

    Attributes:
        rank_tokens: Σ rank·ℓ, with the rank of the sample's adapter.
    """

    tokens: int
    squares: int
    labelled: int
    rank_tokens: int = 0

    @classmethod
    def of(cls, lengths: Sequence[int], *, labelled: int | None = None) -> MicrobatchShape:
        """The shape of samples of these lengths; if ``labelled`` is None, every token is labelled."""
        tokens, squares = sum(lengths), sum(length * length for length in lengths)
        return cls(tokens, squares, tokens if labelled is None else labelled)

    @classmethod
    def of_microbatch(
        cls, microbatch: Microbatch, *, ranks: Mapping[str, int], labelled: int
    ) -> MicrobatchShape:
        """The shape of a planned microbatch, given each job's rank and the labelled tokens in it."""
        segments = microbatch.segments
        return cls(
            tokens=microbatch.tokens,
            squares=sum(length * length for segment in segments for length in segment.lengths),
            labelled=labelled,
            rank_tokens=sum(ranks[segment.job] * segment.tokens for segment in segments),
        )

    def __add__(self, other: MicrobatchShape) -> MicrobatchShape:
        return MicrobatchShape(
            self.tokens + other.tokens,
            self.squares + other.squares,
            self.labelled + other.labelled,
            self.rank_tokens + other.rank_tokens,
        )


EMPTY = MicrobatchShape(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one decoder layer, forward and backward: fixed + token·Σℓ + square·Σℓ²."""

    fixed: NotNegative
    token: NotNegative
    square: NotNegative = 0.0

    def __post_init__(self) -> None:
        check(self, "time.layer")

    def seconds(self, shape: MicrobatchShape) -> float:
        """Seconds of one microbatch; 0 if it is empty."""
        if shape.tokens == 0:
            return 0.0
        return self.fixed + self.token * shape.tokens + self.square * shape.squares


@dataclass(frozen=True, slots=True)
class HeadTime:
    """Seconds of embedding, head and loss, forward and backward: fixed + labelled·(labelled tokens)."""

    fixed: NotNegative = 0.0
    labelled: NotNegative = 0.0

    def __post_init__(self) -> None:
        check(self, "time.head")

    def seconds(self, shape: MicrobatchShape) -> float:
        """Seconds of one microbatch; 0 if it is empty."""
        return self.fixed + self.labelled * shape.labelled if shape.tokens else 0.0


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one pipeline stage for one microbatch."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Seconds of microbatches for one model on one device kind.

    Attributes:
        head: coefficients by tensor-parallel degree; degrees without published figures cost nothing.
        forward_share: share of forward in a layer's forward + backward seconds.
        gather: seconds in which the weights of a layer of a sharded base come, forward and again backward,
            while the layer before it runs.
    """

    layers: Annotated[int, at_least(1)]
    layer: Annotated[Mapping[int, LayerTime], NOT_EMPTY]
    head: Mapping[int, HeadTime] = field(default_factory=dict)
    forward_share: InnerShare = 1 / 3
    head_forward_share: InnerShare = 1 / 3
    gather: NotNegative = 0.0

    def __post_init__(self) -> None:
        check(self, "time")

    def recomputing(self) -> TimeModel:
        """The model with activation checkpointing: backward runs each layer's forward pass once more."""
        more = 1.0 + self.forward_share
        layer = {
            tp: LayerTime(more * each.fixed, more * each.token, more * each.square)
            for tp, each in self.layer.items()
        }
        return replace(self, layer=layer, forward_share=self.forward_share / more)

    def at_speed(self, speed: float) -> TimeModel:
        """The model for devices that are ``speed`` times as fast."""
        layer = {
            tp: LayerTime(each.fixed / speed, each.token / speed, each.square / speed)
            for tp, each in self.layer.items()
        }
        head = {tp: HeadTime(each.fixed / speed, each.labelled / speed) for tp, each in self.head.items()}
        return replace(self, layer=layer, head=head)

    def gathering(self, seconds: float) -> TimeModel:
        """The model where each layer of each microbatch waits so long for weights that others have."""
        layer = {tp: replace(each, fixed=each.fixed + seconds) for tp, each in self.layer.items()}
        return replace(self, layer=layer)

    def sliced(self, tp: int, token_seconds: float) -> TimeModel:
        """The model of ``tp`` slices of each layer, as far as no measured degree says it: all but the fixed
        part is divided, and each token of a layer is exchanged in ``token_seconds``."""
        if tp in self.layer:
            return self
        whole, head = self.layer_time(1), self.head_time(1)
        layer = LayerTime(whole.fixed, whole.token / tp + token_seconds, whole.square / tp)
        sliced = HeadTime(head.fixed, head.labelled / tp)
        return replace(self, layer={**self.layer, tp: layer}, head={**self.head, tp: sliced})

    def layer_time(self, tp: int) -> LayerTime:
        """Coefficients at this tensor-parallel degree.

        Raises:
            InputError: no profile for it.
        """
        if tp not in self.layer:
            raise InputError(
                f"tp={tp}", f"The time profile has tensor-parallel degrees {choices(list(self.layer))}."
            )
        return self.layer[tp]

    def head_time(self, tp: int) -> HeadTime:
        """Coefficients of embedding, head and loss at this tensor-parallel degree."""
        return self.head[tp] if tp in self.head else HeadTime()  # made only if needed: plans ask often

    def stage(self, shape: MicrobatchShape, *, tp: int = 1, layers: float, last: bool) -> StageTime:
        """Seconds of a stage with ``layers`` layers, and with head and loss if it is the last."""
        layer = self.layer_time(tp).seconds(shape)
        head = self.head_time(tp).seconds(shape) if last else 0.0
        if self.gather and shape.tokens:
            there, back = (
                max(each * run + at_start for each, at_start in self.gathered(layers))
                for run in (self.forward_share * layer, (1 - self.forward_share) * layer)
            )
            forward_head = head * self.head_forward_share
            return StageTime(there + forward_head, back + head - forward_head)
        body = layers * layer
        forward = body * self.forward_share + head * self.head_forward_share
        return StageTime(forward, body + head - forward)

    def gathered(self, layers: float) -> tuple[tuple[float, float], tuple[float, float]]:
        """How often the seconds of a layer count in one pass over the layers, and what is added: where layers
        take longer than gathering, which then only the first one waits for, and where gathering does. The
        larger sum holds."""
        return (layers, self.gather), (1.0, layers * self.gather)

    def microbatch(self, shape: MicrobatchShape) -> float:
        """Seconds of the whole model, forward and backward, without a pipeline."""
        return self.stage(shape, tp=1, layers=self.layers, last=True).total


def arithmetic_time(layers: int, *, weights: int, hidden: int, vocabulary: int) -> TimeModel:
    """Microbatches by the arithmetic that they take, in 10¹² multiplications and additions a second.

    Forward and backward are equally long: the frozen weights have no gradient. Attention is counted without
    its masked half.

    Args:
        weights: of the linears of all layers.
    """
    token = 4e-12 * weights / layers
    layer = LayerTime(ASSUMED_OVERHEAD * token, token, 6e-12 * hidden)
    return TimeModel(layers, {1: layer}, {1: HeadTime(labelled=4e-12 * hidden * vocabulary)}, 0.5, 0.5)


def fit_layer(observations: Iterable[tuple[MicrobatchShape, float]]) -> tuple[LayerTime, Fit]:
    """Fit one layer's seconds on relative error.

    Raises:
        InputError: no observations, or a negative or missing entry.
    """
    rows = list(observations)
    features = [(1.0, shape.tokens, shape.squares) for shape, _ in rows]
    fit = fit_relative(features, [seconds for _, seconds in rows], _LAYER)
    return LayerTime(*fit.coefficients), fit


def fit_head(observations: Iterable[tuple[MicrobatchShape, float]]) -> tuple[HeadTime, Fit]:
    """Fit the seconds of embedding, head and loss on relative error.

    Raises:
        InputError: no observations, or a negative or missing entry.
    """
    rows = list(observations)
    fit = fit_relative([(1.0, shape.labelled) for shape, _ in rows], [seconds for _, seconds in rows], _HEAD)
    return HeadTime(*fit.coefficients), fit


def by_degree(rows: Iterable[Mapping[str, object]], kind: type[T], key: str) -> dict[int, T]:
    """Rows such as {tp: 2, fixed: …, token: …} as dataclasses by tensor-parallel degree.

    Raises:
        ConfigError: an entry is missing or wrong, or a degree appears twice.
    """
    found: dict[int, T] = {}
    for place, row in enumerate(rows):
        owner = f"{key}[{place}]"
        entries = dict(row)
        tp = convert(int, entries.pop("tp", MISSING), f"{owner}.tp")
        if tp < 1 or tp in found:
            raise ConfigError(
                f"{owner}.tp={tp}", "Each tensor-parallel degree must be 1 or more and have only one row."
            )
        found[tp] = build(kind, entries, owner)
    return found
