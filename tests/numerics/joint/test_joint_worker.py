"""What the worker does beside training: facts, peaks, answers, export, and a whole run in one call."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laboratory import TINY, stopping
from safetensors.torch import load_file

from plait.adapters.variants import adapter_bytes
from plait.core.errors import ConfigError
from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.lifecycle import JobResult
from plait.core.messages import (
    Attach,
    Event,
    Generate,
    GenerateJob,
    JobFailed,
    JobGenerated,
    Notice,
    RunSchedule,
    StepDone,
    StepJob,
)
from plait.core.settings import EngineSettings, RunSettings
from plait.engine.build import build_coordinator, open_data
from plait.engine.catalogue import DataCatalogue
from plait.engine.devices import choose_device, choose_kernels
from plait.engine.local_worker import LocalWorker
from plait.engine.microbatches import gather
from plait.engine.steps import DataOrder, training_batch
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait.models.load import load_model, transformers_model
from plait.planner.packing import pack
from plait.serve import engine
from plait_kernels.bank import GRADIENTS, parts_of
from plait_kernels.pooled import PooledRows


def attached(lab: Any, jobs: list[JobSpec]) -> tuple[LocalWorker, DataCatalogue]:
    data = DataCatalogue(lambda spec: lab.data(JobSpec("any", data=spec)))
    worker = LocalWorker(lab.model, data, EngineSettings(capacity=256))
    for job in jobs:
        worker.execute(Attach(job))
    return worker, data


def test_predicted_adapter_bytes_are_what_the_bank_holds(laboratory: Any) -> None:
    lab = laboratory("llama")
    job = lab.group()[3]
    worker, _ = attached(lab, [job])
    sites = [linear for linear in lab.model.linears if linear.name in worker.bank.weights(job.name)]
    state = worker.bank.block(job.name).state
    assert adapter_bytes(job.adapter, sites, lab.model.dtype.itemsize) == state.numel() * 4
    assert worker.facts.shape.weight_bytes == lab.model.weight_bytes
    sharded = LocalWorker(lab.model, DataCatalogue(lambda _: lab.data(job)), EngineSettings(), part=(0, 3))
    sharded.execute(Attach(job))
    sharded.bank.block(job.name).keep_own()
    own = sharded.bank.block(job.name)
    held = 4 * (own.state.numel() + own.moments.numel())
    assert adapter_bytes(job.adapter, sites, lab.model.dtype.itemsize, parts=3) == held < state.numel() * 4


@given(st.integers(0, 3000), st.integers(1, 9))
def test_parts_hold_every_number_once_and_begin_aligned(size: int, count: int) -> None:
    parts = parts_of(size, count)
    assert [number for part in parts for number in range(part.start, part.stop)] == list(range(size))
    assert len(parts) == count
    assert all(part.start % 16 == 0 for part in parts if part.start < part.stop)


def test_only_labelled_rows_reach_the_head_and_weights_are_those_of_the_global_batch(laboratory: Any) -> None:
    lab = laboratory("llama")
    job = lab.group()[1]
    worker, data = attached(lab, [job])
    split = data.of(job.data).train

    batch = training_batch(job, DataOrder.of(job.train, len(split)), split, 1)
    labelled = 0
    for microbatch in pack([batch], capacity=130):
        loaded = gather(microbatch, lambda _: split).loaded(worker.bank, training=True)
        start = 0
        for sample, length in zip(
            microbatch.segments[0].samples, microbatch.segments[0].lengths, strict=True
        ):
            own = split[sample]
            rows = [start + i - 1 for i in range(length) if own.labels[i]]
            found = zip(loaded.rows.tolist(), loaded.targets.tolist(), strict=True)
            inside = [(row, target) for row, target in found if start <= row < start + length]
            assert inside == [(row, int(own.tokens[row - start + 1])) for row in rows]
            start += length
        labelled += sum(loaded.counts)
        assert torch.allclose(loaded.weights, torch.full((sum(loaded.counts),), batch.loss_weight))
    assert labelled * batch.loss_weight == pytest.approx(1.0)


def test_in_float16_gradients_of_a_large_batch_are_not_rounded_away(laboratory: Any, tmp_path: Path) -> None:
    lab = laboratory("llama")
    job = lab.group()[1]
    split = lab.data(job).train
    batch = training_batch(job, DataOrder.over(job.train, split), split, 1)
    batch = replace(batch, loss_weight=1 / 64_000)  # as if it had so many labelled tokens
    gradients, norms = [], []
    for model in (lab.model, load_model(replace(TINY, dtype="float16"), cache=tmp_path)):
        worker = LocalWorker(model, DataCatalogue(lambda _: lab.data(job)), EngineSettings(capacity=256))
        worker.execute(Attach(job))
        noise = torch.Generator().manual_seed(1)
        for _, b in worker.bank.weights(job.name).values():
            b.normal_(std=0.02, generator=noise)
        worker.bank.refresh()
        worker.execute(RunSchedule(pack([batch], capacity=256)))
        gradients.append(worker.bank.block(job.name).state[GRADIENTS] / worker.bank.loss_scale)
        (stepped,) = worker.execute(RunSchedule((StepJob(job.name, 1, 1e-3),)))
        assert isinstance(stepped, StepDone)
        norms.append(stepped.grad_norm)
    exact, half = gradients
    assert float((half - exact).norm() / exact.norm()) < 0.01
    assert norms[1] == pytest.approx(norms[0], rel=0.01)


def test_answers_of_a_batch_are_those_of_each_job_alone(laboratory: Any) -> None:
    lab = laboratory("llama")
    jobs = lab.group()[:3]
    worker, _ = attached(lab, jobs)
    for job in jobs:  # B is zero at first: give each adapter an effect of its own
        for _, b in worker.bank.weights(job.name).values():
            b.normal_(generator=torch.Generator().manual_seed(job.train.seed))
    worker.bank.refresh()
    asked = tuple(GenerateJob(job.name, (0, 1, 2)) for job in jobs)
    together = worker.execute(Generate(asked, 6))
    alone = [worker.execute(Generate((each,), 6))[0] for each in asked]
    assert [answers.texts for answers in together] == [answers.texts for answers in alone]
    assert len({answers.texts for answers in together}) == 3
    assert all(answers.seconds > 0 for answers in together)


def test_answers_for_which_memory_runs_out_are_generated_fewer_at_a_time(
    laboratory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to one; if that is too much, that job has no answers, and the others have theirs."""
    lab = laboratory("llama")
    jobs = lab.group()[:3]
    worker, _ = attached(lab, jobs)
    asked = Generate(tuple(GenerateJob(job.name, (0, 1, 2)) for job in jobs), 6)
    whole = worker.execute(asked)
    at_once: list[int] = []
    never = 0  # the rank of a job

    hidden = BaseModel.hidden

    def short(base: BaseModel, context: MicrobatchContext) -> torch.Tensor:
        if not isinstance(context.routing, PooledRows):  # a layer's keys are sized with one token
            return hidden(base, context)
        at_once.append(len(context.sample_offsets) - 1)
        adapters = [each[-1] for each in (*context.routing.single, *context.routing.spans)]
        if at_once[-1] > 2 or never in {each.rank for each in adapters}:
            raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
        return hidden(base, context)

    monkeypatch.setattr(BaseModel, "hidden", short)
    found = worker.execute(asked)
    assert [each.texts for each in found] == [each.texts for each in whole]
    assert at_once[:2] == [9, 4]
    assert max(at_once[2:]) == 2

    assert len({job.adapter.rank for job in jobs}) == 3
    never = jobs[1].adapter.rank
    first, second, third = worker.execute(asked)
    assert (first.texts, third.texts) == (whole[0].texts, whole[2].texts)
    assert isinstance(second, JobFailed)
    assert second.job == jobs[1].name
    assert second.reason.startswith("out of memory for a single prompt of ")
    assert second.reason.endswith(" tokens: tried to allocate 20.00 GiB")


