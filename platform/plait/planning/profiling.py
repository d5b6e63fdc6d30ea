"""The work of `plait profile`: measure or compute. A seam: its command only prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from plait.core.errors import CapacityError
from plait.cost.fitting import Fit
from plait.cost.memory import MemoryModel, MemoryObservation, MemoryShape
from plait.cost.probes import (
    Probe,
    ProbeOptions,
    ProbeSegment,
    TimeObservation,
    drawn_probe,
    fit_seconds,
    observe_device,
    observe_seconds,
    probe_grid,
    seconds_errors,
)
from plait.cost.profile_store import CapacityChoice, Profile, ProfileKey
from plait.models.attention import KEEP_UP_TO
from plait_kernels.loss import chunk_rows

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from plait.models.base import BaseModel


HELD_OUT = 4  # random probes that no fit has seen
SEED = 0
LEAST_CAPACITY = 128  # smaller microbatches are not tried, unless engine.capacity is smaller
NEAR_BEST = 0.03  # throughput this near to the best counts as equal, because timings are no more exact
RANK = 16  # rank of the adapter with which capacities are compared
TYPICAL_LENGTH, TYPICAL_LABELLED = 128, 0.25
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Made:
    """A profile with the fits behind it.

    Attributes:
        memory_errors: relative errors of held-out peaks − static.
        layer_fit, head_fit, time_errors: fits and errors of the time model; None and empty if nothing ran.
    """

    profile: Profile
    memory_errors: tuple[float, ...]
    available: int
    layer_fit: Fit | None = None
    head_fit: Fit | None = None
    time_errors: tuple[float, ...] = ()


def profile_device(
    model: BaseModel, key: ProfileKey, options: ProbeOptions, *, most: int, available: int, say: Say
) -> Made:
    """Measure a model on its device.

    Raises:
        CapacityError: no capacity fits.
    """
    grid, held = _probes(most, model.max_length)
    say(f"Memory: {len(grid)} probes to fit, {len(held)} held out, up to {most:,} tokens ...")
    peaks = observe_device(model, [*grid, *held], options)
    memory, memory_errors = _fit_memory(peaks, len(grid), model.vocabulary, options)
    capacities = capacities_up_to(most)
    typical = [_typical(capacity, model.max_length) for capacity in capacities]
    say(f"Time: {len(grid) + len(typical)} probes to fit, {len(held)} held out ...")
    timed = observe_seconds(model, [*grid, *typical, *held], options)
    seen, unseen = timed[: -len(held)], timed[-len(held) :]
    time, layer_fit, head_fit = fit_seconds(seen, model.layer_count)
    errors = seconds_errors(time, unseen)
    static = max(each.static for each in peaks)
    choices = _choices(memory, capacities, timed[len(grid) : -len(held)], static=static, available=available)
    profile = Profile(
        key=key,
        model=model.identity.name,
        memory=memory,
        time=time,
        capacity=choose_capacity(choices, available),
        capacities=choices,
        targets=options.targets,
        how="measured",
        memory_error=_mean(memory_errors),
        time_error=_mean(errors),
    )
    return Made(profile, memory_errors, available, layer_fit, head_fit, errors)


def profile_without_weights(
    config: LlamaConfig,
    name: str,
    key: ProfileKey,
    options: ProbeOptions,
    *,
    most: int,
    available: int,
    made: int,
    say: Say,
) -> Made:
    """Compute a model's memory from its configuration only; seconds stay unknown.

    Args:
        made: most bytes while a quantised weight is made, which peaks of dense weights do not have.

    Raises:
        CapacityError: no capacity fits.
        ModelError: the memory of the model's family is not known without weights.
    """
    from plait.cost.fake_memory import depth_error, observe_extrapolated

    grid, held = _probes(most, config.max_position_embeddings)
    say(f"Memory, without weights: {len(grid)} probes to fit, {len(held)} held out ...")
    dense = observe_extrapolated(config, [*grid, *held], options)
    peaks = [replace(o, peaks={name: size + made for name, size in o.peaks.items()}) for o in dense]
    memory, errors = _fit_memory(peaks, len(grid), config.vocab_size, options)
    say(f"One check at full depth: {config.num_hidden_layers} layers ...")
    off = depth_error(config, grid[0], options, dense[0])
    static = max(each.static for each in peaks)
    choices = _choices(memory, capacities_up_to(most), None, static=static, available=available)
    profile = Profile(
        key=key,
        model=name,
        memory=memory,
        time=None,
        capacity=choose_capacity(choices, available),
        capacities=choices,
        targets=options.targets,
        how="computed",
        memory_error=_mean(errors),
        time_error=None,
        depth_error=off,
    )
    return Made(profile, errors, available)


def capacities_up_to(most: int) -> tuple[int, ...]:
    """Halves of the largest capacity, ascending, down to ``LEAST_CAPACITY``."""
    found = [most]
    while found[-1] // 2 >= LEAST_CAPACITY:
        found.append(found[-1] // 2)
    return tuple(reversed(found))


def choose_capacity(choices: Sequence[CapacityChoice], available: int) -> int:
    """The smallest of the fitting capacities near the best throughput; the largest if nothing ran.

    Raises:
        CapacityError: none fits.
    """
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        least = min(choices, key=lambda choice: choice.capacity)
        raise CapacityError(
            f"a microbatch of {least.capacity} tokens needs about {least.predicted_bytes / 2**30:.2f} GiB",
            f"{available / 2**30:.2f} GiB may be used (planner.memory_share of the device's memory).",
            "Lower engine.capacity, set engine.checkpointing=true, or use a smaller model.",
        )
    rates = [choice.tokens_per_second for choice in fitting if choice.tokens_per_second is not None]
    if not rates:
        return max(choice.capacity for choice in fitting)
    near = (c for c in fitting if (c.tokens_per_second or 0.0) >= max(rates) * (1.0 - NEAR_BEST))
    return min(choice.capacity for choice in near)


def _probes(most: int, longest: int) -> tuple[tuple[Probe, ...], tuple[Probe, ...]]:
    """The grid, and random probes that no fit sees; no sample exceeds the model's limit."""
    rng = np.random.default_rng(SEED)
    held = [drawn_probe(rng, most) for _ in range(HELD_OUT)]
    return tuple(_cut(probe, longest) for probe in probe_grid(most)), tuple(
        _cut(probe, longest) for probe in held
    )


