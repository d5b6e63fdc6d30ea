"""Bytes of a microbatch: exact static bytes, and a fitted model of the rest.

mLoRA's Eq. 5 is β0 + β1·B·L + β2·B·L², β ≥ 0, for B sequences of length L. For ragged packed microbatches
Σℓ and Σℓ² replace B·L and B·L², and terms for labelled tokens and ranks are added (§5.2's packed form). Two
things were found necessary for errors far below one percent:

- A peak is the highest of several moments, each of that form: the loss, when logits are added to all saved
activations, and the first layer of backward. A model has one set of coefficients for each, its *phases*, and
predicts the highest; a peak observed only as a whole makes one phase.
- The features are what the engine really stores: attention pads samples to buckets of nearly equal length
  (:mod:`plait.core.samples`), keeps squares for short samples only, and the head makes logits in chunks.

With equal lengths, everything kept and labelled, one rank and no chunks, this is Eq. 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np

from plait.core.checks import NOT_EMPTY, at_least, check
from plait.core.errors import InputError
from plait.core.samples import bucket_samples
from plait.cost.fitting import UNKNOWN_MARGIN, Fit, fit_relative

FEATURES = ("fixed", "token", "padded", "square", "labelled", "logit_row", "rank_token", "input")
KEPT_OBSERVATIONS = 512  # an online fit keeps only the newest observations
SAME_SHARE = 1e-9  # shares of inputs that differ by less count as equal
ALL_ROWS = 2**53  # all rows of logits at once: more than any microbatch has
NotNegative = Annotated[float, at_least(0)]
KEPT = "kept"  # the phase between forward and backward, in which a stage has several microbatches
LOSS = "loss"  # the phase of head and loss, in which no layer runs


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """What the memory of one microbatch depends on.

    Attributes:
        padded: rows that attention works on, padding included.
        squares: Σℓ² of the padded lengths whose attention probabilities are kept for backward.
        rank_tokens: Σ rank·ℓ, with the rank of the sample's adapter; an adapter on only a share of the
            model's linears counts by that share.
        inputs: Σℓ times the share of the linears' input features that some adapter of the microbatch reads,
            because these are kept for the gradients of A.
    """

    tokens: int
    padded: int
    squares: int
    labelled: int
    rank_tokens: float
    inputs: float = 0.0

    @classmethod
    def heaviest(cls, capacity: int, *, rank: float, keep_up_to: float) -> MemoryShape:
        """A full microbatch of samples as long as possible, with every token labelled."""
        squares = capacity * int(min(capacity, keep_up_to))
        return cls(capacity, capacity, squares, capacity, rank * capacity, capacity)

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        *,
        labelled: int | None = None,
        ranks: Sequence[float] | float = 0,
        inputs_read: float = 1.0,
        keep_up_to: float = math.inf,
    ) -> MemoryShape:
        """The shape of samples of these lengths.

        Args:
            ranks: one rank for all samples, or one for each, times the share of linears that it is used on.
            inputs_read: share of the linears' input features that adapters read.
        """
        each = [ranks] * len(lengths) if isinstance(ranks, (int, float)) else ranks
        buckets = [(lengths[members[0]], len(members)) for members in bucket_samples(lengths)]
        return cls(
            tokens=sum(lengths),
            padded=sum(length * count for length, count in buckets),
            squares=sum(length**2 * count for length, count in buckets if length <= keep_up_to),
            labelled=sum(lengths) if labelled is None else labelled,
            rank_tokens=sum(rank * length for rank, length in zip(each, lengths, strict=True)),
            inputs=inputs_read * sum(lengths),
        )


@dataclass(frozen=True, slots=True)
class MemoryCoefficients:
    """Bytes of one phase for each unit of a feature; ``fixed`` counts once.

    ``logit_row`` is per row of the head's largest chunk of logits.
    """

    fixed: NotNegative = 0.0
    token: NotNegative = 0.0
    padded: NotNegative = 0.0
    square: NotNegative = 0.0
    labelled: NotNegative = 0.0
    logit_row: NotNegative = 0.0
    rank_token: NotNegative = 0.0
    input: NotNegative = 0.0

    def __post_init__(self) -> None:
        check(self, "memory")

    def body(self, shape: MemoryShape) -> float:
        """Bytes of the layers' activations."""
        rows = self.token * shape.tokens + self.padded * shape.padded
        kept = self.square * shape.squares + self.input * shape.inputs
        return rows + kept + self.rank_token * shape.rank_tokens

    def head(self, shape: MemoryShape, logit_rows: float, slices: int = 1) -> float:
        """Bytes of the head and the loss, which only the last pipeline stage has. Each of so many slices has
        a part of a row's logits."""
        rows = min(shape.labelled, logit_rows)
        return self.labelled * shape.labelled + self.logit_row * rows / slices


