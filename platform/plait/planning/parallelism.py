"""Which parallelism and capacity serve a cluster best (LoRAFusion's profiler), by simulation.

Every configuration that the time profile knows, on as many equal replicas as the cluster holds, is judged
by the throughput of a few global batches, packed, scheduled and simulated. What fits is told by the model's
sizes: its memory is computed over tensors without memory and spread over devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from plait.core.errors import CapacityError
from plait.core.plans import GlobalBatch, Replica
from plait.cost.profiles import ClusterProfile
from plait.cost.replica import Configuration
from plait.planning.model_memory import ModelMemory
from plait.simulate.forecast import PlanOptions, forecast

CAPACITIES = (1024, 2048, 4096, 8192, 16384)  # looked at beside those of the published table


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration and what it gives.

    Attributes:
        replicas: equal ones, as many as the cluster holds.
        predicted_bytes: largest on one device; None where the model's sizes are not known.
        published: its capacity stands in the cluster's table of what ran.
        tokens_per_second: simulated; None where it was not simulated.
        reason: why it was not simulated; "".
    """

    configuration: Configuration
    replicas: int
    predicted_bytes: int | None
    published: bool
    tokens_per_second: float | None = None
    reason: str = ""


def compare(
    profile: ClusterProfile,
    batches: Mapping[str, Sequence[GlobalBatch]],
    memory: ModelMemory | None,
    *,
    available: int,
    labelled_share: float,
    say: Callable[[str], None],
    most_tokens: int | None = None,
) -> tuple[Candidate, ...]:
    """Every configuration at every capacity, best throughput first, those that do not serve last.

    Args:
        batches: each job's global batches that are simulated.
        memory: None takes the capacities of the cluster's table for what fits.
        available: bytes of one device that may be used.
        most_tokens: largest capacity that is looked at (engine.capacity); None takes the usual ones.

    Raises:
        CapacityError: no configuration takes the longest sample and fits.
    """
    longest = max(length for own in batches.values() for batch in own for length in batch.lengths)
    found = []
    for configuration in configurations(profile, every=memory is not None, most_tokens=most_tokens):
        replicas = profile.devices.count // configuration.devices
        bytes_ = None if memory is None else memory.peak(configuration, profile.time.layers)
        candidate = Candidate(configuration, replicas, bytes_, configuration in profile.configurations)
        if bytes_ is not None and bytes_ > available:
            found.append(
                _refused(candidate, f"needs {bytes_ / 2**30:.1f} GiB, {available / 2**30:.1f} may be used")
            )
        elif longest > configuration.max_tokens:
            found.append(_refused(candidate, f"does not take {longest} tokens"))
        else:
            say(f"{configuration} × {replicas}, {configuration.max_tokens:,} tokens ...")
            found.append(_simulated(candidate, profile, batches, labelled_share))
    if all(each.reason for each in found):
        nearest = {(each.configuration.tp, each.configuration.pp): each for each in reversed(found)}
        reasons = "; ".join(
            f"{each.configuration} with {each.configuration.max_tokens} tokens {each.reason}"
            for each in reversed(nearest.values())
        )
        raise CapacityError(
            f"a sample of {longest} tokens on {profile.devices.count} × {profile.devices.kind}",
            f"No configuration takes it and fits: {reasons}.",
            "Set engine.checkpointing=true, drop or cut long samples (data.overlong, model.max_length), or "
            "describe larger devices.",
        )
    return tuple(sorted(found, key=lambda each: -(each.tokens_per_second or 0.0)))


def configurations(
    profile: ClusterProfile, *, every: bool, most_tokens: int | None = None
) -> tuple[Configuration, ...]:
    """The table's configurations that the cluster can hold, or every one that the time profile knows.

    Args:
        every: each tensor-parallel degree of the profile with each power of two of stages.
        most_tokens: of those that are added to the table's.
    """
    most, table = profile.devices.count, profile.configurations
    found = {each for each in table if each.devices <= most}
    if every:
        stages = [2**k for k in range(most.bit_length()) if 2**k <= min(most, profile.time.layers)]
        capacities = {each for each in CAPACITIES if each <= (most_tokens or each)}
        capacities |= {each.max_tokens for each in table}
        found |= {
            Configuration(tp, pp, capacity)
            for tp in profile.time.layer
            for pp in stages
            if tp * pp <= most
            for capacity in capacities
        }
    return tuple(sorted(found))


def _refused(candidate: Candidate, reason: str) -> Candidate:
    return Candidate(
        candidate.configuration,
        candidate.replicas,
        candidate.predicted_bytes,
        candidate.published,
        None,
        reason,
    )


def _simulated(
    candidate: Candidate,
    profile: ClusterProfile,
    batches: Mapping[str, Sequence[GlobalBatch]],
    labelled_share: float,
) -> Candidate:
    configuration = candidate.configuration
    replicas = [Replica(i, configuration.tp, configuration.pp, (), ()) for i in range(candidate.replicas)]
    options = PlanOptions(
        capacities={each.id: configuration.max_tokens for each in replicas}, labelled_share=labelled_share
    )
    metrics = forecast(batches, replicas, profile.time, options).metrics
    return Candidate(
        configuration,
        candidate.replicas,
        candidate.predicted_bytes,
        candidate.published,
        metrics.tokens_per_second,
    )
