"""Predicts the time and memory of each iteration of a group, and learns from the measurements.

Seconds are fitted by non-negative least squares on relative error, over the parts of an iteration. Bytes use
the memory model of :mod:`plait.cost.memory`, fitted to observed peaks (§5.2), which admission then uses. Both
start from a stored profile if there is one, and are fitted again as observations accumulate; when depends
only on their number, never on the clock.

A seam: learning from training is separate from decisions. Seconds influence no decision, and bytes only
admission.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import accumulate, islice
from pathlib import Path
from statistics import median

import numpy as np

from plait.core.errors import StorageError
from plait.core.messages import ModelFitted
from plait.core.plans import Microbatch
from plait.core.spans import ReplicaTime
from plait.cost.fitting import Fit, fit_undisturbed
from plait.cost.memory import FEATURES, KEPT_OBSERVATIONS, MemoryModel, MemoryObservation, MemoryShape
from plait.cost.profile_store import Profile
from plait.cost.time import EMPTY, MicrobatchShape
from plait.engine.admission import Admission, Sized
from plait.engine.jobs import LiveJob
from plait.engine.ledger import Outcome
from plait.engine.worker import HeldPart, Portion, WorkerFacts
from plait.utils.files import write_text

TERMS = ("microbatch", "token", "square", "labelled", "rank_token", "adapter_byte")
FIRST_SECONDS = 8  # iterations before seconds are fitted
FIRST_PEAKS = 12  # microbatches before bytes are fitted
GROWTH, MOST_BETWEEN = 1.25, 64  # the next fit waits for a quarter more observations, at most for 64
KEPT = 256  # seconds are fitted to this many newest iterations
PEAKS_FILE = "peaks.json"  # in the search's folder, for restarts


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected time and memory of an iteration.

    Attributes:
        seconds: None if nothing is known yet.
        bytes: highest peak, weights and adapters included.
        by_rule: ``bytes`` is an upper bound from the model's shape, because nothing was observed yet.
        terms: the sums that seconds depend on, in the order of ``TERMS``, by replica.
        shapes: what the memory of each microbatch depends on, by its index.
        process_bytes: of each process of each replica, by its number.
        replicas: by the index of its microbatches: the replica.
        busy_seconds: of each replica by its number; they differ by its microbatches. Empty where nothing is
            known yet.
        process_seconds: busy and waited, of each process. A replica without stages waits until the slowest is
            done, and what replicas waited beyond that so far (for the coordinator, for sums, and since equal
            work takes unequal time). Empty where nothing is known yet.
    """

    seconds: float | None
    bytes: int
    terms: Mapping[int, tuple[float, ...]]
    shapes: Mapping[int, MemoryShape]
    by_rule: bool = False
    process_bytes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    replicas: Mapping[int, int] = field(default_factory=dict)
    busy_seconds: Mapping[int, float] = field(default_factory=dict)
    process_seconds: tuple[tuple[float, float], ...] = ()

    def with_predictions(self, times: Sequence[ReplicaTime], outcome: Outcome) -> tuple[ReplicaTime, ...]:
        """The times of an iteration with what was expected of each process, and its peak."""
        found = list(times)
        expected = [each for own in self.process_bytes.values() for each in own]
        if len(found) == len(expected):
            counts = {replica: len(own) for replica, own in self.process_bytes.items()}
            peaks = outcome.process_peaks(counts, self.replicas)
            found = [
                replace(each, peak_bytes=peaks.get(place), predicted_bytes=expected[place])
                for place, each in enumerate(found)
            ]
        if len(found) != len(self.process_seconds):
            return tuple(found)
        return tuple(
            replace(each, predicted_busy_seconds=busy, predicted_waited_seconds=waited)
            for each, (busy, waited) in zip(found, self.process_seconds, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Around:
    """What a pipeline that is not drained has in flight beside a window; no-ops included.

    Attributes:
        before: sent before it, oldest first.
        after: what will probably follow it.
    """

    before: Sequence[Microbatch] = ()
    after: Sequence[Microbatch] = ()


class Predictions:
    """Predicts iterations of one worker's group, and learns from them.

    Raises:
        StorageError: the stored peaks cannot be read.
    """

    def __init__(
        self, facts: WorkerFacts, admission: Admission, profile: Profile | None, folder: Path
    ) -> None:
        self._facts = facts
        self._inputs_read: dict[frozenset[frozenset[str]], float] = {}  # share of input features, by targets
        self._admission = admission
        self._profile = profile
        self._path = folder / PEAKS_FILE
        self._time: Fit | None = None
        self._timed: list[tuple[tuple[float, ...], float]] = []
        self._stage_timed: dict[int, list[tuple[tuple[float, ...], float]]] = {}  # by process, of stages
        self._stage_times: list[Fit] = []
        self._beyond: list[
            tuple[float, float]
        ] = []  # waiting of all replicas, and of the mean one, over the plan
        self._peaks: dict[Portion, list[MemoryObservation]] = {}
        self._seen = {"seconds": -1, "bytes": 0}  # a process's first iteration includes one-time costs
        self._due = {"seconds": FIRST_SECONDS, "bytes": FIRST_PEAKS}
        self._ahead: dict[str, list[float]] = {"seconds": [], "bytes": []}
        if kept := _read_peaks(self._path, admission.valid_for, facts.shape.layers):
            for portion, own in kept.items():
                for each in own:
                    self._take_peak(portion, each)
            self._fit_bytes()
            self._wait("bytes")

    # ---- before an iteration ---------------------------------------------------------------------------

    def expect(
        self, given: Sequence[Microbatch], jobs: Mapping[str, LiveJob], around: Around | None = None
    ) -> Expected:
        """Predict the seconds and bytes of an iteration of these attached jobs.

        Args:
            given: its microbatches; a pipeline's have no-ops among them.
            around: what a pipeline works on beside it.
        """
        microbatches = [each for each in given if each.segments]
        adapters = float(sum(job.demand.adapter_bytes for job in jobs.values()))
        parts = {
            replica: [_time_shape(each, jobs) for each in part]
            for replica, part in _parts(microbatches).items()
        }
        terms = {replica: _terms(own, adapters) for replica, own in parts.items()}
        busy = {replica: self._expect_seconds(replica, terms[replica], own) for replica, own in parts.items()}
        known = {replica: seconds for replica, seconds in busy.items() if seconds is not None}
        if self._time is not None and not any(self._time.coefficients[1:5]):
            known = self._shared_by_tokens(known, terms)
        longest = max(known.values(), default=0.0)
        lag, idle = (median(each) for each in zip(*self._beyond, strict=True)) if self._beyond else (0.0, 0.0)
        memory = {each.index: self._memory_shape(each, jobs) for each in microbatches}
        held, by_rule = self._expect_bytes(given, jobs, around or Around())
        if self._facts.staged:
            seconds = self._expect_stages(terms, longest * (1.0 + lag))
        else:
            each_busy = (known.get(number, 0.0) for number in range(len(self._facts.devices)))
            seconds = tuple((own, max(0.0, longest * (1.0 + idle) - own)) for own in each_busy)
        return Expected(
            longest * (1.0 + lag) if known else None,
            max(size for own in held.values() for size in own),
            terms,
            memory,
            by_rule=by_rule,
            process_bytes=held,
            replicas={each.index: each.replica for each in microbatches},
            busy_seconds=known,
            process_seconds=seconds if known else (),
        )

    def _expect_stages(
        self, terms: Mapping[int, tuple[float, ...]], whole: float
    ) -> tuple[tuple[float, float], ...]:
        """Busy and waited seconds of each process in an iteration of so many; nothing without stages."""
        found = []
        for process, fit in enumerate(self._stage_times):
            own = terms.get(self._replica_of(process), (0.0,) * len(TERMS))
            busy = min(whole, float(np.dot(fit.coefficients, own)))
            found.append((busy, whole - busy))
        return tuple(found)

    def _replica_of(self, process: int) -> int:
        return next(n for n, end in enumerate(accumulate(map(len, self._facts.parts))) if process < end)

    def _expect_bytes(
        self, microbatches: Sequence[Microbatch], jobs: Mapping[str, LiveJob], around: Around
    ) -> tuple[dict[int, tuple[int, ...]], bool]:
        """Bytes of each process of each replica, and whether they are an upper bound for want of a model."""
        held: dict[int, tuple[int, ...]] = {}
        demands = [job.demand for job in jobs.values()]
        known = self._admission.model_for(demands) is not None

        def sized(these: Sequence[Microbatch], replica: int) -> list[Sized]:
            own = (each for each in these if each.replica == replica)
            return [(self._memory_shape(each, jobs), _longest(each)) for each in own]

        for replica in range(len(self._facts.devices)):
            before, own, after = (sized(e, replica) for e in (around.before, microbatches, around.after))
            held[replica] = tuple(self._admission.expected(replica, own, demands, before, after))
            known = known or self._admission.learnt_of(replica)
        return held, not known

    def _shared_by_tokens(
        self, busy: Mapping[int, float], terms: Mapping[int, tuple[float, ...]]
    ) -> dict[int, float]:
        """Seconds of all replicas, shared out by tokens: for a fit that says nothing of tokens, as where the
        load of the machine has changed more than they have."""
        work = {replica: terms[replica][1] / self._speed(replica) for replica in busy}
        whole, total = sum(busy.values()), sum(work.values())
        return {replica: whole * each / total for replica, each in work.items()}

    def _expect_seconds(
        self, replica: int, terms: tuple[float, ...], shapes: Sequence[MicrobatchShape]
    ) -> float | None:
        if self._time is not None:
            return float(np.dot(self._time.coefficients, terms)) / self._speed(replica)
        if self._profile is not None and self._profile.time is not None and not self._facts.staged:
            return sum(self._profile.time.microbatch(shape) for shape in shapes) / self._speed(replica)
        return None

    def take_facts(self, facts: WorkerFacts) -> None:
        """Predict for these replicas from now on."""
        if facts.held != self._facts.held:
            self._stage_timed, self._stage_times = {}, []
        self._facts = facts

    def _speed(self, replica: int) -> float:
        return self._facts.speeds[replica] if self._facts.speeds else 1.0

    def _memory_shape(self, microbatch: Microbatch, jobs: Mapping[str, LiveJob]) -> MemoryShape:
        linears = {each.job: jobs[each.job].demand.linears for each in microbatch.segments}
        whole = len(self._facts.linears)
        parts = [
            (jobs[each.job].spec.adapter.rank * len(linears[each.job]) / whole, each.lengths)
            for each in microbatch.segments
        ]
        together = frozenset(linears.values())
        if together not in self._inputs_read:
            self._inputs_read[together] = self._facts.inputs_read(frozenset().union(*together))
        return MemoryShape.of(
            [length for _, lengths in parts for length in lengths],
            labelled=_labelled(microbatch, jobs),
            ranks=[rank for rank, lengths in parts for _ in lengths],
            inputs_read=self._inputs_read[together],
            keep_up_to=self._facts.shape.keep_up_to,
        )

    # ---- after it --------------------------------------------------------------------------------------

    def learn(
        self,
        expected: Expected,
        outcome: Outcome,
        seconds: float,
        iteration: int,
        replicas: Sequence[ReplicaTime] = (),
        jobs: Mapping[str, LiveJob] | None = None,
    ) -> list[ModelFitted]:
        """Take in what an iteration took; the fits that came of it.

        Args:
            replicas: by process; of several replicas, each one's own seconds count. Stages wait for each
                other: of replicas with stages, the iteration's seconds count, for the busiest one.
            jobs: that were attached.
        """
        if seconds > 0:
            busy = [each.busy_seconds for each in replicas]
            own = dict(enumerate(busy)) if len(busy) > 1 else {0: seconds}
            if self._facts.staged:
                own = {self._busiest(busy): seconds}
                self._take_stages(expected, busy)
            self._take_seconds(expected, seconds, own)
        if outcome.peak_bytes is not None:
            static = self._learn_overheads(expected, outcome, (jobs or {}).values())
            error = (expected.bytes - outcome.peak_bytes) / (outcome.peak_bytes - static)
            self._ahead["bytes"].append(abs(error))
        for index, peaks in outcome.peaks.items():
            parts, shape = self._facts.parts[expected.replicas[index]], expected.shapes[index]
            for part, peak in zip(parts, peaks, strict=True):
                self._take_peak(part.portion, MemoryObservation(shape, dict(peak.phases), peak.static))
        fitted = []
        if self._is_due("seconds"):
            fitted.append(self._fit_seconds(iteration))
        if self._is_due("bytes"):
            models = self._fit_bytes()
            _write_peaks(self._path, self._admission.valid_for, self._peaks)
            fitted += [self._fitted_bytes(portion, model, iteration) for portion, model in models.items()]
        return fitted

    def _take_stages(self, expected: Expected, busy: Sequence[float]) -> None:
        if self._seen["seconds"] < 0:
            return
        for process, seconds in enumerate(busy):
            terms = expected.terms.get(self._replica_of(process))
            if terms is not None and seconds > 0:
                kept = self._stage_timed.setdefault(process, [])
                self._stage_timed[process] = [*kept, (terms, seconds)][-KEPT:]

    def _busiest(self, busy: Sequence[float]) -> int:
        """The replica whose stages, of these seconds by process, were the busiest."""
        left = iter(busy)
        means = [sum(islice(left, stages)) / stages for stages in self._facts.stages]
        return max(range(len(means)), key=means.__getitem__)

    def _take_seconds(self, expected: Expected, seconds: float, busy: Mapping[int, float]) -> None:
        self._seen["seconds"] += 1
        if self._seen["seconds"] > 0:
            new = [
                (terms, busy[replica] * self._speed(replica))
                for replica, terms in expected.terms.items()
                if busy.get(replica, 0.0) > 0
            ]
            self._timed = [*self._timed, *new][-KEPT:]
        planned, longest = expected.busy_seconds, max(busy.values(), default=0.0)
        if planned and longest > 0 and len(busy) > 1:
            mean, even = sum(busy.values()) / len(busy), sum(planned.values()) / len(busy)
            waited, uneven = (seconds - mean) / longest, 1.0 - even / max(planned.values())
            self._beyond = [*self._beyond, (seconds / longest - 1.0, waited - uneven)][-KEPT:]
        if expected.seconds is not None:
            self._ahead["seconds"].append(abs(expected.seconds / seconds - 1.0))

    def _learn_overheads(self, expected: Expected, outcome: Outcome, jobs: Iterable[LiveJob]) -> int:
        """Learn what the adapters take in each process; the static bytes of the process with the most."""
        found, demands = dict[HeldPart, int](), [job.demand for job in jobs]
        for index, peaks in outcome.peaks.items():
            for part, peak in zip(self._facts.parts[expected.replicas[index]], peaks, strict=True):
                found[part] = max(peak.static, found.get(part, 0))
        for part, static in found.items():
            self._admission.learn_overhead(static, part, demands)
        return max(found.values())

    def _take_peak(self, portion: Portion, new: MemoryObservation) -> None:
        """Note what a microbatch took; a stage without adapters keeps nothing of it for its backward."""
        taken = {phase: peak for phase, peak in new.peaks.items() if peak > new.static}
        if taken:
            own = replace(new, peaks=taken)
            self._peaks[portion] = [*self._peaks.get(portion, ()), own][-KEPT_OBSERVATIONS:]
            self._seen["bytes"] += 1

    def _is_due(self, target: str) -> bool:
        if self._seen[target] < self._due[target]:
            return False
        self._wait(target)
        return True

    def _wait(self, target: str) -> None:
        """Schedule the next fit for when observations have grown."""
        seen = self._seen[target]
        self._due[target] = min(math.ceil(seen * GROWTH), seen + MOST_BETWEEN)

    def _fit_seconds(self, iteration: int) -> ModelFitted:
        self._time = _fitted(self._timed)
        if len(self._stage_timed) == sum(map(len, self._facts.parts)):
            self._stage_times = [_fitted(own) for _, own in sorted(self._stage_timed.items())]
        return ModelFitted(
            target="seconds",
            iteration=iteration,
            observations=len(self._timed),
            coefficients=tuple(zip(TERMS, self._time.coefficients, strict=True)),
            mean_error=self._time.mean_absolute_error,
            max_error=self._time.max_absolute_error,
            ahead_error=self._ahead_error("seconds"),
            margin=self._time.margin,
        )

    def _fit_bytes(self) -> dict[Portion, MemoryModel]:
        """A model of each portion that was observed."""
        whole, found = (range(self._facts.shape.layers), 1), dict[Portion, MemoryModel]()
        for portion, own in self._peaks.items():
            known = self._profile.memory.observations if self._profile and portion == whole else ()
            before = [each.gathering(self._facts.shape.gathered_bytes) for each in known]
            if len(before) + len(own) < FIRST_PEAKS:  # a portion that was observed too little yet
                continue
            rows = self._facts.shape.rows_at_once(portion[1])
            found[portion] = MemoryModel.fitted([*before, *own], logit_rows=rows)
            self._admission.learn(found[portion], portion)
        return found

    def _fitted_bytes(self, portion: Portion, model: MemoryModel, iteration: int) -> ModelFitted:
        layers, tensor = portion
        part = "" if len(layers) == self._facts.shape.layers else f"layers {layers.start}-{layers[-1]}."
        part += f"slice of {tensor}." if tensor > 1 else ""
        errors = [abs(error) for error in model.errors(model.observations)]
        return ModelFitted(
            target="bytes",
            iteration=iteration,
            observations=len(model.observations),
            coefficients=tuple(
                (f"{part}{name}.{feature}", float(getattr(phase.coefficients, feature)))
                for name, phase in model.phases.items()
                for feature in FEATURES
            ),
            mean_error=sum(errors) / len(errors),
            max_error=max(errors),
            ahead_error=self._ahead_error("bytes"),
            margin=max(phase.margin for phase in model.phases.values()),
        )

    def _ahead_error(self, target: str) -> float | None:
        """The mean error of predictions since the last fit, which is then reset."""
        errors, self._ahead[target] = self._ahead[target], []
        return sum(errors) / len(errors) if errors else None


def _fitted(timed: Sequence[tuple[tuple[float, ...], float]]) -> Fit:
    return fit_undisturbed([terms for terms, _ in timed], [seconds for _, seconds in timed], TERMS)


def _parts(microbatches: Sequence[Microbatch]) -> dict[int, list[Microbatch]]:
    """The microbatches of each replica; they wait for the one with the most tokens."""
    parts: dict[int, list[Microbatch]] = {}
    for each in microbatches:
        parts.setdefault(each.replica, []).append(each)
    return parts


def _terms(shapes: Sequence[MicrobatchShape], adapters: float) -> tuple[float, ...]:
    """The sums that a replica's seconds depend on, in the order of ``TERMS``."""
    return (float(len(shapes)), *map(float, astuple(sum(shapes, EMPTY))), adapters)


def _time_shape(microbatch: Microbatch, jobs: Mapping[str, LiveJob]) -> MicrobatchShape:
    ranks = {segment.job: jobs[segment.job].spec.adapter.rank for segment in microbatch.segments}
    return MicrobatchShape.of_microbatch(microbatch, ranks=ranks, labelled=_labelled(microbatch, jobs))


def _labelled(microbatch: Microbatch, jobs: Mapping[str, LiveJob]) -> int:
    """Labelled tokens of a microbatch of training samples."""
    return sum(
        int(jobs[segment.job].data.train.labelled[list(segment.samples)].sum())
        for segment in microbatch.segments
    )


def _longest(microbatch: Microbatch) -> int:
    """Tokens of its longest sample; 0 of a no-op."""
    return max((length for segment in microbatch.segments for length in segment.lengths), default=0)


def _write_peaks(path: Path, of: str, observations: Mapping[Portion, Sequence[MemoryObservation]]) -> None:
    """Write observations for the next process, which starts from them. Unwritten peaks are observed again.

    Args:
        of: the model and options that they apply to, in words.
    """
    rows = [
        {
            "layers": [layers.start, layers.stop],
            "tensor": tensor,
            "shape": asdict(each.shape),
            "peaks": dict(each.peaks),
            "static": each.static,
        }
        for (layers, tensor), own in observations.items()
        for each in own
    ]
    with suppress(OSError):
        write_text(path, json.dumps({"of": of, "observations": rows}), durable=False)


def _read_peaks(path: Path, of: str, layers: int) -> dict[Portion, list[MemoryObservation]]:
    """The stored observations by portion, oldest first; none if the file is missing or of another model. A
    row without layers is of the whole model.

    Raises:
        StorageError: the file was not written by :func:`_write_peaks`.
    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        found: dict[Portion, list[MemoryObservation]] = {}
        for each in kept["observations"] if kept["of"] == of else ():
            observed = MemoryObservation(MemoryShape(**each["shape"]), each["peaks"], each["static"])
            portion = range(*each.get("layers", (layers,))), each.get("tensor", 1)
            found.setdefault(portion, []).append(observed)
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(
            f"{path}: {getattr(error, 'strerror', None) or 'the file is damaged'}",
            "Plait reads the observed memory peaks from this file.",
            "Remove the file; the peaks will be measured again.",
        ) from error
