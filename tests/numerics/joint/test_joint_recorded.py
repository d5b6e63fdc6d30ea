"""Small microbatches that are recorded and replayed train as those that are launched, to the bit.

No device records here: the stand-in for its recorder runs again what was recorded, with all that was in it
then, as a replay does. Triton's kernels are interpreted; attention is that of the flash kernels' stand-in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from laboratory import NARROW, random_data, random_texts
from recorders import Again, Refusing
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from plait.core.errors import ConfigError
from plait.core.jobs import AdapterSpec, JobSpec, TrainSpec
from plait.core.messages import (
    Attach,
    Detach,
    JobLoss,
    MicrobatchDone,
    OutOfMemory,
    RunSchedule,
    StepDone,
    StepJob,
)
from plait.core.plans import Replica
from plait.core.settings import ClusterSettings, EngineSettings, RunSettings
from plait.cost.peaks import PhasePeaks
from plait.engine.build import check_engine
from plait.engine.catalogue import DataCatalogue
from plait.engine.local_worker import LocalWorker
from plait.engine.microbatches import LoadedMicrobatch, Sizes, gather
from plait.engine.packer import Packer
from plait.engine.recorded import RecordedTraining
from plait.engine.steps import DataOrder, training_batch
from plait.models import flash
from plait_kernels.check import poisoned_memory
from plait_kernels.triton_backend import interpreted

CAPACITY = 32
LEAVES = 3  # a job before this step, for another one


def attention(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float) -> Tensor:
    parts = []
    for low, high in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        q, k, v = (part[low:high].transpose(0, 1) for part in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, rule: Any
) -> Any:
    assert longest >= max(ends.diff().tolist())
    return attention(query, key, value, ends, rule.scale), torch.zeros(1), torch.zeros(2)


def attention_backward(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
    *_, ends, _longest, rule = given
    leaves = [each.detach().requires_grad_() for each in given[:3]]
    with torch.enable_grad():
        out = attention(*leaves, ends, rule.scale)
    return torch.autograd.grad(out, leaves, grad)


def job(name: str, rank: int, seed: int, targets: Any, lengths: tuple[int, int], dropout: float) -> JobSpec:
    adapter = AdapterSpec(rank, dropout=dropout, target_modules=targets)
    train = TrainSpec(steps=9, batch_size=2, lr=1e-2, seed=seed)
    return JobSpec(name, adapter, train, random_texts(seed, *lengths))


JOBS = (
    job("a", 3, 1, NARROW["llama"], (2, 6), 0.2),
    job("b", 20, 2, NARROW["llama"], (4, 9), 0.0),
    job("c", 8, 3, "all-linear", (5, 9), 0.1),
)


class Trained:
    """Losses, norms and states of jobs after some steps, one of which leaves and another comes."""

    def __init__(self, lab: Any, recorder: Any | None, kernels: str = "triton") -> None:
        settings = EngineSettings(kernels=kernels, capacity=CAPACITY)
        self.worker = LocalWorker(lab.model, DataCatalogue(random_data), settings)

        def compute(loaded: LoadedMicrobatch) -> Tensor:
            loaded.context.shared.clear()  # what a device computed is recorded, and computed again
            return self.worker._compute(loaded, PhasePeaks(), training=True)

        if recorder is not None:
            self.worker._recorded = RecordedTraining(
                self.worker.bank, compute, most=64, longest=lab.model.max_length, recorder=recorder
            )
        self.said: list[Any] = []
        self.states: dict[str, Tensor] = {}
        jobs = list(JOBS[:2])
        for each in jobs:
            self.worker.execute(Attach(each))
        for step in range(1, LEAVES + 1):
            if step == LEAVES:
                self.leave(jobs.pop(0))
                self.worker.execute(Attach(replace(JOBS[0], name="d")))
                jobs.append(replace(JOBS[0], name="d"))
            self.step(jobs, step)
        for each in jobs:
            self.leave(each)

    def leave(self, job: JobSpec) -> None:
        self.states[job.name] = self.worker.bank.block(job.name).state.clone()
        self.worker.execute(Detach(job.name))

    def step(self, jobs: list[JobSpec], step: int) -> None:
        batches = [
            training_batch(each, DataOrder.over(each.train, data := random_data(each.data).train), data, step)
            for each in jobs
        ]
        packed = Packer([Replica(capacity=CAPACITY)]).pack(batches)
        steps = (StepJob(each.name, step, each.train.lr) for each in jobs)
        for event in self.worker.execute(RunSchedule((*packed, *steps))):
            if isinstance(event, MicrobatchDone):
                self.said.append(event.losses)
            elif isinstance(event, StepDone):
                self.said.append((event.job, event.step, event.grad_norm))


def numbers(said: Any) -> Tensor:
    """What an event says, as numbers."""
    found = [each.loss_sum for each in said] if isinstance(said[0], JobLoss) else said[1:]
    return torch.tensor(found, dtype=torch.float64)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "forward_kernel", attention_forward)
    monkeypatch.setattr(flash, "backward_kernel", attention_backward)
    monkeypatch.setattr(flash, "takes", lambda *_: True)


@pytest.mark.skipif(not interpreted(), reason="runs Triton's kernels in its interpreter")
@pytest.mark.usefixtures("stand_in")
def test_replayed_microbatches_train_as_launched_ones_to_the_bit(
    laboratory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, again = laboratory("llama"), Again()
    monkeypatch.setattr(lab.model, "own", lab.model.own[:2])  # every layer is launched alike, for seconds
    launched = Trained(lab, Refusing())
    plain = Trained(lab, None, "grouped")  # the interpreter takes seconds
    for one, other in zip(plain.said, launched.said, strict=True):
        torch.testing.assert_close(numbers(one), numbers(other), rtol=1e-5, atol=0.0)
    embedding = lab.model._parts.embedding.weight
    spoilt = embedding.clone()
    spoilt[0] = torch.nan  # of the tokens that fill up, and of no other
    monkeypatch.setattr(embedding, "data", spoilt)
    with poisoned_memory():  # a replay finds in its memory what others left there
        replayed = Trained(lab, again)
    recordings = replayed.worker._recorded.recordings  # type: ignore[union-attr]
    assert again.recorded >= 1
    assert recordings.replays > again.recorded
    assert not recordings.refusals
    assert replayed.said == launched.said
    assert all(torch.equal(replayed.states[name], launched.states[name]) for name in "abd")


def test_recordings_are_let_go_of_where_memory_runs_out(laboratory: Any) -> None:
    class Short:
        """Recordings that leave a microbatch no room."""

        forgotten = 0

        def run(self, _: Any) -> Any:
            raise torch.OutOfMemoryError("no room")

        def forget(self) -> None:
            self.forgotten += 1

    worker = LocalWorker(laboratory("llama").model, DataCatalogue(random_data), EngineSettings(capacity=64))
    worker.execute(Attach(JOBS[2]))
    worker._recorded = short = Short()  # type: ignore[assignment]
    data = random_data(JOBS[2].data).train
    batch = training_batch(JOBS[2], DataOrder.over(JOBS[2].train, data), data, 1)
    events = worker.execute(RunSchedule(tuple(Packer([Replica(capacity=64)]).pack([batch]))))
    assert isinstance(events[-1], OutOfMemory)
    assert short.forgotten == 1


def test_sizes_are_few_and_do_not_depend_on_what_fills_them(laboratory: Any) -> None:
    lab = laboratory("llama")
    worker = LocalWorker(lab.model, DataCatalogue(random_data), EngineSettings(capacity=CAPACITY))
    for each in JOBS:
        worker.execute(Attach(each))

    def sizes_of(each: JobSpec, step: int, longest: int = lab.model.max_length) -> Sizes | None:
        data = random_data(each.data).train
        batch = training_batch(each, DataOrder.over(each.train, data), data, step)
        (microbatch,) = Packer([Replica(capacity=CAPACITY)]).pack([batch])
        gathered = gather(microbatch, worker._split_of)
        sizes = Sizes.of(gathered, worker.bank, longest=longest)
        if sizes is not None:
            filled = gathered.filled(sizes)
            assert len(filled.tokens) == filled.lengths.sum() == sizes.tokens > len(gathered.tokens)
            assert len(filled.lengths) == sizes.samples > len(gathered.lengths)
            assert filled.lengths.min() > 0
            assert len(filled.rows) == len(filled.targets) == len(filled.weights) == sizes.labelled
            for name in ("tokens", "lengths", "steps", "samples", "draws", "rows", "targets", "weights"):
                own = getattr(gathered, name)
                assert np.array_equal(getattr(filled, name)[: len(own)], own), name
            assert not filled.weights[len(gathered.weights) :].any()
            assert filled.rows[len(gathered.rows) :].min(initial=10**9) >= len(gathered.tokens)
        return sizes

    (sizes,) = {sizes_of(each, step) for step in range(1, 5) for each in JOBS[:2]}
    assert sizes is not None
    assert (sizes.ranks, sizes.dropout) == ((3, 8, 20), True)
    more = worker.bank.block("c").targets
    assert more > sizes.targets == worker.bank.block("b").targets
    assert sizes_of(JOBS[2], 1) == replace(sizes, targets=more) != sizes
    for left in "ac":
        worker.execute(Detach(left))
    assert sizes_of(JOBS[1], 1) == replace(sizes, ranks=(20,), dropout=False) != replace(sizes, ranks=(20,))
    assert replace(sizes, ranks=(20,)) != sizes != replace(sizes, labelled=1)
    assert sizes_of(JOBS[1], 1, longest=1) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine": {"device": "cpu"}},
        {"engine": {"kernels": "grouped"}},
        {"engine": {"checkpointing": True}},
        {"cluster": {"pipeline": 2, "processes": 2}},
        {"cluster": {"deployment": ("1x2", 2), "processes": 4}},
        pytest.param({}, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without")),
    ],
)
def test_graphs_are_refused_where_none_would_be_made(wrong: dict[str, Any]) -> None:
    engine = EngineSettings(graph_tokens=1024, **wrong.get("engine", {}))
    settings = RunSettings(engine=engine, cluster=ClusterSettings(**wrong.get("cluster", {})))
    with pytest.raises(ConfigError, match=r"engine\.graph_tokens=1024 with") as refused:
        check_engine(settings, [])
    named = [value for part in wrong.values() for value in part][:1]
    assert all(name in str(refused.value) for name in named)
