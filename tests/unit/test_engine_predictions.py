"""Predictions of iterations: learnt from what came, recorded with their errors, kept over a restart."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.core.errors import CapacityError, StorageError
from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.messages import ModelFitted, ObservedPeak
from plait.core.plans import Microbatch, Replica, Segment
from plait.core.samples import Sample, Split, TokenisedData
from plait.core.settings import EngineSettings, RunSettings
from plait.core.spans import ReplicaTime
from plait.cost.memory import KEPT, MemoryCoefficients, MemoryModel, MemoryShape, Phase
from plait.cost.profile_store import Profile, ProfileKey
from plait.engine.admission import Admission
from plait.engine.jobs import LiveJob
from plait.engine.ledger import Outcome
from plait.engine.memory import ENOUGH, FIRST, PeakSampler
from plait.engine.packer import Packer
from plait.engine.predictions import (
    FIRST_PEAKS,
    FIRST_SECONDS,
    PEAKS_FILE,
    TERMS,
    Around,
    Expected,
    Predictions,
)
from plait.engine.steps import DataOrder
from plait.engine.worker import ActivationShape, HeldPart, WorkerFacts
from plait.models.slices import vocabulary_slice
from plait.models.targets import LinearInfo
from plait.tracking.tables import FIT_COLUMNS, FITS_FILE, MOST_FITS, LineTable
from plait_kernels.loss import chunk_rows

CAPACITY, WEIGHTS = 64, 50_000
PACKER = Packer([Replica(capacity=CAPACITY)])
LINEARS = (LinearInfo("layers.0.q_proj", 8, 8),)
SHAPE = ActivationShape(1, 8, 2, 16, 16, WEIGHTS, 4, logit_rows=1000, keep_up_to=256)


def facts(memory_bytes: int = 10**9) -> WorkerFacts:
    return WorkerFacts(SHAPE, LINEARS, max_length=CAPACITY, memory_bytes=memory_bytes)


def admission(memory_bytes: int = 10**9) -> Admission:
    return Admission(facts(memory_bytes), RunSettings(engine=EngineSettings(capacity=CAPACITY)))


def live(
    name: str, rank: int, lengths: Sequence[int], admit: Admission, targets: tuple[str, ...] = ("q_proj",)
) -> LiveJob:
    labels = [np.arange(length) >= length // 2 for length in lengths]
    split = Split.of([Sample(np.ones(len(each), np.int32), each) for each in labels])
    data = TokenisedData(name, split, split)
    adapter = AdapterSpec(rank=rank, target_modules=targets)
    train = TrainSpec(steps=400, batch_size=4, seed=rank)
    spec = JobSpec(name, adapter, train, DataSpec.of("none"))
    demand = admit.demand(adapter, max(lengths))
    return LiveJob(spec, data, DataOrder.of(train, len(split)), demand, 0, 0.0)


class Machine:
    """Iterations of two jobs on a device whose seconds and bytes follow a rule that is not given to
    anything."""

    def __init__(self, folder: Path, admit: Admission | None = None) -> None:
        self.admission = admit or admission()
        rng = np.random.default_rng(3)
        ranks = {"a": 4, "b": 8}
        self.jobs = {
            name: live(name, rank, [int(n) for n in rng.integers(3, 40, 30)], self.admission)
            for name, rank in ranks.items()
        }
        self.predictions = Predictions(facts(), self.admission, None, folder)
        self.errors: list[tuple[float | None, float]] = []
        self.fits: list[ModelFitted] = []

    def seconds(self, batches: Sequence[Microbatch]) -> float:
        return 0.02 + sum(0.01 + 1e-3 * batch.tokens for batch in batches)

    def peak(self, batch: Microbatch) -> ObservedPeak:
        static = WEIGHTS + sum(job.demand.adapter_bytes for job in self.jobs.values())
        return ObservedPeak(
            static, (("forward", static + 700), ("backward", static + 900 + 300 * batch.tokens))
        )

    def run(self, iterations: int) -> None:
        for iteration in range(1, iterations + 1):
            batches = PACKER.pack([job.next_batch() for job in self.jobs.values()])
            expected = self.predictions.expect(batches, self.jobs)
            peaks = {batch.index: self.peak(batch) for batch in batches}
            seconds = self.seconds(batches) * (50.0 if iteration == 1 else 1.0)  # the first one pays for all
            if expected.seconds is not None:
                self.errors.append(
                    (
                        expected.seconds / seconds - 1,
                        expected.bytes / max(p.bytes for p in peaks.values()) - 1,
                    )
                )
            outcome = Outcome(microbatches=len(batches), peaks={at: (own,) for at, own in peaks.items()})
            self.fits += self.predictions.learn(expected, outcome, seconds, iteration, jobs=self.jobs)
            for job in self.jobs.values():
                job.advance(1, 1.0, 1.0, 1.0)


def test_the_traffic_of_jobs_with_equal_targets_is_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not for every mixture of jobs, of which a long search has more and more."""
    asked: list[frozenset[str]] = []
    found = WorkerFacts.inputs_read

    def inputs_read(self: WorkerFacts, linears: frozenset[str]) -> float:
        asked.append(linears)
        return found(self, linears)

    monkeypatch.setattr(WorkerFacts, "inputs_read", inputs_read)
    machine = Machine(tmp_path)
    machine.run(20)
    assert asked == [{"layers.0.q_proj"}]


