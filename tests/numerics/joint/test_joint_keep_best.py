"""``train.keep=best`` on the real engine: the adapter is that of the best evaluation, in company and after an
interruption too; what is trained is what is trained without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from laboratory import random_data, stopping, with_train
from peft_folders import stored_pairs
from safetensors import safe_open

import plait.engine.local_worker as worker_module
from plait.core.jobs import JobSpec
from plait.core.messages import (
    Attach,
    Command,
    Cursor,
    Detach,
    Evaluate,
    Generate,
    GenerateJob,
    JobFailed,
    KeepWeights,
    SaveCheckpoint,
)
from plait.core.settings import EngineSettings
from plait.engine.catalogue import DataCatalogue
from plait.engine.local_worker import Answers, LocalWorker

STEPS = 10
Tensors = dict[str, tuple[torch.Tensor, torch.Tensor]]


def overfitting(lab: Any, at: int, keep: str) -> JobSpec:
    """Learns random tokens by heart, so that validation gets worse."""
    job = lab.group(steps=STEPS)[at]
    return with_train(job, lr=1e-2, schedule="constant", warmup_steps=0, eval_every=2, keep=keep)


def exported(history: Any, name: str) -> tuple[Tensors, str | None]:
    """The adapter's weights, and the step in their metadata."""
    folder = history.ended(name).adapter
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        step = (file.metadata() or {}).get("step")
    return stored_pairs(folder), step


def same(left: Tensors, right: Tensors) -> bool:
    pairs = [(a, b) for site in left for a, b in zip(left[site], right[site], strict=True)]
    return left.keys() == right.keys() and all(torch.equal(a, b) for a, b in pairs)


def noting(at_evaluations: dict[str, list[Tensors]]) -> Any:
    def before(worker: LocalWorker, command: Command) -> None:
        if isinstance(command, Evaluate):
            for name in sorted({each.job for item in command.microbatches for each in item.segments}):
                weights = worker.bank.weights(name)
                copies = {site: (a.clone(), b.clone()) for site, (a, b) in weights.items()}
                at_evaluations.setdefault(name, []).append(copies)

    return before


def test_best_weights_are_equal_alone_jointly_and_after_an_interruption(laboratory: Any) -> None:
    lab = laboratory("llama")
    best, last = overfitting(lab, 2, "best"), overfitting(lab, 2, "last")
    notes: dict[str, list[Tensors]] = {}
    alone = lab.run([best], before=noting(notes))
    losses = alone.evaluations(best.name)
    lowest = losses.index(min(losses))
    assert lowest < len(losses) - 1  # or this would show nothing
    weights, step = exported(alone, best.name)
    assert same(weights, notes[best.name][lowest])
    assert step == str(2 * (lowest + 1))
    assert alone.ended(best.name).eval_loss == losses[lowest]

    usual = lab.run([last])
    assert usual.losses(last.name) == alone.losses(best.name)
    assert usual.evaluations(last.name) == losses
    assert same(usual.end[last.name], alone.end[best.name])
    assert exported(usual, last.name)[1] is None
    assert same(exported(usual, last.name)[0], usual.end[last.name])
    assert usual.ended(last.name).eval_loss == losses[-1]

    together = lab.run([best, *lab.group(steps=STEPS)[3:5]])
    assert together.ended(best.name).eval_loss == pytest.approx(losses[lowest], rel=1e-5)
    there, step_there = exported(together, best.name)
    assert step_there == step
    assert all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-5)
        for site in weights
        for a, b in zip(weights[site], there[site], strict=True)
    )

    cut = lab.run([best], between=stopping(2 * (lowest + 1) + 1))
    state = cut.ended(best.name).checkpoint
    later = lab.run([best], resume_from={best.name: state})
    assert later.evaluations(best.name) == losses[lowest + 1 :]
    assert exported(later, best.name)[1] == step
    assert same(exported(later, best.name)[0], weights)
    assert later.ended(best.name).eval_loss == losses[lowest]


def test_a_checkpoint_without_its_best_weights_is_refused(laboratory: Any, tmp_path: Path) -> None:
    lab = laboratory("llama")
    data, best = DataCatalogue(random_data), overfitting(lab, 0, "best")
    worker = LocalWorker(lab.model, data, EngineSettings(kernels="reference"))
    worker.execute(Attach(best))
    worker.execute(
        SaveCheckpoint(best.name, tmp_path / "state", Cursor(2, 10, 0, best_step=2, best_loss=1.0))
    )
    worker.execute(Detach(best.name))
    (failed,) = worker.execute(Attach(best, tmp_path / "state"))
    assert isinstance(failed, JobFailed)
    assert "best weights" in failed.reason


def test_answers_are_those_of_the_kept_weights(laboratory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = laboratory("llama")
    data = DataCatalogue(random_data)
    worker = LocalWorker(lab.model, data, EngineSettings(kernels="reference"))
    jobs = [overfitting(lab, at, "best") for at in (0, 5)]
    for job in jobs:
        worker.execute(Attach(job))
    worker.execute(KeepWeights((jobs[0].name,)))
    kept = {job.name: _copy(worker, job.name) for job in jobs}
    for job in jobs:
        for pair in worker.bank.weights(job.name).values():
            for tensor in pair:
                tensor += 1
    now = {job.name: _copy(worker, job.name) for job in jobs}
    seen: dict[str, Tensors] = {}

    def answer(command: Generate, *_: Any, **__: Any) -> dict[str, Answers]:
        seen.update({each.job: _copy(worker, each.job) for each in command.jobs})
        return {each.job: Answers(("a",), 1) for each in command.jobs}

    monkeypatch.setattr(worker_module, "answer", answer)
    worker.execute(Generate(tuple(GenerateJob(job.name, (0,)) for job in jobs), 4))
    assert same(seen[jobs[0].name], kept[jobs[0].name])
    assert same(seen[jobs[1].name], now[jobs[1].name])
    assert all(same(_copy(worker, job.name), now[job.name]) for job in jobs)


def _copy(worker: LocalWorker, job: str) -> Tensors:
    return {site: (a.clone(), b.clone()) for site, (a, b) in worker.bank.weights(job).items()}