def test_a_pool_for_answers_that_does_not_fit_is_made_smaller(
    laboratory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to the longest prompt's; where that is too much, its job has no answers."""
    lab = laboratory("llama")
    jobs = lab.group()[:2]
    worker, _ = attached(lab, jobs)
    asked = Generate(tuple(GenerateJob(job.name, (0, 1)) for job in jobs), 4)
    tried, most, make = list[int](), 2**30, engine.pool_memory

    def short(layers: int, pages: int, *given: Any, **named: Any) -> list[torch.Tensor]:
        tried.append(pages)
        if pages > most:
            raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
        return make(layers, pages, *given, **named)

    monkeypatch.setattr(engine, "pool_memory", short)
    whole = worker.execute(asked)
    most = tried[0] - 1
    assert [each.texts for each in worker.execute(asked)] == [each.texts for each in whole]
    assert tried[0] == tried[1] > tried[2]
    most = 0
    for event in worker.execute(asked):
        assert isinstance(event, JobFailed)
        assert event.reason.startswith("out of memory for a single prompt of ")


def test_the_exported_adapter_gives_the_same_logits_in_peft(laboratory: Any, tmp_path: Path) -> None:
    lab = laboratory("llama")
    job = lab.group(steps=5)[2]
    history = lab.run([job])
    folder = history.ended(job.name).adapter
    loaded = peft.PeftModel.from_pretrained(transformers_model(TINY, cache=tmp_path), folder)
    weights = load_file(folder / "adapter_model.safetensors")
    for site, (a, b) in history.end[job.name].items():
        assert torch.equal(weights[f"base_model.model.{site}.lora_A.weight"], a)
        assert torch.equal(weights[f"base_model.model.{site}.lora_B.weight"], b)
    validation = lab.data(job).validation
    total, count = 0.0, 0
    for index in range(len(validation)):
        tokens, labels = (torch.from_numpy(part) for part in validation[index])
        with torch.no_grad():
            logits = loaded(tokens.long().unsqueeze(0), use_cache=False).logits[0, :-1]
        nll = -logits.log_softmax(-1).gather(1, tokens.long()[1:, None])[:, 0]
        total += float(nll[labels[1:]].sum())
        count += int(labels.sum())
    assert history.evaluations(job.name)[-1] == pytest.approx(total / count, rel=1e-5)


def test_a_folder_that_cannot_be_written_is_reported(laboratory: Any) -> None:
    """The finished job waits for its adapter's folder, until the run is stopped."""
    lab = laboratory("llama")
    job = lab.group(steps=2)[0]
    for name in ("adapters", "checkpoints"):
        (lab.folder / name).write_text("a file where a folder must be")
    history = lab.run([job], between=stopping(4))
    adapter, checkpoint = [event.text for event in history.events if isinstance(event, Notice)]
    assert f"{job.name}: its adapter could not be written" in adapter
    assert checkpoint.endswith(f": could not save {job.name} at step 2 (not saved yet)")
    assert history.ended(job.name).checkpoint is None


@pytest.mark.usefixtures("peaks")
def test_the_peak_of_a_step_in_which_no_job_is_new_is_observed(laboratory: Any) -> None:
    lab = laboratory("llama")
    history = lab.run(lab.group(steps=2)[:2])
    _, second = history.steps
    assert second.peak_bytes is not None
    assert second.peak_bytes > lab.model.weight_bytes


def test_backends_and_devices_are_checked_by_name() -> None:
    cpu = torch.device("cpu")
    assert choose_kernels("auto", cpu, torch.float32) == "grouped"
    assert choose_kernels("reference", cpu, torch.float32) == "reference"
    assert choose_device("cpu") == cpu
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="not find a CUDA device"):
            choose_device("cuda")


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real data, tiny model: two jobs, answers judged, adapters on disk."""
    spec = DataSpec.of(
        "reasoning_gym", task="chain_sum", size=24, validation=4, generate=True, max_new_tokens=3
    )
    jobs = [
        JobSpec(
            f"rank-{rank}",
            AdapterSpec(rank, target_modules="all-linear", dropout=0.05),
            TrainSpec(lr=3e-3, steps=8, batch_size=4, seed=rank),
            spec,
        )
        for rank in (2, 5)
    ]
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    settings = RunSettings(model=TINY, engine=EngineSettings(capacity=512))
    coordinator = build_coordinator(settings, open_data(settings, 512, jobs).catalogue, tmp_path / "run")
    for job in jobs:
        coordinator.submit(job)
    events: list[Event] = []
    while not coordinator.idle:
        events += coordinator.advance()
    ended = [event for event in events if isinstance(event, JobResult)]
    assert [(end.job, end.state, end.step) for end in ended] == [
        ("rank-2", "finished", 8),
        ("rank-5", "finished", 8),
    ]
    for end in ended:
        assert end.eval_loss is not None
        assert json.loads((end.adapter / "adapter_config.json").read_text())["r"] == int(end.job[-1])
    assert [type(event) for event in events].count(JobGenerated) == 2