def test_seconds_and_bytes_are_learnt_and_every_fit_reports_its_error(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.run(80)
    late = machine.errors[-30:]
    assert max(abs(seconds) for seconds, _ in late if seconds is not None) < 0.01
    assert max(abs(bytes_) for _, bytes_ in late) < 0.01
    by_target = {
        target: [fit for fit in machine.fits if fit.target == target] for target in ("seconds", "bytes")
    }
    assert by_target["seconds"][0].iteration == FIRST_SECONDS + 1
    assert by_target["bytes"][0].observations >= FIRST_PEAKS
    assert [name for name, _ in by_target["seconds"][0].coefficients] == list(TERMS)
    assert by_target["seconds"][0].ahead_error is None  # nothing was predicted before
    assert by_target["seconds"][-1].ahead_error is not None
    assert by_target["bytes"][-1].max_error < 0.01
    assert len(machine.fits) < 30


def test_nothing_is_known_of_seconds_before_the_first_fit_and_bytes_are_estimated(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    batches = PACKER.pack([machine.jobs["a"].next_batch()])
    expected = machine.predictions.expect(batches, machine.jobs)
    assert expected.seconds is None
    assert expected.bytes > WEIGHTS
    assert expected.by_rule


def test_admission_goes_by_what_was_learnt_and_a_restart_knows_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    before = machine.admission.predicted([machine.jobs["a"].demand])
    machine.run(20)
    demand = machine.jobs["a"].demand
    learnt = machine.admission.predicted([demand])
    assert learnt != before
    full = WEIGHTS + demand.adapter_bytes + 900 + 300 * CAPACITY
    assert full <= learnt < 1.05 * full
    again = admission()
    Predictions(facts(), again, None, tmp_path)
    assert again.predicted([demand]) == learnt
    batches = PACKER.pack([machine.jobs["a"].next_batch()])
    assert not Predictions(facts(), again, None, tmp_path).expect(batches, machine.jobs).by_rule
    other = Admission(facts(), RunSettings(engine=EngineSettings(capacity=CAPACITY, checkpointing=True)))
    plain = other.predicted([demand])
    Predictions(facts(), other, None, tmp_path)  # peaks of other options say nothing here
    assert other.predicted([demand]) == plain
    tight = admission(int(learnt / 0.8) + 1)
    tight.learn(again.model_for([demand]) or pytest.fail("a model was fitted"))
    assert tight.fits([demand])
    assert not tight.fits([demand, demand])
    with pytest.raises(CapacityError):
        admission(1000).demand(AdapterSpec(rank=4, target_modules=("q_proj",)), 8)


def test_bytes_are_learnt_again_however_many_were_observed_and_are_kept(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.run(399)  # of each one at least two microbatches are observed
    fits = [fit.iteration for fit in machine.fits if fit.target == "bytes"]
    assert max(later - before for before, later in itertools.pairwise([*fits, 399])) <= 64
    assert fits[-1] > 300


def test_peaks_without_layers_are_of_the_whole_model(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.run(20)
    demand = machine.jobs["a"].demand
    kept = json.loads((tmp_path / PEAKS_FILE).read_text())
    for each in kept["observations"]:
        del each["layers"]
    (tmp_path / PEAKS_FILE).write_text(json.dumps(kept))
    again = admission()
    Predictions(facts(), again, None, tmp_path)
    assert again.predicted([demand]) == machine.admission.predicted([demand])


def test_few_peaks_are_no_model(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.run(20)
    demand = machine.jobs["a"].demand
    kept = json.loads((tmp_path / PEAKS_FILE).read_text())
    del kept["observations"][FIRST_PEAKS - 1 :]
    (tmp_path / PEAKS_FILE).write_text(json.dumps(kept))
    again = admission()
    before = again.predicted([demand])
    Predictions(facts(), again, None, tmp_path)
    assert again.predicted([demand]) == before


def test_a_replica_without_microbatches_takes_no_bytes(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.run(20)
    model = machine.admission.model_for([machine.jobs["a"].demand])
    assert model is not None
    assert model.in_flight([], 1) == 0.0
    assert model.in_flight([], None) == 0.0


def test_a_spoilt_file_of_peaks_is_named(tmp_path: Path) -> None:
    (tmp_path / PEAKS_FILE).write_text('{"of"')
    with pytest.raises(StorageError, match=r"peaks\.json: the file is damaged\n"):
        Predictions(facts(), admission(), None, tmp_path)


def test_a_sample_of_iterations_is_observed() -> None:
    sampler = PeakSampler(every=64)
    assert not sampler.wanted(["a"], [100])  # what is made once for a new job would count as passing
    first = [sampler.wanted(["a"], [100]) for _ in range(200)]
    assert all(first[:FIRST])
    assert not any(first[FIRST:8])
    assert sum(first) == ENOUGH + (200 - 1) // 64 - 1  # early ones, then one in 64
    assert not sampler.wanted(["a", "b"], [100])
    assert sampler.wanted(["a", "b"], [100])
    assert sampler.wanted(["a", "b"], [10, 120])
    assert not sampler.wanted(["a", "b"], [120])
    each = PeakSampler(every=1)
    assert [each.wanted(["a"], [1]) for _ in range(100)] == [False, *[True] * 99]


def fits_table(folder: Path) -> LineTable:
    return LineTable(folder / FITS_FILE, FIT_COLUMNS, MOST_FITS)


def test_fits_are_a_table(tmp_path: Path) -> None:
    fits = fits_table(tmp_path)
    fits.add(ModelFitted("seconds", 9, 8, (("token", 0.5),), 0.01, 0.02, None, 0.1))
    with fits.path.open("a") as file:
        file.write('{"target": "by')
    table = json.loads(fits.artifact())
    assert tuple(table["columns"]) == FIT_COLUMNS
    row = dict(zip(table["columns"], table["data"][0], strict=True))
    assert json.loads(row["coefficients"]) == {"token": 0.5}
    assert (row["iteration"], row["mean_error"], row["ahead_error"]) == (9, 0.01, None)


def test_many_fits_are_written_as_the_table_grows_and_stay_few_on_the_page(tmp_path: Path) -> None:
    def fitted(at: int) -> ModelFitted:
        return ModelFitted("seconds", at, 8, (("token", 0.5),), 0.01, 0.02, None, 0.1)

    sizes = []
    for count in (1000, 2000):
        (tmp_path / str(count)).mkdir()
        fits, sent = fits_table(tmp_path / str(count)), 0
        for at in range(1, count + 1):
            fits.add(fitted(at))
            if fits.grown:
                sent += len(fits.artifact())
        sizes.append(sent)
    assert sizes[1] < 2.5 * sizes[0]  # and not four times
    rows = json.loads(fits.artifact())["data"]
    assert MOST_FITS / 2 < len(rows) <= MOST_FITS
    assert [row[1] for row in rows] == sorted(row[1] for row in rows)
    assert rows[-1][1] == 2000
    assert not fits.behind
    assert fits_table(tmp_path / "2000").behind  # of an earlier process


class Replicas:
    """Iterations of a job on two replicas, on a machine whose load changes for both alike."""

    def __init__(self, folder: Path, *, tokens: tuple[int, int], lag: float, noise: float = 0.0) -> None:
        own = replace(facts(), devices=("cpu", "cpu"))
        admit = Admission(own, RunSettings(engine=EngineSettings(capacity=CAPACITY)))
        self.predictions = Predictions(own, admit, None, folder)
        self.jobs = {"a": live("a", 4, [*tokens], admit)}
        self.tokens, self.lag, self.noise = tokens, lag, noise
        self.rng = np.random.default_rng(5)

    def run(self, iterations: int) -> tuple[Expected, list[float], float]:
        """The last iteration's prediction, busy seconds and whole."""
        for number in range(iterations):
            microbatches = [
                Microbatch(replica, replica, (Segment("a", number, (replica,), (0,), (count,), 1.0),))
                for replica, count in enumerate(self.tokens)
            ]
            expected = self.predictions.expect(microbatches, self.jobs)
            load = self.rng.uniform(1.0, 3.0)
            busy = [load * 1e-2 * count * (1 + self.noise * self.rng.uniform()) for count in self.tokens]
            whole = max(busy) * (1.0 + self.lag)
            times = [ReplicaTime(each, busy[each], whole - busy[each], 0, 0) for each in range(2)]
            self.predictions.learn(expected, Outcome(), whole, number, times)
        return expected, busy, whole


def test_replicas_with_equal_work_wait_for_sums_and_for_the_slower_one(tmp_path: Path) -> None:
    expected, _, _ = Replicas(tmp_path, tokens=(20, 20), lag=0.1, noise=0.2).run(60)
    assert expected.seconds is not None
    longest = max(expected.busy_seconds.values())
    assert expected.seconds == pytest.approx(1.1 * longest, rel=1e-6)
    # The mean of |x - y| / 2 / max over two draws of [1, 1.2] is 3 %.
    waited = sum(waited for _, waited in expected.process_seconds) / 2 / longest
    assert waited == pytest.approx(0.1 + 0.03, abs=0.01)


def test_a_replica_with_fewer_tokens_is_predicted_to_wait(tmp_path: Path) -> None:
    expected, busy, whole = Replicas(tmp_path, tokens=(30, 10), lag=0.0).run(60)
    share = expected.busy_seconds[1] / expected.busy_seconds[0]
    assert share == pytest.approx(1 / 3, rel=0.05)
    first, second = (waited for _, waited in expected.process_seconds)
    assert first == pytest.approx(0.0, abs=0.02 * max(expected.busy_seconds.values()))
    waited = [whole - each for each in busy]
    assert second / expected.busy_seconds[0] == pytest.approx(waited[1] / whole, rel=0.05)


def test_a_fit_that_says_nothing_of_tokens_is_shared_out_by_them(tmp_path: Path) -> None:
    machine = Replicas(tmp_path, tokens=(30, 10), lag=0.0)
    machine.run(20)
    fit = machine.predictions._time
    assert fit is not None
    machine.predictions._time = replace(fit, coefficients=(0.4, 0.0, 0.0, 0.0, 0.0, 0.0))
    expected, _, _ = machine.run(1)
    assert expected.busy_seconds == pytest.approx({0: 0.6, 1: 0.2})


class Stages:
    """A pipeline of uneven stages, whose bytes follow a rule that is not given to anything.

    Attributes:
        statics: bytes of each stage without microbatches.
        peaks: of microbatches of so many tokens: what each stage keeps of a token, and what passes.
    """

    def __init__(
        self, folder: Path, *, kept: tuple[int, int], passing: tuple[int, int], **options: Any
    ) -> None:
        shape = replace(SHAPE, layers=4)
        held = (HeldPart(range(3), 40_000, 10**9), HeldPart(range(3, 4), 10_000, 10**9))
        linears = tuple(LinearInfo(f"layers.{layer}.q_proj", 8, 8) for layer in range(4))
        self.facts = replace(facts(), shape=shape, linears=linears, held=(held,))
        self.folder, self.kept, self.passing = folder, kept, passing
        self.admission = self.admit()
        self.predictions = Predictions(self.facts, self.admission, None, folder)
        self.jobs = {"a": live("a", 4, [20, 30], self.admission, **options)}
        self.demand = self.jobs["a"].demand
        self.statics = [part.weight_bytes + self.demand.bytes_on(part.layers) for part in held]

    def admit(self, schedule: Any = "plait") -> Admission:
        """Admission of a process that starts now."""
        run = RunSettings(engine=EngineSettings(capacity=CAPACITY, schedule=schedule))
        return Admission(self.facts, run)

    def again(self, schedule: Any = "plait") -> Admission:
        """The same with the peaks that are stored."""
        admit = self.admit(schedule)
        Predictions(self.facts, admit, None, self.folder)
        return admit

    def peak(self, stage: int, count: int) -> ObservedPeak:
        static, keeps, more = self.statics[stage], self.kept[stage], self.passing[stage]
        highest = static + (keeps + more) * count
        return ObservedPeak(static, (("backward", highest), (KEPT, static + keeps * count)))

    def learn(self, *lengths: int) -> tuple[Expected, Outcome, tuple[ReplicaTime, ...]]:
        """The last of iterations of such microbatches."""
        times = (ReplicaTime(0, 0.1, 0.4, 20, 0), ReplicaTime(1, 0.3, 0.2, 20, 0))
        peaks = {at: tuple(self.peak(stage, count) for stage in range(2)) for at, count in enumerate(lengths)}
        outcome = Outcome(microbatches=len(lengths), peaks=peaks)
        for number in range(20):
            expected = self.predictions.expect(filled(*lengths), self.jobs)
            self.predictions.learn(expected, outcome, 0.5, number, times, self.jobs)
        return expected, outcome, times


def filled(*lengths: int) -> list[Microbatch]:
    """Microbatches of job a; those of no tokens are no-ops."""
    return [
        Microbatch(0, at, (Segment("a", 0, (at % 2,), (0,), (count,), 1.0),) if count else ())
        for at, count in enumerate(lengths)
    ]


def test_of_a_pipeline_each_stage_is_predicted_by_what_was_observed_of_it(tmp_path: Path) -> None:
    """Of uneven stages: how long each is busy, and what it keeps of microbatches that are in flight."""
    stages = Stages(tmp_path, kept=(3000, 700), passing=(900, 5000))
    assert sum(stages.statics) == 50_000 + stages.demand.adapter_bytes
    expected, outcome, times = stages.learn(30, 20, 20)
    assert expected.seconds == pytest.approx(0.5, rel=1e-3)
    first, last = expected.with_predictions(times, outcome)
    assert first.predicted_waited_share == pytest.approx(0.8, rel=1e-3)
    assert last.predicted_busy_seconds == pytest.approx(0.3, rel=1e-3)
    # The first has two in flight, the last one; without what passes, the longest two are those before.
    assert first.predicted_bytes == pytest.approx(stages.statics[0] + 50 * 3000 + 30 * 900, rel=1e-3)
    assert last.predicted_bytes == pytest.approx(stages.statics[1] + 30 * 5700, rel=1e-3)
    full = stages.statics[0] + CAPACITY * (2 * 3000 + 900) + 4 * CAPACITY * SHAPE.hidden * 4
    many = [replace(stages.demand, samples=16)]
    admit = stages.admission
    assert full <= admit.predicted(many) < 1.05 * full  # the fullest stage, with a margin and messages
    assert stages.again().predicted(many) == admit.predicted(many) > admit.predicted([stages.demand])
    every = stages.again("gpipe")
    assert every.predicted(many) > 3 * every.predicted([stages.demand])  # it keeps all of an iteration


def test_what_a_pipeline_has_in_flight_beside_a_window_is_predicted_with_it(tmp_path: Path) -> None:
    stages = Stages(tmp_path, kept=(3000, 700), passing=(900, 5000))
    stages.learn(30, 20, 20)

    def first(before: Sequence[int], own: Sequence[int], after: Sequence[int]) -> float:
        around = Around(filled(*before), filled(*after))
        expected = stages.predictions.expect(filled(*own), stages.jobs, around)
        assert expected.process_bytes[0][1] == pytest.approx(stages.statics[1] + 20 * 5700, rel=1e-3)
        return expected.process_bytes[0][0] - stages.statics[0]

    assert first([], [20], []) == pytest.approx(20 * 3900, rel=1e-3)
    assert first([10, 30], [20], []) == pytest.approx(50 * 3000 + 30 * 900, rel=1e-3)  # it holds two
    assert first([30, 10], [20], [30]) == pytest.approx(50 * 3000 + 30 * 900, rel=1e-3)
    assert first([30], [0, 20, 0], [30]) == pytest.approx(30 * 3900, rel=1e-3)  # no-ops lie between


def test_a_stage_that_keeps_nothing_is_predicted_until_a_job_has_adapters_there(tmp_path: Path) -> None:
    stages = Stages(tmp_path, kept=(0, 700), passing=(900, 100), targets=("layers.3.q_proj",))
    expected, _, _ = stages.learn(30, 20, 20)
    assert stages.demand.bytes_on(range(3)) == 0
    assert not expected.by_rule
    assert expected.process_bytes[0][0] == pytest.approx(40_000 + 30 * 900, rel=1e-3)
    other = replace(live("b", 4, [20, 30], stages.admission).demand, samples=16)
    assert other.bytes_on(range(3)) > 0
    fresh = stages.admit()
    assert stages.admission.predicted([other]) == fresh.predicted([other])


def test_slices_of_layers_and_whole_ones_are_different_portions(tmp_path: Path) -> None:
    """A profile says what whole layers take, and so do peaks of a run before."""
    whole = Machine(tmp_path)
    whole.run(40)
    model = whole.admission.model_for([whole.jobs["a"].demand])
    assert model is not None
    key = ProfileKey("m", "cpu", "float32", "auto", False, 1)
    profile = Profile(key, "m", model, None, CAPACITY, (), ("q_proj",), "measured", 0.0, None)
    part = HeldPart(range(1), WEIGHTS, 10**9, tensor=2)
    own = replace(facts(), held=((part, part),))
    admit = Admission(own, RunSettings(engine=EngineSettings(capacity=CAPACITY)), profile)
    sliced = Predictions(own, admit, profile, tmp_path)
    jobs = {"a": live("a", 4, [20, 30], admit)}
    static = WEIGHTS + jobs["a"].demand.bytes_on(range(1), 2)
    assert static == admit.static([jobs["a"].demand], part)
    for number in range(20):
        expected = sliced.expect(filled(30, 20), jobs)
        peaks = {
            at: (ObservedPeak(static, (("backward", static + 500 * count), (KEPT, static + 100 * count))),)
            * 2
            for at, count in enumerate((30, 20))
        }
        sliced.learn(expected, Outcome(microbatches=2, peaks=peaks), 0.5, number, (), jobs)
    assert expected.bytes == pytest.approx(static + 500 * 30, rel=1e-3)
    again = Admission(own, RunSettings(engine=EngineSettings(capacity=CAPACITY)))
    Predictions(own, again, None, tmp_path)
    assert again.predicted([jobs["a"].demand]) == admit.predicted([jobs["a"].demand])


@pytest.mark.parametrize(
    ("rows", "kernels", "holds"), [(1000, "grouped", True), (4000, "", False), (1000, "triton", False)]
)
def test_a_whole_model_s_fused_loss_does_not_hold_for_slices(rows: int, kernels: str, holds: bool) -> None:
    """Of slices it never is fused, and takes several times the bytes of a row; layers take what they take."""
    phase = Phase(MemoryCoefficients(token=900.0, logit_row=32.0))
    key = ProfileKey("m", "cpu", "float32", "auto", False, 1)
    model = MemoryModel({"forward": phase}, rows)
    profile = Profile(key, "m", model, None, CAPACITY, (), ("q_proj",), "measured", 0.0, None)
    first, last = (
        HeldPart(range(1), WEIGHTS, 10**9, tensor=2),
        HeldPart(range(1, 2), WEIGHTS, 10**9, tensor=2),
    )
    two = replace(facts(), shape=replace(SHAPE, layers=2), chosen={"kernels": kernels})
    for part, same in ((first, False), (last, not holds)):
        own = replace(two, held=((part, part),))
        settings = RunSettings(engine=EngineSettings(capacity=CAPACITY))
        with_it, without = Admission(own, settings, profile), Admission(own, settings)
        job = [with_it.demand(AdapterSpec(rank=4, target_modules=("q_proj",)), 30)]
        assert (with_it.predicted(job) == without.predicted(job)) == same
        replica, shapes = 0, [(MemoryShape.of([30], ranks=4), 30)]
        assert (with_it.expected(replica, shapes, job) == without.expected(replica, shapes, job)) == same


@pytest.mark.parametrize("slices", [2, 3, 8])
@pytest.mark.parametrize("vocabulary", [49_152, 128_256, 151_936, 262_145])
def test_rows_of_slices_are_those_of_their_loss(vocabulary: int, slices: int) -> None:
    shape = replace(SHAPE, vocabulary=vocabulary, logit_rows=chunk_rows(vocabulary))
    assert shape.rows_at_once(1) == shape.logit_rows
    assert shape.rows_at_once(slices) == chunk_rows(vocabulary_slice(vocabulary, 0, slices).stop)
    model = MemoryModel({"loss": Phase(MemoryCoefficients(logit_row=float(slices)), 0.0)}, shape.logit_rows)
    rows = shape.rows_at_once(slices)
    whole = MemoryShape.of([10_000_000], labelled=10_000_000)
    assert model.part(whole, share=1.0, flights=1, last=True, sliced=(slices, rows)) == rows