@dataclass(frozen=True, slots=True)
class StaticBytes:
    """Bytes of the whole model that stay on the device.

    Attributes:
        layers: weights of the decoder layers and all adapters on them.
        embedding: on the first pipeline stage.
        head: on the last one.
        made: while a quantised weight is made; on every stage.
    """

    layers: float
    embedding: float = 0.0
    head: float = 0.0
    made: float = 0.0

    def with_adapters(self, held: float) -> StaticBytes:
        """The static bytes with ``held`` more bytes of adapters."""
        return replace(self, layers=self.layers + held)

    def sharded(self, count: int, layers: int) -> StaticBytes:
        """The static bytes of one of ``count`` processes that share the layers' weights, of which two whole
        layers are gathered."""
        return replace(self, layers=self.layers / count, made=self.made + 2 * self.layers / layers)

    def stage(self, layer_split: Sequence[int], stage: int) -> float:
        """Bytes of one pipeline stage."""
        found = self.layers * layer_split[stage] / sum(layer_split) + self.made
        if stage == 0:
            found += self.embedding
        if stage == len(layer_split) - 1:
            found += self.head
        return found


def linear_bytes(rows: int, features: int, element_bytes: int, quantise: str) -> int:
    """Bytes of the frozen weight of a linear layer; ``plait_kernels.quantised`` says what is kept."""
    size = rows * features
    if quantise == "none":
        return element_bytes * size
    if quantise != "nf4":
        return size + 4 * rows  # a float32 scale for each row
    blocks = math.ceil(size / 64)
    return 32 * blocks + blocks + 4 * math.ceil(blocks / 256) + 4