def _cut(probe: Probe, longest: int) -> Probe:
    """The probe with samples longer than ``longest`` cut into several."""
    segments = tuple(
        ProbeSegment(
            segment.rank,
            tuple(
                min(longest, length - at) for length in segment.lengths for at in range(0, length, longest)
            ),
        )
        for segment in probe.segments
    )
    return Probe(segments, probe.labelled)


def _typical(capacity: int, longest: int) -> Probe:
    """A full microbatch of one adapter, with the same mixture of lengths at every capacity."""
    whole, rest = divmod(capacity, TYPICAL_LENGTH)
    lengths = (TYPICAL_LENGTH,) * whole + ((rest,) if rest else ())
    return _cut(Probe((ProbeSegment(RANK, lengths),), max(1, int(capacity * TYPICAL_LABELLED))), longest)


def _fit_memory(
    peaks: Sequence[MemoryObservation], fitted: int, vocabulary: int, options: ProbeOptions
) -> tuple[MemoryModel, tuple[float, ...]]:
    logit_rows = chunk_rows(vocabulary, options.backend, options.dtype.itemsize)
    memory = MemoryModel.fitted(peaks[:fitted], logit_rows=logit_rows)
    return memory, memory.errors(peaks[fitted:])


def _choices(
    memory: MemoryModel,
    capacities: Iterable[int],
    timed: Sequence[TimeObservation] | None,
    *,
    static: float,
    available: int,
) -> tuple[CapacityChoice, ...]:
    """Each capacity with its bytes if every sample is as heavy as possible, and its measured throughput."""
    found = []
    for place, capacity in enumerate(capacities):
        heaviest = MemoryShape.heaviest(capacity, rank=RANK, keep_up_to=KEEP_UP_TO)
        peak = int(memory.safe_peak(heaviest, static=static))
        rate = None if timed is None else timed[place].shape.tokens / timed[place].total
        found.append(CapacityChoice(capacity, rate, peak, peak <= available))
    return tuple(found)


def _mean(errors: Sequence[float]) -> float:
    return float(np.mean(np.abs(errors)))
