"""Bytes of a microbatch (DESIGN §5.2): exact static bytes, and a fitted model of what comes on top.

Packed form: peak − static = fixed + token·Σℓ + square·Σℓ² + labelled·(labelled tokens) + rank·Σ rank·ℓ,
all coefficients ≥ 0. mLoRA's Eq. 5, β0 + β1·B·L + β2·B·L² for B sequences of length L, is the case
with equal lengths, every token labelled and one rank; its β0 joins static bytes and ``fixed``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plait.cost.fitting import UNKNOWN_MARGIN, Fit, fit_relative
from plait.cost.shapes import MicrobatchShape
from plait.errors import CapacityError, ConfigError, InputError

FEATURES = ("fixed", "token", "square", "labelled", "rank_token")
MASTER_BYTES = 16  # float32 master, gradient and two moments of every adapter weight
KEPT_OBSERVATIONS = 512  # an online fit forgets the oldest beyond these


@dataclass(frozen=True, slots=True)
class MemoryCoefficients:
    """Bytes by feature of :class:`MicrobatchShape`."""

    fixed: float = 0.0
    token: float = 0.0
    square: float = 0.0
    labelled: float = 0.0
    rank_token: float = 0.0

    def __post_init__(self) -> None:
        for name in FEATURES:
            if not getattr(self, name) >= 0.0:  # also refuses nan
                raise ConfigError(f"memory.{name}={getattr(self, name)}", "It must be 0 or more.")

    def bytes(self, shape: MicrobatchShape) -> float:
        """Of one microbatch; 0 where it is empty."""
        if shape.tokens == 0:
            return 0.0
        body = self.fixed + self.token * shape.tokens + self.square * shape.squares
        return body + self.labelled * shape.labelled + self.rank_token * shape.rank_tokens


@dataclass(frozen=True, slots=True)
class MemoryObservation:
    """One measured peak: ``peak`` and ``static`` in bytes, for a microbatch of ``shape``."""

    shape: MicrobatchShape
    peak: float
    static: float

    @property
    def dynamic(self) -> float:
        """What the microbatch itself took."""
        return self.peak - self.static


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """A fitted memory model with its own margin.

    Attributes:
        coefficients: of peak − static.
        margin: relative; see :attr:`plait.cost.fitting.Fit.margin`.
        observations: what it was fitted to, oldest first.
        fit: residuals; None where the coefficients were loaded and not fitted here.
    """

    coefficients: MemoryCoefficients
    margin: float = UNKNOWN_MARGIN
    observations: tuple[MemoryObservation, ...] = ()
    fit: Fit | None = None

    @classmethod
    def fitted(cls, observations: Iterable[MemoryObservation]) -> MemoryModel:
        """The model that fits these peaks best, on relative error of peak − static.

        Raises:
            InputError: no observations, or a peak at or below its static bytes.
        """
        kept = tuple(observations)[-KEPT_OBSERVATIONS:]
        for observation in kept:
            if observation.dynamic <= 0:
                raise InputError(
                    f"peak {observation.peak:.0f} B, static {observation.static:.0f} B",
                    "A peak must lie above the static bytes.",
                )
        fit = fit_relative(
            [_features(observation.shape) for observation in kept],
            [observation.dynamic for observation in kept],
            FEATURES,
        )
        return cls(MemoryCoefficients(*fit.coefficients), fit.margin, kept, fit)

    def observe(self, observations: Iterable[MemoryObservation]) -> MemoryModel:
        """The model refitted with more observations."""
        return MemoryModel.fitted((*self.observations, *observations))

    def dynamic(self, shape: MicrobatchShape) -> float:
        """Predicted bytes above static."""
        return self.coefficients.bytes(shape)

    def peak(self, shape: MicrobatchShape, *, static: float) -> float:
        """Predicted peak in bytes."""
        return static + self.dynamic(shape)

    def safe_peak(self, shape: MicrobatchShape, *, static: float) -> float:
        """Predicted peak with the margin: what admission compares with the device's memory."""
        return static + self.dynamic(shape) * (1.0 + self.margin)

    def capacity(self, *, available: float, static: float, rank: int, longest: int) -> int:
        """Most tokens of a microbatch whose safe peak stays within ``available`` bytes.

        The microbatch is taken as full of samples of ``longest`` tokens with every token labelled, the
        heaviest that can come.

        Raises:
            CapacityError: not even one token fits.
        """
        c = self.coefficients
        each = c.token + c.square * longest + c.labelled + c.rank_token * rank
        room = (available - static) / (1.0 + self.margin) - c.fixed
        if room < each or each == 0.0:
            raise CapacityError(
                f"{available:.0f} bytes available, {static:.0f} static",
                "Weights, adapters and one token must fit into the device's memory.",
                "Use a device with more memory, fewer jobs at once, or a model parallel deployment.",
            )
        return int(room / each)


def stage_bytes(
    model: MemoryModel,
    shape: MicrobatchShape,
    *,
    static: float,
    layers: int,
    layer_split: Sequence[int],
    stage: int,
) -> float:
    """Safe peak of one pipeline stage, in bytes.

    Stage s of S holds up to S − s microbatches in flight (1F1B). Everything but the labelled term is
    taken as spread evenly over the layers; the labelled term belongs to the last stage.

    Args:
        static: of this stage alone.
        layers: of the whole model.
        layer_split: layers of each stage.
    """
    c, stages = model.coefficients, len(layer_split)
    share = layer_split[stage] / layers
    body = MemoryCoefficients(c.fixed, c.token, c.square, 0.0, c.rank_token).bytes(shape)
    head = c.labelled * shape.labelled if stage == stages - 1 else 0.0
    return static + ((stages - stage) * share * body + head) * (1.0 + model.margin)


def adapter_bytes(rank: int, sites: Iterable[tuple[int, int]], *, compute_bytes: int) -> int:
    """Exact bytes of one adapter: masters, gradients, moments (float32) and the compute-dtype copy.

    Args:
        sites: (in, out) of every linear that the adapter sits on.
        compute_bytes: of one element of the copy that the kernels read; 0 where they read the masters.
    """
    elements = sum(rank * (inside + outside) for inside, outside in sites)
    return elements * (MASTER_BYTES + compute_bytes)


def _features(shape: MicrobatchShape) -> tuple[float, ...]:
    return (1.0, shape.tokens, shape.squares, shape.labelled, shape.rank_tokens)