@dataclass(frozen=True, slots=True)
class MemoryObservation:
    """Measured peaks of one microbatch.

    Attributes:
        peaks: bytes by phase; of a peak without distinguished moments, under any one name.
        static: bytes in use before and after the microbatch.
    """

    shape: MemoryShape
    peaks: Mapping[str, float]
    static: float

    @property
    def dynamic(self) -> float:
        """Bytes of the microbatch itself: the highest peak above static."""
        return max(self.peaks.values()) - self.static

    def gathering(self, more: float) -> MemoryObservation:
        """What a process would have seen that gathers so many bytes of layers while these run."""
        peaks = {name: peak + more * (name != LOSS) for name, peak in self.peaks.items()}
        return replace(self, peaks=peaks)


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a microbatch: its coefficients, its margin, and its fit if it was fitted here."""

    coefficients: MemoryCoefficients
    margin: float = UNKNOWN_MARGIN
    fit: Fit | None = None


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """A fitted memory model with its own margins.

    Attributes:
        phases: its phases by name; the highest counts.
        logit_rows: rows of logits that the head makes at once.
        observations: the observations that it was fitted to, oldest first.
    """

    phases: Annotated[Mapping[str, Phase], NOT_EMPTY]
    logit_rows: float = ALL_ROWS
    observations: tuple[MemoryObservation, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        check(self, "memory")

    @classmethod
    def fitted(
        cls, observations: Iterable[MemoryObservation], *, logit_rows: float = ALL_ROWS
    ) -> MemoryModel:
        """The model with the best fit to these peaks, by relative error of peak − static.

        Raises:
            InputError: no observations, or a peak at or below its static bytes.
        """
        kept = tuple(observations)[-KEPT_OBSERVATIONS:]
        names = dict.fromkeys(name for observation in kept for name in observation.peaks)
        if not names:
            raise InputError("no observations", "A memory model needs at least one peak.")
        phases = {name: _fit_phase(name, kept, logit_rows) for name in names}
        return cls(phases, logit_rows, kept)

    def dynamic(self, shape: MemoryShape) -> float:
        """Predicted bytes above static; 0 if the microbatch is empty."""
        return self.part(shape, share=1.0, flights=1, last=True)

    def safe_peak(self, shape: MemoryShape, *, static: float) -> float:
        """Predicted peak with the margin, which admission compares with the device's memory."""
        return static + self.part(shape, share=1.0, flights=1, last=True, safe=True)

    def errors(self, observations: Iterable[MemoryObservation]) -> tuple[float, ...]:
        """(predicted − observed) / observed, for peak − static of each observation."""
        return tuple(self.dynamic(each.shape) / each.dynamic - 1.0 for each in observations)

    def stage_peak(
        self, shape: MemoryShape, *, static: float, layer_split: Sequence[int], stage: int
    ) -> float:
        """Safe peak of one pipeline stage, in bytes.

        Stage s of S has up to S − s microbatches in flight (1F1B).

        Args:
            static: bytes of this stage.
        """
        share = layer_split[stage] / sum(layer_split)
        last = stage == len(layer_split) - 1
        return static + self.part(shape, share=share, flights=len(layer_split) - stage, last=last, safe=True)

    def part(
        self,
        shape: MemoryShape,
        *,
        share: float,
        flights: float,
        last: bool,
        safe: bool = False,
        sliced: tuple[int, float] | None = None,
    ) -> float:
        """Bytes above static of a part of the layers with so many such microbatches in flight.

        The layers' bytes are assumed to be spread evenly over the layers and kept for each of these; head and
        loss belong to the last stage.

        Args:
            share: of the layers.
            safe: with the margins.
            sliced: among how many slices the vocabulary is cut, and the rows of logits that each makes at
                once; None: it is whole.
        """
        if shape.tokens == 0:
            return 0.0
        slices, rows = sliced or (1, self.logit_rows)
        return max(
            (1.0 + safe * phase.margin)
            * (
                flights * share * phase.coefficients.body(shape)
                + phase.coefficients.fixed
                + last * phase.coefficients.head(shape, rows, slices)
            )
            for phase in self.phases.values()
        )

    def in_flight(self, shapes: Sequence[MemoryShape], flights: int | None) -> float:
        """Bytes above static of a stage that this model was fitted to, while these microbatches follow each
        other.

        Args:
            flights: most that are between forward and backward; None: all may be.
        """
        most = flights or len(shapes)
        held = [self._kept(each) for each in shapes]
        found = [0.0]  # a replica may have nothing to do in an iteration
        for at, shape in enumerate(shapes):  # its forward, after those before it; its backward, before others
            beside = max(sum(held[max(0, at - most + 1) : at]), sum(held[at + 1 : at + most]))
            found.append(beside + self.dynamic(shape))
        return max(found)

    def safe_in_flight(self, shape: MemoryShape, flights: float) -> float:
        """The same of so many alike, with margins."""
        margin = self.phases[KEPT].margin if self.keeps else 0.0
        return self.safe_peak(shape, static=0.0) + (flights - 1) * (1.0 + margin) * self._kept(shape)

    @property
    def keeps(self) -> bool:
        """Whether it knows what is kept of a microbatch between forward and backward."""
        return KEPT in self.phases

    def _kept(self, shape: MemoryShape) -> float:
        if not self.keeps or shape.tokens == 0:
            return 0.0
        kept = self.phases[KEPT].coefficients
        return kept.fixed + kept.body(shape) + kept.head(shape, self.logit_rows)


def _fit_phase(name: str, observations: Sequence[MemoryObservation], logit_rows: float) -> Phase:
    having = [observation for observation in observations if name in observation.peaks]
    for observation in having:
        if observation.peaks[name] <= observation.static:
            raise InputError(
                f"peak {observation.peaks[name]:.0f} B, static {observation.static:.0f} B",
                "A peak must lie above the static bytes.",
            )
    features = np.array([_features(observation.shape, logit_rows) for observation in having])
    inputs, tokens = features[:, FEATURES.index("input")], features[:, FEATURES.index("token")]
    if np.ptp(inputs / tokens) < SAME_SHARE:  # tokens say the same, and apply to fewer linears, too
        inputs[:] = 0.0
    fit = fit_relative(
        features,
        [observation.peaks[name] - observation.static for observation in having],
        FEATURES,
    )
    return Phase(MemoryCoefficients(*fit.coefficients), fit.margin, fit)


def _features(shape: MemoryShape, logit_rows: float) -> tuple[float, ...]:
    rows = min(shape.labelled, logit_rows)
    return (
        1.0,
        shape.tokens,
        shape.padded,
        shape.squares,
        shape.labelled,
        rows,
        shape.rank_tokens,
        shape.inputs,
    )
