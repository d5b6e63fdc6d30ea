"""Traces of lengths: what each job's global batches weigh, from a file, from data or from assumptions."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from plait.core.errors import DataError
from plait.core.plans import GlobalBatch
from plait.cost.lengths import LengthGenerator

Trace = Mapping[str, Sequence[Sequence[int]]]  # by job: the lengths of each global batch


def mixed_lengths(generators: Mapping[str, LengthGenerator], count: int, *, seed: int, job: str) -> list[int]:
    """``count`` lengths of a job whose samples come from several data sets in equal shares."""
    names = sorted(generators)
    rng = np.random.default_rng([seed, zlib.crc32(job.encode())])
    which = rng.integers(0, len(names), count)
    drawn = {name: iter(generators[name].draw(count, stream=f"{job}/{name}").tolist()) for name in names}
    return [int(next(drawn[names[place]])) for place in which]


def in_batches(lengths: Sequence[int], global_batch: int) -> list[list[int]]:
    """Lengths in global batches; an incomplete last one is left out."""
    whole = len(lengths) // global_batch * global_batch
    return [list(lengths[begin : begin + global_batch]) for begin in range(0, whole, global_batch)]


def read_trace(path: Path) -> dict[str, list[list[int]]]:
    """A trace from JSON: {"jobs": {name: [[length, ...], ...]}}.

    Raises:
        DataError: not such a file, or a length below 1.
    """
    try:
        jobs = json.loads(path.read_text(encoding="utf-8"))["jobs"]
        trace = {str(job): [[int(length) for length in batch] for batch in own] for job, own in jobs.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: {error}", 'A trace is JSON: {"jobs": {"name": [[length, ...], ...]}}.'
        ) from error
    for job, own in trace.items():
        for step, batch in enumerate(own):
            if not batch or min(batch) < 1:
                raise DataError(
                    f"{path}: {job} step {step}: {batch}", "Every global batch needs lengths of at least 1."
                )
    return trace


def global_batches(trace: Trace) -> dict[str, list[GlobalBatch]]:
    """The trace as global batches, every token labelled."""
    result: dict[str, list[GlobalBatch]] = {}
    for job, own in trace.items():
        begin, result[job] = 0, []
        for step, lengths in enumerate(own):
            samples = tuple(range(begin, begin + len(lengths)))
            weight = 1.0 / sum(lengths)
            result[job].append(GlobalBatch(job, step, samples, (0,) * len(samples), tuple(lengths), weight))
            begin += len(lengths)
    return result
